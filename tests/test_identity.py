"""Numbers that stand for tenants, conversations, images and sounds.

The literals were written down once. An engine keeps such numbers in its records and shares them between replicas, so
no version of the package may change one.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from metrale_numba import RadixTree, adapter_key, identity, placeholder_tokens, session_hash

TOP_BIT = 2**63
MAX_UINT64 = 2**64 - 1

# --- adapter_key --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter_id", "salt", "key"),
    [
        (0, "secret", 0xAF9A_FDF2_4C80_9F45),
        (1, "secret", 0xD01A_448D_BC48_7193),
        (1, "s\u00e9cret", 0xE2FB_AB7D_F264_E710),
        (MAX_UINT64, b"\0" * 100, 0x9472_F96E_4453_21AF),
        (0, b"x" * 64, 0x86BC_96FD_AF64_9FE8),
    ],
)
def test_an_adapter_key_is_the_same_in_every_version(adapter_id: int, salt: bytes | str, key: int) -> None:
    assert adapter_key(adapter_id, salt) == key


@pytest.mark.parametrize("adapter_id", [0, 1, 12345, TOP_BIT - 1])
@pytest.mark.parametrize("salt", ["", b"", bytearray(), memoryview(b"")])
def test_without_a_salt_an_adapter_is_its_own_key(adapter_id: int, salt: Any) -> None:
    assert adapter_key(adapter_id, salt) == adapter_id


@pytest.mark.parametrize("adapter_id", [TOP_BIT, TOP_BIT + 1, MAX_UINT64])
def test_without_a_salt_an_adapter_that_looks_like_a_salted_one_is_refused(adapter_id: int) -> None:
    with pytest.raises(ValueError, match=rf"^adapter_id is {adapter_id}, .*2\^63"):
        adapter_key(adapter_id, "")


def test_a_salted_key_is_an_int_with_the_top_bit_set() -> None:
    for adapter_id, salt in itertools.product((0, 1, TOP_BIT, MAX_UINT64), ("a", b"\0", "\0\0", b"b" * 1000)):
        key = adapter_key(adapter_id, salt)
        assert type(key) is int
        assert TOP_BIT <= key <= MAX_UINT64


def test_a_salt_as_text_is_its_utf_8_bytes() -> None:
    for text in ("secret", "g\u00e9h\u00e9im", "\U0001f511"):
        assert adapter_key(3, text) == adapter_key(3, text.encode()) == adapter_key(3, bytearray(text.encode()))


def test_adapters_and_salts_that_differ_have_different_keys() -> None:
    salts = [b"\0", b"\0\0", b"a", b"b", b"ab", b"a\0", b"x" * 63, b"x" * 64, b"x" * 65, b"x" * 128, b"x" * 129]
    adapters = [0, 1, 2, 256, 2**32, TOP_BIT, MAX_UINT64]
    keys = {adapter_key(adapter_id, salt) for adapter_id, salt in itertools.product(adapters, salts)}
    assert len(keys) == len(adapters) * len(salts)


def test_all_63_bits_of_a_salted_key_depend_on_adapter_and_salt() -> None:
    by_adapter = [adapter_key(adapter_id, "salt") for adapter_id in range(64)]
    by_salt = [adapter_key(0, f"salt {number}") for number in range(64)]
    for keys in (by_adapter, by_salt):
        assert np.bitwise_and.reduce(np.array(keys, np.uint64)) == TOP_BIT
        assert np.bitwise_or.reduce(np.array(keys, np.uint64)) == MAX_UINT64


def test_tenants_with_salted_keys_share_nothing_in_a_cache() -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2, 3, 4], [5, 6], adapter_id=adapter_key(3, "one"))
    assert cache.lookup([1, 2, 3, 4], adapter_id=adapter_key(3, "one")).matched_tokens == 4
    for other in (adapter_key(3, "other"), adapter_key(4, "one"), adapter_key(3, "")):
        assert cache.lookup([1, 2, 3, 4], adapter_id=other).is_empty()


@pytest.mark.parametrize("salt", [None, 5, 1.5, ["a"], object(), True, np.zeros(3, np.uint8), array("B", b"a")])
def test_a_salt_that_is_neither_bytes_nor_text_is_refused_by_name(salt: Any) -> None:
    with pytest.raises(TypeError, match=r"^salt must be bytes or str, not "):
        adapter_key(1, salt)


@pytest.mark.parametrize(
    ("adapter_id", "error"),
    [(-1, ValueError), (2**64, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError), (None, TypeError)],
)
def test_what_is_no_adapter_is_refused_by_name_and_before_the_salt(adapter_id: Any, error: type[Exception]) -> None:
    for salt in ("secret", None):
        with pytest.raises(error, match=r"^adapter_id "):
            adapter_key(adapter_id, salt)  # type: ignore[arg-type]


def test_an_adapter_may_be_any_kind_of_integer() -> None:
    assert adapter_key(np.uint64(1), "secret") == adapter_key(1, "secret")


# --- session_hash -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "tenant", "number"),
    [
        ([], b"", 0x877F_2B47_4A5E_3333),
        ([1, 2, 3], b"", 0xCA57_BB1B_DAA4_E0F2),
        ([1, 2, 3], b"tenant", 0x80C0_093B_EC68_AF1A),
        ([2**32 - 1], b"", 0xB629_D6F9_D53A_F931),
        (range(1023), b"", 0x1DCA_4159_9BA4_96E6),
        (range(1024), b"", 0xB384_C96A_5A79_73C3),
    ],
)
def test_a_session_hash_is_the_same_in_every_version(tokens: Any, tenant: bytes, number: int) -> None:
    assert session_hash(tokens, tenant) == number


def test_only_the_first_1024_tokens_of_a_prompt_count() -> None:
    tokens = list(range(1024))
    assert session_hash([*tokens, 5]) == session_hash([*tokens, 6, 7]) == session_hash(tokens)


def test_every_one_of_the_first_1024_tokens_counts() -> None:
    tokens = np.arange(2000, dtype=np.uint32)
    seen = {session_hash(tokens)}
    for place in range(1024):
        tokens[place] ^= 1 << place % 32
        seen.add(session_hash(tokens))
        tokens[place] ^= 1 << place % 32
    assert len(seen) == 1025


def test_a_session_hash_changes_from_turn_to_turn_until_a_chat_has_1024_tokens() -> None:
    chat = list(range(3000))
    hashes = [session_hash(chat[:length]) for length in range(0, 1024, 31)]
    assert len(set(hashes)) == len(hashes)
    assert len({session_hash(chat[:length]) for length in range(1024, 3000, 100)}) == 1


def test_tokens_of_any_form_have_one_hash() -> None:
    tokens = [1, 2**31, 2**32 - 1]
    for form in (tuple, lambda v: np.array(v, np.uint32), lambda v: np.array(v, ">i8"), lambda v: array("I", v)):
        assert session_hash(form(tokens)) == session_hash(tokens)


def test_a_tenant_keeps_its_sessions_from_those_of_others() -> None:
    tenants = ["", "a", "b", "ab", b"\0", b"\0\0", "x" * 64, "x" * 65]
    assert len({session_hash([1, 2, 3], tenant) for tenant in tenants}) == len(tenants)
    assert session_hash([1], "t\u00e9") == session_hash([1], "t\u00e9".encode())
    assert session_hash([1]) == session_hash([1], b"") == session_hash([1], "")


def test_a_session_hash_is_an_int_that_a_cache_takes_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [session_hash([token]) for token in range(1000)]
    assert all(type(number) is int and 1 <= number <= MAX_UINT64 for number in numbers)
    assert len(set(numbers)) == 1000
    # No prompt is known that would come to 0, which stands for no session; so here every one does.
    nothing = SimpleNamespace(digest=lambda: bytes(8))
    monkeypatch.setattr(identity, "hashlib", SimpleNamespace(blake2b=lambda *_, **__: nothing))
    assert session_hash([1, 2, 3]) == 1


@pytest.mark.parametrize(
    ("tokens", "error", "says"),
    [
        (None, TypeError, "tokens must be a sequence"),
        ("text", TypeError, "tokens must be a sequence"),
        ([1.5], TypeError, r"tokens must hold integers, but tokens\[0\]"),
        ([1, -1], ValueError, r"tokens\[1\] is -1"),
        # Beyond those that count, too.
        ([0] * 2000 + [2**32], ValueError, r"tokens\[2000\] is 4294967296"),
        ([[1], [2]], ValueError, "tokens must be one-dimensional"),
    ],
)
def test_what_are_no_tokens_is_refused_by_name(tokens: Any, error: type[Exception], says: str) -> None:
    for tenant in (b"", None):
        with pytest.raises(error, match=f"^{says}"):
            session_hash(tokens, tenant)  # type: ignore[arg-type]


@pytest.mark.parametrize("tenant", [None, 5, 1.5, ["a"], object(), True])
def test_a_tenant_that_is_neither_bytes_nor_text_is_refused_by_name(tenant: Any) -> None:
    with pytest.raises(TypeError, match=r"^tenant must be bytes or str, not "):
        session_hash([1], tenant)


# --- placeholder_tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digest", "tokens"),
    [
        (bytes(32), [0xE399_3460, 0xE5CA_43D4, 0xD84C_5335, 0xAF95_8056]),
        (b"image", [0xC0F1_C066, 0xE924_EB64, 0x82AE_DF70]),
    ],
)
def test_placeholder_tokens_are_the_same_in_every_version(digest: bytes, tokens: list[int]) -> None:
    assert placeholder_tokens(digest, len(tokens)).tolist() == tokens


@pytest.mark.parametrize("n", [0, 1, 2, 7, 256, 4097])
def test_there_are_as_many_placeholder_tokens_as_were_asked_for(n: int) -> None:
    tokens = placeholder_tokens(b"digest", n)
    assert (tokens.dtype, tokens.shape) == (np.uint32, (n,))


def test_no_placeholder_token_is_in_any_vocabulary() -> None:
    assert placeholder_tokens(b"digest", 10_000).min() >= 2**31


def test_the_array_of_placeholder_tokens_is_the_caller_s() -> None:
    tokens = placeholder_tokens(b"digest", 8)
    expected = tokens.copy()
    assert tokens.flags.writeable
    tokens[:] = 0
    assert np.array_equal(placeholder_tokens(b"digest", 8), expected)


def test_a_digest_is_spread_over_all_tokens() -> None:
    # A digest that is another in a single bit has another token at every place, whatever the bit.
    digest = bytes(range(32))
    base = placeholder_tokens(digest, 40)
    for bit in range(256):
        changed = bytearray(digest)
        changed[bit // 8] ^= 1 << bit % 8
        assert not (placeholder_tokens(changed, 40) == base).any()


def test_all_31_bits_of_a_placeholder_token_are_used() -> None:
    tokens = placeholder_tokens(b"digest", 64)
    assert np.bitwise_and.reduce(tokens) == 2**31
    assert np.bitwise_or.reduce(tokens) == 2**32 - 1


@pytest.mark.parametrize("place", [0, 1, 30])
def test_different_inputs_differ_at_every_place(place: int) -> None:
    # Two agree with a chance of 2^-31; some pair of 5,000 with one of 1 in 172, and not of these.
    tokens = {int(placeholder_tokens(number.to_bytes(8, "little"), 31)[place]) for number in range(5000)}
    assert len(tokens) == 5000


def test_digests_of_which_one_begins_the_other_have_different_tokens() -> None:
    digests = [b"\0", b"\0\0", b"\0" * 32, b"\0" * 200, b"\0" * 199 + b"\1"]
    first = [int(placeholder_tokens(digest, 1)[0]) for digest in digests]
    assert len(set(first)) == len(digests)


def test_prompts_with_different_images_share_the_text_before_them_alone() -> None:
    cache = RadixTree(block_size=4)
    text = [1, 2, 3, 4]
    one, other = (np.concatenate([text, placeholder_tokens(digest, 8)]) for digest in (b"one", b"other"))
    cache.insert(one, [1, 2, 3])
    assert cache.peek_matched_tokens(one) == 12
    assert cache.peek_matched_tokens(other) == 4


def test_a_digest_may_be_any_kind_of_bytes() -> None:
    for form in (bytes, bytearray, memoryview):
        assert placeholder_tokens(form(b"digest"), 5).tolist() == placeholder_tokens(b"digest", 5).tolist()


@pytest.mark.parametrize("digest", [None, "text", "", 5, [1, 2], object(), np.zeros(3, np.uint8)])
def test_a_digest_that_is_no_bytes_is_refused_by_name_and_before_the_number(digest: Any) -> None:
    for n in (3, -1):
        with pytest.raises(TypeError, match=r"^digest must be bytes, not "):
            placeholder_tokens(digest, n)


@pytest.mark.parametrize("digest", [b"", bytearray(), memoryview(b"")])
def test_an_empty_digest_is_refused(digest: Any) -> None:
    with pytest.raises(ValueError, match=r"^digest is empty"):
        placeholder_tokens(digest, 3)


@pytest.mark.parametrize(
    ("n", "error"),
    [
        *((n, ValueError) for n in (-1, 2**61, 2**62, 2**63 - 1, 2**63, 10**40)),
        *((n, TypeError) for n in (True, 1.0, "1", None, [1])),
    ],
)
def test_what_is_no_number_of_tokens_is_refused_by_name(n: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^n (is|must be) "):
        placeholder_tokens(b"digest", n)


# --- the same everywhere ------------------------------------------------------------------------------------------

ELSEWHERE = """
import json, sys
from metrale_numba import adapter_key, placeholder_tokens, session_hash
print(json.dumps([adapter_key(5, "salt"), session_hash(range(9), "t"), placeholder_tokens(b"d", 9).tolist()]))
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_comes_to_the_same_numbers(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [adapter_key(5, "salt"), session_hash(range(9), "t"), placeholder_tokens(b"d", 9).tolist()]
    assert json.loads(done.stdout) == here


def test_none_of_it_needs_a_cache_or_counts_anything() -> None:
    for call in (adapter_key, session_hash, placeholder_tokens):
        assert call.__module__ == "metrale_numba.identity"
    script = "import sys, metrale_numba.identity; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)

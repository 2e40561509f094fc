"""Numbers that stand for something else: a tenant's adapter, a conversation, an image or a sound in a prompt.

Pure functions, the same in every process and on every machine; nothing here needs a cache.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from metrale_numba.arguments import as_count, as_tokens, as_u64, shown
from metrale_numba.interface import Ids, Tokens

__all__ = ["adapter_key", "placeholder_tokens", "session_hash"]

_TOP_BIT: Final = 1 << 63
_PLACEHOLDER_BIT: Final = np.uint32(0x8000_0000)
_SESSION_TOKENS: Final = 1024
# Of more, the bytes could not be counted in an address.
_MAX_PLACEHOLDERS: Final = 2**61 - 1


def _bytes_of(value: object, name: str) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"{name} must be bytes or str, not {shown(value)} ({type(value).__name__})")


def adapter_key(adapter_id: int, salt: bytes | str) -> int:
    """Fold a tenant's secret into an adapter id, so that tenants share nothing in one cache.

    Parameters
    ----------
    adapter_id : int
        The adapter, 0..2^64-1; with an empty salt below 2^63.
    salt : bytes or str
        The tenant's secret; a str counts as its UTF-8 bytes. Empty for what all may share.

    Returns
    -------
    int
        What to give as `adapter_id`: the id itself for an empty salt, otherwise 63 bits of a keyed digest with the top
        bit set. So no salt imitates an adapter, and who does not know the salt cannot aim at its prefixes.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what it should be.
    """
    adapter_id = as_u64(adapter_id, "adapter_id")
    key = _bytes_of(salt, "salt")
    if not key:
        if adapter_id >= _TOP_BIT:
            raise ValueError(f"adapter_id is {adapter_id}, but without a salt it must be below 2^63")
        return adapter_id
    # BLAKE2 takes keys of up to 64 bytes; a digest of the salt is a key of one length, whatever the salt's.
    digest = hashlib.blake2b(
        adapter_id.to_bytes(8, "little"), digest_size=8, key=hashlib.blake2b(key).digest(), person=b"metrale.adapter"
    )
    return int.from_bytes(digest.digest(), "little") | _TOP_BIT


def session_hash(tokens: Tokens, tenant: bytes | str = b"") -> int:
    """Hash the beginning of a prompt, as a stopgap for an id of the conversation.

    It changes from turn to turn until a chat has 1,024 tokens, and it is the same for all chats that share a system
    prompt at least that long. An id that the client gives with each request of a conversation is better.

    Parameters
    ----------
    tokens : array of uint32, shape (n,)
        The prompt; its first 1,024 tokens count.
    tenant : bytes or str, default empty
        Keeps the sessions of one tenant from those of another.

    Returns
    -------
    int
        What to give as `session_hash`, 1..2^64-1.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what it should be.
    """
    head = as_tokens(tokens)[:_SESSION_TOKENS]
    key = hashlib.blake2b(_bytes_of(tenant, "tenant")).digest()
    digest = hashlib.blake2b(head.astype("<u4").tobytes(), digest_size=8, key=key, person=b"metrale.session")
    # 0 means no session.
    return int.from_bytes(digest.digest(), "little") or 1


def placeholder_tokens(digest: bytes, n: int) -> Ids:
    """Make tokens that stand for an input that is no text, so that prompts with different inputs do not share.

    Parameters
    ----------
    digest : bytes
        A hash of the input (and of how it was processed), not empty.
    n : int
        How many tokens the model puts in its place.

    Returns
    -------
    ndarray of uint32, shape (n,)
        Tokens from 2^31 on, where no vocabulary reaches. Two inputs agree in their first token with a chance of 2^-31
        and in a run of k tokens with 2^-31k, as far as the digest itself tells them apart.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what it should be.
    """
    if not isinstance(digest, (bytes, bytearray, memoryview)):
        raise TypeError(f"digest must be bytes, not {shown(digest)} ({type(digest).__name__})")
    digest = bytes(digest)
    if not digest:
        raise ValueError("digest is empty, so every input would get the same tokens")
    n = as_count(n, "n")
    if n > _MAX_PLACEHOLDERS:
        raise ValueError(f"n is {n}, outside 0..{_MAX_PLACEHOLDERS}")
    stream = hashlib.shake_256(b"metrale.placeholder" + digest).digest(4 * n)
    tokens: Ids = np.frombuffer(stream, "<u4").astype(np.uint32)
    tokens |= _PLACEHOLDER_BIT
    return tokens

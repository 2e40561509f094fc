"""The three formats of a trace: how its first line tells which one it is, what is read of each, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from metrale_numba.replay import Request, TraceError, open_trace, traces

LARGEST_NAME = 2**64 - 1
DELETED = object()


def encoded(fields: dict[str, object], changes: dict[str, object]) -> bytes:
    changed = {name: value for name, value in {**fields, **changes}.items() if value is not DELETED}
    return json.dumps(changed).encode() + b"\n"


def mooncake(**changes: object) -> bytes:
    return encoded({"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}, changes)


def bailian(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "chat_id": 159,
        "parent_chat_id": -1,
        "timestamp": 61.114,
        "input_length": 37,
        "output_length": 132,
        "type": "text",
        "turn": 1,
        "hash_ids": [1089, 1090, 6326],
    }
    return encoded(fields, changes)


def token_line(**changes: object) -> bytes:
    return encoded({"tokens": [5, 0, 0xFFFF_FFFF]}, changes)


def read(folder: Path, *lines: bytes) -> list[Request]:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    with open_trace(path) as reader:
        return list(reader)


def sessions(folder: Path, links: Sequence[tuple[int, int]]) -> list[int]:
    """The sessions of chats, each given as itself and its parent."""
    lines = [bailian(chat_id=chat, parent_chat_id=parent) for chat, parent in links]
    return [request.session for request in read(folder, *lines)]


# --------------------------------------------------------------------------------------------------------- which one


@pytest.mark.parametrize(
    ("line", "name", "tokens_per_id"),
    [
        (mooncake(), "mooncake", 512),
        (mooncake(tokens=600, session="a"), "mooncake", 512),
        (bailian(), "bailian", 16),
        (token_line(), "tokens", 1),
        (token_line(tokens=DELETED, prompt_token_ids=[1]), "tokens", 1),
    ],
    ids=["Mooncake", "Mooncake with fields of others", "Bailian", "tokens", "prompt_token_ids"],
)
def test_the_fields_of_the_first_line_tell_the_format(
    tmp_path: Path, line: bytes, name: str, tokens_per_id: int
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n" + line)
    with open_trace(path) as reader:
        assert reader.format is None
        assert reader.tokens_per_id is None
        (request,) = reader
        assert (reader.format, reader.tokens_per_id) == (name, tokens_per_id)
    assert request.tokens_per_id == tokens_per_id


@pytest.mark.parametrize(
    ("first", "second", "missing"),
    [
        (mooncake(), token_line(), "timestamp"),
        (bailian(), mooncake(), "chat_id"),
        (bailian(), token_line(), "chat_id"),
        (token_line(), mooncake(), "tokens, or prompt_token_ids,"),
    ],
)
def test_a_line_in_another_format_than_the_first_is_refused(
    tmp_path: Path, first: bytes, second: bytes, missing: str
) -> None:
    with pytest.raises(TraceError, match=f"trace.jsonl:2: the field {missing} is missing"):
        read(tmp_path, first, second)


@pytest.mark.parametrize("changes", [{"hash_ids": DELETED}, {"chat_id": DELETED}, {"parent_chat_id": DELETED}])
def test_a_first_line_that_lacks_a_field_of_bailian_is_told_so(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(TraceError, match=f":1: the field {next(iter(changes))} is missing"):
        read(tmp_path, bailian(**changes))


def test_a_mooncake_request_is_of_no_session_and_no_adapter(tmp_path: Path) -> None:
    (request,) = read(tmp_path, mooncake(session=4, adapter=4))
    assert (request.session, request.adapter) == (0, 0)


# ----------------------------------------------------------------------------------------------------------- Bailian


def test_a_bailian_request_has_the_fields_of_its_line(tmp_path: Path) -> None:
    (request,) = read(tmp_path, bailian())
    assert (request.input_length, request.output_length, request.adapter) == (37, 132, 0)
    assert request.hash_ids.dtype == np.uint32
    assert request.hash_ids.tolist() == [1089, 1090, 6326]


@pytest.mark.parametrize(("seconds", "milliseconds"), [(61.114, 61_114.0), (0, 0.0), (7, 7_000.0), (0.0005, 0.5)])
def test_seconds_of_a_bailian_trace_become_milliseconds(tmp_path: Path, seconds: float, milliseconds: float) -> None:
    (request,) = read(tmp_path, bailian(timestamp=seconds))
    assert request.timestamp == milliseconds


def test_the_session_of_a_chat_is_the_first_of_its_conversation(tmp_path: Path) -> None:
    links = [(5, -1), (8, 5), (6, -1), (9, 8), (10, 6), (11, 8), (12, 11)]
    assert sessions(tmp_path, links) == [5, 5, 6, 5, 6, 5, 5]


def test_the_session_of_chat_0_is_one_that_no_chat_has(tmp_path: Path) -> None:
    assert sessions(tmp_path, [(0, -1), (4, 0)]) == [LARGEST_NAME, LARGEST_NAME]


def test_chats_whose_parent_is_not_in_the_trace_are_of_the_session_of_that_parent(tmp_path: Path) -> None:
    assert sessions(tmp_path, [(5, 3), (6, 3), (7, 6)]) == [3, 3, 3]


def test_the_oldest_chats_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_CHATS_REMEMBERED", 2)
    links = [(1, -1), (2, 1), (3, 2), (4, 3), (5, 2), (6, 4)]
    # 2, whose root was 1, is forgotten when 4 comes.
    assert sessions(tmp_path, links) == [1, 1, 1, 1, 2, 1]


def test_a_chat_that_comes_again_is_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_CHATS_REMEMBERED", 2)
    assert sessions(tmp_path, [(1, -1), (2, 1), (3, -1), (2, 3), (4, -1), (5, 2)]) == [1, 1, 3, 3, 4, 3]


@pytest.mark.parametrize(
    ("input_length", "output_length", "ids", "kept"),
    [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (1, 0, 1, 1),
        (16, 0, 1, 1),
        (17, 0, 1, 1),
        (17, 0, 2, 2),
        (17, 15, 2, 2),
        (17, 16, 3, 2),
        (16, 32, 3, 1),
        (0, 16, 1, 0),
    ],
)
def test_a_bailian_prompt_keeps_the_ids_of_its_own_blocks(
    tmp_path: Path, input_length: int, output_length: int, ids: int, kept: int
) -> None:
    line = bailian(input_length=input_length, output_length=output_length, hash_ids=list(range(ids)))
    (request,) = read(tmp_path, line)
    assert request.hash_ids.tolist() == list(range(kept))


@pytest.mark.parametrize(
    ("input_length", "output_length", "ids"), [(16, 0, 0), (16, 0, 2), (17, 15, 3), (33, 0, 1), (0, 0, 1)]
)
def test_a_bailian_prompt_with_too_few_or_too_many_ids_is_refused(
    tmp_path: Path, input_length: int, output_length: int, ids: int
) -> None:
    line = bailian(input_length=input_length, output_length=output_length, hash_ids=list(range(ids)))
    with pytest.raises(TraceError, match=f":1: hash_ids has {ids} ids, but an input_length of {input_length} tokens"):
        read(tmp_path, line)


# ------------------------------------------------------------------------------------------------------------ tokens


def test_a_token_request_has_its_tokens_for_ids(tmp_path: Path) -> None:
    (request,) = read(tmp_path, token_line())
    assert request.hash_ids.dtype == np.uint32
    assert request.hash_ids.tolist() == [5, 0, 0xFFFF_FFFF]
    assert (request.input_length, request.output_length, request.tokens_per_id) == (3, 0, 1)


@pytest.mark.parametrize("value", [DELETED, None])
def test_what_a_token_request_does_not_say_is_nothing(tmp_path: Path, value: object) -> None:
    line = token_line(timestamp=value, session=value, adapter=value, output_tokens=value)
    (request,) = read(tmp_path, line)
    assert (request.timestamp, request.session, request.adapter, request.output_length) == (0, 0, 0, 0)


def test_an_empty_prompt_of_tokens_is_read(tmp_path: Path) -> None:
    (request,) = read(tmp_path, token_line(tokens=[]))
    assert request.input_length == request.hash_ids.size == 0


@pytest.mark.parametrize(("output_tokens", "length"), [([4, 5, 6], 3), ([], 0), (17, 17), (0, 0)])
def test_output_tokens_are_a_list_or_their_number(tmp_path: Path, output_tokens: object, length: int) -> None:
    (request,) = read(tmp_path, token_line(output_tokens=output_tokens))
    assert request.output_length == length


def test_a_token_request_without_a_time_came_with_the_one_before(tmp_path: Path) -> None:
    lines = [token_line(), token_line(timestamp=3.5), token_line(), token_line(timestamp=9)]
    assert [request.timestamp for request in read(tmp_path, *lines)] == [0, 3.5, 3.5, 9]


@pytest.mark.parametrize("field", ["session", "adapter"])
@pytest.mark.parametrize("number", [0, 1, LARGEST_NAME])
def test_a_session_or_adapter_that_is_a_number_is_that_number(tmp_path: Path, field: str, number: int) -> None:
    (request,) = read(tmp_path, token_line(**{field: number}))
    assert getattr(request, field) == number


@pytest.mark.parametrize("field", ["session", "adapter"])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("alice", 9_933_345_172_075_899_469),
        ("", 13_020_603_013_274_838_756),
        ("größe", 16_832_822_397_561_338_100),
        ("\ud800", 7_497_787_021_708_494_914),
    ],
    ids=["letters", "no letter", "no ASCII", "half of a surrogate pair"],
)
def test_a_session_or_adapter_that_is_a_text_hashes_to_the_same_number_everywhere(
    tmp_path: Path, field: str, text: str, number: int
) -> None:
    (request,) = read(tmp_path, token_line(**{field: text}))
    assert getattr(request, field) == number


def test_a_text_that_hashes_to_0_is_a_session_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces.hashlib, "blake2b", lambda *_, **__: SimpleNamespace(digest=lambda: bytes(8)))
    (request,) = read(tmp_path, token_line(session="alice"))
    assert request.session == 1


def test_a_text_and_the_number_it_spells_are_two_sessions(tmp_path: Path) -> None:
    first, second = read(tmp_path, token_line(session="5"), token_line(session=5))
    assert first.session != second.session


# ----------------------------------------------------------------------------------------------------- hostile lines

WHOLE = "must be an integer of 0 or more, and is"
ID = "must be an integer from 0 to 4294967295, and is"
NAME = "must be a string or an integer from 0 to 18446744073709551615, and is"
CHAT = "chat_id must be an integer from 0 to 18446744073709551614, and is"
PARENT = "parent_chat_id must be an integer from -1 to 18446744073709551614, and is"
TIME = "timestamp must be a number of 0 or more, and is"

NO_TIMES = [("1", '"1"'), (-0.5, "-0.5"), (True, "true"), ([], "a list"), ({}, "an object"), (10**400, "1000")]
NO_LENGTHS = [("1", '"1"'), (-1, "-1"), (1.0, "1.0"), (True, "true"), ([], "a list"), (None, "null")]
NO_IDS = [("1", '"1"'), (-1, "-1"), (1.0, "1.0"), (True, "true"), ([], "a list"), (None, "null"), (2**32, "4294967296")]
NO_LISTS = [("1 2 3", '"1 2 3"'), (3, "3"), ({}, "an object"), (True, "true")]
NO_CHATS = [("1", '"1"'), (-2, "-2"), (1.0, "1.0"), (True, "true"), (None, "null"), (LARGEST_NAME, str(LARGEST_NAME))]

HOSTILE = {
    "mooncake": (
        mooncake,
        [
            *(("timestamp", value, f"{TIME} {shown}") for value, shown in [*NO_TIMES, (None, "null")]),
            *(("input_length", value, f"input_length {WHOLE} {shown}") for value, shown in NO_LENGTHS),
            *(("output_length", value, f"output_length {WHOLE} {shown}") for value, shown in NO_LENGTHS),
            ("input_length", 2**32, "input_length must be at most 4294967295, and is 4294967296"),
            ("output_length", 2**32, "output_length must be at most 4294967295, and is 4294967296"),
            *(("hash_ids", value, f"hash_ids must be a list, and is {shown}") for value, shown in NO_LISTS),
            *(("hash_ids", [7, value], f"hash_ids[1] {ID} {shown}") for value, shown in NO_IDS),
        ],
    ),
    "bailian": (
        bailian,
        [
            *(("chat_id", value, f"{CHAT} {shown}") for value, shown in [*NO_CHATS, (-1, "-1")]),
            *(("parent_chat_id", value, f"{PARENT} {shown}") for value, shown in NO_CHATS),
            ("parent_chat_id", 159, "parent_chat_id must be another chat or -1, and is 159, the chat_id"),
            *(("timestamp", value, f"{TIME} {shown}") for value, shown in [*NO_TIMES, (None, "null")]),
            ("timestamp", 1e306, f"{TIME} 1e+306"),
            *(("input_length", value, f"input_length {WHOLE} {shown}") for value, shown in NO_LENGTHS),
            *(("output_length", value, f"output_length {WHOLE} {shown}") for value, shown in NO_LENGTHS),
            ("output_length", 2**32, "output_length must be at most 4294967295, and is 4294967296"),
            *(
                ("type", value, f"type must be a string, and is {shown}")
                for value, shown in [(1, "1"), (None, "null"), ([], "a list"), (True, "true")]
            ),
            *(("turn", value, f"turn {WHOLE} {shown}") for value, shown in NO_LENGTHS),
            *(("hash_ids", value, f"hash_ids must be a list, and is {shown}") for value, shown in NO_LISTS),
            *(("hash_ids", [7, value, 9], f"hash_ids[1] {ID} {shown}") for value, shown in NO_IDS),
            *((field, DELETED, f"the field {field} is missing") for field in json.loads(bailian())),
        ],
    ),
    "tokens": (
        token_line,
        [
            *(
                ("tokens", value, f"tokens must be a list, and is {shown}")
                for value, shown in [*NO_LISTS, (None, "null")]
            ),
            *(("tokens", [7, value], f"tokens[1] {ID} {shown}") for value, shown in NO_IDS),
            ("prompt_token_ids", [1], "tokens and prompt_token_ids are two names for one field, and both are there"),
            *(("timestamp", value, f"{TIME} {shown}") for value, shown in NO_TIMES),
            *(
                (field, value, f"{field} {NAME} {shown}")
                for field in ("session", "adapter")
                for value, shown in [(-1, "-1"), (2**64, str(2**64)), (1.0, "1.0"), (True, "true"), ([], "a list")]
            ),
            ("output_tokens", -1, f"output_tokens {WHOLE} -1"),
            ("output_tokens", 2**32, "output_tokens must be at most 4294967295, and is 4294967296"),
            *(("output_tokens", [7, value], f"output_tokens[1] {ID} {shown}") for value, shown in NO_IDS),
            *(
                ("output_tokens", value, f"output_tokens must be a list or an integer of 0 or more, and is {shown}")
                for value, shown in [("7", '"7"'), (1.0, "1.0"), (True, "true"), ({}, "an object")]
            ),
        ],
    ),
}


@pytest.mark.parametrize(
    ("name", "field", "value", "reason"),
    [(name, *each) for name, (_, cases) in HOSTILE.items() for each in cases],
)
def test_a_field_that_is_not_as_it_should_be_is_refused_with_file_line_and_value(
    tmp_path: Path, name: str, field: str, value: object, reason: str
) -> None:
    line = HOSTILE[name][0]
    with pytest.raises(TraceError) as refusal:
        read(tmp_path, line(), b"\n", line(**{field: value}))
    assert refusal.value.line == 3
    assert refusal.value.reason.startswith(reason)


def test_prompt_token_ids_are_called_by_their_name_when_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":1: prompt_token_ids\[0\] must be an integer"):
        read(tmp_path, token_line(tokens=DELETED, prompt_token_ids=[-1]))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("line", [mooncake, bailian, token_line])
def test_a_time_that_is_no_finite_number_is_refused(tmp_path: Path, line: type, constant: str) -> None:
    content = line(timestamp="here").replace(b'"here"', constant.encode())
    with pytest.raises(TraceError, match=r":1: (timestamp must be a number|not JSON)"):
        read(tmp_path, content)


def test_a_first_line_of_no_known_format_is_told_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=":1: no format that is known: it has neither hash_ids nor tokens"):
        read(tmp_path, b'{"prompt": "hi"}\n')

"""The trace reader: what it yields of a sound trace, and how it refuses a damaged one."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from metrale_numba.replay import Request, TraceError, TraceReader


def line(hash_ids: object = (7, 8), input_length: object = 600, **others: object) -> bytes:
    fields = {"timestamp": 0, "input_length": input_length, "output_length": 5, "hash_ids": hash_ids, **others}
    return json.dumps(fields).encode() + b"\n"


def read(path: Path) -> list[Request]:
    with TraceReader(path) as reader:
        return list(reader)


def written(folder: Path, content: bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_request_has_the_fields_of_its_line(tmp_path: Path) -> None:
    (request,) = read(written(tmp_path, line([3, 0, 0xFFFF_FFFF], 1_025, timestamp=12, output_length=0)))
    assert (request.timestamp, request.input_length, request.output_length) == (12, 1_025, 0)
    assert request.hash_ids.dtype == np.uint32
    assert request.hash_ids.tolist() == [3, 0, 0xFFFF_FFFF]


def test_requests_come_in_the_order_of_the_lines(tmp_path: Path) -> None:
    content = b"".join(line([n], 512, timestamp=100 - n) for n in range(50))
    assert [int(request.hash_ids[0]) for request in read(written(tmp_path, content))] == list(range(50))


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_gzip_is_known_by_its_content_whatever_its_name(tmp_path: Path, name: str) -> None:
    assert len(read(written(tmp_path, gzip.compress(line() + line()), name))) == 2


def test_gzip_files_joined_end_to_end_are_one_trace(tmp_path: Path) -> None:
    assert len(read(written(tmp_path, gzip.compress(line()) + gzip.compress(line())))) == 2


@pytest.mark.parametrize(
    ("content", "requests"),
    [
        (line()[:-1], 1),
        (b"\n" + line() + b"  \t\n\n" + line() + b"\n", 2),
        (line().replace(b"\n", b"\r\n") * 2, 2),
        (line(unknown={"more": [None]}), 1),
        (line(timestamp=0.5), 1),
        (line([], 0), 1),
        (line([1], 1), 1),
        (line([1], 512), 1),
        (line([1, 2], 513), 1),
        (line([4, 4], 1_024), 1),
    ],
    ids=[
        "no line end at the end",
        "blank lines",
        "CRLF",
        "an unknown field",
        "a fractional timestamp",
        "an empty prompt",
        "a prompt of one token",
        "a full block",
        "a token more than a block",
        "one id twice",
    ],
)
def test_a_sound_trace_is_read(tmp_path: Path, content: bytes, requests: int) -> None:
    assert len(read(written(tmp_path, content))) == requests


DAMAGED = {
    "cut off": (line() + line()[:40] + b"\n" + line(), 2, "not JSON"),
    "two objects on a line": (line()[:-1] + line(), 1, "not JSON: Extra data"),
    "no JSON": (b"timestamp,input_length\n", 1, "not JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + line(), 1, "not JSON"),
    "UTF-16": (line().decode().encode("utf-16"), 1, "not UTF-8: byte 1 of the line is 0xff"),
    "not UTF-8": (line() + b'{"timestamp": "\xe9"}\n', 2, "not UTF-8: byte 16 of the line is 0xe9"),
    "no object": (b"[1, 2]\n", 1, "not a JSON object but a list"),
    "null": (b"null\n", 1, "not a JSON object but null"),
    "nested beyond measure": (b"[" * 200_000 + b"\n", 1, "not JSON"),
    "NaN": (line(timestamp=float("nan")), 1, "NaN is no JSON value"),
    "an infinite timestamp": (line(timestamp=0).replace(b": 0", b": 1e999", 1), 1, "timestamp must be a number"),
    "a timestamp of digits": (line(timestamp="12"), 1, 'timestamp must be a number of 0 or more, and is "12"'),
    "a negative timestamp": (line(timestamp=-1), 1, "timestamp must be a number of 0 or more, and is -1"),
    "a boolean timestamp": (line(timestamp=True), 1, "timestamp must be a number of 0 or more, and is true"),
    "a fractional length": (line(input_length=600.0), 1, "input_length must be an integer of 0 or more, and is 600.0"),
    "a negative length": (line(output_length=-5), 1, "output_length must be an integer of 0 or more, and is -5"),
    "a boolean length": (line(output_length=True), 1, "output_length must be an integer of 0 or more, and is true"),
    "a length of more digits than Python reads": (line().replace(b"600", b"6" * 5_000), 1, "not JSON"),
    "no list of ids": (line("7 8"), 1, 'hash_ids must be a list, and is "7 8"'),
    "null for ids": (line(None), 1, "hash_ids must be a list, and is null"),
    "an id of digits": (line([7, "8"]), 1, 'hash_ids[1] must be an integer from 0 to 4294967295, and is "8"'),
    "a fractional id": (line([7.0, 8]), 1, "hash_ids[0] must be an integer from 0 to 4294967295, and is 7.0"),
    "a boolean id": (line([1, True]), 1, "hash_ids[1] must be an integer from 0 to 4294967295, and is true"),
    "null for an id": (line([None, 2]), 1, "hash_ids[0] must be an integer from 0 to 4294967295, and is null"),
    "a list for an id": (line([1, [2]]), 1, "hash_ids[1] must be an integer from 0 to 4294967295, and is a list"),
    "an object for an id": (line([{}, 2]), 1, "hash_ids[0] must be an integer from 0 to 4294967295, and is an object"),
    "a negative id": (line([7, -1]), 1, "hash_ids[1] must be an integer from 0 to 4294967295, and is -1"),
    "an id of 33 bits": (line([2**32, 0]), 1, "hash_ids[0] must be an integer from 0 to 4294967295, and is 4294967296"),
    "a long string for an id": (line(["x" * 900, 1]), 1, '"' + "x" * 39 + "..."),
    "too few ids": (line([7], 513), 1, "hash_ids has 1 ids, but an input_length of 513 tokens makes 2 blocks of 512"),
    "too many ids": (line([7, 8], 512), 1, "hash_ids has 2 ids, but an input_length of 512 tokens makes 1 blocks"),
    "ids of nothing": (line([7], 0), 1, "hash_ids has 1 ids"),
    "damage after blank lines": (b"\n\n" + line() + b"\n{}\n", 5, "the field timestamp is missing"),
    "gzip cut off": (gzip.compress(line() * 3, mtime=0)[:-12], None, "the gzip data is damaged"),
    "gzip with a wrong checksum": (gzip.compress(line(), mtime=0)[:-8] + bytes(8), None, "the gzip data is damaged"),
    "gzip with a broken stream": (gzip.compress(line(), mtime=0)[:10] + b"\xff" * 40, 1, "the gzip data is damaged"),
    "gzip with something behind it": (gzip.compress(line()) + b"more", None, "the gzip data is damaged"),
    "the first byte of gzip alone": (b"\x1f", 1, "the gzip data is damaged"),
    "nothing": (b"", None, "the file is empty"),
    "nothing, in gzip": (gzip.compress(b""), None, "the trace holds no request"),
    "blank lines only": (b"\n \n\n", None, "the trace holds no request"),
}


@pytest.mark.parametrize(("content", "number", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_refused_with_file_line_and_reason(
    tmp_path: Path, content: bytes, number: int | None, reason: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(TraceError) as refusal:
        read(path)
    assert reason in str(refusal.value)
    assert refusal.value.file == str(path)
    if number is not None:
        assert refusal.value.line == number
        assert str(refusal.value).startswith(f"{path}:{number}: ")
    else:
        assert str(refusal.value).startswith(f"{path}:")


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b" \t\n"], ids=["nothing", "LF", "CRLF", "spaces"])
@pytest.mark.parametrize(
    ("kept", "message", "column"),
    [
        (b'{"timestamp": 0, "input_le', "Unterminated string starting at", 18),
        (b'{"timestamp": 0', "Expecting ',' delimiter", 16),
        (b'{"timestamp":', "Expecting value", 14),
        (b'{"hash_ids": [46,', "Expecting value", 18),
        ('{"größe": [46'.encode(), "Expecting ',' delimiter", 14),
        (b'{"timestamp": 0 "', "Expecting ',' delimiter", 17),
    ],
)
def test_the_column_of_a_line_that_is_cut_off_is_where_it_ends_or_where_the_fault_begins(
    tmp_path: Path, kept: bytes, message: str, column: int, end: bytes
) -> None:
    with pytest.raises(TraceError) as refusal:
        read(written(tmp_path, line() + kept + end))
    assert refusal.value.reason == f"not JSON: {message} (column {column})"


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    fields = json.loads(line())
    del fields[field]
    path = written(tmp_path, line() + json.dumps(fields).encode())
    with pytest.raises(TraceError, match=f":2: the field {field} is missing"):
        read(path)


def test_a_plain_file_named_gz_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.gz:1: the gzip data is damaged: Not a gzipped file"):
        read(written(tmp_path, line(), "trace.gz"))


def test_a_file_without_line_ends_is_given_up_after_16_mebibytes() -> None:
    with pytest.raises(TraceError, match=r"/dev/zero:1: the line is longer than 16,777,216 bytes"):
        read(Path("/dev/zero"))


def test_a_missing_file_is_refused_when_the_reader_is_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be opened: No such file or directory"):
        TraceReader(tmp_path / "none.jsonl")


def test_a_directory_is_refused_when_the_reader_is_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be opened: Is a directory"):
        TraceReader(tmp_path)


def test_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(TraceError, match="<stdin>: cannot be opened: standard input is closed"):
        TraceReader("-")


def test_requests_before_the_damage_are_yielded_first(tmp_path: Path) -> None:
    with TraceReader(written(tmp_path, line() + line() + b"oops\n")) as reader:
        requests = iter(reader)
        next(requests)
        next(requests)
        with pytest.raises(TraceError, match=":3: not JSON"):
            next(requests)


def test_a_trace_is_not_held_in_memory(tmp_path: Path) -> None:
    path = written(tmp_path, line(list(range(200)), 200 * 512) * 3_000)
    assert path.stat().st_size > 2_500_000
    tracemalloc.start()
    try:
        with TraceReader(path) as reader:
            assert sum(1 for _ in reader) == 3_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000


@pytest.mark.parametrize("packed", [False, True])
def test_the_fraction_read_grows_to_one(tmp_path: Path, packed: bool) -> None:
    rng = np.random.default_rng(0)
    content = b"".join(line(rng.integers(2**32, size=100).tolist(), 51_200) for _ in range(500))
    with TraceReader(written(tmp_path, gzip.compress(content) if packed else content)) as reader:
        fractions = [reader.fraction_read for _ in reader]
    assert all(isinstance(fraction, float) for fraction in fractions)
    assert fractions == sorted(fractions, key=float)  # type: ignore[arg-type]
    assert fractions[0] < 0.2  # type: ignore[operator]
    assert fractions[-1] == 1.0


def test_a_pipe_is_read_and_has_no_fraction(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(line() * 3,))
    writer.start()
    with TraceReader(pipe) as reader:
        assert [reader.fraction_read for _ in reader] == [None] * 3
    writer.join()


def test_leaving_the_context_closes_the_file(tmp_path: Path) -> None:
    with TraceReader(written(tmp_path, line())) as reader:
        pass
    with pytest.raises(ValueError, match="closed file"):
        list(reader)


def test_leaving_the_context_leaves_standard_input_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(os.dup(_pipe_with(line())), "rb")))
    monkeypatch.setattr("sys.stdin", stdin)
    with TraceReader("-") as reader:
        assert len(list(reader)) == 1
    assert not stdin.closed
    stdin.close()


def _pipe_with(content: bytes) -> int:
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading

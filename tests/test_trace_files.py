"""The files that traces come in: zstd beside gzip, standard input, and memory that does not grow with the length."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import metrale_numba
from metrale_numba.replay import TraceError, open_trace

LINE = b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'
SKIPPABLE = b"\x5f\x2a\x4d\x18\x04\x00\x00\x00more"


@pytest.fixture
def zstandard() -> ModuleType:
    package: ModuleType = pytest.importorskip("zstandard")
    return package


def count(path: Path | str) -> int:
    with open_trace(path) as reader:
        return sum(1 for _ in reader)


def written(folder: Path, content: bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl.zst", "trace.jsonl", "trace.gz"])
def test_zstd_is_known_by_its_content_whatever_its_name(tmp_path: Path, zstandard: ModuleType, name: str) -> None:
    assert count(written(tmp_path, zstandard.compress(LINE * 2), name)) == 2


def test_gzip_is_known_by_its_content_if_its_name_says_zstd(tmp_path: Path) -> None:
    assert count(written(tmp_path, gzip.compress(LINE * 2), "trace.zst")) == 2


def test_zstd_frames_joined_end_to_end_are_one_trace(tmp_path: Path, zstandard: ModuleType) -> None:
    frames = [zstandard.compress(LINE * 2), zstandard.compress(b""), zstandard.compress(LINE[:20])]
    assert count(written(tmp_path, b"".join([*frames, zstandard.compress(LINE[20:] + LINE)]))) == 4


@pytest.mark.parametrize("place", ["before", "between", "behind"])
def test_what_a_packer_has_zstd_skip_is_skipped(tmp_path: Path, zstandard: ModuleType, place: str) -> None:
    frame = zstandard.compress(LINE)
    content = {
        "before": SKIPPABLE + frame + frame,
        "between": frame + SKIPPABLE + frame,
        "behind": frame + frame + SKIPPABLE,
    }[place]
    assert count(written(tmp_path, content)) == 2


def test_a_long_trace_is_read_out_of_zstd_whole(tmp_path: Path, zstandard: ModuleType) -> None:
    rng = np.random.default_rng(0)
    lines = [LINE.replace(b"7, 8", b"%d, %d" % tuple(rng.integers(2**32, size=2))) for _ in range(20_000)]
    with open_trace(written(tmp_path, zstandard.compress(b"".join(lines)))) as reader:
        read = [request.hash_ids.tolist() for request in reader]
    assert read == [[int(each) for each in line.split(b"[")[1].split(b"]")[0].split(b",")] for line in lines]


@pytest.mark.parametrize("cut", [1, 6, 12, -1, -5])
def test_zstd_that_is_cut_off_is_refused(tmp_path: Path, zstandard: ModuleType, cut: int) -> None:
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(LINE * 9)
    with pytest.raises(TraceError, match=r":\d+: the zstd data is damaged: it ends in the middle of a frame"):
        count(written(tmp_path, whole[:cut]))


def test_a_second_frame_that_is_cut_off_is_refused(tmp_path: Path, zstandard: ModuleType) -> None:
    frame = zstandard.compress(LINE)
    with pytest.raises(TraceError, match=r":2: the zstd data is damaged: it ends in the middle of a frame"):
        count(written(tmp_path, frame + frame[:10]))


@pytest.mark.parametrize("behind", [b"more", LINE, b"\x00" * 8])
def test_zstd_with_something_behind_it_is_refused(tmp_path: Path, zstandard: ModuleType, behind: bytes) -> None:
    with pytest.raises(TraceError, match=r":2: the zstd data is damaged"):
        count(written(tmp_path, zstandard.compress(LINE) + behind))


def test_zstd_with_a_wrong_checksum_is_refused(tmp_path: Path, zstandard: ModuleType) -> None:
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(LINE)
    with pytest.raises(TraceError, match=r":1: the zstd data is damaged"):
        count(written(tmp_path, whole[:-4] + bytes(4)))


def test_a_plain_file_named_zst_is_refused(tmp_path: Path, zstandard: ModuleType) -> None:
    with pytest.raises(TraceError, match=r"trace\.zst:1: the zstd data is damaged"):
        count(written(tmp_path, LINE, "trace.zst"))


def test_zstd_of_nothing_holds_no_request(tmp_path: Path, zstandard: ModuleType) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl: the trace holds no request"):
        count(written(tmp_path, zstandard.compress(b"")))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.zst"])
def test_without_the_package_zstd_is_refused_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match=r"the package zstandard is missing: pip install 'metrale-numba\[zstd\]'"):
        open_trace(written(tmp_path, b"\x28\xb5\x2f\xfd", name))


def test_without_the_package_other_traces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert count(written(tmp_path, gzip.compress(LINE))) == 1


def test_zstd_that_unpacks_to_gigabytes_without_a_line_end_is_given_up(tmp_path: Path, zstandard: ModuleType) -> None:
    zeros = bytes(1 << 20)
    packer = zstandard.ZstdCompressor().compressobj()
    packed = b"".join([*(packer.compress(zeros) for _ in range(400)), packer.flush()])
    path = written(tmp_path, packed)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="the line is longer than 16,777,216 bytes"):
            count(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000


def test_the_fraction_read_of_zstd_grows_to_one(tmp_path: Path, zstandard: ModuleType) -> None:
    rng = np.random.default_rng(0)
    lines = [LINE.replace(b"7, 8", b"%d, %d" % tuple(rng.integers(2**32, size=2))) for _ in range(5_000)]
    with open_trace(written(tmp_path, zstandard.compress(b"".join(lines)))) as reader:
        fractions = [reader.fraction_read or 0.0 for _ in reader]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.9
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("pack", ["plain", "gzip", "zstd"])
def test_a_pipe_may_bring_one_byte_at_a_time(tmp_path: Path, zstandard: ModuleType, pack: str) -> None:
    packed = {"plain": LINE, "gzip": gzip.compress(LINE), "zstd": zstandard.compress(LINE)}[pack]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "wb", buffering=0) as end:
            for value in packed:
                end.write(bytes([value]))

    writer = threading.Thread(target=write)
    writer.start()
    assert count(pipe) == 1
    writer.join()


# The command, and then the most memory that it ever had, in bytes.
MEASURED = """
import resource, sys
from metrale_numba.cli import main
main(["replay", "-", "--json", "--blocks", "1000"], standalone_mode=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_of_a_replay(lines: bytes, times: int) -> int:
    """Bytes of memory that a replay of standard input takes at most."""
    package = str(Path(metrale_numba.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", MEASURED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(times):
            process.stdin.write(lines)
        process.stdin.close()
        peak = int(process.stdout.read().split()[-1])
    assert process.returncode == 0
    return peak


@pytest.mark.parametrize("kind", ["mooncake", "bailian", "tokens"])
def test_a_long_trace_takes_no_more_memory_than_a_short_one(kind: str) -> None:
    lines = []
    for number in range(500):
        ids = list(range(number, number + 200))
        lines.append(
            {
                "mooncake": f'{{"timestamp": {number}, "input_length": 102400, "output_length": 5, "hash_ids": {ids}}}',
                "bailian": f'{{"chat_id": {number}, "parent_chat_id": {number - 1}, "timestamp": {number}, '
                f'"input_length": 3200, "output_length": 5, "type": "text", "turn": 1, "hash_ids": {ids}}}',
                "tokens": f'{{"tokens": {ids}, "session": "{number}", "output_tokens": 5}}',
            }[kind]
        )
    content = "".join(line + "\n" for line in lines).encode()
    assert len(content) > 400_000
    short, long = peak_of_a_replay(content, 4), peak_of_a_replay(content, 40)
    # Held, the requests alone would take 16 MB more.
    assert long - short < 8_000_000

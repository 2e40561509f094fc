"""Copies by pickle, by `deepcopy` and by file answer like the original; a file that is not whole is refused by name.

It relies on random calls to make a rich cache. Files are torn, turned over and forged, with a right checksum around
what no cache would write; each is opened in the promise that nothing in it is executed, hangs or kills the process.
"""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, Caller, answer_of, same, told_by
from pair import COPIES
from state import arrays_of, differences, snapshot_of

import metrale_numba
from metrale_numba import CacheFileError, RadixTree, copies
from metrale_numba.kernels import layout

PACKAGE_PARENT = Path(metrale_numba.__file__).parent.parent
SETTINGS: dict[str, Any] = {
    "partial_tail_sharing": True,
    "tail_lease_ttl": 4,
    "evict_alpha": 0.75,
    "block_size": 2,
    "max_pinned_blocks": 12,
    "quotas": {1: 20},
}
#: What depends on how much room the arrays have, which a copy need not have.
NOT_COPIED = ("memory_usage", "compact")
#: For a child process that might hang.
DEADLINE_SECONDS = 600


def call_at_random(cache: RadixTree, caller: Caller, count: int) -> None:
    for _ in range(count):
        call = caller.draw()
        caller.learn(call, answer_of(cache, call))


def rich_cache(seed: int = 1, count: int = 3000, **settings: Any) -> tuple[RadixTree, Caller]:
    """A cache that has seen everything, and who called it."""
    cache, caller = RadixTree(**{**SETTINGS, **settings}), Caller(seed)
    call_at_random(cache, caller, count)
    # Whatever quota the calls have left.
    cache.set_quota(0, None)
    cache.insert(range(9), range(5), range(5))
    cache.pin("for ever", range(9))
    cache.pin("for an hour", range(4), ttl=3600)
    cache.insert([1] * 30, range(10), block_size=3, adapter_id=5)
    cache.drop_adapter(5)
    cache.insert_tail_snapshot([1, 1, 1], 2**40, session_hash=1)
    assert cache.evict_snapshot_to_tier(0) is not None
    detail = cache.stats_detail()
    assert detail.num_blocks > 20
    assert detail.num_suffix_blocks > 2
    assert detail.over_releases > 0
    assert cache.snapshot_count() > 5
    return cache, caller


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a small cache with something of everything in it: candidates and held blocks, free rows, two pools."""
    cache = RadixTree(block_size=4, partial_tail_sharing=True, check_secret=b"secret", quotas={3: 9})
    cache.insert(range(18), range(5), range(100, 105))
    cache.insert([*range(8), 9, 9, 9, 9], [0, 1, 10])
    cache.insert(range(10), range(20, 23), adapter_id=3)
    cache.insert(range(30, 35), range(30, 33), block_size=2)
    cache.insert([50] * 9, range(40, 43), adapter_id=9)
    cache.release([50] * 9, adapter_id=9)
    assert len(cache.evict(9)) == 3
    cache.release(range(18))
    cache.release([*range(8), 9, 9, 9, 9])
    cache.release(range(30, 35), block_size=2)
    for slot, depth in enumerate((4, 8, 9)):
        cache.insert_tail_sibling_snapshot(range(depth), slot, session_hash=7)
    cache.evict_snapshot_to_tier(0)
    cache.insert_intermediate_snapshot(range(4), (), (), None, 9)
    cache.pin("system", range(8))
    path = tmp_path_factory.mktemp("saved") / "cache"
    cache.save(path)
    return path.read_bytes()


# ------------------------------------------------------------------------------------------ answering like the original


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_answers_every_later_call_like_the_original(way: str) -> None:
    cache, caller = rich_cache()
    twin = COPIES[way](cache)
    assert told_by(twin)[:3] == told_by(cache)[:3]
    for _ in range(3000):
        call = caller.draw()
        answer = answer_of(cache, call)
        if call.name not in ("pins", "copy"):
            assert same(answer_of(twin, call), answer) or call.name in NOT_COPIED, call
        caller.learn(call, answer)
    assert same(answer_of(twin, Call("clear", {})), answer_of(cache, Call("clear", {})))


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_keeps_pins_with_the_time_left(way: str) -> None:
    cache, _ = rich_cache()
    pins, copied = cache.pins(), COPIES[way](cache).pins()
    assert list(copied) == list(pins)
    for name, pin in pins.items():
        left, left_in_copy = pin.seconds_left, copied[name].seconds_left
        assert copied[name]._replace(seconds_left=left) == pin
        if name == "for an hour":
            assert left is not None
            assert left_in_copy is not None
            assert left - 60 < left_in_copy <= left
        else:
            assert left_in_copy is None


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_its_settings_whatever_the_environment_says(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = rich_cache(hermetic=True, tail_protect=False, check_secret=b"\0secret")
    for name, value in {
        "METRALE_PREFIX_SUBBLOCK": "0",
        "METRALE_HERMETIC": "0",
        "METRALE_SNAP_EVICT_ALPHA": "8",
        "METRALE_SNAP_EVICT_LEGACY": "1",
        "METRALE_ADOPT_BLOCKS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert COPIES[way](cache).settings == cache.settings


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_finds_and_checks_as_the_original_did(way: str) -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2, 3, 4], [7, 8])
    cache.insert_tail_snapshot([1, 2], 3, session_hash=9)
    spill = cache.evict_snapshot_to_tier(0)
    assert isinstance(spill, metrale_numba.Spill)
    twin = COPIES[way](cache)
    match = twin.lookup([1, 2, 3, 4], session_hash=9)
    assert (match.ssm_snapshot_tier_key, match.ssm_snapshot_check) == (spill.key, spill.check)
    # The random key of the check hash was copied, too: the bytes that were stored with the old check are still good.
    assert twin.promote_snapshot(spill.key, 5, spill.check)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_shares_no_memory_with_the_original(way: str) -> None:
    cache, caller = rich_cache()
    before = snapshot_of(cache)
    twin = COPIES[way](cache)
    mine, others = arrays_of(cache), arrays_of(twin)
    assert mine.keys() == others.keys()
    assert not any(np.shares_memory(mine[name], array) for name, array in others.items())
    call_at_random(twin, caller, 2000)
    twin.clear()
    after = snapshot_of(cache)
    assert [path for path in differences(before, after) if path != "process"] == []
    cache.check_integrity()


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_counts_on_for_itself_and_from_zero_for_the_process(way: str) -> None:
    cache, _ = rich_cache()
    detail = cache.stats_detail()
    assert detail.cache_hits > 0
    before = metrale_numba.cache_hit_count(), metrale_numba.cache_hit_tokens_total()
    twin = COPIES[way](cache)
    assert twin.stats_detail() == detail
    assert (metrale_numba.cache_hit_count(), metrale_numba.cache_hit_tokens_total()) == before
    matched = twin.lookup(range(4)).matched_tokens
    assert matched == 4
    assert twin.stats_detail().cache_hits == detail.cache_hits + 1
    assert cache.stats_detail().cache_hits == detail.cache_hits
    gone = weakref.ref(twin)
    del twin
    gc.collect()
    assert gone() is None
    assert (metrale_numba.cache_hit_count(), metrale_numba.cache_hit_tokens_total()) == (before[0] + 1, before[1] + 4)


@pytest.mark.parametrize("way", COPIES)
def test_an_empty_cache_can_be_copied(way: str) -> None:
    twin = COPIES[way](RadixTree(block_size=1))
    twin.check_integrity()
    assert twin.insert([1, 2], [3, 4]).blocks.tolist() == [3, 4]
    assert twin.lookup([1, 2]).matched_blocks.tolist() == [3, 4]


def test_a_copy_of_a_copy_is_as_good() -> None:
    cache, caller = rich_cache()
    twin = cache
    for _ in range(3):
        for make in COPIES.values():
            twin = make(twin)
    for _ in range(1000):
        call = caller.draw()
        answer = answer_of(cache, call)
        if call.name not in ("pins", "copy"):
            assert same(answer_of(twin, call), answer) or call.name in NOT_COPIED, call
        caller.learn(call, answer)


def answers_in_another_process(cache: RadixTree, calls: list[Call], results: Any) -> None:
    """Runs in a spawned process, which has unpickled the cache."""
    cache.check_integrity()
    counted = metrale_numba.cache_hit_count()
    results.send((counted, [answer_of(cache, call) for call in calls]))


def test_a_spawned_process_gets_a_cache_that_answers_like_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    # The child gets this path, and imports this module by the name that pytest gave it.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent.parent)])
    cache, caller = rich_cache()
    left_out = (*NOT_COPIED, "pins", "copy")
    calls = [call for call in (caller.draw() for _ in range(500)) if call.name not in left_out]
    context = multiprocessing.get_context("spawn")
    mine, others = context.Pipe()
    child = context.Process(target=answers_in_another_process, args=(cache, calls, others))
    child.start()
    # So that a child that dies ends the wait.
    others.close()
    assert mine.poll(DEADLINE_SECONDS)
    counted, answers = mine.recv()
    child.join()
    assert child.exitcode == 0
    assert counted == 0
    assert all(same(answer_of(cache, call), answer) for call, answer in zip(calls, answers, strict=True))


# --------------------------------------------------------------------------------------------------------------- saving


def test_saving_leaves_one_file_that_its_owner_alone_can_read(tmp_path: Path) -> None:
    cache, _ = rich_cache()
    cache.save(tmp_path / "cache")
    cache.save(str(tmp_path / "cache"))
    (path,) = tmp_path.iterdir()
    # It holds the key of the check hash.
    assert path.stat().st_mode & 0o077 == 0


def test_saving_changes_nothing(tmp_path: Path) -> None:
    cache, _ = rich_cache()
    before = snapshot_of(cache)
    cache.save(tmp_path / "cache")
    assert differences(before, snapshot_of(cache)) == []


@pytest.mark.parametrize("place", ["missing/cache", "."])
def test_a_save_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path, place: str) -> None:
    cache, _ = rich_cache()
    with pytest.raises(OSError, match=r"No such file|directory"):
        cache.save(tmp_path / place)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_half_way_leaves_the_earlier_file_and_no_other(tmp_path: Path) -> None:
    cache, _ = rich_cache()
    cache.save(tmp_path / "cache")
    earlier = (tmp_path / "cache").read_bytes()
    cache.insert([5] * 8, range(4))
    # As on a full disk, but that the system says it of this process alone.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(earlier) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            cache.save(tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache").read_bytes() == earlier


SAVE_WITHOUT_END = """
import signal, sys
signal.alarm({deadline})
from metrale_numba import RadixTree
cache = RadixTree(block_size=1)
number = 0
while True:
    # The version is the number of blocks; large enough to be written in more than one step.
    cache.insert(range(number * 5000, (number + 1) * 5000), range(5000), adapter_id=number % 8)
    number += 1
    if number % 8 == 0:
        cache.clear()
    cache.save({path!r})
    print(number, cache.stats()[0], flush=True)
"""


def test_a_process_killed_while_saving_leaves_the_earlier_version_or_the_later(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    code = SAVE_WITHOUT_END.format(deadline=DEADLINE_SECONDS, path=str(path))
    env = {**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)}
    moments = random.Random(1)
    num_left = 0
    for turn in range(100):
        # At least so many kills, and as many more as it takes until one has hit a save.
        if turn >= 12 and num_left > 0:
            break
        process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        # Some saves are made, and the kill comes at any moment of the next ones.
        told = [process.stdout.readline() for _ in range(moments.randrange(1, 5))]
        for _ in range(moments.randrange(200_000)):
            pass
        process.kill()
        rest, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        lines = [*told, *rest.splitlines()]
        saved_last = len(lines)
        # It may have been killed between a save and the word of it.
        versions = [5000 * (number % 8) for number in (saved_last, saved_last + 1)]
        cache = RadixTree.load(path)
        assert cache.stats()[0] in versions
        num_left += len(list(tmp_path.iterdir())) - 1
        # What the killed one left beside it is in nobody's way.
        cache.insert([9] * 10, range(10), block_size=10)
        cache.save(path)
        assert RadixTree.load(path).stats() == cache.stats()
        for left in tmp_path.iterdir():
            if left != path:
                left.unlink()
    # Or no kill would have hit a save.
    assert num_left > 0


# -------------------------------------------------------------------------------------------------------- damaged files


def refused(path: Path, content: bytes) -> str:
    """The words in which a file is refused, after its name."""
    path.write_bytes(content)
    with pytest.raises(CacheFileError) as caught:
        RadixTree.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path} "), message
    return message.removeprefix(f"{path} ")


def test_the_whole_file_is_not_refused(tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "cache"
    path.write_bytes(saved)
    cache = RadixTree.load(path)
    assert cache.lookup(range(18)).matched_blocks.tolist() == [0, 1, 2, 3, 4]
    cache.check_integrity()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, saved: bytes) -> None:
    header = copies._HEADER.size
    for length in range(header):
        assert refused(tmp_path / "cache", saved[:length]) == "is not a saved cache"
    whole = len(saved) - header
    for length in {header, header + 1, *range(header, len(saved), 97), *range(len(saved) - 40, len(saved))}:
        assert refused(tmp_path / "cache", saved[:length]) == (
            f"has {length - header} bytes of content where {whole} were written"
        )


def test_a_file_with_more_behind_it_is_refused(tmp_path: Path, saved: bytes) -> None:
    whole = len(saved) - copies._HEADER.size
    message = refused(tmp_path / "cache", saved + b"\0")
    assert message == f"has {whole + 1} bytes of content where {whole} were written"


def test_a_file_with_a_bit_turned_over_anywhere_is_refused(tmp_path: Path, saved: bytes) -> None:
    positions = {*range(copies._HEADER.size + 20), *range(0, len(saved), 13), len(saved) - 1}
    for position in sorted(positions):
        content = bytearray(saved)
        content[position] ^= 1 << position % 8
        refused(tmp_path / "cache", bytes(content))


def test_a_file_of_a_newer_version_is_refused_as_that(tmp_path: Path, saved: bytes) -> None:
    newer = copies.FORMAT_VERSION + 1
    content = bytearray(saved)
    content[8:12] = newer.to_bytes(4, "little")
    assert refused(tmp_path / "cache", bytes(content)).startswith(f"is of format {newer}, newer than {newer - 1}")


def test_a_file_of_an_older_version_is_refused_as_that(tmp_path: Path, saved: bytes) -> None:
    content = bytearray(saved)
    content[8:12] = (1).to_bytes(4, "little")
    assert refused(tmp_path / "cache", bytes(content)).startswith("is of format 1, older than")


class Bomb:
    """Whoever unpickles it makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def foreign_files(bomb: Bomb) -> dict[str, bytes]:
    archive, arrays = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("meta.npy", "{}")
    np.savez(arrays, allow_pickle=True, meta=np.array([bomb], object))
    return {
        "empty": b"",
        "text": b"METRALE is what it begins with, but text is all it is. " * 9,
        "a pickle": pickle.dumps(bomb),
        "a pickled cache": pickle.dumps(RadixTree()),
        "a zip archive": archive.getvalue(),
        "a NumPy archive with objects": arrays.getvalue(),
        "zeros": bytes(4096),
        "the magic alone": copies._MAGIC,
        "the magic and zeros": copies._MAGIC + bytes(4096),
    }


FOREIGN = (*foreign_files(Bomb(Path("unused"))),)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused_and_nothing_in_it_runs(tmp_path: Path, kind: str) -> None:
    went_off = tmp_path / "went off"
    refused(tmp_path / "cache", foreign_files(Bomb(went_off))[kind])
    assert not went_off.exists()


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_content_under_a_right_checksum_is_refused_and_nothing_in_it_runs(tmp_path: Path, kind: str) -> None:
    went_off = tmp_path / "went off"
    content = foreign_files(Bomb(went_off))[kind]
    assert refused(tmp_path / "cache", sealed(content)).startswith("cannot be read as a saved cache: ")
    # Also in the place of an array and of the description.
    text = content.decode("latin-1").encode()
    for inner in (content, json.dumps(text.decode()).encode()):
        refused(tmp_path / "cache", sealed(copies._LENGTH.pack(len(inner)) + inner + content))
    assert not went_off.exists()


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(CacheFileError, match=r"^/dev/zero is not a saved cache$"):
        RadixTree.load("/dev/zero")


def test_a_file_that_is_not_there_or_a_directory_is_an_operating_system_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RadixTree.load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        RadixTree.load(tmp_path)


# --------------------------------------------------------------------------------------------------------- forged files


def sealed(content: bytes) -> bytes:
    """A file of this content with a right length and checksum."""
    version = copies.FORMAT_VERSION
    checksum = copies._checksum(version, [content])
    return copies._HEADER.pack(copies._MAGIC, version, len(content), checksum) + content


def taken_apart(saved: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description and the arrays of a file, to be changed."""
    meta, arrays = copies._taken_apart(saved[copies._HEADER.size :])
    del meta["arrays"]
    return meta, {name: array.copy() for name, array in arrays.items()}


def put_together(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A file of them by the rules of the format, whatever they say; a list of arrays in `meta` stands as it is."""
    shapes = [[name, *array.shape] for name, array in arrays.items()]
    text = json.dumps({"arrays": shapes, **meta}).encode()
    return sealed(b"".join([copies._LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays.values())]))


Forgery = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def at(name: str, row: int, **fields: int) -> Forgery:
    """Overwrite fields of a row."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        for field, value in fields.items():
            arrays[name][row][field] = value

    return forge


def put(name: str, place: int, value: int) -> Forgery:
    """Overwrite an element of a plain array."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name].reshape(-1)[place] = value

    return forge


def fill(name: str, value: int) -> Forgery:
    """Overwrite a plain array."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name][...] = value

    return forge


def exchange(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Forgery:
    """Put what is made of an array in its place."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = change(arrays[name])

    return forge


def shorten(name: str) -> Forgery:
    """Take the last row of an array away."""
    return exchange(name, lambda array: array[:-1])


def add(name: str) -> Forgery:
    """Add an array."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = np.zeros(3, np.uint32)

    return forge


def drop(name: str) -> Forgery:
    """Leave an array out."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        del arrays[name]

    return forge


def together(*forgeries: Forgery) -> Forgery:
    """Forge several things in one file."""

    def forge(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        for one in forgeries:
            one(meta, arrays)

    return forge


def say(*path: Any, value: Any) -> Forgery:
    """Put something else in a place of the description."""

    def forge(meta: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        *way, last = path
        part: Any = meta
        for step in way:
            part = part[step]
        part[last] = value

    return forge


def leave_out(*path: Any) -> Forgery:
    """Take something out of the description."""

    def forge(meta: dict[str, Any], _arrays: dict[str, np.ndarray]) -> None:
        *way, last = path
        part: Any = meta
        for step in way:
            part = part[step]
        del part[last]

    return forge


def swap(name: str, left: int, right: int) -> Forgery:
    """Exchange two rows."""

    def forge(_meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        array = arrays[name]
        array[[left, right]] = array[[right, left]]

    return forge


NODES, LINKS, SUFFIXES, POOL = "pool/4/nodes", "pool/4/links", "pool/4/suffixes", "pool/4/header"
# Of the pool of block size 4: row 0 is a root, 1 to 4 are its prompt of 18 tokens, 5 the branch, 6 to 8 another root's
# prompt, 9 to 11 are free.
FORGERIES: dict[str, Forgery] = {
    "a parent out of range": at(NODES, 2, parent=12),
    "a node that is its own parent": at(NODES, 2, parent=2),
    "two nodes that are each other's parents": together(
        at(NODES, 2, parent=3),
        at(LINKS, 3, first_child=2),
        at(LINKS, 1, first_child=layout.NONE),
        at(NODES, 1, children=0),
    ),
    "a node without a parent": at(NODES, 2, parent=layout.NONE),
    "a root among the nodes": at(NODES, 2, parent=layout.ROOT),
    "a node without a block": at(NODES, 2, block=layout.NONE),
    "a stamp from the future": at(NODES, 2, stamp=2**61),
    "a stamp of nought": at(NODES, 4, stamp=0),
    "another check hash": at(NODES, 2, state=1),
    "a mark too many": at(NODES, 4, children=layout.HAS_SNAPSHOTS | layout.HAS_SUFFIX),
    "more children than there are": at(NODES, 2, children=0x7FFF_FFFF),
    "a first child out of range": at(LINKS, 2, first_child=12),
    "a node that is its own first child": at(LINKS, 2, first_child=2),
    "a sibling out of range": at(LINKS, 5, next_sibling=12),
    "a node that is its own sibling": at(LINKS, 5, next_sibling=5),
    "siblings in a ring": together(
        at(LINKS, 3, next_sibling=5, previous_sibling=5),
        at(LINKS, 5, next_sibling=3, previous_sibling=3),
    ),
    "a previous sibling out of range": at(LINKS, 5, previous_sibling=2**31),
    "another forest's root": at(LINKS, 2, root=6),
    "a root out of range": at(LINKS, 2, root=12),
    "a root that is no root": at(LINKS, 2, root=1),
    "a suffix out of range": at(LINKS, 4, suffix=3),
    "another node's suffix": at(LINKS, 4, suffix=1),
    "a place out of range": at(LINKS, 4, place=2**31),
    "a candidate that is in no order": at(LINKS, 4, place=layout.NONE),
    "other tokens": put("pool/4/tokens", 9, 77),
    "a suffix as long as a block": at(SUFFIXES, 0, length=4),
    "a suffix of no length": at(SUFFIXES, 0, length=0),
    "a suffix longer than all tokens": at(SUFFIXES, 0, length=layout.NONE),
    "a suffix without a block": at(SUFFIXES, 0, block=layout.NONE),
    "a suffix of a node out of range": at(SUFFIXES, 0, node=12),
    "a free row out of range": put(POOL, layout.POOL_FREE, 12),
    "a free row that is in use": put(POOL, layout.POOL_FREE, 2),
    "a free row below all": put(POOL, layout.POOL_FREE, -2),
    "free rows in a ring": at(NODES, 11, block=9),
    "free rows that leave the array": at(NODES, 11, block=12),
    "more free rows than there are": put(POOL, layout.POOL_NUM_FREE, 2**40),
    "a free suffix out of range": put(POOL, layout.POOL_SUFFIX_FREE, 3),
    "more nodes than there are": put(POOL, layout.POOL_NUM_NODES, 2**40),
    "more roots than there are": put(POOL, layout.POOL_NUM_ROOTS, 2**40),
    "a first root out of range": put(POOL, layout.POOL_FIRST_ROOT, 12),
    "a first root below all": put(POOL, layout.POOL_FIRST_ROOT, -1),
    "roots in a ring": together(
        at(LINKS, 0, next_sibling=6, previous_sibling=6),
        at(LINKS, 6, next_sibling=0, previous_sibling=0),
    ),
    "more suffixes than there are": put(POOL, layout.POOL_NUM_SUFFIXES, 2**40),
    "a pool of a number without measure": put(POOL, layout.POOL_NUMBER, 2**40),
    "a pool of a number below all": put(POOL, layout.POOL_NUMBER, -1),
    "two pools of one number": put(POOL, layout.POOL_NUMBER, 1),
    "a table without a free slot": fill("pool/4/table", 5),
    "a table that names a row out of range": fill("pool/4/table", 12),
    "a table that finds nothing": fill("pool/4/table", layout.EMPTY_SLOT),
    "a table too small for its rows": exchange("pool/4/table", lambda table: table[:12]),
    "a table of no size": exchange("pool/4/table", lambda table: table[:0]),
    "a candidate out of range": put("shared/heap_nodes", 0, 12),
    "a candidate of no pool": put("shared/heap_nodes", 0, 7 << 32),
    "candidates out of order": put("shared/heap_stamps", 0, 2**40),
    "candidates exchanged": swap("shared/heap_nodes", 0, 1),
    "more candidates than there are": put("shared/header", layout.SHARED_HEAP_SIZE, 2**40),
    "fewer candidates than there are": put("shared/header", layout.SHARED_HEAP_SIZE, 0),
    "a clock that is behind": put("shared/header", layout.SHARED_CLOCK, 0),
    "a clock before all time": put("shared/header", layout.SHARED_CLOCK, -(2**63)),
    "a clock at its end": put("shared/header", layout.SHARED_CLOCK, 2**63 - 1),
    "more blocks than there are": put("shared/header", layout.SHARED_NUM_NODES, 2**40),
    "more suffixes than there are in all": put("shared/header", layout.SHARED_NUM_SUFFIXES, 2**40),
    "more evictable blocks than there are": put("shared/header", layout.SHARED_NUM_EVICTABLE, 2**40),
    "a resident out of range": put("index/residents", 0, 99),
    "residents exchanged": swap("index/residents", 0, 1),
    "an entry in the place of another": at("index/entries", 0, place=1),
    "a depth below nought": at("index/entries", 0, depth=-5),
    "another depth": at("index/entries", 0, depth=5),
    "a slot below nought": at("index/entries", 0, slot=-5),
    "a resident entry said to be spilled": at("index/entries", 1, flags=layout.SPILLED),
    "two entries of one key": exchange("index/entries", lambda entries: entries[[1, *range(1, len(entries))]]),
    "an entry from the future": at("index/entries", 0, stamp=2**61),
    **{
        f"{what} of the index's {name}": forge(f"index/{name}")
        for name in ("keys", "checks", "sessions", "floor_table")
        for what, forge in (
            ("a full table", lambda name: fill(name, 1)),
            ("an empty table", lambda name: fill(name, layout.EMPTY_SLOT)),
            ("too small a table", lambda name: exchange(name, lambda array: array[:4])),
        )
    },
    "a floor out of range": at("index/entries", 0, floor=99),
    "another floor": at("index/entries", 0, floor=1),
    "a floor without its entry's offset": at("index/floors", 0, offsets=0),
    "a floor of no entries": at("index/floors", 0, count=0),
    "a floor of another prefix": at("index/floors", 0, state=1),
    "a free floor out of range": put("index/header", layout.INDEX_FLOORS_FREE, 99),
    "an index clock before all time": put("index/header", layout.INDEX_CLOCK, -1),
    "an index clock at its end": put("index/header", layout.INDEX_CLOCK, 2**63 - 1),
    "depths miscounted": put("index/depth_counts", 4, 9),
    "depths without a bit": put("index/depth_bits", 0, 0),
    "fewer nodes than links": shorten(NODES),
    "fewer links than nodes": shorten(LINKS),
    "fewer tokens than nodes": shorten("pool/4/tokens"),
    "fewer disk ids than nodes": shorten("pool/4/disks"),
    "fewer suffix tokens than suffixes": shorten("pool/4/suffix_tokens"),
    "fewer stamps than candidates": shorten("shared/heap_stamps"),
    "fewer residents than there are": shorten("index/residents"),
    "a short header": shorten("shared/header"),
    "a short pool header": shorten(POOL),
    "a short index header": shorten("index/header"),
    "tokens of another block size": exchange("pool/4/tokens", lambda tokens: np.resize(tokens, (12, 8))),
    "tokens in one row": exchange("pool/4/tokens", lambda tokens: tokens.reshape(-1)),
    "nodes in a square": exchange(NODES, lambda nodes: nodes.reshape(3, 4)),
    "candidates in a square": together(
        exchange("shared/heap_nodes", lambda nodes: nodes.reshape(1, -1)),
        exchange("shared/heap_stamps", lambda stamps: stamps.reshape(1, -1)),
    ),
    "no nodes": drop(NODES),
    "an array of a name that there is not": add("pool/4/code"),
    "an array of a group that there is not": add("code/nodes"),
    "a list of arrays that is none": say("arrays", value=5),
    "an array whose name is a number": say("arrays", value=[[5, 5]]),
    "an array without a name": say("arrays", value=[[]]),
    "an array of less than no length": say("arrays", value=[["shared/header", -20]]),
    "an array without measure": say("arrays", value=[["shared/header", 2**62]]),
    "an array beyond measure": say("arrays", value=[["shared/header", 10**30]]),
    "an array of nothing without measure": say("arrays", value=[["pool/4/tokens", 0, 2**62]]),
    "an array of a broken length": say("arrays", value=[["shared/header", 20.5]]),
    "an array of many dimensions": say("arrays", value=[["shared/header", *[1] * 99]]),
    "an array whose length is a list": say("arrays", value=[["shared/header", [20]]]),
    "another byte order": say("byte_order", value="middle"),
    "no byte order": leave_out("byte_order"),
    "no settings": leave_out("settings"),
    "settings that are a list": say("settings", value=[]),
    "a setting left to the environment": say("settings", "hermetic", value=None),
    "a setting left out": leave_out("settings", "evict_alpha"),
    "a setting that there is not": say("settings", "code", value=1),
    "a setting out of range": say("settings", "evict_alpha", value=9),
    "a setting that is no number": say("settings", "evict_alpha", value=float("nan")),
    "a block size of nought": say("settings", "block_size", value=0),
    "a secret that is none": say("check_secret", value=5),
    "a secret that is no number": say("check_secret", value="zz"),
    "no hash keys": say("hash_keys", value=[]),
    "a blind hash": say("hash_keys", 0, value=0),
    "a hash base beyond its prime": say("hash_keys", 0, value=2**64 - 59),
    "an even multiplier": say("hash_keys", 1, value=2),
    "another hash base": say("hash_keys", 0, value=12345),
    "a quota below nought": say("quotas", value=[[3, -1]]),
    "quotas that are a number": say("quotas", value=3),
    "a pool left out": say("block_sizes", value=[4]),
    "a pool too many": say("block_sizes", value=[4, 2, 8]),
    "a pool of no size": say("block_sizes", value=[4, 2, 0]),
    "a pool without measure": say("block_sizes", value=[4, 2, 2**62]),
    "a dead key beyond 64 bits": say("dead_keys", value=[2**64]),
    "an epoch below nought": say("epoch", value=-1),
    "an epoch that is a bool": say("epoch", value=True),
    "an adapter that was dropped less than never": say("adapter_drops", value=[[3, -1]]),
    "a pin that holds more tokens than it has": say("pins", 0, 1, value=2**40),
    "a pin without tokens": say("pins", value=[["a", 8, 4, 0, None], ["b", 8, 4, 0, None]]),
    "a pin whose name is a number": say("pins", 0, 0, value=5),
    "a pin of blocks of no size": say("pins", 0, 2, value=0),
    "a pin for ever and a day": say("pins", 0, 4, value=10**400),
    "a pin until no time": say("pins", 0, 4, value=float("nan")),
    "a pin of too few words": say("pins", value=[["a"]]),
    "disk ids denied": say("has_disk_ids", value=False),
}
DESCRIPTIONS: dict[str, bytes] = {
    "none": b"",
    "a list": b"[]",
    "no JSON": b"{",
    "no text": b"\xff\xfe\xfd",
    "nested without end": b"[" * 200_000,
    "a number without end": b"9" * 100_000,
    "a pickle": pickle.dumps({}),
}

#: Loads the files that are named on standard input, and uses what it gets.
LOADING = """
import json, signal, sys
from calls import Caller, answer_of
from metrale_numba import CacheFileError, RadixTree

def outcome_of(path):
    try:
        cache = RadixTree.load(path)
    except CacheFileError as error:
        return "refused" if str(error).startswith(path + " ") else f"refused without its name: {{error}}"
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    try:
        caller = Caller(1, block_sizes=(2, 4), adapters=(0, 3))
        for _ in range(60):
            call = caller.draw()
            caller.learn(call, answer_of(cache, call))
        cache.check_integrity()
        cache.evict(10**6)
        cache.check_integrity()
        cache.clear()
    except Exception as error:
        return f"{{type(error).__name__}} in use: {{error}}"
    return "sound"

for line in sys.stdin:
    signal.alarm({deadline})
    print(json.dumps([line.rstrip(), outcome_of(line.rstrip())]), flush=True)
"""


def outcomes_of(files: dict[str, bytes], directory: Path) -> dict[str, str]:
    """What becomes of each file in a process of its own, or of the next one where that process died or hung."""
    paths = {str(directory / f"{number:05}"): name for number, name in enumerate(files)}
    for path, name in paths.items():
        Path(path).write_bytes(files[name])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE_PARENT, Path(__file__).parent)))}
    command = [sys.executable, "-c", LOADING.format(deadline=DEADLINE_SECONDS // 4)]
    outcomes: dict[str, str] = {}
    left = list(paths)
    while left:
        done = subprocess.run(command, input="\n".join(left), env=env, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            path, outcome = json.loads(line)
            outcomes[paths[path]] = outcome
            left.remove(path)
        if left:
            outcomes[paths[left.pop(0)]] = f"status {done.returncode}: {done.stderr[-500:]}"
    return outcomes


@pytest.fixture(scope="module")
def forged(saved: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What becomes of every forgery."""
    files = {"nothing forged": put_together(*taken_apart(saved))}
    for name, forge in FORGERIES.items():
        meta, arrays = taken_apart(saved)
        forge(meta, arrays)
        files[name] = put_together(meta, arrays)
    for name, text in DESCRIPTIONS.items():
        files[f"a description: {name}"] = sealed(copies._LENGTH.pack(len(text)) + text)
        files[f"a description with arrays: {name}"] = sealed(copies._LENGTH.pack(len(text)) + text + bytes(999))
    for length in (1, 2**40, 2**64 - 1):
        files[f"a description of {length} bytes"] = sealed(copies._LENGTH.pack(length) + b"{}")
    return outcomes_of(files, tmp_path_factory.mktemp("forged"))


def test_what_is_put_together_without_forgery_is_sound(forged: dict[str, str]) -> None:
    assert forged["nothing forged"] == "sound"


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_under_a_right_checksum_is_refused(name: str, forged: dict[str, str]) -> None:
    assert forged[name] == "refused"


def test_a_forged_description_is_refused(forged: dict[str, str]) -> None:
    outcomes = {name: outcome for name, outcome in forged.items() if name.startswith("a description")}
    assert len(outcomes) == 2 * len(DESCRIPTIONS) + 3
    assert set(outcomes.values()) == {"refused"}, outcomes


def each_value_changed(saved: bytes) -> Iterator[tuple[str, bytes]]:
    """A file for each of some wrong values in each field of some rows of each array."""
    _, arrays = taken_apart(saved)
    for name, array in arrays.items():
        if name.startswith("index/depth"):
            rows: Iterator[int] = iter((0, 4, 5))
        else:
            rows = iter(range(0, array.reshape(-1).size, 1 if array.dtype.names else 3))
        for row in rows:
            for field in array.dtype.names or ("",):
                kind = array.dtype[field] if field else array.dtype
                values = {0, 1, 2, len(array) - 1, len(array), layout.NONE, layout.ROOT, 2**31, np.iinfo(kind).max}
                if kind.kind == "i":
                    values |= {-1, int(np.iinfo(kind).min)}
                for value in sorted(values):
                    meta, changed = taken_apart(saved)
                    flat = changed[name].reshape(-1)
                    target = flat[field] if field else flat
                    if target[row] != value:
                        target[row] = value
                        yield f"{name}[{row}].{field} = {value}", put_together(meta, changed)


def test_any_value_in_any_place_is_refused_or_harmless(saved: bytes, tmp_path: Path) -> None:
    outcomes = outcomes_of(dict(each_value_changed(saved)), tmp_path)
    assert len(outcomes) > 1000
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in ("refused", "sound")} == {}
    # Block, disk and slot ids, references and the like may be anything; what holds the rest together may not.
    assert sum(outcome == "refused" for outcome in outcomes.values()) > len(outcomes) // 2

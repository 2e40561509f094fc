"""The tier in a directory: what is killed, damaged, foreign, full or shared does no harm.

It relies on processes of its own that are really killed, and on :data:`WRITER` storing only what can be told to be
right or wrong as a whole. What all tiers promise is in ``test_tiers.py``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import metrale_numba
from metrale_numba.serving import directory_tier
from metrale_numba.serving.blob import blob_name
from metrale_numba.serving.directory_tier import DirectoryTier
from metrale_numba.serving.tier import StoreKey, TierError

PACKAGE_PARENT = Path(metrale_numba.__file__).parents[1]
KEY = StoreKey("llama", "f2", 3, 5, 17, 23)
OTHER = KEY._replace(check=24)
PAYLOAD = b"state after 9 tokens"
LOCK = ".metrale.lock"

#: Defines what the scripts share: blobs that tell of themselves whether they are whole.
WRITER = """
import hashlib, os, random, signal, sys
signal.alarm(120)
from pathlib import Path
from metrale_numba.serving.directory_tier import DirectoryTier
from metrale_numba.serving.tier import StoreKey

def key_of(number):
    return StoreKey("model", "f2", 0, 0, number, 0)

def size_of(number):
    return 1000 + 37_000 * number

def payload(number, seed):
    start = seed.to_bytes(8, "little")
    return start + hashlib.shake_128(start + bytes([number])).digest(size_of(number) - 8)

def check(tier, number):
    # Whether there is a blob; what is there must be whole.
    into = bytearray(size_of(number))
    if not tier.get(key_of(number), into):
        return False
    assert into == payload(number, int.from_bytes(into[:8], "little")), f"blob {number} is not what was stored"
    return True

def check_all(tier, numbers):
    # What is listed is there, and it is all that is counted and all that the directory has.
    listed = tier.keys()
    assert listed == [key for key in listed if check(tier, key.key)], "a listed blob is damaged"
    assert not any(check(tier, number) for number in range(numbers) if key_of(number) not in listed)
    assert tier.bytes_used == sum(size_of(key.key) for key in listed)
    names = os.listdir(tier.path)
    assert len(names) == len(listed) + 1, f"left over: {names}"
"""


def run(code: str, *arguments: object, script: str = WRITER) -> str:
    """What a script prints, once it has ended well."""
    ended = subprocess.run(
        [sys.executable, "-c", script + code, *map(str, arguments)],
        cwd=PACKAGE_PARENT,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


def read(tier: DirectoryTier, key: StoreKey = KEY, num_bytes: int = len(PAYLOAD)) -> bytes | None:
    into = bytearray(num_bytes)
    return bytes(into) if tier.get(key, into) else None


def path_of(tier: DirectoryTier, key: StoreKey = KEY) -> Path:
    return tier.path / f"{blob_name(key)}.snapshot"


def files(tier: DirectoryTier) -> set[str]:
    """All but the lock file."""
    return {path.name for path in tier.path.iterdir()} - {LOCK}


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path / "tier", 10**6)


# --- kills --------------------------------------------------------------------------------------------------------

KILLED_WRITERS = """
import select, time
path, numbers, rng = Path(sys.argv[1]), 8, random.Random(int(sys.argv[2]))
most = 400_000

def start():
    # A child that puts, reads and deletes without end, and says so each time.
    progress, said = os.pipe()
    pid = os.fork()
    if pid:
        os.close(said)
        return pid, progress
    signal.alarm(60)
    try:
        rng = random.Random()
        tier = DirectoryTier(path, most)
        while True:
            number = rng.randrange(numbers)
            tier.put(key_of(number), payload(number, rng.getrandbits(64)))
            check(tier, rng.randrange(numbers))
            if rng.random() < 0.2:
                tier.delete(key_of(rng.randrange(numbers)))
            os.write(said, b".")
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(1)

writers = [start() for _ in range(2)]
reader = DirectoryTier(path, most)

def kill_one():
    pid, progress = writers.pop(0)
    for _ in range(rng.randrange(1, 5)):
        assert os.read(progress, 1), "a writer failed"
    # Anywhere within about two calls.
    end = time.perf_counter() + rng.random() * 0.003
    while time.perf_counter() < end:
        pass
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    os.close(progress)
    for number in range(numbers):
        check(reader, number)
    # One that was killed between storing and evicting leaves the latter to the next.
    assert reader.bytes_used <= most + size_of(numbers - 1)
    writers.append(start())

try:
    for _ in range(40):
        kill_one()
finally:
    for pid, progress in writers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
left = {name for name in os.listdir(path) if name.endswith(".part")}
tier = DirectoryTier(path, most)
check_all(tier, numbers)
for number in range(numbers):
    tier.put(key_of(number), payload(number, number))
    check_all(tier, numbers)
print(len(left))
"""


@pytest.mark.parametrize("seed", range(2))
def test_writers_that_are_killed_leave_whole_blobs_and_a_sum_that_is_right(tmp_path: Path, seed: int) -> None:
    run(KILLED_WRITERS, tmp_path / "tier", seed)


KILLED_AT_EACH_STEP = """
path, most = Path(sys.argv[1]), 60_000
steps = ("open", "write", "replace", "unlink", "pwrite", "utime")
survived = 0
for fatal in range(10_000):
    tier = DirectoryTier(path, most)
    for number in (0, 1):
        tier.put(key_of(number), payload(number, fatal))
    pid = os.fork()
    if not pid:
        calls = 0
        def dying(call):
            def instead(*arguments, **options):
                global calls
                # Before the call and after it.
                for moment in (0, 1):
                    if calls == fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls += 1
                    if moment == 0:
                        answer = call(*arguments, **options)
                return answer
            return instead
        for step in steps:
            setattr(os, step, dying(getattr(os, step)))
        # Replaces one blob and evicts the other.
        tier.put(key_of(1), payload(1, 2 * fatal))
        tier.put(key_of(0), payload(0, 2 * fatal))
        tier.put(key_of(1), payload(1, 3 * fatal))
        tier.put(StoreKey("model", "f2", 0, 0, 2, 1), bytes(30_000))
        tier.delete(key_of(0))
        os._exit(0)
    killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
    # A tier that was open all the time sees it as one that is opened now.
    assert tier.bytes_used == sum(
        30_000 if key.check else size_of(key.key) for key in tier.keys()
    ) <= most + 38_000
    tier.delete(StoreKey("model", "f2", 0, 0, 2, 1))
    check_all(DirectoryTier(path, most), 2)
    if not killed:
        break
print(fatal)
"""


def test_a_kill_before_or_after_any_system_call_leaves_whole_blobs(tmp_path: Path) -> None:
    steps = int(run(KILLED_AT_EACH_STEP, tmp_path / "tier"))
    assert 50 < steps < 1000


STOPPED_IN_A_PUT = """
from metrale_numba.serving import directory_tier
write = directory_tier._write
def stopping(descriptor, parts):
    write(descriptor, parts[:1])
    print("writing", flush=True)
    input()
    write(descriptor, parts[1:])
directory_tier._write = stopping
tier = DirectoryTier(sys.argv[1], 10**6)
tier.put(key_of(0), payload(0, 0))
print(check(tier, 0), flush=True)
"""


def start_a_put(path: Path) -> subprocess.Popen[str]:
    """A process in the middle of a put."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER + STOPPED_IN_A_PUT, str(path)],
        cwd=PACKAGE_PARENT,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_what_another_process_still_writes_is_left_alone(tier: DirectoryTier) -> None:
    process = start_a_put(tier.path)
    DirectoryTier(tier.path, 10**6).put(KEY, PAYLOAD)
    assert len(files(tier)) == 2
    assert tier.keys() == [KEY]
    assert process.communicate("\n")[0] == "True\n"
    assert len(tier.keys()) == 2


def test_what_a_killed_process_has_half_written_is_cleared_away(tier: DirectoryTier) -> None:
    process = start_a_put(tier.path)
    process.kill()
    process.communicate()
    assert len(files(tier)) == 1
    DirectoryTier(tier.path, 10**6)
    assert files(tier) == set()


# --- opened again -------------------------------------------------------------------------------------------------


def test_a_tier_that_is_opened_again_has_what_it_had(tier: DirectoryTier) -> None:
    for key in (KEY, OTHER):
        tier.put(key, PAYLOAD)
    assert read(tier) == PAYLOAD
    tier.close()
    again = DirectoryTier(str(tier.path), 2 * len(PAYLOAD))
    assert again.keys() == [OTHER, KEY]
    assert again.bytes_used == 2 * len(PAYLOAD)
    again.put(KEY._replace(rank=0), b"x")
    assert again.keys() == [KEY, KEY._replace(rank=0)]
    assert read(again) == PAYLOAD


def test_a_smaller_limit_holds_from_the_next_put_on(tier: DirectoryTier) -> None:
    for number in range(10):
        tier.put(KEY._replace(key=number), PAYLOAD)
    smaller = DirectoryTier(tier.path, 2 * len(PAYLOAD))
    smaller.put(KEY, PAYLOAD)
    assert smaller.keys() == [KEY._replace(key=9), KEY]


def test_the_directory_and_those_above_it_are_made_for_the_owner_only(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "a" / "b", 100)
    tier.put(KEY, PAYLOAD)
    assert tier.path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in tier.path.iterdir()} == {0o600}


def test_the_path_stays_what_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tier = DirectoryTier("tier", 100)
    monkeypatch.chdir("/")
    tier.put(KEY, PAYLOAD)
    assert (tmp_path / "tier" / path_of(tier).name).exists()


def test_fsync_forces_the_file_and_then_its_name_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [DirectoryTier(tmp_path / str(fsync), 100, fsync=fsync) for fsync in (False, True)]
    forced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: forced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix, path.exists())),
    )
    for tier in tiers:
        path = path_of(tier)
        tier.put(KEY, PAYLOAD)
    assert forced == [(".part", False), ("", True)]


# --- damage -------------------------------------------------------------------------------------------------------


def assert_missed_and_removed(tier: DirectoryTier) -> None:
    assert read(tier) is None
    assert not path_of(tier).exists()
    assert tier.bytes_used == len(PAYLOAD)
    assert tier.keys() == [OTHER]


def test_each_byte_that_is_flipped_makes_a_miss(tier: DirectoryTier) -> None:
    tier.put(OTHER, PAYLOAD)
    tier.put(KEY, PAYLOAD)
    whole = path_of(tier).read_bytes()
    for position in range(len(whole)):
        tier.put(KEY, PAYLOAD)
        path_of(tier).write_bytes(
            whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :]
        )
        assert_missed_and_removed(tier)


def test_a_file_cut_short_or_longer_makes_a_miss(tier: DirectoryTier) -> None:
    tier.put(OTHER, PAYLOAD)
    tier.put(KEY, PAYLOAD)
    whole = path_of(tier).read_bytes()
    for damaged in [whole[:length] for length in range(len(whole))] + [whole + b"\0", whole * 2, bytes(10**5)]:
        tier.put(KEY, PAYLOAD)
        path_of(tier).write_bytes(damaged)
        assert_missed_and_removed(tier)


def test_a_damaged_file_can_be_replaced_deleted_and_evicted(tier: DirectoryTier) -> None:
    def damage() -> None:
        tier.put(OTHER, PAYLOAD)
        tier.put(KEY, PAYLOAD)
        path_of(tier).write_bytes(b"damaged")

    damage()
    assert not tier.contains(KEY)
    assert tier.put(KEY, PAYLOAD)
    assert tier.bytes_used == 2 * len(PAYLOAD)
    damage()
    assert not tier.delete(KEY)
    assert not path_of(tier).exists()
    assert tier.bytes_used == len(PAYLOAD)
    damage()
    DirectoryTier(tier.path, 1).put(KEY._replace(rank=0), b"x")
    assert tier.keys() == [KEY._replace(rank=0)]


def test_opening_and_listing_remove_what_says_wrong_things_of_itself(tier: DirectoryTier) -> None:
    tier.put(OTHER, PAYLOAD)
    for look in (tier.keys, lambda: DirectoryTier(tier.path, 100).keys()):
        path_of(tier).write_bytes(b"damaged")
        assert look() == [OTHER]
        assert not path_of(tier).exists()


def test_the_blob_of_another_key_under_this_ones_name_is_not_given_out(tier: DirectoryTier) -> None:
    tier.put(OTHER, PAYLOAD)
    path_of(tier).write_bytes(path_of(tier, OTHER).read_bytes())
    assert not tier.contains(KEY)
    assert_missed_and_removed(tier)
    path_of(tier).write_bytes(path_of(tier, OTHER).read_bytes())
    assert tier.keys() == [OTHER]
    assert tier.bytes_used == len(PAYLOAD)
    assert read(tier, OTHER) == PAYLOAD


def test_a_whole_file_that_took_the_place_of_a_damaged_one_is_not_removed(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(KEY, PAYLOAD)
    path_of(tier).write_bytes(b"damaged")
    discard = tier._discard

    def late(name: str, damaged: os.stat_result) -> None:
        tier.put(KEY, PAYLOAD)
        discard(name, damaged)

    monkeypatch.setattr(tier, "_discard", late)
    assert read(tier) is None
    assert read(tier) == PAYLOAD


@pytest.mark.parametrize("content", [b"", b"x", bytes(17), bytes([255]) * 17, bytes(1000), None])
def test_a_lock_file_that_says_nothing_sure_is_no_loss(tier: DirectoryTier, content: bytes | None) -> None:
    tier.put(KEY, PAYLOAD)
    again = DirectoryTier(tier.path, 10**6)
    if content is None:
        (tier.path / LOCK).unlink()
    else:
        (tier.path / LOCK).write_bytes(content)
    again.put(OTHER, PAYLOAD)
    assert tier.bytes_used == again.bytes_used == 2 * len(PAYLOAD)


def test_a_call_that_failed_half_way_has_the_next_one_count(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(KEY, PAYLOAD)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_evict", lambda name: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tier.put(OTHER, PAYLOAD)
    assert tier.bytes_used == 2 * len(PAYLOAD)


@pytest.mark.parametrize("remove", [read, DirectoryTier.delete])
@pytest.mark.parametrize(("position", "counts_after"), [(-1, 0), (0, 1)], ids=["payload", "head"])
def test_removing_a_damaged_blob_reads_no_other_one(
    tier: DirectoryTier,
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[DirectoryTier, StoreKey], object],
    position: int,
    counts_after: int,
) -> None:
    keys = [KEY._replace(key=number) for number in range(20)]
    for key in keys:
        tier.put(key, PAYLOAD)
    for key in keys[5:]:
        data = bytearray(path_of(tier, key).read_bytes())
        data[position] ^= 1
        path_of(tier, key).write_bytes(data)
    counts = []
    count = tier._count
    monkeypatch.setattr(tier, "_count", lambda: (counts.append(1), count())[1])
    for key in keys[5:]:
        remove(tier, key)
        assert not path_of(tier, key).exists()
    assert counts == []
    # Where a blob does not say what it was counted for, the next one who needs the sum counts, once.
    for _ in range(2):
        assert tier.bytes_used == 5 * len(PAYLOAD)
        assert len(counts) == counts_after


# --- what is not ours ---------------------------------------------------------------------------------------------


def test_nothing_is_written_or_read_outside_the_directory(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "deep" / "tier", 10**6)
    (tmp_path / "deep" / "secret").write_bytes(b"secret")
    before = sorted(tmp_path.rglob("*"))
    for model in ("../secret", "../../x", str(tmp_path / "y"), "a/../../b", "..", ".", "~/x", "\0../z"):
        for dtype in ("../w", ""):
            key = KEY._replace(model=model, dtype=dtype)
            assert read(tier, key, 6) is None
            assert not tier.delete(key)
            tier.put(key, PAYLOAD)
    new = set(tmp_path.rglob("*")) - set(before)
    assert len(new) == 16
    assert {path.parent for path in new} == {tier.path}


def test_a_link_under_a_blobs_name_is_not_followed(tier: DirectoryTier, tmp_path: Path) -> None:
    tier.put(KEY, PAYLOAD)
    target = tmp_path / "target"
    path_of(tier).rename(target)
    before = target.read_bytes()
    path_of(tier).symlink_to(target)
    assert read(tier) is None
    assert not tier.contains(KEY)
    assert tier.put(KEY, b"another")
    assert not path_of(tier).is_symlink()
    assert read(tier, KEY, 7) == b"another"
    assert target.read_bytes() == before


def test_files_of_other_names_are_neither_touched_nor_counted(tier: DirectoryTier) -> None:
    digits = "0" * 64
    names = ["notes.txt", ".lock", f"{digits}.snapshot.bak", f"{digits}", f".{digits}.part", f"{digits[1:]}.snapshot"]
    names += [f"{digits.replace('0', 'A')}.snapshot", f"{digits}.snapshot\n", f"x.{digits}.{digits[:16]}.part"]
    for name in names:
        (tier.path / name).write_bytes(b"theirs")
    (tier.path / "folder").mkdir()
    (tier.path / f"{digits}.snapshot").mkdir()
    os.mkfifo(tier.path / f"{digits.replace('0', '1')}.snapshot")
    before = files(tier)
    small = DirectoryTier(tier.path, 30)
    for number in range(5):
        small.put(KEY._replace(key=number), PAYLOAD)
    assert small.bytes_used == len(PAYLOAD)
    assert before < files(tier)
    assert len(files(tier)) == len(before) + 1
    assert all((tier.path / name).read_bytes() == b"theirs" for name in names)


def test_a_blob_that_was_copied_from_another_directory_can_be_read_and_deleted(
    tier: DirectoryTier, tmp_path: Path
) -> None:
    elsewhere = DirectoryTier(tmp_path / "elsewhere", 100)
    elsewhere.put(KEY, PAYLOAD)
    path_of(tier).write_bytes(path_of(elsewhere).read_bytes())
    assert read(tier) == PAYLOAD
    assert tier.delete(KEY)
    assert tier.bytes_used == 0


# --- when the disk will not ---------------------------------------------------------------------------------------

TOO_LARGE_A_FILE = """
import resource
tier = DirectoryTier(sys.argv[1], 10**6)
assert tier.put(key_of(0), payload(0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for number in (1, 2):
    try:
        tier.put(key_of(number), payload(number, 0))
    except OSError as error:
        print(type(error).__name__, error.errno)
    check_all(tier, 3)
assert check(tier, 0) and tier.put(key_of(0), payload(0, 1)) and check(tier, 0)
check_all(tier, 3)
"""


def test_a_file_that_cannot_be_written_to_its_end_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    assert run(TOO_LARGE_A_FILE, tmp_path / "tier") == f"OSError {errno.EFBIG}\n" * 2


@pytest.mark.parametrize("step", ["open", "write", "replace", "pwrite", "fsync", "utime"])
def test_a_full_disk_at_any_step_is_an_os_error_and_nothing_is_left_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    tier = DirectoryTier(tmp_path / "tier", 10**6, fsync=True)
    tier.put(KEY, PAYLOAD)
    tier.put(OTHER, PAYLOAD)
    real = getattr(os, step)
    calls = fatal = 0

    def full(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > fatal:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    def is_full() -> bool:
        """Whether a put fails whose step does not work any more after so many times."""
        with monkeypatch.context() as patch:
            patch.setattr(directory_tier.os, step, full)
            try:
                return not tier.put(KEY, PAYLOAD.upper())
            except OSError as error:
                return error.errno == errno.ENOSPC

    while is_full():
        assert files(tier) == {path_of(tier).name, path_of(tier, OTHER).name}
        assert read(tier) in (PAYLOAD, PAYLOAD.upper())
        assert tier.bytes_used == 2 * len(PAYLOAD)
        tier.put(KEY, PAYLOAD)
        calls, fatal = 0, fatal + 1
    assert 0 < fatal < 20
    assert read(tier) == PAYLOAD.upper()


def test_a_read_that_fails_is_an_os_error_and_keeps_the_blob(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tier.put(KEY, PAYLOAD)
    for step in ("open", "pread", "preadv"):
        with monkeypatch.context() as patch:
            patch.setattr(directory_tier.os, step, broken)
            with pytest.raises(OSError, match="Input/output error"):
                read(tier)
    assert read(tier) == PAYLOAD


def test_a_use_that_cannot_be_noted_is_no_failure_of_the_read(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    tier.put(KEY, PAYLOAD)
    monkeypatch.setattr(directory_tier.os, "utime", forbidden)
    assert read(tier) == PAYLOAD


NOT_PERMITTED = """
from metrale_numba.serving.tier import TierStore
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
path = Path(sys.argv[1])
tier = DirectoryTier(path / "tier", 10**6)
tier.put(key_of(0), payload(0, 0))
os.chmod(path / "tier", 0o500)
for call in (
    lambda: tier.put(key_of(1), payload(1, 0)),
    lambda: tier.put(key_of(0), payload(0, 1)),
    lambda: tier.delete(key_of(0)),
    lambda: DirectoryTier(path / "tier" / "below", 100),
):
    try:
        call()
    except PermissionError:
        print("refused")
assert check(tier, 0)
blob = next((path / "tier").glob("*.snapshot"))
os.chmod(blob, 0)
try:
    check(tier, 0)
except PermissionError:
    print("refused")
# It is counted, by what it takes on the disk, and can be evicted.
os.chmod(path / "tier", 0o700)
small = DirectoryTier(path / "tier", 40_000)
assert small.bytes_used > size_of(0) and small.keys() == []
small.put(key_of(1), payload(1, 0))
small.put(StoreKey("", "", 0, 0, 0, 0), b"x" * 1500)
assert small.bytes_used == size_of(1) + 1500 and not blob.exists()
"""


def test_what_is_not_permitted_is_an_os_error() -> None:
    # A directory that another user can reach, for root is permitted everything.
    with tempfile.TemporaryDirectory() as directory:
        if os.getuid() == 0:
            os.chown(directory, 65534, 65534)
        assert run(NOT_PERMITTED, directory) == "refused\n" * 5


def test_a_path_that_is_a_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"theirs")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            DirectoryTier(path, 100)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ((5, 100), TypeError, "path"),
        ((b"tier", 100), TypeError, "path"),
        (("a\0b", 100), ValueError, "path"),
        (("tier", -1), ValueError, "max_bytes"),
        (("tier", 100, 1), TypeError, "fsync"),
    ],
)
def test_what_makes_no_tier_is_refused_and_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, error: type[Exception], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=rf"^{named} "):
        DirectoryTier(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_cleared_and_made_again_is_used_again(tier: DirectoryTier) -> None:
    tier.put(KEY, PAYLOAD)
    for path in tier.path.iterdir():
        path.unlink()
    tier.path.rmdir()
    with pytest.raises(FileNotFoundError):
        tier.put(KEY, PAYLOAD)
    tier.path.mkdir()
    assert tier.put(KEY, PAYLOAD)
    assert tier.bytes_used == len(PAYLOAD)
    assert DirectoryTier(tier.path, 100).keys() == [KEY]


def test_a_directory_that_is_gone_for_a_while_is_an_error_and_no_miss(tier: DirectoryTier) -> None:
    tier.put(KEY, PAYLOAD)
    away = tier.path.rename(tier.path.with_name("away"))
    calls: list[Callable[[], object]] = [
        lambda: read(tier),
        lambda: read(tier, OTHER),
        lambda: tier.contains(KEY),
        lambda: tier.put(KEY, PAYLOAD),
        lambda: tier.delete(KEY),
        tier.keys,
        lambda: tier.bytes_used,
    ]
    for call in calls:
        with pytest.raises(OSError, match=str(tier.path)):
            call()
    # As a mount point that nothing is mounted on.
    tier.path.mkdir()
    for call in calls[:3]:
        with pytest.raises(TierError, match=str(tier.path)):
            call()
    tier.path.rmdir()
    away.rename(tier.path)
    assert read(tier) == PAYLOAD
    assert read(tier, OTHER) is None
    assert not tier.contains(OTHER)


# --- somebody has the lock ----------------------------------------------------------------------------------------


@pytest.fixture
def holder(tier: DirectoryTier) -> Iterator[int]:
    """Somebody who has locked the directory and was stopped; before, it got a whole blob and a damaged one."""
    tier.put(KEY, PAYLOAD)
    tier.put(OTHER, PAYLOAD)
    path_of(tier, OTHER).write_bytes(b"damaged")
    with open(tier.path / LOCK, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@pytest.mark.usefixtures("holder")
def test_a_lock_that_is_not_given_back_is_a_tier_error_after_the_timeout(tier: DirectoryTier) -> None:
    tier.timeout = 0.05
    calls: list[Callable[[], object]] = [
        lambda: tier.put(KEY, PAYLOAD),
        lambda: tier.put(KEY, bytes(10**6 + 1)),
        lambda: tier.delete(KEY),
        lambda: read(tier, OTHER),
        tier.keys,
        lambda: tier.bytes_used,
        lambda: DirectoryTier(tier.path, 100, timeout=0.05),
    ]
    for call in calls:
        with pytest.raises(TierError, match=str(tier.path)):
            call()
    assert read(tier) == PAYLOAD
    assert tier.contains(KEY)
    assert not tier.contains(OTHER._replace(rank=0))
    assert len(files(tier)) == 2
    tier.close()


@pytest.mark.usefixtures("holder")
def test_threads_wait_for_a_lock_at_the_same_time(tier: DirectoryTier) -> None:
    tier.timeout = 0.5
    waited: list[float] = []

    def wait() -> None:
        start = time.monotonic()
        with pytest.raises(TierError):
            tier.delete(KEY)
        waited.append(time.monotonic() - start)

    threads = [threading.Thread(target=wait) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(waited) == 10
    # Not ten times as long.
    assert 0.5 <= min(waited) <= max(waited) < 2.5


def test_a_lock_that_is_given_back_in_time_is_taken(
    tier: DirectoryTier, holder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.timeout = 60.0
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 20:
            fcntl.flock(holder, fcntl.LOCK_UN)

    monkeypatch.setattr(directory_tier.time, "sleep", nap)
    assert tier.delete(KEY)
    assert len(naps) == 20
    assert naps == sorted(naps)
    assert max(naps) <= 0.01


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), (float("inf"), ValueError)]
    + [(value, TypeError) for value in (None, "1", True)],
)
def test_a_timeout_that_is_no_time_is_refused(tmp_path: Path, timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^timeout "):
        DirectoryTier(tmp_path / "tier", 100, timeout=timeout)
    assert list(tmp_path.iterdir()) == []


# --- several at once ----------------------------------------------------------------------------------------------


def test_two_tiers_in_one_directory_share_what_they_store_and_its_order(tmp_path: Path) -> None:
    one, two = (DirectoryTier(tmp_path / "tier", 3 * len(PAYLOAD)) for _ in range(2))
    keys = [KEY._replace(key=number) for number in range(5)]
    for key, tier in zip(keys[:3], (one, two, one), strict=True):
        tier.put(key, PAYLOAD)
    assert read(two, keys[0]) == PAYLOAD
    one.put(keys[3], PAYLOAD)
    assert one.keys() == two.keys() == [keys[2], keys[0], keys[3]]
    # Each of them has read the directory by now; a use by the other one counts all the same.
    assert read(two, keys[2]) == PAYLOAD
    one.put(keys[4], PAYLOAD)
    assert one.keys() == [keys[3], keys[2], keys[4]]
    assert two.bytes_used == 3 * len(PAYLOAD)
    assert two.delete(keys[3])
    assert one.bytes_used == 2 * len(PAYLOAD)


MANY_WRITERS = """
path, numbers, most = Path(sys.argv[1]), 8, 500_000
children = []
for seed in range(4):
    pid = os.fork()
    if pid:
        children.append(pid)
        continue
    status = 1
    try:
        rng = random.Random(seed)
        tier = DirectoryTier(path, most)
        hits = 0
        for _ in range(100):
            number = rng.randrange(numbers)
            assert tier.put(key_of(number), payload(number, rng.getrandbits(64)))
            hits += check(tier, rng.randrange(numbers))
            if rng.random() < 0.1:
                tier.delete(key_of(rng.randrange(numbers)))
            assert tier.bytes_used <= most
        assert hits
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
tier = DirectoryTier(path, most)
assert not any(os.waitpid(pid, 0)[1] for pid in children)
# As it was kept from call to call, before anybody counts.
used = tier.bytes_used
check_all(tier, numbers)
assert used == tier.bytes_used
"""


def test_several_processes_keep_one_directory_in_order(tmp_path: Path) -> None:
    run(MANY_WRITERS, tmp_path / "tier")


def test_a_put_reads_the_directory_only_when_victims_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DirectoryTier(tmp_path / "tier", 100)
    counts = []
    count = tier._count
    monkeypatch.setattr(tier, "_count", lambda: (counts.append(1), count())[1])
    for number in range(100):
        tier.put(KEY._replace(key=number), b"x")
    assert counts == []
    for number in range(100, 300):
        tier.put(KEY._replace(key=number), b"x")
    # Each time it is read, a hundred victims are found.
    assert len(counts) == 2
    assert tier.bytes_used == 100


def test_threads_that_put_one_key_leave_one_whole_blob(tier: DirectoryTier) -> None:
    barrier = threading.Barrier(4)

    def put(number: int) -> None:
        barrier.wait()
        for _ in range(20):
            tier.put(KEY, bytes([number]) * 10_000)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = read(tier, KEY, 10_000)
    assert data is not None
    assert data == data[:1] * 10_000
    assert files(tier) == {path_of(tier).name}
    assert tier.bytes_used == 10_000


def test_a_clock_that_is_set_back_does_not_have_a_put_discard_its_own_blob(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier", 3)
    keys = [KEY._replace(key=number) for number in range(3)]
    for key in keys:
        tier.put(key, b"x")
    for number, key in enumerate(keys):
        os.utime(path_of(tier, key), (2**33 + number, 2**33 + number))
    tier.put(OTHER, b"x")
    assert tier.keys() == [OTHER, *keys[1:]]


def test_no_file_stays_open_after_a_call(tier: DirectoryTier) -> None:
    before = os.listdir("/proc/self/fd")
    tier.put(KEY, PAYLOAD)
    tier.put(OTHER, PAYLOAD)
    assert read(tier) == PAYLOAD
    path_of(tier).write_bytes(b"damaged")
    assert read(tier) is None
    tier.delete(OTHER)
    tier.keys()
    assert os.listdir("/proc/self/fd") == before


def test_a_random_order_of_uses_is_the_order_of_eviction(tmp_path: Path) -> None:
    tier = DirectoryTier(tmp_path / "tier", 20)
    order = [KEY._replace(key=number) for number in range(20)]
    for key in order:
        tier.put(key, b"x")
    random.Random(1).shuffle(order)
    calls: list[Callable[[StoreKey], object]] = [lambda key: tier.put(key, b"y"), lambda key: read(tier, key, 1)]
    for number, key in enumerate(order):
        calls[number % 2](key)
    for number in range(20):
        assert tier.keys() == order
        order = [*order[1:], OTHER._replace(key=number)]
        tier.put(order[-1], b"z")

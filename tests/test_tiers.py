"""What all tiers promise, each of them asked the same.

It relies on :mod:`redis_server` for the tier in Redis. A plain LRU of a dict says what a tier must hold after any
sequence of calls. Times are told apart to the nanosecond, so nothing waits.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from redis_server import RedisServer, redis_server

import metrale_numba
from metrale_numba.serving.directory_tier import DirectoryTier
from metrale_numba.serving.redis_tier import RedisTier
from metrale_numba.serving.tier import MemoryTier, StoreKey, TierError, TierStore

PACKAGE_PARENT = Path(metrale_numba.__file__).parents[1]
KINDS = ("memory", "directory", "redis")
KEY = StoreKey("llama", "float16", 0, 0, 17, 23)
OTHER = KEY._replace(check=24)

Make = Callable[[int], TierStore]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes an empty tier of each kind."""
    made: list[TierStore] = []

    def of_kind(max_bytes: int) -> TierStore:
        if request.param == "memory":
            made.append(MemoryTier(max_bytes))
        elif request.param == "directory":
            made.append(DirectoryTier(tmp_path / str(len(made)), max_bytes))
        else:
            url = request.getfixturevalue("server").url
            prefix = f"{request.node.name} {len(made)}"
            made.append(RedisTier(url, prefix=prefix, max_bytes=max_bytes))
        return made[-1]

    yield of_kind
    for tier in made:
        tier.close()


def numbered(number: int) -> StoreKey:
    return KEY._replace(key=number)


def read(tier: TierStore, key: StoreKey, num_bytes: int) -> bytes | None:
    into = bytearray(num_bytes)
    return bytes(into) if tier.get(key, into) else None


# --- put, get, delete ---------------------------------------------------------------------------------------------


def test_each_is_a_tier_store(make: Make) -> None:
    tier = make(1)
    assert isinstance(tier, TierStore)
    assert tier.persistent == (not isinstance(tier, MemoryTier))


@pytest.mark.parametrize("num_bytes", [0, 1, 511, 4096, 3_000_001])
def test_a_blob_comes_back_as_it_was_stored(make: Make, num_bytes: int) -> None:
    tier = make(10**7)
    data = random.Random(num_bytes).randbytes(num_bytes)
    assert tier.put(KEY, data)
    assert read(tier, KEY, num_bytes) == data
    assert tier.contains(KEY)


def test_a_key_that_was_never_stored_is_a_miss(make: Make) -> None:
    tier = make(100)
    assert read(tier, KEY, 4) is None
    assert not tier.contains(KEY)
    assert not tier.delete(KEY)
    assert tier.keys() == []
    assert tier.bytes_used == 0


def test_keys_that_differ_in_any_part_have_blobs_of_their_own(make: Make) -> None:
    tier = make(1000)
    keys = [KEY, *(KEY._replace(**{field: 1}) for field in ("rank", "adapter", "key", "check"))]
    keys += [KEY._replace(model="llam", dtype="afloat16"), KEY._replace(model="llama "), KEY._replace(dtype="")]
    for number, key in enumerate(keys):
        assert tier.put(key, bytes([number]))
    assert [read(tier, key, 1) for key in keys] == [bytes([number]) for number in range(len(keys))]
    assert tier.keys() == keys


@pytest.mark.parametrize(
    "model", ["", "../../../etc/passwd", "/", "a/b\0c", "x" * 10_000, "Modèle 模型 \U0001f40d", "\udc80", "%s{}\n*?[a]"]
)
def test_any_text_can_name_a_model(make: Make, model: str) -> None:
    tier = make(100)
    key = KEY._replace(model=model, dtype=model, rank=2**63 - 1, check=2**64 - 1)
    assert tier.put(key, b"state")
    assert read(tier, key, 5) == b"state"
    assert tier.keys() == [key]
    assert tier.contains(key)
    assert tier.delete(key)
    assert not tier.contains(key)


def test_put_replaces_what_the_key_had(make: Make) -> None:
    tier = make(100)
    for data in (b"first", b"second one", b"3"):
        assert tier.put(KEY, data)
        assert read(tier, KEY, len(data)) == data
        assert tier.bytes_used == len(data)
    assert tier.keys() == [KEY]


def test_a_blob_of_another_length_is_a_miss_and_stays(make: Make) -> None:
    tier = make(100)
    tier.put(KEY, b"state")
    for num_bytes in (0, 4, 6, 1000):
        assert read(tier, KEY, num_bytes) is None
    assert read(tier, KEY, 5) == b"state"


def test_delete_removes_one_blob_once(make: Make) -> None:
    tier = make(100)
    tier.put(KEY, b"state")
    tier.put(OTHER, b"other")
    assert tier.delete(KEY)
    assert not tier.delete(KEY)
    assert read(tier, KEY, 5) is None
    assert tier.keys() == [OTHER]
    assert tier.bytes_used == 5


def test_what_is_stored_is_a_copy(make: Make) -> None:
    tier = make(100)
    data = bytearray(b"state")
    tier.put(KEY, data)
    data[:] = b"wrong"
    assert read(tier, KEY, 5) == b"state"


# --- how much is kept ---------------------------------------------------------------------------------------------


def test_as_much_as_max_bytes_is_kept(make: Make) -> None:
    tier = make(8)
    assert tier.put(KEY, b"8 bytes.")
    assert tier.put(OTHER, b"too many")
    assert tier.keys() == [OTHER]
    assert tier.bytes_used == 8


def test_what_is_too_large_is_refused_and_takes_the_earlier_blob_along(make: Make) -> None:
    tier = make(8)
    tier.put(KEY, b"old")
    tier.put(OTHER, b"other")
    assert not tier.put(KEY, b"nine bytes"[:9])
    assert tier.keys() == [OTHER]
    assert tier.bytes_used == 5


def test_nothing_but_nothing_fits_in_no_bytes(make: Make) -> None:
    tier = make(0)
    assert not tier.put(KEY, b"1")
    assert tier.put(KEY, b"")
    assert tier.put(KEY, b"")
    assert tier.put(OTHER, b"")
    assert tier.keys() == [KEY, OTHER]
    assert tier.delete(KEY)
    assert tier.bytes_used == 0


def test_the_least_recently_used_blob_is_discarded_first(make: Make) -> None:
    tier = make(3)
    for number in range(3):
        tier.put(numbered(number), b"x")
    tier.put(numbered(3), b"x")
    assert tier.keys() == [numbered(1), numbered(2), numbered(3)]
    assert read(tier, numbered(1), 1) == b"x"
    tier.put(numbered(4), b"x")
    assert tier.keys() == [numbered(3), numbered(1), numbered(4)]
    tier.put(numbered(3), b"y")
    tier.put(numbered(5), b"xx")
    assert tier.keys() == [numbered(3), numbered(5)]


def test_only_a_read_that_succeeds_is_a_use(make: Make) -> None:
    tier = make(3)
    for number in range(3):
        tier.put(numbered(number), b"x")
    assert tier.contains(numbered(0))
    assert read(tier, numbered(0), 2) is None
    tier.keys()
    tier.put(numbered(3), b"x")
    assert tier.keys() == [numbered(number) for number in (1, 2, 3)]


def test_one_large_blob_takes_the_place_of_many(make: Make) -> None:
    tier = make(10)
    for number in range(10):
        tier.put(numbered(number), b"x")
    tier.put(KEY, b"8 bytes.")
    assert tier.keys() == [numbered(8), numbered(9), KEY]


@pytest.mark.parametrize("seed", range(3))
def test_any_calls_leave_what_a_plain_lru_holds(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    tier = make(40)
    model: dict[StoreKey, bytes] = {}
    for step in range(250):
        key = numbered(rng.randrange(8))
        match rng.randrange(6):
            case 0 | 1 | 2:
                data = rng.randbytes(rng.randrange(0, 45))
                assert tier.put(key, data) == (len(data) <= 40)
                model.pop(key, None)
                if len(data) <= 40:
                    model[key] = data
                while sum(map(len, model.values())) > 40:
                    del model[next(iter(model))]
            case 3 | 4:
                data = model.get(key, b"?")
                assert read(tier, key, len(data)) == model.get(key)
                if key in model:
                    model[key] = model.pop(key)
            case 5:
                assert tier.delete(key) == (model.pop(key, None) is not None)
        assert tier.contains(key) == (key in model)
        assert tier.bytes_used == sum(map(len, model.values()))
        if step % 10 == 0:
            assert tier.keys() == list(model)


# --- arguments ----------------------------------------------------------------------------------------------------

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "data",
    [
        bytearray(b"abc"),
        memoryview(b"abcdef")[1:4],
        memoryview(ARRAY),
        ARRAY,
        ARRAY.astype(np.float16),
        ARRAY.astype(">i4"),
        ARRAY.astype("datetime64[s]"),
        np.zeros(3, dtype="i4,f8"),
        np.array(5),
        np.empty((0, 3)),
        np.asfortranarray(ARRAY[:, :1]),
        ARRAY[1:],
    ],
    ids=lambda data: f"{type(data).__name__} {getattr(data, 'dtype', '')}",
)
def test_any_buffer_can_be_stored_and_filled(make: Make, data: Any) -> None:
    tier = make(1000)
    raw = data.tobytes() if hasattr(data, "tobytes") else bytes(data)
    assert tier.put(KEY, data)
    assert tier.bytes_used == len(raw)
    assert read(tier, KEY, len(raw)) == raw
    if isinstance(data, np.ndarray):
        into = np.empty(data.shape, data.dtype)
        assert tier.get(KEY, into)
        assert into.tobytes() == raw


@pytest.mark.parametrize(
    "data",
    [
        "text",
        5,
        None,
        [1, 2],
        [b"a"],
        np.float32,
        ARRAY[:, ::2],
        ARRAY.T,
        memoryview(b"abcdef")[::2],
        np.array([None]),
        memoryview(np.array([None, None])),
    ],
    ids=repr,
)
def test_data_that_is_no_plain_run_of_bytes_is_refused(make: Make, data: Any) -> None:
    tier = make(1000)
    tier.put(KEY, b"state")
    with pytest.raises((TypeError, ValueError), match=r"^data "):
        tier.put(KEY, data)
    assert read(tier, KEY, 5) == b"state"


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


def released() -> memoryview:
    view = memoryview(bytearray(5))
    view.release()
    return view


@pytest.mark.parametrize(
    "into",
    [
        b"12345",
        b"",
        memoryview(b"12345"),
        read_only(np.zeros(5, np.uint8)),
        np.zeros(10, np.uint8)[::2],
        np.zeros(5, object),
        released(),
        5,
        None,
        "12345",
        [0] * 5,
    ],
    ids=repr,
)
def test_what_cannot_be_filled_is_refused(make: Make, into: Any) -> None:
    tier = make(1000)
    tier.put(KEY, b"state")
    with pytest.raises((TypeError, ValueError), match=r"^into "):
        tier.get(KEY, into)


@pytest.mark.parametrize(
    ("key", "error", "named"),
    [
        (tuple(KEY), TypeError, "key"),
        (None, TypeError, "key"),
        ("name", TypeError, "key"),
        (KEY._replace(model=b"llama"), TypeError, "key.model"),  # type: ignore[arg-type]
        (KEY._replace(dtype=None), TypeError, "key.dtype"),  # type: ignore[arg-type]
        (KEY._replace(rank=-1), ValueError, "key.rank"),
        (KEY._replace(rank=True), TypeError, "key.rank"),
        (KEY._replace(adapter=2**64), ValueError, "key.adapter"),
        (KEY._replace(key=1.0), TypeError, "key.key"),  # type: ignore[arg-type]
        (KEY._replace(check=-1), ValueError, "key.check"),
    ],
    ids=repr,
)
def test_what_is_no_store_key_is_refused(make: Make, key: Any, error: type[Exception], named: str) -> None:
    tier = make(1000)
    calls: list[Callable[[], object]] = [
        lambda: tier.put(key, b""),
        lambda: tier.get(key, bytearray()),
        lambda: tier.delete(key),
        lambda: tier.contains(key),
    ]
    for call in calls:
        with pytest.raises(error, match=rf"^{named} "):
            call()


def test_numbers_of_numpy_name_the_same_blob(make: Make) -> None:
    tier = make(100)
    key = StoreKey("llama", "float16", np.int64(0), np.uint64(0), np.uint64(17), np.uint64(23))  # type: ignore[arg-type]
    tier.put(key, b"state")
    assert read(tier, KEY, 5) == b"state"
    assert [type(part) for part in tier.keys()[0]] == [str, str, int, int, int, int]


@pytest.mark.parametrize(("max_bytes", "error"), [(-1, ValueError), (1.5, TypeError), (None, TypeError)])
def test_a_limit_that_is_no_number_of_bytes_is_refused(make: Make, max_bytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_bytes"):
        make(max_bytes)


def test_a_closed_tier_does_nothing_more(make: Make) -> None:
    tier = make(100)
    tier.put(KEY, b"state")
    tier.close()
    tier.close()
    calls: list[Callable[[], object]] = [
        lambda: tier.put(KEY, b"state"),
        lambda: tier.put(KEY, bytes(101)),
        lambda: tier.get(KEY, bytearray(5)),
        lambda: tier.delete(KEY),
        lambda: tier.contains(KEY),
        tier.keys,
        lambda: tier.bytes_used,
    ]
    for call in calls:
        with pytest.raises(TierError, match="closed"):
            call()


# --- signals ------------------------------------------------------------------------------------------------------


class InterruptedAtStep(BaseException):
    """What a signal handler raises."""


class Interrupting:
    """A profiler that raises once, where a signal handler would: at the start of a function, or after one of C."""

    def __init__(self, fatal: int) -> None:
        self.steps_left = fatal

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return"):
            return
        self.steps_left -= 1
        # What is raised while an object is dropped goes nowhere, so that has to wait.
        if self.steps_left < 0 and not is_dropping(frame):
            raise InterruptedAtStep


def is_dropping(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# A file that is on its way from one function to the next is closed by being dropped.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_exception_of_a_signal_handler_at_any_step_leaves_the_tier_right(make: Make) -> None:
    tier = make(40)
    # The others take thousands of steps.
    steps_apart = 1 if isinstance(tier, MemoryTier) else 5
    keys = [numbered(number) for number in range(4)]

    files = open_files()
    for fatal in itertools.count(0, steps_apart):
        for key in keys:
            tier.put(key, bytes([key.key]) * (8 + key.key))
        interrupting = Interrupting(fatal)
        try:
            sys.setprofile(interrupting)
            try:
                tier.put(keys[1], b"replaced ")
                tier.put(OTHER, b"evicts two of them..")
                read(tier, keys[3], 11)
                tier.delete(OTHER)
                _ = tier.bytes_used
            finally:
                sys.setprofile(None)
        except InterruptedAtStep:
            # With the exception at hand, which keeps alive whatever was at work.
            if not isinstance(tier, RedisTier):
                assert open_files() == files
            tier.delete(OTHER)
            left = tier.keys()
            assert all(read(tier, key, 8 + key.key) for key in left)
            assert tier.bytes_used == sum(8 + key.key for key in left) <= 40
        if interrupting.steps_left >= 0:
            break
    assert fatal > 20


# --- threads and forks --------------------------------------------------------------------------------------------


def told_apart(number: int, writer: int) -> bytes:
    """What a writer stores under a number: of a length of the number's, and right or wrong as a whole."""
    seed = bytes([writer])
    return seed + hashlib.shake_128(seed + bytes([number])).digest(200 + 31 * number)


def is_right(number: int, data: bytes) -> bool:
    return data == told_apart(number, data[0])


def test_threads_find_whole_blobs_and_leave_the_sum_right(make: Make) -> None:
    tier = make(2000)
    failures: list[object] = []

    def work(writer: int) -> None:
        rng = random.Random(writer)
        try:
            for _ in range(120):
                number = rng.randrange(10)
                match rng.randrange(5):
                    case 0 | 1:
                        tier.put(numbered(number), told_apart(number, writer))
                    case 2 | 3:
                        data = read(tier, numbered(number), 201 + 31 * number)
                        if data is not None and not is_right(number, data):
                            failures.append(number)
                    case 4:
                        tier.delete(numbered(number))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    keys = tier.keys()
    assert tier.bytes_used == sum(201 + 31 * key.key for key in keys) <= 2000


FORK = """
import os, signal, sys, threading
signal.alarm(60)
from metrale_numba.serving.directory_tier import DirectoryTier
from metrale_numba.serving.tier import MemoryTier, StoreKey
tier = DirectoryTier(sys.argv[1], 3000) if sys.argv[1] else MemoryTier(3000)
stop = threading.Event()
def work(rank):
    while not stop.is_set():
        tier.put(StoreKey("", "", rank, 0, 0, 0), bytes(1000))
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
for thread in threads: thread.start()
for _ in range(20):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(20)
            key = StoreKey("", "", 9, 0, 0, 0)
            assert tier.put(key, b"child")
            assert tier.get(key, bytearray(5)) or sys.argv[1]
            assert tier.bytes_used <= 3000
            assert sys.argv[1] or tier.bytes_used == 5 + 1000 * (len(tier.keys()) - 1)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_fork_inside_a_call_gives_the_child_a_tier_that_works(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path / "tier") if kind == "directory" else ""]
    ended = subprocess.run(
        command,
        cwd=PACKAGE_PARENT,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_every_pair_of_parts_has_a_name_of_its_own(make: Make) -> None:
    tier = make(10**6)
    texts = ["", "a", "aa", "\0"]
    keys = [
        StoreKey(model, dtype, rank, adapter, key, check)
        for model, dtype in itertools.product(texts, texts)
        for rank, adapter, key, check in itertools.product((0, 1), repeat=4)
    ]
    for key in keys:
        tier.put(key, repr(key).encode())
    assert set(tier.keys()) == set(keys)
    assert all(read(tier, key, len(repr(key))) == repr(key).encode() for key in keys)

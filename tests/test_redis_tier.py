"""The tier in Redis: the server dies, hangs, forgets, is full, and comes back; the tier is wrong at no time.

It relies on :mod:`redis_server` for real servers. What all tiers promise is in ``test_tiers.py``.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer, redis_server

import metrale_numba
from metrale_numba.serving.blob import blob_name
from metrale_numba.serving.redis_tier import RedisTier
from metrale_numba.serving.tier import StoreKey, TierError

PACKAGE_PARENT = Path(metrale_numba.__file__).parents[1]
KEY = StoreKey("llama", "f2", 3, 5, 17, 23)
OTHER = KEY._replace(check=24)
PAYLOAD = b"state after 9 tokens"
#: Long for a server on the same machine, short for a test that waits for one that hangs.
TIMEOUT = 0.3


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server that a test may kill."""
    with redis_server() as server:
        yield server


@pytest.fixture
def tier(shared: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(shared.url, max_bytes=10**6)
    tier._client.flushall()
    yield tier
    tier.close()


@pytest.fixture
def own_tier(own: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(own.url, max_bytes=10**6, timeout=TIMEOUT)
    yield tier
    tier.close()


def read(tier: RedisTier, key: StoreKey = KEY, num_bytes: int = len(PAYLOAD)) -> bytes | None:
    into = bytearray(num_bytes)
    return bytes(into) if tier.get(key, into) else None


def place_of(tier: RedisTier, key: StoreKey = KEY) -> str:
    return f"{tier.prefix}:blob:{blob_name(key)}"


def all_calls(tier: RedisTier) -> list[Callable[[], object]]:
    return [
        lambda: tier.put(KEY, PAYLOAD),
        lambda: read(tier),
        lambda: tier.delete(KEY),
        lambda: tier.contains(KEY),
        tier.keys,
        lambda: tier.bytes_used,
    ]


def assert_in_step(tier: RedisTier) -> None:
    """The index has the blobs that are there, each of them, and the sum of their bytes."""
    client = tier._client
    blobs = {name.decode().rpartition(":")[2] for name in client.scan_iter(match=f"{tier.prefix}:blob:*")}
    times = {name.decode() for name in client.zrange(f"{tier.prefix}:times", 0, -1)}
    sizes = {name.decode(): int(size) for name, size in client.hgetall(f"{tier.prefix}:sizes").items()}
    assert sizes.pop("used") == sum(sizes.values())
    assert times == set(sizes) == blobs


# --- a server that dies and comes back ----------------------------------------------------------------------------


def test_a_server_that_is_dead_is_a_tier_error_of_every_call(own: RedisServer, own_tier: RedisTier) -> None:
    own_tier.put(KEY, PAYLOAD)
    own.kill()
    for call in all_calls(own_tier):
        with pytest.raises(TierError):
            call()


def test_a_tier_works_again_as_soon_as_the_server_is_back(own: RedisServer, own_tier: RedisTier) -> None:
    for call in all_calls(own_tier):
        own_tier.put(KEY, PAYLOAD)
        own.kill()
        own.start()
        # The very first call after it, though its connection is broken.
        call()
        own.kill()
        with pytest.raises(TierError):
            call()
        own.start()
        own_tier.delete(KEY)
        assert own_tier.keys() == []
        assert own_tier.put(OTHER, PAYLOAD)
        assert read(own_tier, OTHER) == PAYLOAD
        assert own_tier.bytes_used == len(PAYLOAD)


def test_a_tier_can_be_made_before_there_is_a_server(own: RedisServer) -> None:
    own.kill()
    tier = RedisTier(own.url, max_bytes=100, timeout=TIMEOUT)
    with pytest.raises(TierError):
        tier.put(KEY, PAYLOAD)
    own.start()
    assert tier.put(KEY, PAYLOAD)
    tier.close()


def test_what_a_server_has_on_disk_is_there_when_it_was_killed_and_started_again() -> None:
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as server:
        tier = RedisTier(server.url, max_bytes=100)
        for key in (KEY, OTHER):
            tier.put(key, PAYLOAD)
        assert read(tier) == PAYLOAD
        server.kill()
        server.start()
        assert tier.keys() == [OTHER, KEY]
        assert read(tier) == PAYLOAD
        assert_in_step(tier)
        tier.close()


def test_a_server_that_hangs_is_given_up_and_its_late_answers_go_to_nobody(
    own: RedisServer, own_tier: RedisTier
) -> None:
    own_tier.put(KEY, PAYLOAD)
    own_tier.put(OTHER, PAYLOAD.upper())
    own.pause()
    before = time.perf_counter()
    for call in all_calls(own_tier)[1:2] + all_calls(own_tier)[3:]:
        with pytest.raises(TierError):
            call()
    assert time.perf_counter() - before < 4 * 10 * TIMEOUT
    own.go_on()
    for _ in range(5):
        assert read(own_tier, OTHER) == PAYLOAD.upper()
        assert read(own_tier) == PAYLOAD
        assert own_tier.keys() == [OTHER, KEY]
        own_tier.get(OTHER, bytearray(len(PAYLOAD)))
        own_tier.get(KEY, bytearray(len(PAYLOAD)))


def told_apart(number: int, writer: int) -> bytes:
    seed = bytes([writer])
    return seed + hashlib.shake_128(seed + bytes([number])).digest(5000 + 31 * number)


def test_threads_find_no_wrong_byte_while_the_server_dies_and_comes_back(own: RedisServer) -> None:
    tier = RedisTier(own.url, max_bytes=40_000, timeout=5.0)
    stop = threading.Event()
    failures: list[object] = []
    done = [0] * 3

    def work(writer: int) -> None:
        rng = random.Random(writer)
        while not stop.is_set():
            number = rng.randrange(10)
            key = KEY._replace(key=number)
            try:
                if rng.random() < 0.5:
                    tier.put(key, told_apart(number, writer))
                else:
                    data = read(tier, key, 5001 + 31 * number)
                    if data is not None and data != told_apart(number, data[0]):
                        failures.append(number)
                done[writer] += 1
            except TierError:
                pass
            except BaseException as error:
                failures.append(error)
                raise

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        reached = sum(done) + 60
        while sum(done) < reached and all(thread.is_alive() for thread in threads):
            time.sleep(0.001)
        own.kill()
        own.start()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    tier.put(KEY, PAYLOAD)
    assert_in_step(tier)
    tier.close()


# --- a server that forgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", range(6))
def test_a_server_that_was_flushed_is_an_empty_tier(tier: RedisTier, call: int) -> None:
    tier.put(KEY, PAYLOAD)
    tier.put(OTHER, PAYLOAD)
    tier._client.flushall()
    answer = all_calls(tier)[call]()
    assert answer == [True, None, False, False, [], 0][call]
    tier.put(OTHER, b"x")
    assert tier.bytes_used == 1 + len(PAYLOAD) * (call == 0)
    assert_in_step(tier)


def test_scripts_that_the_server_forgot_are_sent_again(tier: RedisTier) -> None:
    for _ in range(2):
        for call in all_calls(tier):
            tier._client.script_flush()
            call()


@pytest.mark.parametrize("lost", [["times"], ["sizes"], ["times", "sizes"]])
@pytest.mark.parametrize("call", [0, 2, 4, 5])
def test_an_index_that_is_lost_is_made_anew_from_the_blobs(tier: RedisTier, lost: list[str], call: int) -> None:
    keys = [KEY._replace(key=number, model="m" * (number * 100)) for number in range(20)]
    for key in keys:
        tier.put(key, PAYLOAD)
    tier._client.set(f"{tier.prefix}:blob:other", "theirs")
    tier._client.delete(*(f"{tier.prefix}:{name}" for name in lost))
    all_calls(tier)[call]()
    expected = {*keys, KEY} if call == 0 else set(keys)
    assert set(tier.keys()) == expected
    assert tier.bytes_used == len(expected) * len(PAYLOAD)
    tier._client.delete(f"{tier.prefix}:blob:other")
    assert_in_step(tier)


def test_an_index_of_more_blobs_than_are_looked_at_at_once_is_made_anew(tier: RedisTier) -> None:
    for number in range(600):
        tier.put(KEY._replace(key=number), b"x")
    tier._client.delete(f"{tier.prefix}:times")
    assert tier.bytes_used == 600
    assert len(tier.keys()) == 600


def test_an_index_that_another_process_has_made_anew_meanwhile_is_left_alone(tier: RedisTier) -> None:
    keys = [KEY._replace(key=number) for number in range(10)]
    for key in keys:
        tier.put(key, b"x")
    tier._rebuild()
    assert tier.keys() == keys


def test_no_blob_stays_that_the_index_does_not_have(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    tier._client.flushall()
    monkeypatch.setattr(tier, "_rebuild", killed)
    with pytest.raises(KeyboardInterrupt):
        tier.put(KEY, PAYLOAD)
    assert not tier._client.exists(place_of(tier))


def test_a_blob_without_its_index_can_be_read(tier: RedisTier) -> None:
    tier.put(KEY, PAYLOAD)
    tier._client.delete(f"{tier.prefix}:times", f"{tier.prefix}:sizes")
    assert read(tier) == PAYLOAD
    assert tier.contains(KEY)


@pytest.mark.parametrize("notice", [read, lambda tier: tier.delete(KEY), RedisTier.keys], ids=["get", "delete", "keys"])
def test_a_blob_that_redis_lost_leaves_the_sum_when_it_is_missed(
    tier: RedisTier, notice: Callable[[RedisTier], object]
) -> None:
    tier.put(KEY, PAYLOAD)
    tier.put(OTHER, PAYLOAD)
    tier._client.delete(place_of(tier))
    assert not tier.contains(KEY)
    notice(tier)
    assert tier.bytes_used == len(PAYLOAD)
    assert tier.keys() == [OTHER]
    assert_in_step(tier)


def test_blobs_that_redis_lost_are_evicted_like_others(shared: RedisServer) -> None:
    tier = RedisTier(shared.url, prefix="lost", max_bytes=3)
    for number in range(3):
        tier.put(KEY._replace(key=number), b"x")
    for number in range(2):
        tier._client.delete(place_of(tier, KEY._replace(key=number)))
    for number in range(3, 5):
        tier.put(KEY._replace(key=number), b"x")
    assert tier.keys() == [KEY._replace(key=number) for number in (2, 3, 4)]
    assert_in_step(tier)
    tier.close()


# --- a server that is full ----------------------------------------------------------------------------------------


def test_a_server_without_memory_refuses_puts_and_still_reads_and_deletes() -> None:
    with redis_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier = RedisTier(server.url, max_bytes=10**9)
        tier.put(KEY, PAYLOAD)
        stored: list[int] = []

        def fill() -> None:
            for number in range(200):
                tier.put(OTHER._replace(key=number), bytes(50_000))
                stored.append(number)

        with pytest.raises(TierError):
            fill()
        assert 5 < len(stored) < 100
        assert_in_step(tier)
        assert read(tier) == PAYLOAD
        assert len(tier.keys()) == len(stored) + 1
        with pytest.raises(TierError):
            tier.put(KEY, bytes(100_000))
        assert read(tier) == PAYLOAD
        for number in stored:
            assert tier.delete(OTHER._replace(key=number))
        # What Redis would not write down at first is found out by now.
        assert tier.keys() == [KEY]
        assert tier.bytes_used == len(PAYLOAD)
        assert tier.put(OTHER, bytes(50_000))
        assert_in_step(tier)
        tier.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
def test_a_server_that_evicts_by_itself_leaves_a_tier_that_works(policy: str) -> None:
    with redis_server("--maxmemory", "4mb", "--maxmemory-policy", policy) as server:
        tier = RedisTier(server.url, max_bytes=10**9)
        rng = random.Random(1)
        for _ in range(300):
            number = rng.randrange(100)
            data = bytes([number]) * 50_000
            tier.put(KEY._replace(key=number), data)
            number = rng.randrange(100)
            assert read(tier, KEY._replace(key=number), 50_000) in (None, bytes([number]) * 50_000)
        keys = tier.keys()
        assert keys
        assert tier.bytes_used == 50_000 * len(keys)
        tier.close()


# --- damage -------------------------------------------------------------------------------------------------------


def assert_missed_and_removed(tier: RedisTier) -> None:
    assert read(tier) is None
    assert not tier._client.exists(place_of(tier))
    assert tier.bytes_used == len(PAYLOAD)
    assert tier.keys() == [OTHER]


def test_each_byte_that_is_flipped_makes_a_miss(tier: RedisTier) -> None:
    tier.put(OTHER, PAYLOAD)
    tier.put(KEY, PAYLOAD)
    whole = tier._client.get(place_of(tier))
    for position in range(len(whole)):
        tier.put(KEY, PAYLOAD)
        tier._client.setrange(place_of(tier), position, bytes([whole[position] ^ 1 << position % 8]))
        assert_missed_and_removed(tier)


def test_a_value_cut_short_or_longer_makes_a_miss(tier: RedisTier) -> None:
    tier.put(OTHER, PAYLOAD)
    tier.put(KEY, PAYLOAD)
    whole = tier._client.get(place_of(tier))
    for damaged in [whole[:length] for length in range(1, len(whole))] + [whole + b"\0", whole * 2, bytes(10**5)]:
        tier.put(KEY, PAYLOAD)
        tier._client.set(place_of(tier), damaged)
        assert_missed_and_removed(tier)


def test_the_blob_of_another_key_under_this_ones_name_is_not_given_out(tier: RedisTier) -> None:
    tier.put(OTHER, PAYLOAD)
    tier.put(KEY, PAYLOAD)
    tier._client.copy(place_of(tier, OTHER), place_of(tier), replace=True)
    assert not tier.contains(KEY)
    assert_missed_and_removed(tier)


def test_a_whole_value_that_took_the_place_of_a_damaged_one_is_not_removed(
    tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(KEY, PAYLOAD)
    tier._client.setrange(place_of(tier), 0, "?")
    run = tier._run

    def late(script: str, *arguments: object) -> Any:
        if arguments[0] == "discard":
            tier.put(KEY, PAYLOAD)
        return run(script, *arguments)

    monkeypatch.setattr(tier, "_run", late)
    assert read(tier) is None
    assert read(tier) == PAYLOAD
    assert_in_step(tier)


def test_a_damaged_value_is_left_out_when_the_index_is_made_anew(tier: RedisTier) -> None:
    tier.put(KEY, PAYLOAD)
    tier.put(OTHER, PAYLOAD)
    tier._client.setrange(place_of(tier), 0, "?")
    tier._client.delete(f"{tier.prefix}:sizes")
    assert tier.bytes_used == len(PAYLOAD)
    assert_in_step(tier)


def test_what_is_no_value_at_all_is_a_tier_error(tier: RedisTier) -> None:
    tier.put(OTHER, PAYLOAD)
    tier._client.lpush(place_of(tier), "theirs")
    for call in (lambda: read(tier), lambda: tier.contains(KEY)):
        with pytest.raises(TierError, match="WRONGTYPE"):
            call()
    assert tier.put(KEY, PAYLOAD)
    assert read(tier) == PAYLOAD


# --- several at once ----------------------------------------------------------------------------------------------

WRITER = """
import random, signal, sys
signal.alarm(60)
from metrale_numba.serving.redis_tier import RedisTier
from metrale_numba.serving.tier import StoreKey
tier = RedisTier(sys.argv[1], max_bytes=60_000)
rng = random.Random(int(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    number = rng.randrange(10)
    key = StoreKey("", "", 0, 0, number, 0)
    match rng.randrange(5):
        case 0 | 1 | 2:
            tier.put(key, bytes([rng.randrange(256)]) * 9_000)
        case 3:
            into = bytearray(9_000)
            assert not tier.get(key, into) or into == into[:1] * 9_000
        case 4:
            tier.delete(key)
    assert tier.bytes_used <= 60_000
    print(".", flush=True)
"""


def start_writer(url: str, seed: int, calls: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, str(seed), str(calls)],
        cwd=PACKAGE_PARENT,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_several_processes_keep_one_index_in_step(tier: RedisTier, shared: RedisServer) -> None:
    writers = [start_writer(shared.url, seed, 150) for seed in range(3)]
    for writer in writers:
        errors = writer.communicate()[1]
        assert writer.returncode == 0, errors[-2000:]
    assert_in_step(tier)


def test_writers_that_are_killed_leave_an_index_in_step(tier: RedisTier, shared: RedisServer) -> None:
    rng = random.Random(1)
    for seed in range(6):
        writer = start_writer(shared.url, seed, 10**6)
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 40)):
            assert writer.stdout.readline() == ".\n"
        writer.kill()
        writer.communicate()
        # One that was killed between the two steps of a delete leaves the second to whoever misses the blob.
        tier.keys()
        assert_in_step(tier)


def test_tiers_of_the_same_prefix_share_what_they_store_and_others_do_not(shared: RedisServer) -> None:
    prefixes = ["a", "a", "a:blob", "a*", "[a]", "A", "\\a?"]
    tiers = [RedisTier(shared.url, prefix=prefix, max_bytes=100) for prefix in prefixes]
    for number, tier in enumerate(tiers):
        tier.put(KEY, bytes([number]))
    # What one makes anew is its own only.
    for tier in tiers:
        tier._client.delete(f"{tier.prefix}:times")
    assert [read(tier, KEY, 1) for tier in tiers] == [bytes([number]) for number in (1, 1, 2, 3, 4, 5, 6)]
    assert [tier.bytes_used for tier in tiers] == [1] * 7
    for tier in tiers:
        tier.close()


def test_the_order_holds_when_the_servers_clock_is_set_back(tier: RedisTier) -> None:
    keys = [KEY._replace(key=number) for number in range(3)]
    for key in keys:
        tier.put(key, b"x")
    # As if all had been used a year from now.
    for number, key in enumerate(keys):
        tier._client.zadd(f"{tier.prefix}:times", {blob_name(key): (time.time() + 3e7) * 1e6 + number})
    assert read(tier, keys[0], 1) == b"x"
    tier.put(keys[1], b"y")
    assert tier.keys() == [keys[2], keys[0], keys[1]]


# --- clients ------------------------------------------------------------------------------------------------------


def test_a_client_of_the_callers_is_used_and_left_open(shared: RedisServer) -> None:
    redis = pytest.importorskip("redis")
    with redis.Redis(unix_socket_path=shared.socket, socket_timeout=2.0) as client:
        tier = RedisTier(client, prefix="client", max_bytes=100)
        assert tier.put(KEY, PAYLOAD)
        assert read(tier) == PAYLOAD
        tier.close()
        with pytest.raises(TierError, match="closed"):
            tier.keys()
        assert client.ping()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"decode_responses": True}, "decode_responses"), ({"socket_timeout": None}, "socket_timeout")],
)
def test_a_client_that_would_decode_or_wait_for_ever_is_refused(options: dict[str, Any], named: str) -> None:
    redis = pytest.importorskip("redis")
    client = redis.Redis(**{"socket_timeout": 2.0, **options})
    with pytest.raises(ValueError, match=named):
        RedisTier(client, max_bytes=100)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"client": 5}, TypeError, "client"),
        ({"client": None}, TypeError, "client"),
        ({"client": "ftp://host"}, ValueError, "URL"),
        ({"prefix": ""}, ValueError, "prefix"),
        ({"prefix": b"p"}, TypeError, "prefix"),
        ({"max_bytes": -1}, ValueError, "max_bytes"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": None}, TypeError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
    ],
)
def test_what_makes_no_tier_is_refused(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    pytest.importorskip("redis")
    given = {"client": "redis://localhost", "max_bytes": 100, **arguments}
    with pytest.raises(error, match=named):
        RedisTier(given.pop("client"), **given)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"pip install 'metrale-numba\[redis\]'"):
        RedisTier("redis://localhost", max_bytes=100)


def test_the_module_can_be_imported_without_the_package() -> None:
    code = "import sys; sys.modules['redis'] = None; import metrale_numba.serving.redis_tier"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE_PARENT,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT)},
        check=True,
    )

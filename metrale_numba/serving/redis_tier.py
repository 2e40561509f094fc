"""A tier in Redis, shared by all that use the same prefix there.

A blob is one value. Beside the blobs there is an index: a sorted set with the time of each blob's last use, and a hash
with its bytes and the sum of all. Scripts keep the two in step. Redis may lose any of it (evict it, be flushed, be
started again empty): an index that is not whole is made anew from the blobs, a blob that is gone leaves the index
when that is noticed, and no blob stays without a place in the index.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from metrale_numba.arguments import as_count, shown
from metrale_numba.serving.blob import USUAL_HEAD_BYTES, Head, blob_name, decode_head, encode_head, is_intact
from metrale_numba.serving.tier import (
    Buffer,
    StoreKey,
    TierError,
    TierStore,
    as_data,
    as_store_key,
    as_target,
    as_timeout,
)

__all__ = ["RedisTier"]

_READ_BYTES: Final = 1 << 20
# Heads that are asked for at once.
_BATCH: Final = 256
# Times that a call makes the index anew before it gives up.
_ATTEMPTS: Final = 4
_INDEX_IS_LOST: Final = -1

# What all scripts begin with. KEYS: the times of last use, the bytes of each, what the names of blobs begin with.
# Numbers are written out, since Lua would round large ones.
_COMMON: Final = """
local times, sizes, blobs = KEYS[1], KEYS[2], KEYS[3]

local function is_whole()
    return redis.call('HEXISTS', sizes, 'used') == 1
        and redis.call('ZCARD', times) == redis.call('HLEN', sizes) - 1
end

local function written(number)
    return string.format('%.0f', number)
end

local function time_after_all()
    local clock = redis.call('TIME')
    local now = clock[1] * 1000000 + clock[2]
    local last = redis.call('ZRANGE', times, -1, -1, 'WITHSCORES')[2]
    if last and tonumber(last) >= now then
        now = tonumber(last) + 1
    end
    return written(now)
end

local function forget(name)
    local size = redis.call('HGET', sizes, name) or 0
    -- What Redis refuses as long as its memory is full. The entry stays then, until it is found to have no blob.
    if type(redis.pcall('HINCRBY', sizes, 'used', written(0 - size))) == 'table' then
        return false
    end
    redis.call('HDEL', sizes, name)
    redis.call('ZREM', times, name)
    return true
end

if ARGV[1] ~= 'rebuild' and not is_whole() then
    if ARGV[1] == 'enter' then
        redis.call('UNLINK', blobs .. ARGV[2])
    end
    return -1
end
"""

# ARGV: name, bytes, most bytes. Enters a blob that was just set, and evicts what is too much.
_ENTER: Final = (
    _COMMON
    + """
local name, size, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
local used = redis.call('HINCRBY', sizes, 'used', written(size - (redis.call('HGET', sizes, name) or 0)))
redis.call('HSET', sizes, name, size)
redis.call('ZADD', times, time_after_all(), name)
while used > most do
    local victim = redis.call('ZRANGE', times, 0, 0)[1]
    if victim == name or not forget(victim) then
        break
    end
    redis.call('UNLINK', blobs .. victim)
    used = tonumber(redis.call('HGET', sizes, 'used'))
end
return 0
"""
)

# ARGV: name, bytes wanted. Makes a blob of so many bytes the last to be evicted. Redis may have no memory for that,
# which is no harm to the reader.
_TOUCH: Final = (
    _COMMON
    + """
if redis.call('EXISTS', blobs .. ARGV[2]) == 0 then
    forget(ARGV[2])
elseif redis.call('HGET', sizes, ARGV[2]) == ARGV[3] then
    redis.pcall('ZADD', times, 'XX', time_after_all(), ARGV[2])
end
return 0
"""
)

# ARGV: name. Takes a blob that is gone out of the index.
_FORGET: Final = (
    _COMMON
    + """
if redis.call('EXISTS', blobs .. ARGV[2]) == 0 then
    forget(ARGV[2])
end
return 0
"""
)

# ARGV: name, bytes of the value, what it begins with. Removes a blob that is damaged, if it is still that one.
_DISCARD: Final = (
    _COMMON
    + """
local blob = blobs .. ARGV[2]
if redis.call('STRLEN', blob) == tonumber(ARGV[3]) and redis.call('GETRANGE', blob, 0, #ARGV[4] - 1) == ARGV[4] then
    forget(ARGV[2])
    redis.call('UNLINK', blob)
end
return 0
"""
)

_USED: Final = _COMMON + "return redis.call('HGET', sizes, 'used')"
_NAMES: Final = _COMMON + "return redis.call('ZRANGE', times, 0, -1)"

# ARGV: name, bytes of the value, bytes of the payload, of each blob. Another process may have been faster.
_REBUILD: Final = (
    _COMMON
    + """
if is_whole() then
    return 0
end
redis.call('UNLINK', times, sizes)
local used = 0
for i = 2, #ARGV, 3 do
    if redis.call('STRLEN', blobs .. ARGV[i]) == tonumber(ARGV[i + 1]) then
        redis.call('HSET', sizes, ARGV[i], ARGV[i + 2])
        redis.call('ZADD', times, time_after_all(), ARGV[i])
        used = used + ARGV[i + 2]
    end
end
redis.call('HSET', sizes, 'used', written(used))
return 0
"""
)


class RedisTier(TierStore):
    """A tier in Redis.

    Every method may be called from any thread and any process. Whatever goes wrong with Redis is a :class:`TierError`,
    and as soon as Redis is back the tier works again. No connection is made before the first call. When a call is cut
    off by any other exception, such as one that a signal handler raises, the client forgets its connections and makes
    new ones.

    Needs the package `redis`: ``pip install 'metrale-numba[redis]'``. Redis must be of version 5 or later, a single
    server, and be allowed more memory than `max_bytes`.

    Parameters
    ----------
    client : redis.Redis or str
        A client, or the address of a server, as ``redis://host:6379/0`` or ``unix:///path``. A client must not decode
        answers, and must have a ``socket_timeout``. It stays the caller's to close.
    prefix : str, default "metrale"
        What the names of all that is stored begin with. Tiers of the same prefix share what they store.
    max_bytes : int
        What all blobs together may have. In Redis come some hundred bytes for each.
    timeout : float, default 5.0
        Seconds to wait for a connection, and for each answer, of a server given by its address. A call gives up after
        a few of these.

    Raises
    ------
    ImportError
        If the package `redis` is not installed.
    """

    persistent: bool = True

    def __init__(self, client: Any, *, prefix: str = "metrale", max_bytes: int, timeout: float = 5.0) -> None:
        self._redis = _imported()
        self.prefix = _as_prefix(prefix)
        self.max_bytes = as_count(max_bytes, "max_bytes")
        self._owns_client = isinstance(client, str)
        self._client = self._connected(client, timeout) if self._owns_client else self._checked(client)
        self._blobs = f"{self.prefix}:blob:".encode()
        self._keys = (f"{self.prefix}:times".encode(), f"{self.prefix}:sizes".encode(), self._blobs)
        self._is_closed = False

    def put(self, key: StoreKey, data: Buffer) -> bool:
        key = as_store_key(key)
        payload = as_data(data)
        if payload.nbytes > self.max_bytes:
            self.delete(key)
            return False
        name = blob_name(key)
        value = b"".join((encode_head(key, payload), payload))

        def set_and_enter() -> Any:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.set(self._blobs + name.encode(), value)
                self._eval(pipe, _ENTER, "enter", name, payload.nbytes, self.max_bytes)
                return pipe.execute()[-1]

        with self._talking():
            self._with_index(set_and_enter)
        return True

    def get(self, key: StoreKey, into: Buffer) -> bool:
        key = as_store_key(key)
        view = as_target(into)
        name = blob_name(key)
        with self._talking():
            with self._client.pipeline(transaction=False) as pipe:
                pipe.get(self._blobs + name.encode())
                self._eval(pipe, _TOUCH, "touch", name, view.nbytes)
                # Where the index is lost there is nothing to touch, and whoever puts next makes it anew.
                value, _ = pipe.execute()
            if value is None:
                return False
            head = _head_of(value, len(value))
            if head is not None and head.key == key:
                payload = memoryview(value)[head.num_bytes :]
                if len(payload) != view.nbytes:
                    return False
                if is_intact(head, payload):
                    view[:] = payload
                    return True
            self._run(_DISCARD, "discard", name, len(value), value[:USUAL_HEAD_BYTES])
            return False

    def delete(self, key: StoreKey) -> bool:
        name = blob_name(as_store_key(key))
        with self._talking():
            # By itself, for as long as its memory is full Redis may refuse to change the index.
            removed = self._client.unlink(self._blobs + name.encode())
            self._run(_FORGET, "forget", name)
            return bool(removed)

    def contains(self, key: StoreKey) -> bool:
        key = as_store_key(key)
        with self._talking():
            ((head, _),) = self._heads([blob_name(key)])
            return head is not None and head.key == key

    def keys(self) -> list[StoreKey]:
        with self._talking():
            names = [name.decode() for name in self._run(_NAMES, "names")]
            found = []
            for name, (head, is_there) in zip(names, self._heads(names), strict=True):
                if head is not None:
                    found.append(head.key)
                elif not is_there:
                    self._run(_FORGET, "forget", name)
            return found

    @property
    def bytes_used(self) -> int:
        with self._talking():
            return int(self._run(_USED, "used"))

    def close(self) -> None:
        self._is_closed = True
        if self._owns_client:
            self._client.close()

    # --- the way to Redis -----------------------------------------------------------------------------------------

    def _connected(self, url: str, timeout: object) -> Any:
        seconds = as_timeout(timeout)
        return self._checked(
            self._redis.Redis.from_url(
                url,
                socket_timeout=seconds,
                socket_connect_timeout=seconds,
                socket_read_size=_READ_BYTES,
                # Once, for a connection that was made before the server was started anew.
                retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 1),
            )
        )

    def _checked(self, client: Any) -> Any:
        if not isinstance(client, self._redis.Redis):
            raise TypeError(f"client must be a redis.Redis or a URL, not {shown(client)} ({type(client).__name__})")
        pool = client.connection_pool
        if client.get_encoder().decode_responses:
            raise ValueError("client must not decode answers, since blobs are no text: decode_responses=False")
        if pool.connection_class(**pool.connection_kwargs).socket_timeout is None:
            raise ValueError("client must have a socket_timeout, or it would wait for ever for a server that hangs")
        return client

    @contextmanager
    def _talking(self) -> Iterator[None]:
        if self._is_closed:
            raise TierError("the tier is closed")
        try:
            yield
        except self._redis.RedisError as error:
            raise TierError(f"Redis: {error}") from error
        except BaseException:
            # Raised by a signal handler, say: a connection may be back in the pool whose answer is still to come, and
            # would be taken for that to the next question, or may never come back. Those in use are closed after it.
            self._client.connection_pool.reset()
            raise

    def _eval(self, client: Any, script: str, *arguments: object) -> Any:
        # Not by its digest, which a server that was started anew does not know.
        return client.eval(script, len(self._keys), *self._keys, *arguments)

    def _run(self, script: str, *arguments: object) -> Any:
        return self._with_index(lambda: self._eval(self._client, script, *arguments))

    def _with_index(self, call: Callable[[], Any]) -> Any:
        """What a script answers, with the index made anew whenever it is found to be lost."""
        for _ in range(_ATTEMPTS):
            answer = call()
            if answer != _INDEX_IS_LOST:
                return answer
            self._rebuild()
        raise TierError("Redis: the index is lost again and again")

    def _rebuild(self) -> None:
        ours = re.compile(re.escape(self._blobs) + rb"[0-9a-f]{64}")
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._blobs) + b"*"
        # A scan may name a blob twice.
        found = {name for name in self._client.scan_iter(match=pattern, count=1000) if ours.fullmatch(name)}
        names = sorted(name[len(self._blobs) :].decode() for name in found)
        entries: list[object] = []
        for name, (head, is_there) in zip(names, self._heads(names), strict=True):
            if head is not None:
                entries += (name, head.num_bytes + head.payload_bytes, head.payload_bytes)
            elif is_there:
                # It would be counted nowhere. If somebody has just put a whole one there, that one is missed, no more.
                self._client.unlink(self._blobs + name.encode())
        self._eval(self._client, _REBUILD, "rebuild", *entries)

    def _heads(self, names: list[str]) -> Iterator[tuple[Head | None, bool]]:
        """The head of each blob, None if it is damaged, and whether there is anything."""
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            with self._client.pipeline(transaction=False) as pipe:
                for name in batch:
                    pipe.strlen(self._blobs + name.encode())
                    pipe.getrange(self._blobs + name.encode(), 0, USUAL_HEAD_BYTES - 1)
                answers = pipe.execute()
            for name, num_bytes, beginning in zip(batch, answers[::2], answers[1::2], strict=True):
                head = self._head(name, num_bytes, beginning)
                yield (head if head is not None and head.name == name else None), num_bytes > 0

    def _head(self, name: str, num_bytes: int, beginning: bytes) -> Head | None:
        def read(length: int) -> bytes:
            if length <= USUAL_HEAD_BYTES:
                return beginning
            more: bytes = self._client.getrange(self._blobs + name.encode(), 0, length - 1)
            return more

        return decode_head(read, num_bytes)


def _head_of(value: bytes, num_bytes: int) -> Head | None:
    return decode_head(lambda length: value[:length], num_bytes)


def _imported() -> Any:
    try:
        importlib.import_module("redis.retry")
        importlib.import_module("redis.backoff")
        return importlib.import_module("redis")
    except ImportError as error:
        raise ImportError("RedisTier needs the package redis: pip install 'metrale-numba[redis]'") from error


def _as_prefix(prefix: object) -> str:
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, not {shown(prefix)} ({type(prefix).__name__})")
    if not prefix:
        raise ValueError("prefix must have a character at least, since all else in the server has other names")
    return prefix

"""A tier in a directory: one file per blob, shared by any number of processes, whole after any of them is killed.

A blob is written beside its goal and moved there when it is whole. All changes of what the directory holds are made
under a lock on one file in it, which has the sum of all bytes, too, and a mark that stands while a change is made:
whoever finds the mark there counts anew. Reading takes no lock. The time of a file is the time of its last use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from metrale_numba.arguments import as_bool, as_count, as_path
from metrale_numba.serving.blob import Head, blob_name, decode_head, encode_head, is_intact
from metrale_numba.serving.tier import (
    Buffer,
    StoreKey,
    TierError,
    TierStore,
    as_data,
    as_store_key,
    as_target,
    renew_after_fork,
)

__all__ = ["DirectoryTier"]

_LOCK_NAME: Final = ".metrale.lock"
_BLOB: Final = re.compile(r"[0-9a-f]{64}\.snapshot")
_PART: Final = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.part")
# What the lock file has: bytes used, whether a change is being made, and the start of the BLAKE2b of the two.
_STATE: Final = struct.Struct("<Q?")
_STATE_CHECK_BYTES: Final = 8
# No link may lead out of the directory, and no pipe may keep whoever opens it waiting.
_READING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITING: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# States of users' prompts are for nobody else to read.
_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700


class _File(NamedTuple):
    """A file of the directory as eviction sees it. The key is None if it cannot be read."""

    stamp: int
    name: str
    num_bytes: int
    key: StoreKey | None


class DirectoryTier(TierStore):
    """A tier in a directory of a file system.

    Every method may be called from any thread, and any number of processes may have tiers in one directory. A process
    may be killed at any moment: whatever is stored stays whole, and what is not yet stored whole is cleared away by the
    next one. What was stored before is there when the directory is opened again. Files of other names than this tier
    gives are neither touched nor counted.

    The directory must be on a file system with locks (``flock``) that all its users share.

    Parameters
    ----------
    path : str or path
        The directory. It is made if it is not there, readable for its owner only.
    max_bytes : int
        What all blobs together may have. On the disk come some hundred bytes for each, and what is being written.
    fsync : bool, default False
        Whether a blob is forced to the disk before `put` returns. If not, a power failure (not the end of the process)
        can lose or damage blobs; a damaged one is found to be so when it is read.

    Raises
    ------
    OSError
        If the directory cannot be made, read or written.
    """

    persistent: bool = True

    def __init__(self, path: str | os.PathLike[str], max_bytes: int, fsync: bool = False) -> None:
        self._descriptor: int | None = None
        self.path = as_path(path).absolute()
        self.max_bytes = as_count(max_bytes, "max_bytes")
        self.fsync = as_bool(fsync, "fsync")
        # Guards all that follows. It is taken before the lock on the file, which does not tell threads apart.
        self._lock = threading.Lock()
        self._is_closed = False
        self._bytes_used = 0
        # Time and name of each file when the directory was last read; the least recently used one comes last. Times
        # only go forward, so as long as the last one's time is what it was, it is the least recently used one.
        self._victims: list[tuple[int, str]] = []
        self.path.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
        # Counted even if no mark says so: a power failure may have kept one file and not another.
        with self._changing():
            self._count()
        renew_after_fork(self)

    def __del__(self) -> None:
        self._close_lock_file()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        # The parent's lock: the child would share it, and keep it if the parent were killed.
        self._close_lock_file()
        self._victims = []

    def put(self, key: StoreKey, data: Buffer) -> bool:
        key = as_store_key(key)
        payload = as_data(data)
        if payload.nbytes > self.max_bytes:
            self.delete(key)
            return False
        name = blob_name(key)
        head = encode_head(key, payload)
        descriptor, part = self._begin_part(name)
        try:
            _write(descriptor, [memoryview(head), payload])
            if self.fsync:
                os.fsync(descriptor)
            with self._changing():
                earlier = self._payload_bytes(name)
                _stamp(descriptor)
                os.replace(part, self._path_of(name))
                if earlier is None:
                    self._count()
                else:
                    self._bytes_used += payload.nbytes - earlier
                self._evict(name)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            raise
        finally:
            os.close(descriptor)
        return True

    def get(self, key: StoreKey, into: Buffer) -> bool:
        key = as_store_key(key)
        view = as_target(into)
        name = blob_name(key)
        with self._opened(name) as descriptor:
            if descriptor is None:
                return False
            head = _head_of(descriptor)
            if head is not None and head.key == key:
                if head.payload_bytes != view.nbytes:
                    return False
                if _read(descriptor, view, head.num_bytes) and is_intact(head, view):
                    # The bytes are right, wherever the file stands in the order.
                    with contextlib.suppress(OSError):
                        _stamp(descriptor)
                    return True
            self._discard(name, os.fstat(descriptor))
            return False

    def delete(self, key: StoreKey) -> bool:
        name = blob_name(as_store_key(key))
        with self._changing():
            return self._remove(name)

    def contains(self, key: StoreKey) -> bool:
        key = as_store_key(key)
        with self._opened(blob_name(key)) as descriptor:
            head = None if descriptor is None else _head_of(descriptor)
            return head is not None and head.key == key

    def keys(self) -> list[StoreKey]:
        with self._changing():
            return self._count()

    @property
    def bytes_used(self) -> int:
        with self._changing():
            return self._bytes_used

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._close_lock_file()

    # --- the lock and what is written down under it ---------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Keep all other threads and processes from changing anything."""
        with self._lock:
            self._check_open()
            descriptor = self._lock_file()
            try:
                yield descriptor
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the directory for changes, with the bytes used at hand, and write down what has become of them."""
        with self._locked() as descriptor:
            before = _read_state(descriptor)
            if before is None:
                self._count()
            else:
                self._bytes_used = before
            # Whoever is killed from here on, or fails, leaves the mark to the next one.
            _write_state(descriptor, self._bytes_used, is_changing=True)
            yield
            if self._bytes_used < 0:
                # There were blobs that somebody else had put there.
                self._count()
            if self.fsync:
                self._sync_names()
            _write_state(descriptor, self._bytes_used, is_changing=False)

    def _lock_file(self) -> int:
        path = self.path / _LOCK_NAME
        while True:
            if self._descriptor is None:
                self._descriptor = os.open(path, _WRITING | os.O_CREAT, _FILE_MODE)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(self._descriptor)):
                    return self._descriptor
            # The directory was cleared, and others lock another file by now.
            self._close_lock_file()

    def _close_lock_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _sync_names(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError("the tier is closed")

    # --- files, without the lock ----------------------------------------------------------------------------------

    def _path_of(self, name: str) -> Path:
        return self.path / f"{name}.snapshot"

    def _begin_part(self, name: str) -> tuple[int, Path]:
        """Create a file to be filled. Its own lock, which ends with the process, says that somebody writes it."""
        part = self.path / f".{name}.{secrets.token_hex(8)}.part"
        # Under the directory's lock, so that nobody sees the file before it is locked.
        with self._locked():
            descriptor = os.open(part, _WRITING | os.O_CREAT | os.O_EXCL, _FILE_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except BaseException:
                os.unlink(part)
                os.close(descriptor)
                raise
        return descriptor, part

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        self._check_open()
        try:
            descriptor = os.open(self._path_of(name), _READING)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            # A link, which is none of ours. It is in the way of nothing: a blob can take its place.
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    # --- files, under the lock ------------------------------------------------------------------------------------

    def _payload_bytes(self, name: str) -> int | None:
        """How much of the bytes used is a blob's; None if nobody can say."""
        try:
            with self._opened(name) as descriptor:
                if descriptor is None:
                    return 0
                head = _head_of(descriptor)
        except OSError as error:
            if not _is_about_the_file(error):
                raise
            return None
        return None if head is None or head.name != name else head.payload_bytes

    def _remove(self, name: str) -> bool:
        """Remove a blob; whether there was one."""
        size = self._payload_bytes(name)
        try:
            os.unlink(self._path_of(name))
        except FileNotFoundError:
            return False
        if size is None:
            self._count()
        else:
            self._bytes_used -= size
        return size is not None

    def _discard(self, name: str, damaged: os.stat_result) -> None:
        """Remove a damaged file, unless another one has taken its place."""
        with self._changing():
            path = self._path_of(name)
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                if os.path.samestat(os.stat(path, follow_symlinks=False), damaged):
                    os.unlink(path)
            # What it was counted for, nobody can say.
            self._count()

    def _evict(self, kept: str) -> None:
        """Remove the least recently used blobs that are too much."""
        while self._bytes_used > self.max_bytes:
            if not self._victims:
                self._count()
                continue
            stamp, name = self._victims.pop()
            with contextlib.suppress(FileNotFoundError):
                if name != kept and os.stat(self._path_of(name), follow_symlinks=False).st_mtime_ns == stamp:
                    self._remove(name)

    def _count(self) -> list[StoreKey]:
        """Read the whole directory: bytes used, order of eviction. Removes what is damaged or was left half-written.

        Returns the keys in order of eviction.
        """
        with os.scandir(self.path) as entries:
            # Nothing but plain files is ever of this tier's making.
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        found = []
        for name in names:
            # What is not changed under the lock can be gone by now.
            with contextlib.suppress(FileNotFoundError):
                if _PART.fullmatch(name):
                    _remove_if_left(self.path / name)
                elif _BLOB.fullmatch(name):
                    found.append(self._look_at(name.partition(".")[0]))
        files = sorted(file for file in found if file is not None)
        self._bytes_used = sum(file.num_bytes for file in files)
        self._victims = [(file.stamp, file.name) for file in reversed(files)]
        return [file.key for file in files if file.key is not None]

    def _look_at(self, name: str) -> _File | None:
        """What a file says of itself; it is removed if that cannot be true."""
        path = self._path_of(name)
        try:
            with self._opened(name) as descriptor:
                if descriptor is None:
                    return None
                status, head = os.fstat(descriptor), _head_of(descriptor)
        except OSError as error:
            if not _is_about_the_file(error):
                raise
            # It has a place on the disk all the same, and can be evicted.
            status = os.stat(path, follow_symlinks=False)
            return _File(status.st_mtime_ns, name, status.st_size, None)
        if head is None or head.name != name:
            os.unlink(path)
            return None
        return _File(status.st_mtime_ns, name, head.payload_bytes, head.key)


def _stamp(descriptor: int) -> None:
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))


def _is_about_the_file(error: OSError) -> bool:
    """Whether it says that this one file cannot be read, and nothing of others."""
    return error.errno in (errno.EACCES, errno.EPERM, errno.EIO)


def _head_of(descriptor: int) -> Head | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    return decode_head(lambda num_bytes: os.pread(descriptor, num_bytes, 0), status.st_size)


def _read(descriptor: int, into: memoryview, position: int) -> bool:
    """Fill `into`; False if the file ends before."""
    # One call reads two gigabytes at most.
    while into:
        num_bytes = os.preadv(descriptor, [into], position)
        if num_bytes == 0:
            return False
        into = into[num_bytes:]
        position += num_bytes
    return True


def _write(descriptor: int, parts: list[memoryview]) -> None:
    for part in parts:
        rest = part
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def _remove_if_left(part: Path) -> None:
    """Remove a file that was not written to its end, unless somebody still writes it."""
    descriptor = os.open(part, _WRITING)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(part)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _read_state(descriptor: int) -> int | None:
    """The bytes used, or None if they must be counted."""
    data = os.pread(descriptor, _STATE.size + _STATE_CHECK_BYTES, 0)
    if len(data) != _STATE.size + _STATE_CHECK_BYTES or data[_STATE.size :] != _state_check(data[: _STATE.size]):
        return None
    bytes_used, is_changing = _STATE.unpack_from(data)
    return None if is_changing else int(bytes_used)


def _write_state(descriptor: int, bytes_used: int, is_changing: bool) -> None:
    data = _STATE.pack(bytes_used, is_changing)
    os.pwrite(descriptor, data + _state_check(data), 0)


def _state_check(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_STATE_CHECK_BYTES).digest()

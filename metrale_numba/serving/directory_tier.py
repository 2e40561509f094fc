"""A tier in a directory: one file per blob, shared by any number of processes, whole after any of them is killed.

A blob is written beside its goal and moved there when it is whole. All changes of what the directory holds are made
under a lock on one file in it, which has the sum of all bytes, too, and a mark that stands while a change is made:
whoever finds the mark there counts anew. Reading takes no lock. The time of a file is the time of its last use.

A signal handler can raise an exception after any call, before what the call gave is kept anywhere, and at the start of
any function, like an ``__exit__``. So every file is held by an :class:`io.FileIO`, whose ``with`` is none of Python's
code, and no step that takes a lock or opens a file is in a context manager of our own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

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
    as_timeout,
    renew_after_fork,
)

__all__ = ["DirectoryTier"]

_Answer = TypeVar("_Answer")

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
# Seconds between two tries to get the lock: at first about as long as a change takes, then more and more, up to what
# nobody notices and costs a processor nothing.
_FIRST_PAUSE: Final = 1e-4
_LONGEST_PAUSE: Final = 1e-2


class _File(NamedTuple):
    """A file of the directory as eviction sees it. The key is None if it cannot be read, or is not needed."""

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
    timeout : float, default 10.0
        Seconds that a call waits for another process that changes the directory. If that one was stopped meanwhile,
        the call is a :class:`TierError` then. Reading a blob that is whole never waits.

    Raises
    ------
    OSError
        If the directory cannot be made, read or written, or its lock is not to be had.

    Notes
    -----
    While the directory is not there, say because its file system was unmounted, every call is an :class:`OSError`. A
    mount point is still there then, and `put` would fill it, so give a directory below it.

    An exception that a signal handler raises in a call leaves the tier right and its locks free. If it is raised while
    an earlier one of the kind is being dealt with, a file that was not written to its end may stay; whoever next counts
    the directory or opens it clears that away.
    """

    persistent: bool = True

    def __init__(
        self, path: str | os.PathLike[str], max_bytes: int, fsync: bool = False, *, timeout: float = 10.0
    ) -> None:
        self.path = as_path(path).absolute()
        self.max_bytes = as_count(max_bytes, "max_bytes")
        self.fsync = as_bool(fsync, "fsync")
        self.timeout = as_timeout(timeout)
        # Guards all that follows. It is taken before the lock on the file, for which threads would have to ask again
        # and again.
        self._lock = threading.Lock()
        # The one of the call that is being made, or of the last one.
        self._lock_file: io.FileIO | None = None
        self._is_closed = False
        self._bytes_used = 0
        # The files when the directory was last read; the least recently used one comes last. Times only go forward, so
        # as long as the last one's time is what it was, it is the least recently used one.
        self._victims: list[_File] = []
        self.path.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
        # Counted even if no mark says so: a power failure may have kept one file and not another.
        self._change(self._count)
        renew_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        # The parent's lock: the child would share it, and keep it if the parent were killed.
        if self._lock_file is not None:
            self._lock_file.close()
        self._victims = []

    def put(self, key: StoreKey, data: Buffer) -> bool:
        key = as_store_key(key)
        payload = as_data(data)
        if payload.nbytes > self.max_bytes:
            self.delete(key)
            return False
        name = blob_name(key)
        head = encode_head(key, payload)
        part = self.path / f".{name}.{secrets.token_hex(8)}.part"
        try:
            # Begun under the directory's lock, so that nobody sees the file before it is locked.
            with self._locked(lambda _: _begin(part)) as file:
                _write(file.fileno(), [memoryview(head), payload])
                if self.fsync:
                    os.fsync(file.fileno())
                self._change(lambda: self._move(part, file.fileno(), name, payload.nbytes))
        except BaseException:
            # The first error says more than one of this; and whoever counts next removes the file, too.
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        return True

    def get(self, key: StoreKey, into: Buffer) -> bool:
        key = as_store_key(key)
        view = as_target(into)
        name = blob_name(key)
        self._check_open()
        file = self._blob_file(name)
        if file is None:
            self._check_directory()
            return False
        with file:
            descriptor = file.fileno()
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
        return self._locked(lambda lock: self._remove(lock, name))

    def contains(self, key: StoreKey) -> bool:
        key = as_store_key(key)
        self._check_open()
        file = self._blob_file(blob_name(key))
        if file is None:
            self._check_directory()
            return False
        with file:
            head = _head_of(file.fileno())
            return head is not None and head.key == key

    def keys(self) -> list[StoreKey]:
        return self._change(self._count)

    @property
    def bytes_used(self) -> int:
        return self._change(lambda: self._bytes_used)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    # --- the lock and what is written down under it ---------------------------------------------------------------

    def _locked(self, step: Callable[[int], _Answer]) -> _Answer:
        """Call `step` with the lock file, while no other thread or process changes anything."""
        path = self.path / _LOCK_NAME
        # From before the threads queue up, so that they do not wait one after the other for a process that is stopped.
        deadline = time.monotonic() + self.timeout
        with self._lock:
            self._check_open()
            while True:
                # Opened for each call, since closing it gives the lock back whatever happens.
                with _open(path, _WRITING | os.O_CREAT) as file:
                    self._lock_file = file
                    descriptor = file.fileno()
                    try:
                        self._wait_for_lock(descriptor, deadline)
                        if _is_at(path, os.fstat(descriptor)):
                            return step(descriptor)
                    finally:
                        # A child that was forked before it knew of the file has it open, too, and keeps it so.
                        fcntl.flock(descriptor, fcntl.LOCK_UN)
                # The directory was cleared, and others lock another file by now.

    def _wait_for_lock(self, descriptor: int, deadline: float) -> None:
        pause = _FIRST_PAUSE
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TierError(f"{self.path} is locked by another process, for {self.timeout:g} seconds and more")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _change(self, step: Callable[[], _Answer]) -> _Answer:
        """Call `step` under the lock, with the bytes used at hand, and write down what has become of them."""

        def change(lock: int) -> _Answer:
            before = _read_state(lock)
            if before is None:
                self._count()
            else:
                self._bytes_used = before
            # Whoever is killed from here on, or fails, leaves the mark to the next one.
            _write_state(lock, self._bytes_used, is_changing=True)
            answer = step()
            if self._bytes_used < 0:
                # There were blobs that somebody else had put there.
                self._count()
            self._sync_names()
            _write_state(lock, self._bytes_used, is_changing=False)
            return answer

        return self._locked(change)

    def _sync_names(self) -> None:
        if not self.fsync:
            return
        # No call of Python's stands between opening and `try`.
        (descriptor,) = map(os.open, (self.path,), (os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,))
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

    def _blob_file(self, name: str) -> io.FileIO | None:
        try:
            return _open(self._path_of(name), _READING)
        except (FileNotFoundError, IsADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            # A link, which is none of ours. It is in the way of nothing: a blob can take its place.
            return None

    def _check_directory(self) -> None:
        """Fail if a blob may be missing for the sole reason that all are: the lock file is there from the first."""
        try:
            os.stat(self.path / _LOCK_NAME, follow_symlinks=False)
        except FileNotFoundError:
            raise TierError(f"{self.path} is gone, or all that it had") from None

    # --- files, under the lock ------------------------------------------------------------------------------------

    def _payload_bytes(self, name: str) -> int | None:
        """How much of the bytes used is a blob's; None if nobody can say."""
        try:
            file = self._blob_file(name)
            if file is None:
                return 0
            with file:
                head = _head_of(file.fileno())
        except OSError as error:
            if not _is_about_the_file(error):
                raise
            return None
        return None if head is None or head.name != name else head.payload_bytes

    def _move(self, part: Path, descriptor: int, name: str, num_bytes: int) -> None:
        """Put a file that is whole in its place, and remove what is too much."""
        earlier = self._payload_bytes(name)
        _stamp(descriptor)
        os.replace(part, self._path_of(name))
        if earlier is None:
            self._count()
        else:
            self._bytes_used += num_bytes - earlier
        self._evict(name)

    def _remove(self, lock: int, name: str) -> bool:
        """Remove a blob; whether there was one. Looks at no other file, however many there are."""
        size = self._payload_bytes(name)
        before = _read_state(lock)
        _write_state(lock, before or 0, is_changing=True)
        try:
            os.unlink(self._path_of(name))
        except FileNotFoundError:
            is_removed, size = False, 0
        else:
            is_removed = size is not None
        self._sync_names()
        # The mark stays where nobody can say what is left, and whoever needs to know it counts.
        if before is not None and size is not None and size <= before:
            _write_state(lock, before - size, is_changing=False)
        return is_removed

    def _discard(self, name: str, damaged: os.stat_result) -> None:
        """Remove a damaged file, unless another one has taken its place."""

        def discard(lock: int) -> None:
            if _is_at(self._path_of(name), damaged):
                self._remove(lock, name)

        self._locked(discard)

    def _evict(self, kept: str) -> None:
        """Remove the least recently used blobs that are too much."""
        while self._bytes_used > self.max_bytes:
            if not self._victims:
                self._count()
                continue
            victim = self._victims.pop()
            path = self._path_of(victim.name)
            with contextlib.suppress(FileNotFoundError):
                if victim.name != kept and os.stat(path, follow_symlinks=False).st_mtime_ns == victim.stamp:
                    os.unlink(path)
                    # What it was counted for, whatever it says of itself by now.
                    self._bytes_used -= victim.num_bytes

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
        self._victims = [file._replace(key=None) for file in reversed(files)]
        return [file.key for file in files if file.key is not None]

    def _look_at(self, name: str) -> _File | None:
        """What a file says of itself; it is removed if that cannot be true."""
        path = self._path_of(name)
        try:
            file = self._blob_file(name)
            if file is None:
                return None
            with file:
                status, head = os.fstat(file.fileno()), _head_of(file.fileno())
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


def _open(path: Path, flags: int) -> io.FileIO:
    def opener(*_: object) -> int:
        # No call of Python's stands between the system's answer and the FileIO that will close it.
        (descriptor,) = map(os.open, (path,), (flags,), (_FILE_MODE,))
        return descriptor

    return io.FileIO(path, opener=opener)


def _begin(part: Path) -> io.FileIO:
    """Create a file to be filled. Its own lock, which ends with the process, says that somebody writes it."""
    file = _open(part, _WRITING | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
    except BaseException:
        # Else it would be open for as long as somebody looks at the exception.
        file.close()
        raise
    return file


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Whether a path still leads to the file that was seen."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except FileNotFoundError:
        return False


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
    # Of a lock that somebody else has, that is all the answer.
    with _open(part, _WRITING) as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(part)


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

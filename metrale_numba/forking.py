"""Locks and `fork`: a fork while another thread is inside a cache must not leave the child with half a call.

The forking thread first waits for every lock, so the child gets each cache between two calls, and both processes open
the locks again. Kernels run without the interpreter's lock, so nothing less would do. It waits for a thread that
compiles kernels, too: in the child that thread is gone, and nobody would ever open its lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

from metrale_numba.kernels.compile import _lock as _compiling


class Lock(Protocol):
    """A lock that may be open to its own holder or not."""

    def acquire(self) -> bool:
        """Wait for it."""

    def release(self) -> None:
        """Open it."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class _Locked(Protocol):
    _lock: threading.Lock


class _Layered(Protocol):
    def _fork_locks(self) -> Iterable[Lock]: ...


_caches: weakref.WeakSet[_Locked] = weakref.WeakSet()
_layers: weakref.WeakSet[_Layered] = weakref.WeakSet()
# Guards the sets; taken around a fork, too, so that the child's sets are whole.
_registering = threading.Lock()
_held: list[Lock] = []


def register(cache: _Locked) -> None:
    """Have a lock taken around every fork, under which no other of these is taken, for as long as its owner lives."""
    with _registering:
        _caches.add(cache)


def register_layer(layer: _Layered) -> None:
    """Have the locks of what is built on caches taken before theirs, in the order in which it takes them itself."""
    with _registering:
        _layers.add(layer)


def _before() -> None:
    _registering.acquire()
    for layer in list(_layers):
        _take(layer._fork_locks())
    _take(cache._lock for cache in list(_caches))
    # After the caches' locks, since a call that holds one may come to need kernels that are not compiled yet.
    _compiling.acquire()


def _take(locks: Iterable[Lock]) -> None:
    for lock in locks:
        lock.acquire()
        _held.append(lock)


def _after() -> None:
    _compiling.release()
    while _held:
        _held.pop().release()
    _registering.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)

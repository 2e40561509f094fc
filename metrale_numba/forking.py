"""Locks and `fork`: a fork while another thread is inside a cache must not leave the child with half a call.

The forking thread first waits for every cache's lock, so the child gets each cache between two calls, and both
processes open the locks again. Kernels run without the interpreter's lock, so nothing less would do. It waits for a
thread that compiles kernels, too: in the child that thread is gone, and nobody would ever open its lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from metrale_numba.kernels.compile import _lock as _compiling


class _Locked(Protocol):
    _lock: threading.Lock


_caches: weakref.WeakSet[_Locked] = weakref.WeakSet()
# Guards the set; taken around a fork, too, so that the child's set is whole.
_registering = threading.Lock()
_held: list[threading.Lock] = []


def register(cache: _Locked) -> None:
    """Have a cache's lock taken around every fork, for as long as the cache lives."""
    with _registering:
        _caches.add(cache)


def _before() -> None:
    _registering.acquire()
    for cache in list(_caches):
        cache._lock.acquire()
        _held.append(cache._lock)
    # After the caches' locks, since a call that holds one may come to need kernels that are not compiled yet.
    _compiling.acquire()


def _after() -> None:
    _compiling.release()
    while _held:
        _held.pop().release()
    _registering.release()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)

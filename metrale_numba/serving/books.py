"""Steps that an exception cut short, and the books that are put right before the next one.

A step of the serving layer joins a call of the cache with the books of the pools. A signal handler that raises can come
between the two. Then the cache has blocks that the pool calls free, say, and the next prompt would overwrite them. So
each step is marked while it is under way, and the next one that finds the mark of another has everything counted anew.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from metrale_numba.errors import MetraleError

__all__ = ["Books"]


class Books:
    """Entered with the lock held, around each step; `put_right` is called in the step after one that was cut short."""

    def __init__(self, put_right: Callable[[], None]) -> None:
        self._put_right = put_right
        self._is_under_way = False

    def __enter__(self) -> None:
        if self._is_under_way:
            self._put_right()
        self._is_under_way = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # These are refusals, after which nothing has changed.
        if kind is None or issubclass(kind, (MetraleError, TypeError, ValueError)):
            self._is_under_way = False

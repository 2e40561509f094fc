"""Ctrl-C in the commands: it stops work where that leaves nothing half done, and shows in the exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, NoReturn, TypeVar

import click

__all__ = ["INTERRUPTED_STATUS", "CtrlC", "exit_interrupted", "read_interruptibly"]

_Item = TypeVar("_Item")

INTERRUPTED_STATUS: Final = 130
"""128 and the number of SIGINT, which is how a shell tells of a command that Ctrl-C ended."""

# Long enough for the callback in which Ctrl-C was lost to end.
_SECONDS_BEFORE_TRYING_AGAIN = 0.01


class CtrlC:
    """Lets Ctrl-C stop the work only where that leaves no request half played; a context manager.

    Within :meth:`may_interrupt` it raises ``KeyboardInterrupt`` at once, since reading a pipe or compiling may
    take long. Anywhere else it is kept until the next :meth:`may_interrupt`.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._may_interrupt = False

    def __enter__(self) -> CtrlC:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
        self._previous_hook = sys.unraisablehook
        # A job that a shell started in the background is to ignore Ctrl-C, and goes on doing so.
        if self._previous[signal.SIGINT] is not signal.SIG_IGN:
            for number in self._previous:
                signal.signal(number, self._on_signal)
            sys.unraisablehook = self._on_swallowed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._previous_hook

    @contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Raise ``KeyboardInterrupt`` in this block if Ctrl-C comes, or on entry if it has come."""
        try:
            # In this order: the other way round, a Ctrl-C between the two would be kept until the block is over.
            self._may_interrupt = True
            if self._pressed:
                raise KeyboardInterrupt
            yield
        except Exception as error:
            # A callback that Ctrl-C cut short has not done its work, and what called it may stumble over that.
            if self._pressed:
                raise KeyboardInterrupt from error
            raise
        finally:
            self._may_interrupt = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        if self._may_interrupt:
            raise KeyboardInterrupt

    def _on_swallowed(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Try again a little later where the exception could not get out, as in LLVM's callbacks into Python."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _SECONDS_BEFORE_TRYING_AGAIN)
        else:
            self._previous_hook(unraisable)


def exit_interrupted(context: click.Context) -> NoReturn:
    """End a command that Ctrl-C stopped, once its results are printed."""
    # Who presses Ctrl-C twice must not hit the interpreter while it shuts down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context.exit(INTERRUPTED_STATUS)


def read_interruptibly(requests: Iterable[_Item], ctrl_c: CtrlC) -> Iterator[_Item]:
    """Pass the items on; only while one is made or read can Ctrl-C interrupt."""
    iterator = iter(requests)
    while True:
        with ctrl_c.may_interrupt():
            item = next(iterator, None)
        if item is None:
            return
        yield item

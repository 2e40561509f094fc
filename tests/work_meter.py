"""Counts the work of single calls: what kernels count in the counting build, and what is to be seen of Python.

It relies on ``METRALE_COUNT_WORK=1`` in the environment that Python started with, and on one thread. It promises the
same figures for the same calls on every machine: nothing here looks at a clock.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import metrale_numba
from metrale_numba.kernels import counting
from metrale_numba.kernels.compile import kernels

#: Arrays that the package got from a function of NumPy, views among them; what methods of arrays make is not seen.
ARRAYS_MADE = "arrays made"
#: Calls of the package's own Python functions: the usual call takes a way with hardly any.
FUNCTIONS_CALLED = "functions called"

_PACKAGE = metrale_numba.__name__
_SOURCES = str(Path(metrale_numba.__file__).parent)
# Of the modules with kernels, these are plain Python; in the others NumPy belongs to the compiler.
_PYTHON_IN_KERNELS = (f"{_PACKAGE}.kernels.arrays", f"{_PACKAGE}.kernels.pages")

Work = dict[str, int]


class Meter:
    """Measures calls and keeps what each took, by a name; see :attr:`work`."""

    def __init__(self) -> None:
        if not counting.IS_ON:
            raise RuntimeError(f"kernels count nothing unless {counting.VARIABLE} is 1 when Python starts")
        # Before NumPy is watched, so that the compiler sees nothing of it.
        kernels("cache")
        self.work: dict[str, Work] = {}
        self._kinds = counting.KINDS
        self._counts = counting.counts
        self._arrays_made = 0
        self._functions_called = 0
        for name, module in list(sys.modules.items()):
            is_ours = name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
            if is_ours and (not name.startswith(f"{_PACKAGE}.kernels") or name in _PYTHON_IN_KERNELS):
                self._watch(module)

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Make a call, keep its work under a name, and return its answer."""
        assert name not in self.work, f"two scenarios are called {name!r}"
        self._counts[:] = 0
        self._arrays_made = self._functions_called = 0
        sys.setprofile(self._see)
        try:
            answer = call(*args, **keywords)
        finally:
            sys.setprofile(None)
        work = dict(zip(self._kinds, self._counts.tolist(), strict=True))
        work |= {ARRAYS_MADE: self._arrays_made, FUNCTIONS_CALLED: self._functions_called}
        self.work[name] = {kind: number for kind, number in work.items() if number}
        return answer

    def _see(self, frame: types.FrameType, event: str, _: Any) -> None:
        # Comprehensions are functions in some versions of Python and not in others.
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_SOURCES) and not code.co_name.startswith("<"):
            self._functions_called += 1

    def _watch(self, module: types.ModuleType) -> None:
        """Have a module go through this meter wherever it calls a function of NumPy."""
        for name, value in list(vars(module).items()):
            if value is np:
                setattr(module, name, _WatchedNumpy(self._counted))
            elif _is_function(value) and getattr(value, "__module__", None) == np.__name__:
                setattr(module, name, self._counted(value))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            answer = function(*args, **keywords)
            if isinstance(answer, np.ndarray) and not any(answer is arg for arg in args):
                self._arrays_made += 1
            return answer

        return counted


class _WatchedNumpy:
    """NumPy, its functions counted; types and ufuncs are the same as ever."""

    def __init__(self, counted: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        return self._counted(value) if _is_function(value) else value


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (type, np.ufunc))

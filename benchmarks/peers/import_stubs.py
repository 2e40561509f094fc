"""Stands in for packages that a peer imports on the way to its cache and that play no part in it.

Only the import is satisfied, and only of packages that are not installed. The classes that are measured, and all that
they call, are the peer's own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["stand_in_for"]


class _AnyName(type):
    """Lets a stand-in be subscripted, joined with ``|`` and asked for any name, as annotations and decorators do."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


class _StandIn(metaclass=_AnyName):
    """Whatever is looked for in a missing package: a base class, a type, a constant or a decorator."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        decorates = cls is _StandIn and len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else super().__new__(cls)


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a module's own attribute, which makes it a package)
    # Newer than anything that is asked for.
    __version__ = "999.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] in self._packages:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(packages: Iterable[str]) -> None:
    """Let those of `packages` be imported that are not installed.

    Parameters
    ----------
    packages : iterable of str
        Names of top-level modules.
    """
    missing = frozenset(name for name in packages if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))

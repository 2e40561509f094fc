"""The layers of the package: contract, kernels, cache, serving, what is built on that, command. Imports point down."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import metrale_numba

PACKAGE = Path(metrale_numba.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
#: From the bottom up. A module belongs to the longest name that it begins with; what is not named is the cache.
LAYERS = [
    ["interface", "errors"],
    ["kernels", "arguments"],
    [""],
    ["serving"],
    ["replay", "engines"],
    ["cli", "__main__"],
]


def layer_of(module: str) -> int:
    names = {name: level for level, names in enumerate(LAYERS) for name in names}
    while module not in names:
        module = module.rpartition(".")[0]
    return names[module]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """The modules of this package that one of them imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("metrale_numba."):
                yield name.removeprefix("metrale_numba.")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_nothing_from_a_layer_above_its_own(path: Path) -> None:
    mine = layer_of(name_of(path))
    assert [name for name in imported(path) if layer_of(name) > mine] == []


def test_every_layer_has_modules_and_there_is_something_to_check() -> None:
    assert {layer_of(name_of(path)) for path in MODULES} == set(range(len(LAYERS)))
    assert sum(1 for path in MODULES for _ in imported(path)) > 200


@pytest.mark.parametrize(
    ("module", "allowed"),
    [("metrale_numba", {"numpy"}), ("metrale_numba.serving", {"numpy"}), ("metrale_numba.engines", {"numpy"})],
)
def test_importing_a_layer_loads_no_other_package(module: str, allowed: set[str]) -> None:
    program = f"""
import sys
before = set(sys.modules)
import {module}
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(names - sys.stdlib_module_names))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) - {"metrale_numba"} == allowed

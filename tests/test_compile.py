"""The kernels compile at first use, come from our cache directory afterwards, and are checked for bounds on demand."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import metrale_numba
from metrale_numba import RadixTree
from metrale_numba.kernels import compile as compiling
from metrale_numba.kernels.compile import kernels

PACKAGE = Path(metrale_numba.__file__).parent
TESTS = Path(__file__).parent
USE_A_CACHE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
logging.getLogger("numba").setLevel(logging.WARNING)
import metrale_numba
cache = metrale_numba.RadixTree(block_size=2)
cache.insert([1, 2, 3, 4], [7, 8])
print("matched", cache.lookup([1, 2, 3, 4]).matched_blocks.tolist())
"""


def run(code: str, package_parent: Path = PACKAGE.parent, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that imports the package from a folder."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("METRALE_", "NUMBA_"))}
    env = {**inherited, "PYTHONPATH": str(package_parent), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def warm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that a first process has filled."""
    directory = tmp_path_factory.mktemp("kernels")
    first = run(USE_A_CACHE, METRALE_CACHE_DIR=str(directory))
    assert first.returncode == 0, first.stderr
    assert "compiling kernels" in first.stdout
    assert "matched [7, 8]" in first.stdout
    return directory


def copy_of(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target)
    return target


def test_importing_the_package_loads_no_kernel_and_no_library_of_the_command_line() -> None:
    code = (
        "import sys, metrale_numba\n"
        "names = ('numba', 'llvmlite', 'click', 'rich', 'metrale_numba.kernels.tree')\n"
        "print([name for name in names if name in sys.modules])"
    )
    assert run(code).stdout == "[]\n"


def test_a_second_process_loads_what_the_first_compiled(warm_directory: Path) -> None:
    second = run(USE_A_CACHE, METRALE_CACHE_DIR=str(warm_directory))
    assert second.stdout == "matched [7, 8]\n"
    assert second.stderr == ""


def test_a_changed_source_in_any_kernel_file_gets_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = copy_of(PACKAGE / "kernels", tmp_path / "kernels")
    monkeypatch.setattr(compiling, "__file__", str(sources / "compile.py"))
    digests = {compiling._digest()}
    files = sorted(sources.glob("*.py"))
    assert len(files) >= 8
    for file in files:
        file.write_bytes(file.read_bytes() + b"# changed\n")
        digests.add(compiling._digest())
    assert len(digests) == len(files) + 1


@pytest.mark.parametrize("flag", ["BOUNDSCHECK", "OPT"])
def test_a_flag_that_changes_the_code_gets_another_directory(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiling._digest()
    monkeypatch.setattr(numba.config, flag, 1 if flag == "BOUNDSCHECK" else 0)
    assert compiling._digest() != before


def test_a_damaged_file_is_compiled_anew(warm_directory: Path, tmp_path: Path) -> None:
    directory = copy_of(warm_directory, tmp_path / "damaged")
    (kernel,) = directory.glob("**/tree.release*.nbc")
    kernel.write_bytes(kernel.read_bytes()[:100])
    (index,) = directory.glob("**/tree.peek*.nbi")
    index.write_bytes(b"not a pickle")
    result = run(USE_A_CACHE, METRALE_CACHE_DIR=str(directory))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("cannot load a compiled kernel") == 2
    assert "matched [7, 8]" in result.stdout
    again = run(USE_A_CACHE, METRALE_CACHE_DIR=str(directory))
    assert again.stdout == "matched [7, 8]\n"


def test_without_a_writable_directory_it_works_and_warns_once(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("a file can hold no directory, whoever asks")
    code = USE_A_CACHE + "metrale_numba.RadixTree()\n"
    places = dict.fromkeys(("METRALE_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"), str(blocker))
    result = run(code, **places)
    assert result.returncode == 0, result.stderr
    assert "matched [7, 8]" in result.stdout
    assert result.stderr.count("RuntimeWarning: no writable directory for compiled kernels") == 1


def test_a_switched_off_compiler_is_refused_in_words() -> None:
    result = run("import metrale_numba; metrale_numba.RadixTree()", NUMBA_DISABLE_JIT="1")
    assert "RuntimeError: metrale_numba needs its kernels compiled; unset NUMBA_DISABLE_JIT" in result.stderr


def test_a_terminal_is_told_in_one_line_that_kernels_compile(tmp_path: Path) -> None:
    main, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "METRALE_CACHE_DIR": str(tmp_path)}
    code = "import metrale_numba; metrale_numba.RadixTree()"
    process = subprocess.run([sys.executable, "-c", code], env=env, stderr=child, check=True)
    os.close(child)
    shown = os.read(main, 4096).decode()
    os.close(main)
    assert process.returncode == 0
    assert shown == "metrale_numba: compiling kernels; this takes up to half a minute and is done once\r\n"


def test_a_kernel_refuses_other_types_instead_of_compiling_for_them() -> None:
    cache = RadixTree(block_size=2)
    cache.insert([1, 2], [7])
    header = cache._pools[2].header
    for tokens in (np.array([1, 2]), np.array([1, 2], np.uint32)[::-1], np.array([1.0])):
        with pytest.raises(TypeError, match="No matching definition"):
            kernels("cache")["peek"](header, tokens, 0)


def test_warmup_readies_every_kernel() -> None:
    metrale_numba.warmup()
    assert set(compiling._compiled) == set(compiling._groups())


BOUNDS = """
import numpy as np
from metrale_numba import RadixTree
from metrale_numba.kernels import layout
from metrale_numba.kernels.compile import kernels

for size in (2, 16):
    cache = RadixTree(block_size=size)
    tokens = np.arange(4 * size, dtype=np.uint32)
    cache.insert(tokens, [1, 2, 3, 4])
    pool = cache._pools[size]
    # What the kernels are told is less than what they find: five rows are used.
    pool.header[layout.POOL_ROWS] = 2
    calls = {
        "lookup": (tokens, np.empty(4, np.uint32), 0, 0, 1),
        "release": (tokens, 4 * size, 0, 0),
        "insert": (tokens, tokens[:4], tokens[:0], np.empty(4, np.uint32), 0, 0),
    }
    for name, arguments in calls.items():
        try:
            kernels("cache")[name](pool.address, *arguments)
        except IndexError:
            print(f"caught at {size}: {name}")
"""


@pytest.fixture(scope="module")
def checked_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checked")


def test_with_bounds_checks_a_planted_overrun_raises(checked_directory: Path, warm_directory: Path) -> None:
    # The unchecked kernels lie in the same place; they must not be taken for checked ones.
    shutil.copytree(warm_directory, checked_directory, dirs_exist_ok=True)
    result = run(BOUNDS, METRALE_CACHE_DIR=str(checked_directory), NUMBA_BOUNDSCHECK="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"caught at {size}: {name}" for size in (2, 16) for name in ("lookup", "release", "insert")
    ]


@pytest.mark.slow
def test_with_bounds_checks_traces_and_model_agree(checked_directory: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "METRALE_CACHE_DIR": str(checked_directory),
        "NUMBA_BOUNDSCHECK": "1",
    }
    names = ("test_conformance.py", "test_against_model.py", "test_integrity.py", "test_block_pool.py")
    files = [str(TESTS / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=short", *files]
    result = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]

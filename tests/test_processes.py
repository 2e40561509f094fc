"""Processes: forked, spawned, started together, killed, or barred from writing, each runs the right code and goes on.

It relies on scripts in interpreters of their own. Those that compile work on a pickled cache with the few kernels that
they call, unoptimized, so that a compilation takes seconds. A child that hangs is ended by its own alarm; nothing here
waits for a time to pass.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from model import tier_key

import metrale_numba
from metrale_numba import RadixTree, Spill
from metrale_numba.kernels import layout

PACKAGE = Path(metrale_numba.__file__).parent
DEADLINE_SECONDS = 600
#: The tier key of the tokens 1 and 2, whatever the secret.
KEY = tier_key(0, (1, 2))
#: Quick to compile. Unpickling a cache needs the first, :data:`FORGET` the second.
QUICK_KERNELS = ("fill_powers", "forget", "rehash", "promote", "evict_slot")
#: True if the right code runs.
FORGET = "unpickled().forget_snapshot_tier_key(key)"

#: Leaves only a few kernels to be compiled; defines what calls them.
WITH_FEW_KERNELS = """
import logging, os, pickle, signal, sys
signal.alarm({deadline})
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
logging.getLogger("numba").setLevel(logging.WARNING)
import metrale_numba
from metrale_numba.kernels import compile as compiling
from metrale_numba.kernels.compile import kernels
all_groups = compiling._groups
compiling._groups = lambda: {{
    group: {{name: kernel for name, kernel in members.items() if name in {few!r}}}
    for group, members in all_groups().items()
}}
# What every cache has at hand for its usual calls, which nobody makes here.
compile_group = compiling._compile
compiling._compile = lambda group: {{
    **dict.fromkeys(("lookup", "insert", "release", "evict")), **compile_group(group)
}}
def unpickled():
    with open({pickled!r}, "rb") as file:
        return pickle.load(file)
key = {key}
"""

#: Defines what the forking scripts share.
FORKING = """
import os, signal, sys, threading
signal.alarm({deadline})
import metrale_numba
from metrale_numba import RadixTree

def forked(work):
    # The pid of a child that does the work and ends with status 0, or 1 if it fails; one that hangs, by a signal.
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm({deadline} // 2)
        work()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)

def status_of(pid):
    return os.waitpid(pid, 0)[1]
"""


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pickled cache: two blocks and a tail that a sequence holds, and a spilled snapshot under :data:`KEY`."""
    cache = RadixTree(block_size=2, partial_tail_sharing=True, check_secret=b"the same each time")
    cache.insert([1, 2, 3, 4, 5], [7, 8, 9])
    cache.insert_tail_snapshot([1, 2], 5, session_hash=1)
    spill = cache.evict_snapshot_to_tier(0)
    assert isinstance(spill, Spill)
    assert spill.key == KEY
    path = tmp_path_factory.mktemp("pickled") / "cache"
    path.write_bytes(pickle.dumps(cache))
    return path


def start(
    code: str,
    package_parent: Path = PACKAGE.parent,
    launcher: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.Popen[str]:
    """Start code in a fresh interpreter that imports the package from a folder and keeps no bytecode.

    It stands in that folder, since the current one goes before all others.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("METRALE_", "NUMBA_"))}
    env = {**inherited, "PYTHONPATH": str(package_parent), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [*launcher, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=package_parent, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def output_of(process: subprocess.Popen[str], given: str | None = None) -> str:
    """What a process prints, once it has ended well."""
    output, errors = process.communicate(given, timeout=2 * DEADLINE_SECONDS)
    assert process.returncode == 0, f"status {process.returncode}: {output[-2000:]}{errors[-2000:]}"
    return output


def code_with(few: tuple[str, ...], pickled: Path, work: str) -> str:
    return WITH_FEW_KERNELS.format(deadline=DEADLINE_SECONDS, few=few, pickled=str(pickled), key=KEY) + work


def forking(work: str) -> str:
    return FORKING.format(deadline=DEADLINE_SECONDS) + work


def warm_environment() -> dict[str, str]:
    """Where this process found its kernels, for scripts that are not about compiling."""
    return {key: value for key, value in os.environ.items() if key in ("METRALE_CACHE_DIR", "NUMBA_CACHE_DIR")}


# ------------------------------------------------------------------------------------------------------ fork and spawn

FORK_INSIDE_KERNELS = """
import numpy as np
tokens = np.arange(50_000, dtype=np.uint32)
caches = [RadixTree(block_size=1), RadixTree(block_size=16)]
for cache in caches:
    cache.insert(tokens, tokens)
    cache.check_integrity()
stop = threading.Event()
calls = []

def work(cache, number):
    # Kernels of milliseconds, so that nearly every fork finds a thread inside one.
    while not stop.is_set():
        cache.lookup(tokens)
        cache.release(tokens)
        cache.insert(tokens[number:], tokens)
        cache.evict(1000)
        calls.append(number)

def in_the_child():
    assert not any(cache._lock.locked() for cache in caches)
    assert metrale_numba.cache_hit_count() == sum(cache.stats_detail().cache_hits for cache in caches)
    for cache in caches:
        cache.check_integrity()
        before = cache.stats_detail()
        cache.lookup(tokens)
        cache.insert([1, 1, 2], range(3))
        cache.evict(10)
        cache.check_integrity()
        assert cache.stats_detail().cache_hits == before.cache_hits + 1
    # And the child may fork in its turn.
    assert status_of(forked(lambda: caches[0].check_integrity())) == 0

def fork_often():
    # Both threads fork; each child is waited for by the one that made it.
    for _ in range(6):
        statuses.append(status_of(forked(in_the_child)))

statuses = []
workers = [threading.Thread(target=work, args=(cache, i)) for i, cache in enumerate(caches * 2)]
forkers = [threading.Thread(target=fork_often) for _ in range(2)]
for thread in workers + forkers: thread.start()
for thread in forkers: thread.join()
stop.set()
for thread in workers: thread.join()
for cache in caches: cache.check_integrity()
print(statuses, set(calls) == {0, 1, 2, 3})
"""


def test_a_fork_inside_kernel_calls_gives_the_child_whole_caches() -> None:
    output = output_of(start(forking(FORK_INSIDE_KERNELS), **warm_environment()))
    assert output == f"{[0] * 12} True\n"


FORK_WHILE_LOCKED = """
cache = RadixTree(block_size=2)
cache.insert([1, 2, 3, 4], [7, 8])
held, forks = threading.Event(), threading.Event()
# Of the hooks that run before a fork, the one set up last comes first.
os.register_at_fork(before=forks.set)

def hold():
    with cache._lock:
        held.set()
        forks.wait()
        # The forking thread cannot be past its wait for the lock: this is still done before the fork.
        order.append("locked")

order = []
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = forked(lambda: print("child", order, cache._lock.locked(), cache.lookup([1, 2, 3, 4]).matched_tokens, flush=True))
thread.join()
status = status_of(pid)
print("parent", status, order, cache._lock.locked(), cache.stats_detail().cache_hits, flush=True)
"""


def test_a_fork_waits_for_a_thread_that_holds_the_lock() -> None:
    output = output_of(start(forking(FORK_WHILE_LOCKED), **warm_environment()))
    assert output == "child ['locked'] False 4\nparent 0 ['locked'] False 0\n"


FORK_AND_COUNT = """
stop = threading.Event()
cache = RadixTree(block_size=1)
cache.insert([1], [1])

def count():
    while not stop.is_set():
        metrale_numba.record_cache_hit(3)
        metrale_numba.record_cache_miss()
        RadixTree().lookup([5])

def in_the_child():
    # Nobody else counts here, and what is counted by hand moves as one.
    hits, tokens = metrale_numba.cache_hit_count(), metrale_numba.cache_hit_tokens_total()
    assert tokens == 3 * hits
    cache.lookup([1])
    metrale_numba.record_cache_hit(2)
    assert metrale_numba.cache_hit_count() == hits + 2
    assert metrale_numba.cache_hit_tokens_total() == tokens + 3

threads = [threading.Thread(target=count) for _ in range(3)]
for thread in threads: thread.start()
statuses = [status_of(forked(in_the_child)) for _ in range(40)]
stop.set()
for thread in threads: thread.join()
print(statuses, metrale_numba.cache_hit_tokens_total() == 3 * metrale_numba.cache_hit_count())
"""


def test_the_counters_of_the_process_are_whole_in_a_child_and_its_own() -> None:
    output = output_of(start(forking(FORK_AND_COUNT), **warm_environment()))
    assert output == f"{[0] * 40} True\n"


FORK_WHILE_COMPILING = """
import threading
thread = threading.Thread(target=lambda: kernels("cache"))
thread.start()
def has_compiled_one():
    return any(name.endswith(".nbi") for _, _, names in os.walk(os.environ["METRALE_CACHE_DIR"]) for name in names)
while not has_compiled_one():
    assert thread.is_alive()
pid = os.fork()
if pid == 0:
    signal.alarm({half})
    print("child", {forget}, flush=True)
    os._exit(0)
_, status = os.waitpid(pid, 0)
thread.join()
print("parent", status, {forget})
"""


def test_a_child_forked_while_another_thread_compiles_is_not_left_with_its_lock(tmp_path: Path, pickled: Path) -> None:
    work = FORK_WHILE_COMPILING.format(half=DEADLINE_SECONDS // 2, forget=FORGET)
    code = code_with(QUICK_KERNELS, pickled, work)
    output = output_of(start(code, METRALE_CACHE_DIR=str(tmp_path), NUMBA_OPT="0"))
    assert output.splitlines()[-2:] == ["child True", "parent 0 True"]


SPAWN_WHILE_COMPILING = """
import multiprocessing, threading

def forget(results):
    results.put({forget})

if __name__ == "__main__":
    thread = threading.Thread(target=lambda: kernels("cache"))
    thread.start()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    first = context.Process(target=forget, args=(results,))
    first.start()
    thread.join()
    second = context.Process(target=forget, args=(results,))
    second.start()
    for child in (first, second):
        child.join()
    print("children", results.get(), results.get(), first.exitcode, second.exitcode)
"""


def test_children_spawned_during_and_after_compilation_work(tmp_path: Path, pickled: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(code_with(QUICK_KERNELS, pickled, SPAWN_WHILE_COMPILING.format(forget=FORGET)))
    code = f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path(sys.argv[0], run_name='__main__')"
    # Run as a file, since spawned children import their parent's.
    env = {"METRALE_CACHE_DIR": str(tmp_path / "kernels"), "NUMBA_OPT": "0"}
    assert output_of(start(code, **env)).splitlines()[-1] == "children True True 0 0"


# -------------------------------------------------------------------------------------------------- the compile cache

FORGET_WHEN_TOLD = """
import numba
print("ready", flush=True)
sys.stdin.readline()
print("forgotten:", {forget})
"""


def test_eight_processes_on_an_empty_compile_cache_all_run_the_right_code(tmp_path: Path, pickled: Path) -> None:
    code = code_with(QUICK_KERNELS[:2], pickled, FORGET_WHEN_TOLD.format(forget=FORGET))
    processes = [start(code, METRALE_CACHE_DIR=str(tmp_path), NUMBA_OPT="0") for _ in range(8)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [output_of(process) for process in processes]
    assert all(output.endswith("forgotten: True\n") for output in outputs)
    late = output_of(start(code, METRALE_CACHE_DIR=str(tmp_path), NUMBA_OPT="0"), "go\n")
    assert late == "ready\nforgotten: True\n"


def without_write_permission(directory: Path) -> tuple[str, ...]:
    """Make a directory read-only, and give what starts a process that is bound by that even if root starts it."""
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() != 0:
        return ()
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root writes to read-only directories, and there is no setpriv to take that right away")
    return (setpriv, "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")


READ_ONLY_INSTALL = """
import pathlib
package = pathlib.Path(metrale_numba.__file__).parent
for folder in (package, package / "kernels"):
    try:
        (folder / "new").touch()
    except PermissionError:
        print("cannot write to", folder.name)
print("forgotten:", {forget})
"""


def test_a_read_only_install_keeps_its_kernels_elsewhere(tmp_path: Path, pickled: Path) -> None:
    install = tmp_path / "install"
    shutil.copytree(PACKAGE, install / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(install.rglob("*"))
    launcher = without_write_permission(install)
    kernels = tmp_path / "kernels"
    code = code_with(QUICK_KERNELS[:2], pickled, READ_ONLY_INSTALL.format(forget=FORGET))
    refused = "cannot write to metrale_numba\ncannot write to kernels\n"
    # With bytecode wanted, too: that is where other packages would write.
    environment = {"METRALE_CACHE_DIR": str(kernels), "NUMBA_OPT": "0", "PYTHONDONTWRITEBYTECODE": ""}
    first = output_of(start(code, install, launcher, **environment))
    assert first.startswith(refused)
    assert "compiling kernels" in first
    assert first.endswith("forgotten: True\n")
    second = output_of(start(code, install, launcher, **environment))
    assert second == f"{refused}forgotten: True\n"
    assert sorted(install.rglob("*")) == before
    assert list(kernels.rglob("*.nbc"))


def names_in(directory: Path) -> set[str]:
    return {str(path) for path in directory.rglob("*")}


def test_whenever_a_process_is_killed_while_it_compiles_the_next_one_works(tmp_path: Path, pickled: Path) -> None:
    code = code_with(QUICK_KERNELS, pickled, f"kernels('cache')\nprint('forgotten:', {FORGET})")
    environment = {"METRALE_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0"}
    delays = random.Random(1)
    killed = 0
    while killed < 10:
        # Killed just when it has written something, which is the worst moment; of these there are two to a kernel. What
        # the killed ones have left is there for the next.
        before = names_in(tmp_path)
        process = start(code, **environment)
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while process.poll() is None and names_in(tmp_path) == before:
            assert time.monotonic() < give_up_at
        for _ in range(delays.randrange(2000)):
            pass
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        killed += 1
    assert killed >= 6
    assert output_of(start(code, **environment)).endswith("forgotten: True\n")
    assert output_of(start(code, **environment)) == "forgotten: True\n"


class Change(NamedTuple):
    """A change of one kernel source that shows: `old`, which stands there once, becomes `new`."""

    file: str
    old: str
    new: str
    kernels: tuple[str, ...]
    expression: str
    before: str
    after: str


PEEK = "cache.peek_matched_tokens([1, 2, 3, 4, 5])"
#: The same by way of the hash table: the row where the root was last is none.
SEARCH = f"(cache._pool.header.__setitem__({layout.POOL_LAST_ROOT}, 99), {PEEK})[1]"
COMPACT = f"(cache.compact(), {PEEK})[1]"
COMPACTING = ("number_rows", "move_rows", "exchange_rows", "rehash", "peek")
#: The older of two snapshots, which became resident after the other.
LRU = (
    "(cache.insert_intermediate_snapshot([9], [], (), None, 6), cache.promote_snapshot(key, 5), "
    "cache.evict_snapshot_lru())[2]"
)
EVICT = "(cache.release([1, 2, 3, 4]), cache.evict(9).physical.tolist())[1]"
INSERT = "cache.insert([1, 2, 3], [20, 21]).blocks.tolist()"
HEAP = "kernels('integrity')['check_heap'](cache._shared.header, -1)[0]"
POOL = "__import__('metrale_numba.serving').serving.BlockPool(3).allocate(2).tolist()"
#: The next use of one node by two requests.
NEXT_USES = (
    "(np := __import__('numpy'), out := np.zeros(2, 'i8'), kernels('policies')['next_uses']"
    "(np.arange(3), np.zeros(2, 'u4'), np.zeros(1, 'i8'), out))[1].tolist()"
)
GHOSTS = "kernels('ghosts')['check_ghosts'](cache._shared.header, __import__('numpy').array([0] * 6 + [1, 0]))[0]"
DEPTHS = "[node.depth for node in cache.iter_nodes()]"
EVICTING = ("release", "evict")
CHANGES = (
    Change("walk.py", "[SHARED_PARTIAL_TAILS] != 0\n", "[SHARED_PARTIAL_TAILS] == 0\n", ("peek",), PEEK, "5", "4"),
    Change("tree.py", "return np.int64(tokens.size)\n", "return np.int64(9)\n", ("peek",), PEEK, "5", "9"),
    Change("hashing.py", "CHECK_START = np.uint64(1)", "CHECK_START = np.uint64(7)", ("peek",), SEARCH, "5", "0"),
    Change(
        "memory.py", "(product, ir.Constant(wide, 64))", "(product, ir.Constant(wide, 63))", ("peek",), SEARCH, "5", "0"
    ),
    Change("tables.py", "np.int64((hash32 * np.uint64(size)) >> _HALF_WORD)", "size - 1", ("peek",), SEARCH, "5", "0"),
    Change("layout.py", "\nSPILLED = 1\n", "\nSPILLED = 8\n", ("forget",), FORGET, "True", "False"),
    Change(
        "snapshots.py", "REAPS] += 1\n    return 1", "REAPS] += 1\n    return 0", ("forget",), FORGET, "True", "False"
    ),
    Change(
        "candidates.py",
        "== np.uint32(0) and nodes[row].count <= np.uint32(1)",
        "== np.uint32(0) and nodes[row].count < np.uint32(1)",
        EVICTING,
        EVICT,
        "[8, 9, 7]",
        "[]",
    ),
    Change(
        "removal.py",
        "blocks_out[num_out] = nodes[row].block",
        "blocks_out[num_out] = nodes[row].count",
        EVICTING,
        EVICT,
        "[8, 9, 7]",
        "[1, 9, 1]",
    ),
    Change(
        "eviction.py",
        "while num_out < num_blocks and shared[SHARED_HEAP_SIZE] > 0:",
        "while num_out < num_blocks and shared[SHARED_HEAP_SIZE] > 5:",
        EVICTING,
        EVICT,
        "[8, 9, 7]",
        "[]",
    ),
    Change(
        "entries.py", "if entries[row].key == key:", "if entries[row].key != key:", ("forget",), FORGET, "True", "False"
    ),
    Change(
        "victims.py", "return victim\n", "return first\n", ("rehash", "register", "promote", "evict_lru"), LRU, "5", "6"
    ),
    Change("compaction.py", "new_rows[np.int64(nodes[row].parent)]", "new_rows[0]", COMPACTING, COMPACT, "5", "2"),
    Change("insertion.py", "np.int64(block_table[full])", "np.int64(33)", ("insert",), INSERT, "[21]", "[33]"),
    Change(
        "policies.py", "upcoming[:] = requests\n", "upcoming[:] = 7\n", ("next_uses",), NEXT_USES, "[1, 2]", "[1, 7]"
    ),
    Change("pools.py", "ids[place] = free[num_free]", "ids[place] = num_free", ("take_ids",), POOL, "[0, 1]", "[2, 1]"),
    Change("ghosts.py", "return 43, size", "return 99, size", ("check_ghosts",), GHOSTS, "43", "99"),
    Change(
        "listing.py",
        "depths_out[count] = depth",
        "depths_out[count] = count",
        ("list_nodes",),
        DEPTHS,
        "[2, 4]",
        "[0, 2]",
    ),
    Change("integrity.py", "return 26, size", "return 99, size", ("check_heap",), HEAP, "26", "99"),
)
#: Without kernels of their own, or, of `counting.py`, with none in this build.
NOT_COMPILED = {"__init__.py", "arrays.py", "compile.py", "counting.py", "pages.py"}


class Installed(NamedTuple):
    parent: Path
    kernels: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, pickled: Path) -> Installed:
    """A copy of the package, to be changed, and a directory that has the kernels of every expression above."""
    parent = tmp_path_factory.mktemp("changing")
    shutil.copytree(PACKAGE, parent / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    installed = Installed(parent, tmp_path_factory.mktemp("kernels"))
    needed = tuple({"fill_powers"}.union(*(change.kernels for change in CHANGES)))
    work = "kernels('integrity')\n" + "".join(
        f"cache = unpickled()\nprint({change.expression})\n" for change in CHANGES
    )
    code = code_with(needed, pickled, work)
    output = output_of(start(code, parent, METRALE_CACHE_DIR=str(installed.kernels), NUMBA_OPT="0"))
    assert output.splitlines()[1:] == [change.before for change in CHANGES]
    return installed


def test_there_is_a_change_for_every_file_with_kernels() -> None:
    files = {path.name for path in (PACKAGE / "kernels").glob("*.py")}
    assert {change.file for change in CHANGES} == files - NOT_COMPILED


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.file)
def test_after_a_change_of_a_kernel_source_the_changed_code_runs(
    change: Change, installed: Installed, pickled: Path
) -> None:
    source = installed.parent / PACKAGE.name / "kernels" / change.file
    text, stat = source.read_text(), source.stat()
    assert text.count(change.old) == 1
    # Of the same length and the same age, so that only the content can tell.
    end = "\n" if change.new.endswith("\n") else ""
    changed = change.new.removesuffix("\n").ljust(len(change.old) - len(end)) + end
    code = code_with(("fill_powers", *change.kernels), pickled, f"cache = unpickled()\nprint({change.expression})")
    environment = {"METRALE_CACHE_DIR": str(installed.kernels), "NUMBA_OPT": "0"}
    try:
        source.write_text(text.replace(change.old, changed))
        os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (source.stat().st_size, source.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        output = output_of(start(code, installed.parent, **environment))
        assert output.splitlines()[-1] == change.after
    finally:
        source.write_text(text)
        os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # And the earlier source has its earlier code, without compiling it again.
    assert output_of(start(code, installed.parent, **environment)) == f"{change.before}\n"

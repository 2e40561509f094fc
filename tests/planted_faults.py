"""Tests the tests: plants one fault at a time in a copy of the package and sees whether the tests notice.

usage: python tests/planted_faults.py [-j N] [--part K/N] [--tests FILE] [NAME ...]

It relies on the source tree it stands in, and leaves it alone: package and tests are copied to a temporary directory,
where each fault gets a directory of its own, and the compiled kernels but for those that import what it changes. It
promises to fail, with status 1, if a fault is noticed by no test, if one cannot be planted or does not compile, and if
the tests fail without any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "metrale_numba"
#: Those that take seconds come first, so that most faults take no longer.
TESTS = (
    "test_conformance.py",
    "test_scattered_paths.py",
    "test_snapshot_floors.py",
    "test_compaction.py",
    "test_array_forms.py",
    "test_reserve.py",
    "test_against_model.py",
)
#: A fault may make a loop endless, and whoever runs the tests would notice; they take a minute or two.
TIMEOUT_SECONDS = 600
#: How a fault may end the tests' process; any other signal came from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

NOT_COMPILED = 90
WRONG_PACKAGE = 91
#: Runs inside the copy: makes sure that it is the copy, and that it works at all, before any test may fail.
RUN_TESTS = f"""
import pathlib, sys, traceback
import {PACKAGE}
import {PACKAGE}.kernels.compile as compiling
if pathlib.Path({PACKAGE}.__file__).resolve().parent != pathlib.Path("{PACKAGE}").resolve():
    sys.exit({WRONG_PACKAGE})
# Kernels that no fault can touch come compiled from the run without any, which has other sources.
compiling._digest = lambda: "kept"
try:
    {PACKAGE}.warmup()
except Exception:
    traceback.print_exc()
    sys.exit({NOT_COMPILED})
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


class Fault(NamedTuple):
    """A wrong line: `old`, which stands exactly once in `file`, is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str


class Outcome(NamedTuple):
    """What became of one fault; `caught` is None where the fault was no fair test."""

    name: str
    caught: bool | None
    by: str
    seconds: float


TREE = "kernels/tree.py"
EVICTION = "kernels/eviction.py"
SNAPSHOTS = "kernels/snapshots.py"
HASHING = "kernels/hashing.py"
CLASS = "radix_tree.py"
WALK = "kernels/walk.py"
ENTRIES = "kernels/entries.py"
VICTIMS = "kernels/victims.py"
MEMORY = "kernels/memory.py"
COMPACTION = "kernels/compaction.py"
INSERTION = "kernels/insertion.py"
REMOVAL = "kernels/removal.py"
OPERATIONS = "operations.py"
INDEX = "snapshot_index.py"

FAULTS = (
    # The tree.
    Fault(
        "lookup-does-not-stamp",
        TREE,
        "        nodes[at].stamp = stamp\n        if ordered",
        "        if ordered",
    ),
    Fault(
        "run-of-a-lookup-is-not-stamped",
        TREE,
        "        nodes[at].stamp = stamp\n        blocks_out[block]",
        "        blocks_out[block]",
    ),
    Fault(
        "insert-does-not-stamp-what-it-finds",
        INSERTION,
        "            break\n        nodes[row].stamp = stamp\n",
        "            break\n",
    ),
    Fault(
        "pin-leaves-the-clock",
        TREE,
        "    if matched_tokens > 0:\n        shared[SHARED_CLOCK] += 1\n    return matched_tokens\n",
        "    return matched_tokens\n",
    ),
    Fault(
        "pin-overlooks-suffixes",
        TREE,
        "        if child >= 0 or suffix >= 0:\n            matched_tokens = np.int64(tokens.size)\n    if",
        "        if child >= 0:\n            matched_tokens = np.int64(tokens.size)\n    if",
    ),
    Fault(
        "invisible-child-lends-its-block",
        WALK,
        "if nodes[row].count > np.uint32(0) and _same_tokens(",
        "if _same_tokens(",
    ),
    Fault(
        "suffix-of-exactly-the-rest-is-missed",
        WALK,
        "np.int64(suffixes[suffix].length) >= rest",
        "np.int64(suffixes[suffix].length) > rest",
    ),
    Fault(
        "lender-is-the-newest-node-not-the-newest-stamp",
        TREE,
        "        if ordered and nodes[node].children & np.uint32(CHILDREN) > np.uint32(1):\n"
        "            to_front(nodes, links, node, row)\n        blocks_out",
        "        blocks_out",
    ),
    Fault(
        "suffix-survives-a-new-child",
        INSERTION,
        "if i < count and node != root and links[node].suffix != np.uint32(NONE):",
        "if i < count and node == root and links[node].suffix != np.uint32(NONE):",
    ),
    Fault(
        "same-suffix-block-is-listed-again",
        INSERTION,
        "        if new_block != old_block:\n",
        "        if new_block != NONE:\n",
    ),
    Fault(
        "disk-id-of-a-replaced-suffix-leaks",
        INSERTION,
        "            if old_disk != NONE:\n                dropped_disk = old_disk\n",
        "",
    ),
    Fault(
        "insert-over-an-invisible-node-forgets-the-cache",
        INSERTION,
        "            nodes[row].count = np.uint32(1)\n        if i *",
        "            nodes[row].count = np.uint32(0)\n        if i *",
    ),
    Fault(
        "found-block-right-past-the-match-is-not-owned",
        INSERTION,
        "        if i * block_size >= matched_tokens:\n            if nodes[row].count",
        "        if i * block_size > matched_tokens:\n            if nodes[row].count",
    ),
    Fault(
        "run-of-new-blocks-is-owned-before-the-match-ends",
        INSERTION,
        "        begun = i * block_size >= matched_tokens and nodes",
        "        begun = nodes",
    ),
    Fault(
        "new-block-within-the-match-is-owned",
        INSERTION,
        "        if i * block_size >= matched_tokens:\n            nodes[at].count = np.uint32(2)\n",
        "        if (i + 1) * block_size >= matched_tokens:\n            nodes[at].count = np.uint32(2)\n",
    ),
    Fault(
        "adopting-ignores-disk-ids",
        INSERTION,
        "shared[SHARED_ADOPT_BLOCKS] != 0 and disk_ids.size == 0",
        "shared[SHARED_ADOPT_BLOCKS] != 0",
    ),
    Fault(
        "disk-id-of-a-node-is-overwritten",
        INSERTION,
        " and disks[row] == np.uint32(NONE):\n            disks[row] = disk_ids[i]",
        ":\n            disks[row] = disk_ids[i]",
    ),
    Fault(
        "release-to-nothing-is-no-over-release",
        TREE,
        "            else:\n                over += 1\n",
        "            elif count == np.uint32(0):\n                over += 1\n",
    ),
    Fault(
        "evicted-leaf-forgets-its-suffix",
        REMOVAL,
        "        blocks_out[num_out] = np.uint32(block)\n        num_out += 1\n",
        "",
    ),
    Fault(
        "draining-a-sequence-passes-an-older-leaf",
        EVICTION,
        "(shared[SHARED_HEAP_SIZE] > 0 and stamps[0] < nodes[row].stamp)",
        "(shared[SHARED_HEAP_SIZE] > 0 and stamps[0] > nodes[row].stamp)",
    ),
    # The snapshot index.
    Fault(
        "lease-lasts-one-eviction-longer",
        VICTIMS,
        "index[INDEX_EVICTIONS_SINCE_LOOKUP] < index[INDEX_TAIL_LEASE_TTL]",
        "index[INDEX_EVICTIONS_SINCE_LOOKUP] <= index[INDEX_TAIL_LEASE_TTL]",
    ),
    Fault(
        "lease-leaves-siblings-out",
        VICTIMS,
        "    return entries[row].flags & TAIL_OR_SIBLING != np.uint32(0) and entries",
        "    return entries[row].flags & np.uint32(2) != np.uint32(0) and entries",
    ),
    Fault(
        "lookup-without-a-session-ends-the-lease",
        SNAPSHOTS,
        "    if record != 0 and session != 0:\n        index[INDEX_LEASED_SESSION] = session\n",
        "    if record != 0:\n        index[INDEX_LEASED_SESSION] = session\n",
    ),
    Fault(
        "legacy-eviction-wears-the-lease",
        SNAPSHOTS,
        "        row = oldest(index)\n",
        "        row = oldest(index)\n        index[INDEX_EVICTIONS_SINCE_LOOKUP] += 1\n",
    ),
    Fault(
        "last-of-equal-scores-goes-first",
        VICTIMS,
        "score < least_score or (score == least_score and row < victim):",
        "score <= least_score:",
    ),
    Fault(
        "session-is-as-fresh-as-its-last-entry",
        VICTIMS,
        "newest[first] = max(newest[first], entries[row].stamp)",
        "newest[first] = entries[row].stamp",
    ),
    Fault(
        "snapshot-hit-does-not-stamp",
        SNAPSHOTS,
        "    entries[row].stamp = index[INDEX_CLOCK]\n    index[STAT_HITS]",
        "    index[STAT_HITS]",
    ),
    Fault(
        "entry-with-a-forged-key-keeps-the-check-hash-of-the-other",
        ENTRIES,
        "    is_new = row < 0\n    displaced",
        "    is_new = row < 0\n    if not is_new:\n        check = entries[row].check\n    displaced",
    ),
    Fault(
        "snapshot-of-no-deeper-tokens-is-looked-for",
        SNAPSHOTS,
        "advance_check(state, tokens, start, depth, powers), depth, session",
        "advance_check(state, tokens, start, start, powers), depth, session",
    ),
    Fault(
        "tail-of-no-session-is-found",
        ENTRIES,
        "            is_own = session != 0 and entries",
        "            is_own = entries",
    ),
    Fault(
        "sweep-skips-the-entry-moved-into-the-hole",
        SNAPSHOTS,
        "            num_slots += 1\n        remove_entry(index, row)\n",
        "            num_slots += 1\n        remove_entry(index, row)\n        row += 1\n",
    ),
    Fault(
        "session-gives-its-slots-up-in-no-order",
        ENTRIES,
        "(first < 0 or row < first)",
        "first < 0",
    ),
    Fault(
        "overwriting-hands-back-a-live-slot",
        ENTRIES,
        "        elif entries[row].slot != slot:\n            displaced",
        "        else:\n            displaced",
    ),
    Fault(
        "snapshot-of-exactly-min-tokens-is-dropped",
        SNAPSHOTS,
        "    if depth < min_tokens:\n",
        "    if depth <= min_tokens and min_tokens > 0:\n",
    ),
    Fault(
        "promotion-ignores-the-check-hash",
        SNAPSHOTS,
        " or (has_check != 0 and entries[row].check != np.uint64(check)):",
        ":",
    ),
    Fault(
        "evicting-a-slot-takes-the-entry-that-became-resident-first",
        SNAPSHOTS,
        "(found < 0 or row < found)",
        "found < 0",
    ),
    Fault(
        "evicting-a-slot-wears-the-lease",
        SNAPSHOTS,
        "    remove_entry(index, found)\n    index[STAT_EVICTIONS] += 1\n",
        "    remove_entry(index, found)\n    index[STAT_EVICTIONS] += 1\n"
        "    index[INDEX_EVICTIONS_SINCE_LOOKUP] += 1\n",
    ),
    Fault(
        "check-hash-sees-half-of-the-adapter",
        HASHING,
        "_append(CHECK_START, powers[1], zero, adapter >> HALF_WORD)",
        "_append(CHECK_START, powers[1], zero, zero)",
    ),
    # Runs of rows, searches ahead, arrays that kernels get as they are.
    Fault(
        "run-is-held-and-not-counted",
        TREE,
        "        taken += is_idle\n",
        "",
    ),
    Fault(
        "suffix-of-a-run-is-held-and-not-counted",
        TREE,
        "            taken += is_idle & np.uint64(nodes[at].children >> _SUFFIX_SHIFT)\n",
        "",
    ),
    Fault(
        "run-goes-on-over-an-invisible-block",
        TREE,
        "        if count == np.uint32(0):\n            break\n        is_idle",
        "        is_idle",
    ),
    Fault(
        "run-forgets-the-deepest-mark",
        TREE,
        "            if last_marked >= 0:\n                marked = last_marked\n                level = its_level\n",
        "",
    ),
    Fault(
        "release-of-a-run-goes-below-two",
        TREE,
        "        if count < np.uint32(2):\n            break\n",
        "        if count < np.uint32(1):\n            break\n",
    ),
    Fault(
        "run-of-new-blocks-is-listed-from-the-start",
        INSERTION,
        "            num_blocks += stop - i\n            i = stop\n",
        "            i = stop\n",
    ),
    Fault(
        "search-takes-the-hash-of-another-block",
        WALK,
        "pool[POOL_HASHES + block % LOOK_AHEAD]",
        "pool[POOL_HASHES + (block + 1) % LOOK_AHEAD]",
    ),
    Fault(
        "search-takes-the-hashes-of-an-earlier-walk",
        WALK,
        "    pool[POOL_SEARCHED] = -2\n    pool[POOL_AHEAD] = 0\n",
        "    pool[POOL_SEARCHED] = -2\n",
    ),
    Fault(
        "root-of-another-adapter-is-taken-for-the-last",
        WALK,
        "if row < pool[POOL_USED] and nodes[row].parent == np.uint32(ROOT) and nodes[row].stamp == adapter:\n"
        "        return row\n    shared",
        "if row < pool[POOL_USED] and nodes[row].parent == np.uint32(ROOT):\n        return row\n    shared",
    ),
    Fault(
        "kernels-take-arrays-with-gaps",
        MEMORY,
        "(ids.strides[0] == _ID_BYTES or ids.size == 1)",
        "(ids.strides[0] == _ID_BYTES or ids.size >= 1)",
    ),
    Fault(
        "lookup-takes-a-refusal-for-a-miss",
        CLASS,
        "            if matched_tokens == REFUSED:\n",
        "            if matched_tokens == REFUSED - 1:\n",
    ),
    Fault(
        "release-takes-a-refusal-for-done",
        CLASS,
        "            if not unheld:\n                return\n",
        "            if unheld <= 0:\n                return\n",
    ),
    # Floors and marks of snapshots.
    Fault(
        "new-node-above-a-snapshot-bears-no-mark",
        INSERTION,
        "            nodes[at].children |= np.uint32(HAS_SNAPSHOTS)\n",
        "            pass\n",
    ),
    Fault(
        "node-below-a-new-snapshot-gets-no-mark",
        ENTRIES,
        "        _mark_node(index, hash32, state, True)\n",
        "",
    ),
    Fault(
        "node-keeps-its-mark-when-the-floor-goes",
        ENTRIES,
        "    _mark_node(index, hash32, state, False)\n",
        "",
    ),
    Fault(
        "floor-stays-without-entries",
        ENTRIES,
        "    if floors[floor].count > np.uint32(0):\n        return\n",
        "    if floors[floor].count >= np.uint32(0):\n        return\n",
    ),
    Fault(
        "row-of-a-floor-is-lost",
        ENTRIES,
        "    index[INDEX_FLOORS_FREE] = floor\n    index[INDEX_NUM_FLOORS] -= 1\n",
        "    index[INDEX_NUM_FLOORS] -= 1\n",
    ),
    Fault(
        "floor-forgets-the-offsets-before",
        ENTRIES,
        "    floors[floor].offsets |= _ONE << np.uint64(offset)\n",
        "    floors[floor].offsets = _ONE << np.uint64(offset)\n",
    ),
    Fault(
        "snapshot-where-the-match-ends-is-missed",
        SNAPSHOTS,
        "(_ALL_BITS >> np.uint64(WORD_BITS - 1 - room))",
        "(_ALL_BITS >> np.uint64(WORD_BITS - max(room, 1)))",
    ),
    Fault(
        "marks-above-the-deepest-are-not-followed",
        SNAPSHOTS,
        "        if level == 0:\n            return np.int64(-1)\n        row",
        "        if level >= 0:\n            return np.int64(-1)\n        row",
    ),
    Fault(
        "depth-of-the-match-itself-is-not-tried",
        SNAPSHOTS,
        "    top = matched_tokens\n",
        "    top = matched_tokens - 1\n",
    ),
    Fault(
        "removed-entry-stays-in-the-table-of-sessions",
        ENTRIES,
        "    if _is_of_session(entries, row):\n        remove_row(",
        "    if _is_of_session(entries, row) and row < 0:\n        remove_row(",
    ),
    # Memory.
    Fault(
        "compaction-forgets-the-heap",
        COMPACTION,
        "            heap[place] = (heap[place] >> _HALF_WORD << _HALF_WORD) | np.uint64(row)\n",
        "            pass\n",
    ),
    Fault(
        "compaction-forgets-links-of-siblings",
        COMPACTION,
        "        links_out[new].next_sibling = _moved(new_rows, links[row].next_sibling)\n",
        "",
    ),
    Fault(
        "compaction-forgets-disk-ids",
        COMPACTION,
        "            disks_out[new] = disks[row]\n",
        "            pass\n",
    ),
    Fault(
        "compaction-forgets-the-free-list",
        COMPACTION,
        "    pool[POOL_FREE] = -1\n    pool[POOL_NUM_FREE] = 0\n",
        "",
    ),
    Fault(
        "compaction-gives-the-reserve-back",
        OPERATIONS,
        "pool.compact(self._settings.reserve if block_size == self._settings.block_size else 0, movers)",
        "pool.compact(0, movers)",
    ),
    Fault(
        "copy-has-no-reserve",
        OPERATIONS,
        "        if settings.reserve:\n",
        "        if settings.reserve and not pool.rows:\n",
    ),
    # Epochs, tenants and what an operator reads.
    Fault(
        "lookup-that-is-not-recorded-takes-the-lease",
        SNAPSHOTS,
        "    if record != 0 and session != 0:\n",
        "    if session != 0:\n",
    ),
    Fault(
        "dropping-an-adapter-ends-anothers-lease",
        SNAPSHOTS,
        "    if index[INDEX_LEASED_ADAPTER] == adapter:\n        index[INDEX_LEASED_SESSION] = 0\n",
        "    index[INDEX_LEASED_SESSION] = 0\n",
    ),
    Fault(
        "key-that-is-spilled-again-stays-dead",
        INDEX,
        "            self.dead_keys.pop(to_unsigned(key), None)\n",
        "",
    ),
    Fault(
        "release-forgets-the-suffix-among-the-evictable",
        TREE,
        "                freed += np.int64(1) + np.int64(nodes[at].children >> _SUFFIX_SHIFT)\n",
        "                freed += np.int64(1)\n",
    ),
    Fault(
        "release-of-a-run-forgets-the-suffix-among-the-evictable",
        TREE,
        "        freed += becomes_idle + (becomes_idle & np.uint64(nodes[at].children >> _SUFFIX_SHIFT))\n",
        "        freed += becomes_idle\n",
    ),
    Fault(
        "strict-release-changes-what-comes-before-the-fault",
        TREE,
        "        if position > 0:\n            return position\n",
        "        if position == 1:\n            return position\n",
    ),
    Fault(
        "quota-evicts-the-path-that-is-inserted",
        CLASS,
        '        tenants["guard"](pool.header, tokens, count, adapter, 1)\n',
        '        tenants["guard"](pool.header, tokens, 0, adapter, 1)\n',
    ),
    Fault(
        "adapter-evicts-its-newest-leaf-first",
        EVICTION,
        "        if stamps[place] <= stamps[below]:\n            return\n",
        "        if stamps[place] >= stamps[below]:\n            return\n",
    ),
    Fault(
        "copy-forgets-the-clock-of-the-index",
        "kernels/arrays.py",
        "_INDEX_KEPT = (\n    INDEX_CLOCK,\n",
        "_INDEX_KEPT = (\n",
    ),
    # What the class does itself.
    Fault(
        "insert-that-stores-nothing-leaves-the-clock",
        CLASS,
        "            self._shared.header[layout.SHARED_CLOCK] += 1\n            return InsertAcquired()\n",
        "            return InsertAcquired()\n",
    ),
    Fault(
        "miss-in-an-unused-block-size-is-not-counted",
        CLASS,
        "                    self._shared.header[layout.SHARED_MISSES] += flags\n",
        "",
    ),
)


def plant(fault: Fault, package: pathlib.Path) -> None:
    """Change the copy's source; ValueError if the place is not there exactly once."""
    source = package / fault.file
    text = source.read_text(encoding="utf-8")
    places = text.count(fault.old)
    if places != 1:
        raise ValueError(f"{fault.name}: the text to replace stands {places} times in {fault.file}, not once")
    source.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def modules_that_use(module: str) -> set[str]:
    """The modules of kernels that import one, themselves or through others, and that one."""
    imports = {
        path.stem: set(re.findall(rf"^from {PACKAGE}\.kernels\.(\w+) import", path.read_text(), re.MULTILINE))
        for path in (ROOT / PACKAGE / "kernels").glob("*.py")
    }
    found = {module}
    while more := {name for name, imported in imports.items() if imported & found} - found:
        found |= more
    return found


def bring_kernels(fault: Fault, kept: pathlib.Path, copy: pathlib.Path) -> None:
    """Copy the compiled kernels of the run without a fault, but for those that this one may be in."""
    shutil.copytree(kept, copy)
    folder, _, name = fault.file.rpartition("/")
    touched = modules_that_use(name.removesuffix(".py")) if folder == "kernels" else set()
    for file in copy.rglob("*.nb?"):
        if file.name.partition(".")[0] in touched:
            file.unlink()


def run_tests(fault: Fault | None, tests: list[str], workspace: pathlib.Path) -> Outcome:
    """Copy package and tests, plant the fault if there is one, and run the tests until one fails."""
    name = "no fault" if fault is None else fault.name
    started = time.monotonic()

    def outcome(caught: bool | None, by: str) -> Outcome:
        return Outcome(name, caught, by, time.monotonic() - started)

    copy = workspace / name.replace(" ", "-")
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for part in (PACKAGE, "tests"):
        shutil.copytree(ROOT / part, copy / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    if fault is not None:
        try:
            plant(fault, copy / PACKAGE)
        except ValueError as error:
            return outcome(None, str(error))
        bring_kernels(fault, workspace / "kept", copy / "compiled")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("METRALE_", "NUMBA_"))}
    # Compiling costs more than the tests do, and a fault shows as well in code that is not optimised.
    environment |= {"PYTHONPATH": str(copy), "METRALE_CACHE_DIR": str(copy / "compiled"), "NUMBA_OPT": "0"}
    options = ["-x", "-q", "--no-header", "--hypothesis-profile=planted-faults", "-p", "no:cacheprovider"]
    options += [str(pathlib.Path("tests") / test) for test in tests]
    # The model plays the traces too, but no fault can touch it.
    options += ["-k", "not Model-"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN_TESTS, *options],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return outcome(True, f"still running after {TIMEOUT_SECONDS} s")
    finally:
        if fault is None:
            (copy / "compiled").rename(workspace / "kept")
        shutil.rmtree(copy)
    if -done.returncode in CRASHES:
        return outcome(True, f"died of {signal.Signals(-done.returncode).name}")
    if done.returncode == 0:
        return outcome(False, "")
    failed = re.search(r"^FAILED \S*?(\w+\.py::\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return outcome(True, failed[1])
    reasons = {NOT_COMPILED: "it does not compile", WRONG_PACKAGE: "another package was imported than the copy"}
    output = (done.stdout + done.stderr).strip().splitlines()
    return outcome(None, f"{reasons.get(done.returncode, f'status {done.returncode}')}: {output[-1] if output else ''}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="faults to try at the same time")
    parser.add_argument(
        "--tests", action="append", metavar="FILE", help="a test file to run, instead of the usual ones"
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N parts, as long as each other")
    arguments = parser.parse_args()
    number, _, parts = arguments.part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        parser.error(f"no such part: {arguments.part}")
    unknown = sorted(set(arguments.names) - {fault.name for fault in FAULTS})
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}")
    arguments.tests = arguments.tests or list(TESTS)
    missing = [test for test in arguments.tests if not (ROOT / "tests" / test).is_file()]
    if missing:
        parser.error(f"no such test file: {', '.join(missing)}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    number, parts = map(int, arguments.part.split("/"))
    part = FAULTS[len(FAULTS) * (number - 1) // parts : len(FAULTS) * number // parts]
    chosen = [fault for fault in part if not arguments.names or fault.name in arguments.names]
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="planted-faults-") as workspace,
        concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        # First and alone: the others take its kernels.
        without = pool.submit(run_tests, None, arguments.tests, pathlib.Path(workspace))
        concurrent.futures.wait([without])
        running = [without]
        running += [pool.submit(run_tests, fault, arguments.tests, pathlib.Path(workspace)) for fault in chosen]
        for future in concurrent.futures.as_completed(running):
            outcomes.append(future.result())
            name, caught, by, _ = outcomes[-1]
            what = {True: "caught", False: "survived", None: "broken"}[caught]
            done = f"{len(outcomes)} of {len(running)} done"
            console.print(f"{done}: {name}: {what}", by, highlight=False, soft_wrap=True)
    order = {fault.name: i for i, fault in enumerate(FAULTS)}
    outcomes.sort(key=lambda outcome: order.get(outcome.name, -1))
    table = Table("fault", "outcome", Column("by", overflow="fold"), "seconds")
    bad = 0
    for name, caught, by, seconds in outcomes:
        wanted = name != "no fault"
        bad += caught is not wanted
        words = {True: "caught", False: "survived", None: "broken"} if wanted else {True: "FAILS", False: "passes"}
        table.add_row(name, words.get(caught, "broken"), by, f"{seconds:.0f}", style="" if caught is wanted else "red")
    console.print(table)
    console.print(f"{len(outcomes) - bad} of {len(outcomes)} as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

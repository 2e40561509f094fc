"""Measures one peer in this process: fills its cache, times its calls, and checks that each found what it should.

Every call is timed by itself with ``perf_counter_ns`` and the median counts. The garbage collector is run before each
timed loop and is off in it, for all peers alike. What a call takes is built right before it, untimed, as a server does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns

import numpy as np
import psutil

from benchmarks.peers.nothing import Nothing
from benchmarks.peers.peer import EVICT, INSERT, LOOKUP, MEMORY, SIMULATOR, Peer
from benchmarks.workload import BLOCK_SIZE, LONG, SEQUENCE, SHORT, Scale, Tokens, Workload, chat, filler

__all__ = ["Figures", "MissedError", "measure"]

Figures = dict[str, float]
"""What was measured, by row: microseconds, nanoseconds, requests per second or bytes."""

_NS_PER_US = 1_000
# Prompts that are asked over and over: what they touch stays in the processor's caches.
_FEW = 8
_NS_PER_S = 1_000_000_000


class MissedError(Exception):
    """A peer did not find, or did not give up, what it should have: its times would mean nothing."""


@contextmanager
def _undisturbed() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(peer: Peer, scale: Scale, sections: Sequence[str]) -> Figures:
    """Measure a peer.

    Parameters
    ----------
    peer : Peer
        The only one in this process.
    scale : Scale
        How much work it is given.
    sections : sequence of str
        What to measure; sections that the peer lacks are left out.

    Returns
    -------
    dict of str to float
        A figure for each row that the peer has.

    Raises
    ------
    MissedError
        If the peer answered wrong.
    """
    wanted = [section for section in sections if section in peer.sections]
    figures: Figures = {}
    workload = Workload(scale)
    if MEMORY in wanted:
        figures |= _memory(peer, workload)
    if {LOOKUP, INSERT, EVICT} & set(wanted):
        _fill(peer, workload)
        if LOOKUP in wanted:
            figures |= _lookups(peer, workload)
        if INSERT in wanted:
            figures |= _inserts(peer, workload)
        if EVICT in wanted:
            figures |= _evictions(peer, workload)
    del workload
    if SIMULATOR in wanted:
        figures["simulator"] = _simulate(peer, scale)
        figures["harness"] = _simulate(Nothing(), scale)
    return figures


def _memory(peer: Peer, workload: Workload) -> Figures:
    # Whatever comes with a first use is not to be counted.
    peer.reset(SEQUENCE // BLOCK_SIZE)
    peer.store(workload.new[0])
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    # Counted as well, for some make all their blocks in advance.
    peer.reset(workload.num_sequence_blocks)
    for tokens in workload.sequences:
        peer.store(tokens)
    gc.collect()
    return {"bytes_per_block": (process.memory_info().rss - before) / workload.num_sequence_blocks}


def _fill(peer: Peer, workload: Workload) -> None:
    peer.reset(workload.num_blocks + workload.num_new_blocks)
    cached = workload.cached()
    for tokens in cached:
        peer.store(tokens)
    peer.get_ready(cached)


def _lookups(peer: Peer, workload: Workload) -> Figures:
    # The first look-ups of all warm up what is warm in a server that runs.
    _time_lookups(peer, workload.prompts(SEQUENCE)[:50], SEQUENCE)
    figures = {
        f"lookup_{length}": _time_lookups(peer, workload.prompts(length), length) for length in (SHORT, SEQUENCE, LONG)
    }
    few = workload.prompts(SEQUENCE)[:_FEW]
    figures[f"again_{SEQUENCE}"] = _time_lookups(peer, few * (len(workload.prompts(SEQUENCE)) // _FEW), SEQUENCE)
    figures[f"miss_{SEQUENCE}"] = _time_lookups(peer, workload.missing, 0)
    return figures


def _time_lookups(peer: Peer, sequences: Sequence[Tokens], expected: int) -> float:
    times, matched = [], []
    look_up_and_release = peer.look_up_and_release
    with _undisturbed():
        for tokens in sequences:
            prompt = peer.prompt(tokens)
            started = perf_counter_ns()
            num_tokens = look_up_and_release(prompt)
            times.append(perf_counter_ns() - started)
            matched.append(num_tokens)
    wrong = next((number for number in matched if number != expected), None)
    if wrong is not None:
        raise MissedError(f"a look-up matched {wrong} tokens where {expected} are cached")
    return float(np.median(times)) / _NS_PER_US


def _inserts(peer: Peer, workload: Workload) -> Figures:
    times = []
    insert, settle = peer.insert, peer.settle
    with _undisturbed():
        for tokens in workload.new:
            request = peer.request(tokens)
            peer.get_ready_to_insert(request)
            started = perf_counter_ns()
            insert(request)
            times.append(perf_counter_ns() - started)
            settle(request)
    for tokens in workload.new:
        num_tokens = peer.look_up_and_release(peer.prompt(tokens))
        if num_tokens != tokens.size:
            raise MissedError(f"after an insert of {tokens.size} tokens, {num_tokens} are cached")
    return {f"insert_{SEQUENCE}": float(np.median(times)) / _NS_PER_US}


def _evictions(peer: Peer, workload: Workload) -> Figures:
    figures = {}
    peer.get_ready_to_evict()
    evict = peer.evict
    for num_blocks, calls in workload.scale.evictions.items():
        times, evicted = [], []
        with _undisturbed():
            for _ in range(calls):
                started = perf_counter_ns()
                number = evict(num_blocks)
                times.append(perf_counter_ns() - started)
                evicted.append(number)
        if min(evicted) < num_blocks:
            raise MissedError(f"evict({num_blocks}) gave up {min(evicted)} blocks")
        figures[f"evict_{num_blocks}"] = float(np.median(times)) / _NS_PER_US
        figures[f"evict_{num_blocks}_per_block"] = float(np.median(np.divide(times, evicted)))
    return figures


def _simulate(peer: Peer, scale: Scale) -> float:
    """Let every request look up, evict what it lacks, insert and release, and return requests per second."""
    peer.reset(scale.capacity)
    fill = filler(scale)
    for tokens in fill:
        peer.store(tokens)
    peer.get_ready(fill)
    free = scale.capacity - sum(tokens.size for tokens in fill) // BLOCK_SIZE
    chats = chat(scale)
    times, matched = [], []
    with _undisturbed():
        for turn in chats:
            request = peer.request(turn.tokens)
            num_blocks = turn.tokens.size // BLOCK_SIZE
            started = perf_counter_ns()
            match = peer.look_up(request)
            num_matched = peer.num_matched(match)
            missing = num_blocks - num_matched
            if missing > free:
                free += peer.make_room(missing - free)
            free -= missing
            peer.release(request, peer.insert_rest(request, match, missing))
            times.append(perf_counter_ns() - started)
            matched.append(num_matched)
    if not isinstance(peer, Nothing):
        for turn, num_matched in zip(chats, matched, strict=True):
            if not turn.num_cached - peer.withheld_blocks <= num_matched <= turn.num_cached:
                raise MissedError(f"a request matched {num_matched} blocks where {turn.num_cached} are cached")
    return len(times) * _NS_PER_S / sum(times)

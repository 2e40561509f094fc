"""What a cache of a given capacity would have hit under one eviction policy or another, over a whole trace at once.

Every kernel plays the requests of :class:`~metrale_numba.replay.prefix_nodes.PrefixNodes` by the same rules: a request
first hits the nodes of its path that are resident, then as many leaves are evicted as it lacks room for, none of them
on its own path, then the rest of the path becomes resident as far as there is room. They differ in the leaf they
choose. Relies on nodes being numbered from 0 and on a parent for each, or :data:`NONE`. Each writes the hits of every
request and the victims in order, and returns how many victims there were and how many nodes are resident at the end.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from metrale_numba.kernels.layout import NONE, RANK_FREQUENCY, RANK_NEXT_USE

_ABSENT = np.int64(-1)
# A count of uses and the last request that was one share a rank, so that comparing ranks compares both in turn.
_COUNT_SHIFT = np.int64(32)
_LOW_HALF = np.int64(0xFFFF_FFFF)
# After so many, no count is left.
_MOST_HALVINGS = np.int64(32)
# Of two queues, an end is found at twice the queue's number, and one more for the newest.
_SMALL = np.int64(0)
_MAIN = np.int64(1)
_MOST_USES = np.uint8(3)


def next_uses(starts, paths, upcoming, out):
    """For each node of each path, find the next request that uses it too; with none, the number of requests.

    `upcoming` is scratch space for a number per node.
    """
    requests = np.int64(starts.size - 1)
    upcoming[:] = requests
    for request in range(requests - 1, -1, -1):
        for at in range(starts[request], starts[request + 1]):
            out[at] = upcoming[np.int64(paths[at])]
            upcoming[np.int64(paths[at])] = request


@register_jitable
def _count_hits(resident, paths, start, end):
    at = start
    while at < end and resident[np.int64(paths[at])] != 0:
        at += 1
    return at - start


@register_jitable
def _deepest_of(paths, start, hits):
    """Give the deepest node that a request hit, or -1. Of all it holds, no other can be without a resident child."""
    return np.int64(paths[start + hits - 1]) if hits > 0 else _ABSENT


@register_jitable
def _parent_of(parents, node):
    return _ABSENT if parents[node] == np.uint32(NONE) else np.int64(parents[node])


# ------------------------------------------------------------------------------------------------- the lowest rank goes


@register_jitable
def _is_before(ranks, node, other):
    return ranks[node] < ranks[other] or (ranks[node] == ranks[other] and node < other)


@register_jitable
def _settle(heap, places, ranks, size, place):
    """Bring one node of a heap to where it belongs, given that the rest is in order."""
    node = heap[place]
    while place > 0:
        above = (place - 1) // 2
        if not _is_before(ranks, node, heap[above]):
            break
        heap[place] = heap[above]
        places[heap[place]] = place
        place = above
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and _is_before(ranks, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(ranks, heap[below], node):
            break
        heap[place] = heap[below]
        places[heap[place]] = place
        place = below
    heap[place] = node
    places[node] = place


@register_jitable
def _push(heap, places, ranks, size, node):
    heap[size] = node
    _settle(heap, places, ranks, size + 1, size)
    return size + 1


@register_jitable
def _remove(heap, places, ranks, size, node):
    place = places[node]
    places[node] = _ABSENT
    size -= 1
    if place < size:
        heap[place] = heap[size]
        _settle(heap, places, ranks, size, place)
    return size


@register_jitable
def _age(ranks, halved, halvings, node):
    """Halve the count in a node's rank for every halving since its last."""
    count = (ranks[node] >> _COUNT_SHIFT) >> min(halvings - halved[node], _MOST_HALVINGS)
    ranks[node] = (count << _COUNT_SHIFT) | (ranks[node] & _LOW_HALF)
    halved[node] = halvings


def play_by_rank(rule, period, starts, paths, parents, upcoming, capacity, hits_out, victims_out):
    """Evict the leaf of the lowest rank: that used longest ago, that used least, or that whose next use is farthest.

    `rule` is one of the ``RANK_`` constants. For :data:`RANK_FREQUENCY`, counts of uses are halved each time
    `period` blocks were asked for; for :data:`RANK_NEXT_USE`, `upcoming` is what :func:`next_uses` found.
    """
    num_nodes = np.int64(parents.size)
    resident = np.zeros(num_nodes, np.uint8)
    children = np.zeros(num_nodes, np.uint32)
    ranks = np.zeros(num_nodes, np.int64)
    places = np.full(num_nodes, _ABSENT, np.int64)
    heap = np.empty(min(num_nodes, capacity), np.int64)
    size = np.int64(0)
    cached = np.int64(0)
    evicted = np.int64(0)
    asked = np.int64(0)
    # Only candidates are aged when it is time; any other node once it is looked at.
    halvings = np.int64(0)
    halved = np.zeros(num_nodes, np.int64)
    for request in range(np.int64(starts.size - 1)):
        start = starts[request]
        length = starts[request + 1] - start
        if rule == RANK_FREQUENCY:
            if asked >= period:
                halvings += asked // period
                asked %= period
                # From the front, each is settled into the ordered heap of those before it: of counts that became equal,
                # the last use decides.
                for place in range(size):
                    _age(ranks, halved, halvings, heap[place])
                    _settle(heap, places, ranks, place + 1, place)
            asked += length
        hits = _count_hits(resident, paths, start, start + length)
        hits_out[request] = hits
        deepest = _deepest_of(paths, start, hits)
        if deepest >= 0 and places[deepest] >= 0:
            size = _remove(heap, places, ranks, size, deepest)
        lacking = length - hits - (capacity - cached)
        while lacking > 0 and size > 0:
            victim = heap[0]
            size = _remove(heap, places, ranks, size, victim)
            resident[victim] = 0
            cached -= 1
            lacking -= 1
            victims_out[evicted] = np.uint32(victim)
            evicted += 1
            parent = _parent_of(parents, victim)
            if parent >= 0:
                children[parent] -= np.uint32(1)
                if children[parent] == 0 and parent != deepest:
                    if rule == RANK_FREQUENCY:
                        _age(ranks, halved, halvings, parent)
                    size = _push(heap, places, ranks, size, parent)
        stored = min(length, hits + capacity - cached)
        for at in range(start, start + stored):
            node = np.int64(paths[at])
            if resident[node] == 0:
                resident[node] = 1
                ranks[node] = 0
                cached += 1
                parent = _parent_of(parents, node)
                if parent >= 0:
                    children[parent] += np.uint32(1)
            if rule == RANK_NEXT_USE:
                ranks[node] = -upcoming[at]
            elif rule == RANK_FREQUENCY:
                _age(ranks, halved, halvings, node)
                ranks[node] = (((ranks[node] >> _COUNT_SHIFT) + 1) << _COUNT_SHIFT) | np.int64(request)
            else:
                ranks[node] = np.int64(request)
        if stored > 0:
            last = np.int64(paths[start + stored - 1])
            if children[last] == 0:
                size = _push(heap, places, ranks, size, last)
    return evicted, cached


# ------------------------------------------------------------------------------------------------------ queues of nodes


@register_jitable
def _link_newest(newer, older, ends, queue, node):
    newest = ends[2 * queue + 1]
    older[node] = newest
    newer[node] = _ABSENT
    if newest >= 0:
        newer[newest] = node
    else:
        ends[2 * queue] = node
    ends[2 * queue + 1] = node


@register_jitable
def _unlink(newer, older, ends, queue, node):
    if older[node] >= 0:
        newer[older[node]] = newer[node]
    else:
        ends[2 * queue] = newer[node]
    if newer[node] >= 0:
        older[newer[node]] = older[node]
    else:
        ends[2 * queue + 1] = older[node]


def play_sieve(starts, paths, parents, capacity, hits_out, victims_out):
    """Evict the leaf that a hand finds unvisited on its way from the oldest to the newest, clearing marks as it passes.

    The queue holds all resident nodes. The hand passes over those that have children, and their marks are cleared
    too; over those that the request holds it passes without a trace.
    """
    num_nodes = np.int64(parents.size)
    num_requests = np.int64(starts.size - 1)
    resident = np.zeros(num_nodes, np.uint8)
    children = np.zeros(num_nodes, np.uint32)
    # What a request adds stands together in the queue, each node the parent of the next, so the hand takes this *run*
    # in one step: only its last node can go, and those that are visited, or held, come first. Runs are numbered by
    # request. Node by node, the hand would pass over a whole prompt for every block that it evicts.
    runs = np.empty(num_nodes, np.int64)
    offsets = np.empty(num_nodes, np.int64)
    firsts = np.empty(num_requests, np.int64)
    lengths = np.zeros(num_requests, np.int64)
    num_visited = np.zeros(num_requests, np.int64)
    num_held = np.zeros(num_requests, np.int64)
    held_by = np.full(num_requests, _ABSENT, np.int64)
    newer = np.empty(num_requests, np.int64)
    older = np.empty(num_requests, np.int64)
    ends = np.full(2, _ABSENT, np.int64)
    queue = np.int64(0)
    hand = _ABSENT
    leaves = np.int64(0)
    cached = np.int64(0)
    evicted = np.int64(0)
    for request in range(num_requests):
        start = starts[request]
        length = starts[request + 1] - start
        hits = _count_hits(resident, paths, start, start + length)
        hits_out[request] = hits
        for at in range(start, start + hits):
            node = np.int64(paths[at])
            run = runs[node]
            held_by[run] = request
            num_held[run] = offsets[node] + 1
            num_visited[run] = max(num_visited[run], num_held[run])
        deepest = _deepest_of(paths, start, hits)
        lacking = length - hits - (capacity - cached)
        while lacking > 0:
            held = np.int64(1) if deepest >= 0 and children[deepest] == 0 else np.int64(0)
            if leaves == held:
                break
            run = hand if hand >= 0 else ends[2 * queue]
            hand = newer[run]
            node = np.int64(paths[firsts[run] + lengths[run] - 1])
            was_visited = num_visited[run] == lengths[run]
            num_visited[run] = num_held[run] if held_by[run] == request else np.int64(0)
            if was_visited or children[node] != 0:
                continue
            lengths[run] -= 1
            if lengths[run] == 0:
                _unlink(newer, older, ends, queue, run)
            resident[node] = 0
            cached -= 1
            lacking -= 1
            leaves -= 1
            victims_out[evicted] = np.uint32(node)
            evicted += 1
            parent = _parent_of(parents, node)
            if parent >= 0:
                children[parent] -= np.uint32(1)
                if children[parent] == 0:
                    leaves += 1
        stored = min(length, hits + capacity - cached)
        if stored > hits:
            if deepest < 0 or children[deepest] != 0:
                leaves += 1
            if deepest >= 0:
                children[deepest] += np.uint32(1)
            firsts[request] = start + hits
            lengths[request] = stored - hits
            for at in range(start + hits, start + stored):
                node = np.int64(paths[at])
                resident[node] = 1
                runs[node] = request
                offsets[node] = at - start - hits
                children[node] = np.uint32(1) if at + 1 < start + stored else np.uint32(0)
            cached += stored - hits
            _link_newest(newer, older, ends, queue, np.int64(request))
    return evicted, cached


def play_s3_fifo(small_share, starts, paths, parents, capacity, hits_out, victims_out):
    """Evict from a small queue of what is new what was hit at most once, and from a main queue what was not hit lately.

    `small_share` is the number of blocks from which on the small queue gives way. Both queues hold all nodes that
    belong to them. A node whose turn it is but that has children, or that the request holds, is treated as if it had
    been hit enough to stay. The nodes of a request queue from the deepest up, or the turn of a parent would come before
    that of its child, and all but the last block of a prompt would go to the main queue.
    """
    num_nodes = np.int64(parents.size)
    resident = np.zeros(num_nodes, np.uint8)
    queues = np.zeros(num_nodes, np.uint8)
    uses = np.zeros(num_nodes, np.uint8)
    children = np.zeros(num_nodes, np.uint32)
    # The last request that hit each.
    held_by = np.full(num_nodes, _ABSENT, np.int64)
    # The how manieth each was to go from the small queue, or 0.
    departures = np.zeros(num_nodes, np.int64)
    newer = np.empty(num_nodes, np.int64)
    older = np.empty(num_nodes, np.int64)
    ends = np.full(4, _ABSENT, np.int64)
    # How many nodes without children each queue holds.
    leaves = np.zeros(2, np.int64)
    remembered = capacity - small_share
    num_departures = np.int64(0)
    num_small = np.int64(0)
    cached = np.int64(0)
    evicted = np.int64(0)
    for request in range(np.int64(starts.size - 1)):
        start = starts[request]
        length = starts[request + 1] - start
        hits = _count_hits(resident, paths, start, start + length)
        hits_out[request] = hits
        for at in range(start, start + hits):
            node = np.int64(paths[at])
            uses[node] = min(uses[node] + np.uint8(1), _MOST_USES)
            held_by[node] = request
        deepest = _deepest_of(paths, start, hits)
        lacking = length - hits - (capacity - cached)
        while lacking > 0:
            in_small = leaves[_SMALL]
            in_main = leaves[_MAIN]
            if deepest >= 0 and children[deepest] == 0:
                if queues[deepest] == _SMALL:
                    in_small -= 1
                else:
                    in_main -= 1
            if in_small + in_main == 0:
                break
            queue = _SMALL if num_small >= small_share or in_main == 0 else _MAIN
            node = ends[2 * queue]
            may_go = children[node] == 0 and held_by[node] != request
            if queue == _SMALL and (uses[node] > 1 or not may_go):
                _unlink(newer, older, ends, _SMALL, node)
                _link_newest(newer, older, ends, _MAIN, node)
                queues[node] = np.uint8(_MAIN)
                uses[node] = 0
                num_small -= 1
                if children[node] == 0:
                    leaves[_SMALL] -= 1
                    leaves[_MAIN] += 1
                continue
            if queue == _MAIN and (uses[node] > 0 or not may_go):
                if uses[node] > 0:
                    uses[node] -= np.uint8(1)
                _unlink(newer, older, ends, _MAIN, node)
                _link_newest(newer, older, ends, _MAIN, node)
                continue
            if queue == _SMALL:
                num_small -= 1
                num_departures += 1
                departures[node] = num_departures
            _unlink(newer, older, ends, queue, node)
            resident[node] = 0
            cached -= 1
            lacking -= 1
            leaves[queue] -= 1
            victims_out[evicted] = np.uint32(node)
            evicted += 1
            parent = _parent_of(parents, node)
            if parent >= 0:
                children[parent] -= np.uint32(1)
                if children[parent] == 0:
                    leaves[np.int64(queues[parent])] += 1
        stored = min(length, hits + capacity - cached)
        for at in range(start + stored - 1, start + hits - 1, -1):
            node = np.int64(paths[at])
            # One that left the small queue not long ago has been missed.
            queue = _MAIN if departures[node] > max(num_departures - remembered, np.int64(0)) else _SMALL
            departures[node] = 0
            resident[node] = 1
            uses[node] = 0
            queues[node] = np.uint8(queue)
            if queue == _SMALL:
                num_small += 1
            if at == start + stored - 1:
                leaves[queue] += 1
            _link_newest(newer, older, ends, queue, node)
            parent = _parent_of(parents, node)
            if parent >= 0:
                if at == start + hits and children[parent] == 0:
                    leaves[np.int64(queues[parent])] -= 1
                children[parent] += np.uint32(1)
        cached += max(stored - hits, np.int64(0))
    return evicted, cached

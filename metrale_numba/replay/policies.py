"""What a prefix cache would have hit under other eviction policies than its own, and under the best there can be.

Relies on a trace as :class:`~metrale_numba.replay.prefix_nodes.PrefixNodes` and on kernels that play all of it at once.
Every policy plays by the rules of :class:`~metrale_numba.replay.Replay`; for ``"lru"`` the counts are its counts. All
are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import Ids
from metrale_numba.kernels.compile import kernels
from metrale_numba.kernels.layout import RANK_FREQUENCY, RANK_LAST_USE, RANK_NEXT_USE
from metrale_numba.replay.prefix_nodes import PrefixNodes

__all__ = ["OPTIMUM", "POLICIES", "Play", "PolicyResult", "play", "simulate"]

Counts = npt.NDArray[np.int64]

OPTIMUM: Final = "optimum"
"""The policy that knows the future: no other hits more blocks."""

# The part of the capacity that S3-FIFO's paper gives to what is new.
_SMALL_PART = 10
# Prompts that ask for so many times the capacity in blocks pass between two halvings of LFU's counts. With less it is
# LRU, with more it clings to what was used long ago; the documentation has figures.
_CAPACITIES_PER_HALVING = 2

_NO_USES = np.empty(0, dtype=np.int64)


class Play(NamedTuple):
    """What happened while a policy played a trace."""

    hits: Counts
    """Blocks that each request hit."""
    victims: Ids
    """The nodes that were evicted, in this order."""
    cached_blocks: int
    """Nodes that are resident at the end."""


class PolicyResult(NamedTuple):
    """What a policy came to on a trace. A rate of nothing is None."""

    policy: str
    """Its name, one of :data:`POLICIES`."""
    capacity: int
    """Blocks the cache was let hold."""
    requests: int
    """Requests played."""
    blocks: int
    """Blocks of all their prompts."""
    hit_blocks: int
    """Blocks among them that the cache held already."""
    evicted_blocks: int
    """Blocks the cache gave up to make room."""
    cached_blocks: int
    """Blocks in the cache at the end."""
    block_hit_rate: float | None
    """`hit_blocks` in `blocks`."""
    token_hit_rate: float | None
    """The same in tokens, where the last block of a prompt counts for the tokens it has."""


def _play_lru(nodes: PrefixNodes, capacity: int, halving: int, hits: Counts, victims: Ids) -> tuple[int, int]:
    return _play_by_rank(RANK_LAST_USE, 1, nodes, _NO_USES, capacity, hits, victims)


def _play_lfu(nodes: PrefixNodes, capacity: int, halving: int, hits: Counts, victims: Ids) -> tuple[int, int]:
    # A cache of no block ranks none; a period of 0 would never end.
    return _play_by_rank(RANK_FREQUENCY, max(1, halving * capacity), nodes, _NO_USES, capacity, hits, victims)


def _play_optimum(nodes: PrefixNodes, capacity: int, halving: int, hits: Counts, victims: Ids) -> tuple[int, int]:
    upcoming = np.empty(nodes.paths.size, dtype=np.int64)
    scratch = np.empty(nodes.parents.size, dtype=np.int64)
    kernels("policies")["next_uses"](nodes.starts, nodes.paths, scratch, upcoming)
    return _play_by_rank(RANK_NEXT_USE, 1, nodes, upcoming, capacity, hits, victims)


def _play_by_rank(
    rule: int, period: int, nodes: PrefixNodes, upcoming: Counts, capacity: int, hits: Counts, victims: Ids
) -> tuple[int, int]:
    evicted, cached = kernels("policies")["play_by_rank"](
        rule, period, nodes.starts, nodes.paths, nodes.parents, upcoming, capacity, hits, victims
    )
    return evicted, cached


def _play_sieve(nodes: PrefixNodes, capacity: int, halving: int, hits: Counts, victims: Ids) -> tuple[int, int]:
    evicted, cached = kernels("policies")["play_sieve"](
        nodes.starts, nodes.paths, nodes.parents, capacity, hits, victims
    )
    return evicted, cached


def _play_s3_fifo(nodes: PrefixNodes, capacity: int, halving: int, hits: Counts, victims: Ids) -> tuple[int, int]:
    evicted, cached = kernels("policies")["play_s3_fifo"](
        max(1, capacity // _SMALL_PART), nodes.starts, nodes.paths, nodes.parents, capacity, hits, victims
    )
    return evicted, cached


_PLAYERS: dict[str, Callable[[PrefixNodes, int, int, Counts, Ids], tuple[int, int]]] = {
    "lru": _play_lru,
    "sieve": _play_sieve,
    "s3-fifo": _play_s3_fifo,
    "lfu": _play_lfu,
    OPTIMUM: _play_optimum,
}

POLICIES: Final = tuple(_PLAYERS)
"""The names of all policies; that of the cache itself comes first, the optimum last."""


def play(nodes: PrefixNodes, capacity: int, policy: str, *, halving: int = _CAPACITIES_PER_HALVING) -> Play:
    """Play a trace under a policy, and tell request by request what was hit and block by block what was evicted.

    Parameters
    ----------
    nodes : PrefixNodes
        The whole trace; not changed.
    capacity : int
        Blocks the cache may hold; 0 or more.
    policy : {"lru", "sieve", "s3-fifo", "lfu", "optimum"}
        Which leaf is evicted; see :func:`simulate`.
    halving : int, default 2
        Only for ``"lfu"``; 1 or more.

    Returns
    -------
    Play
        The hits of every request and the victims in order.

    Raises
    ------
    ValueError
        If there is no such policy, `capacity` is negative, or `halving` is below 1.
    """
    if policy not in _PLAYERS:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, and is {policy!r}")
    if capacity < 0:
        raise ValueError(f"capacity must be 0 or more, and is {capacity}")
    if halving < 1:
        raise ValueError(f"halving must be 1 or more, and is {halving}")
    hits = np.empty(nodes.requests, dtype=np.int64)
    victims = np.empty(nodes.paths.size, dtype=np.uint32)
    # Room for more than every node changes nothing, and a number without bounds would be none for a kernel.
    evicted, cached = _PLAYERS[policy](nodes, min(capacity, nodes.parents.size), halving, hits, victims)
    return Play(hits, victims[:evicted], cached)


def simulate(nodes: PrefixNodes, capacity: int, policy: str, *, halving: int = _CAPACITIES_PER_HALVING) -> PolicyResult:
    """Count what a cache of `capacity` blocks would have hit and evicted under a policy.

    A request first hits the longest prefix of its prompt that is cached. Then leaves are evicted, nodes without a
    cached child, until there is room for the rest of the prompt; none of the prompt's own blocks goes. Then the rest
    is cached, as far as there is room. The policies differ in the leaf they choose:

    ``"lru"``
        The one used longest ago, as :meth:`RadixTree.evict <metrale_numba.RadixTree.evict>` does.
    ``"sieve"``
        SIEVE [1]_: blocks queue in the order in which they came, and a hand goes from the oldest to the newest and
        round again. It unmarks what was hit since it last passed, and evicts what was not. A block with cached
        children is unmarked and passed over.
    ``"s3-fifo"``
        S3-FIFO [2]_: new blocks, those of a prompt from its end, stand in a small queue with a tenth of the capacity.
        What leaves it goes to the main queue if it was hit more than once, and is evicted if not; if it comes back
        soon, it begins in the main queue. That one lets the oldest go round again as often as it was hit, three times
        at most. A block with cached children stays as if it had been hit.
    ``"lfu"``
        The one used least, and of those the one used longest ago. All counts are halved now and then [3]_, rounding
        down: each time the prompts have asked for `halving` times the capacity in blocks.
    ``"optimum"``
        The one whose next use is farthest [4]_. This needs the future, and no policy hits more: a node's parent is
        used whenever the node is, so among the nodes with the farthest next use there is a leaf, and the choice is
        the one that is best without any tree.

    Parameters
    ----------
    nodes : PrefixNodes
        The whole trace; not changed.
    capacity : int
        Blocks the cache may hold; 0 or more.
    policy : {"lru", "sieve", "s3-fifo", "lfu", "optimum"}
        Which leaf is evicted.
    halving : int, default 2
        Only for ``"lfu"``: how many times the capacity in blocks the prompts ask for until counts are halved; 1 or
        more.

    Returns
    -------
    PolicyResult
        The counts, and the rates that follow from them.

    Raises
    ------
    ValueError
        If there is no such policy, `capacity` is negative, or `halving` is below 1.

    References
    ----------
    .. [1] Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi: SIEVE is Simpler than LRU: an Efficient Turn-Key
       Eviction Algorithm for Web Caches. NSDI 2024.
    .. [2] J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi: FIFO Queues are All You Need for Cache Eviction. SOSP 2023.
    .. [3] G. Einziger, R. Friedman, B. Manes: TinyLFU: A Highly Efficient Cache Admission Policy. ACM Transactions on
       Storage 13 (4), 2017, from which the halving is.
    .. [4] L. A. Belady: A Study of Replacement Algorithms for a Virtual-Storage Computer. IBM Systems Journal 5 (2),
       1966.
    """
    hits, victims, cached = play(nodes, capacity, policy, halving=halving)
    hit_tokens = int(np.minimum(hits * nodes.block_tokens, nodes.prompt_tokens).sum())
    blocks, tokens, hit_blocks = nodes.paths.size, int(nodes.prompt_tokens.sum()), int(hits.sum())
    return PolicyResult(
        policy=policy,
        capacity=capacity,
        requests=nodes.requests,
        blocks=blocks,
        hit_blocks=hit_blocks,
        evicted_blocks=victims.size,
        cached_blocks=cached,
        block_hit_rate=hit_blocks / blocks if blocks else None,
        token_hit_rate=hit_tokens / tokens if tokens else None,
    )

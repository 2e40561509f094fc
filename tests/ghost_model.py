"""The model of the cache, and beside it what it has given up: an oracle for explanations and for lists of nodes.

It relies on :mod:`model` for what is cached, remembers every eviction by its whole prefix, and answers each question by
looking at all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from model import NONE, Entry, EvictedBlocks, InsertAcquired, Model, Node, Tokens, _ints

Place = tuple[int, int, Tokens]


class Ghost(NamedTuple):
    number: int
    tick: int
    stamp: int
    by_adapter: bool


class Lost(NamedTuple):
    adapter_id: int
    prefix: Tokens
    session: int
    tail: bool
    cause: str
    tick: int


class GhostModel(Model):
    """The model with `ghosts`, and the answers of `explain` and `iter_nodes` as plain values."""

    def __init__(self, *, ghosts: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_ghosts = ghosts
        self.ghosts: dict[Place, Ghost] = {}
        self.num_evicted = 0
        self.lost: OrderedDict[int, Lost] = OrderedDict()
        #: True while nodes go for one adapter's sake, False while for the whole cache; None while they are forgotten.
        self.by_adapter: bool | None = None
        self.ticks_begun = 0
        #: Whether a ghost was pushed out by a younger one.
        self.pushed_out = False

    # --------------------------------------------------------------------------------------------------------- evicting

    def _remove_node(self, node: Node, evicted: EvictedBlocks) -> None:
        super()._remove_node(node, evicted)
        if self.by_adapter is None:
            return
        ghost = Ghost(self.num_evicted, self.clock - self.ticks_begun, node.stamp, self.by_adapter)
        self.num_evicted += 1
        self.ghosts[node.adapter_id, node.block_size, node.prefix] = ghost
        old = [place for place, ghost in self.ghosts.items() if ghost.number < self.num_evicted - self.num_ghosts]
        self.pushed_out |= bool(old)
        for place in old:
            del self.ghosts[place]

    def evict(self, num_blocks: int) -> EvictedBlocks:
        return self._evicting(False, lambda: super(GhostModel, self).evict(num_blocks))

    def evict_from(self, adapter_id: int, num_blocks: int) -> EvictedBlocks:
        return self._evicting(True, lambda: super(GhostModel, self).evict_from(adapter_id, num_blocks))

    def _evicting(self, by_adapter: bool, evict: Callable[[], Any]) -> Any:
        self.by_adapter = by_adapter
        try:
            return evict()
        finally:
            self.by_adapter = None

    def insert(self, *arguments: Any, **by_name: Any) -> InsertAcquired:
        before = set(self.nodes)
        # An insert evicts for its quota before it takes its tick of the clock.
        self.ticks_begun = 1
        acquired = self._evicting(True, lambda: super(GhostModel, self).insert(*arguments, **by_name))
        self.ticks_begun = 0
        for place in set(self.nodes) - before:
            self.ghosts.pop(place, None)
        return acquired

    def clear(self) -> Any:
        self.ghosts.clear()
        self.lost.clear()
        return super().clear()

    def drop_adapter(self, adapter_id: int) -> Any:
        self.ghosts = {place: ghost for place, ghost in self.ghosts.items() if place[0] != adapter_id}
        self.lost = OrderedDict((key, lost) for key, lost in self.lost.items() if lost.adapter_id != adapter_id)
        return super().drop_adapter(adapter_id)

    # -------------------------------------------------------------------------------------------------------- snapshots

    def losing(self, cause: str, call: Callable[[], Any]) -> Any:
        """Make a call of the index, and remember which entries it took out."""
        before = list(self.entries)
        answer = call()
        keys = {entry.key for entry in self.entries}
        for entry in before:
            if entry.key not in keys:
                self.lost.pop(entry.key, None)
                adapter_id, prefix = entry.check
                self.lost[entry.key] = Lost(adapter_id, prefix, entry.session, entry.tail, cause, self.clock)
        while len(self.lost) > self.num_ghosts:
            self.lost.popitem(last=False)
        return answer

    def evict_snapshot_lru(self) -> int | None:
        return self.losing("evicted", super().evict_snapshot_lru)

    def evict_snapshot_to_tier(self, min_tokens: int) -> Any:
        return self.losing("dropped", lambda: super(GhostModel, self).evict_snapshot_to_tier(min_tokens))

    def evict_snapshot_slot(self, slot: int) -> bool:
        return self.losing("evicted", lambda: super(GhostModel, self).evict_snapshot_slot(slot))

    def forget_snapshot_tier_key(self, key: int) -> bool:
        return self.losing("forgotten", lambda: super(GhostModel, self).forget_snapshot_tier_key(key))

    def insert_tail_snapshot(self, *arguments: Any, **by_name: Any) -> Any:
        return self.losing("replaced", lambda: super(GhostModel, self).insert_tail_snapshot(*arguments, **by_name))

    # -------------------------------------------------------------------------------------------------------- answering

    def explain(
        self, tokens: Iterable[int], block_size: int, session_hash: int = 0, adapter_id: int = 0
    ) -> dict[str, Any]:
        """What :meth:`metrale_numba.Explanation.as_dict` has to give."""
        tokens = _ints(tokens)
        matched = self.peek_matched_tokens(tokens, block_size, adapter_id)
        blocks = matched // block_size
        others = {node.adapter_id for node in self.nodes.values()} - {adapter_id}
        depths = {other: self.peek_matched_tokens(tokens, block_size, other) for other in others}
        other = min(depths, key=lambda other: (-depths[other], other), default=None)
        if other is not None and depths[other] <= matched:
            other = None
        run: list[Ghost] = []
        path = self._path(tokens, block_size, adapter_id)
        if matched == len(tokens):
            reason = "whole_prompt"
        elif blocks == len(tokens) // block_size:
            reason = "tail_not_cached" if self.partial_tail_sharing else "partial_block"
        elif len(path) > blocks:
            reason = "hidden"
        else:
            for end in range((blocks + 1) * block_size, len(tokens) + 1, block_size):
                ghost = self.ghosts.get((adapter_id, block_size, tokens[:end]))
                if ghost is None:
                    break
                run.append(ghost)
            if run:
                reason = "evicted"
            elif other is not None and depths[other] >= (blocks + 1) * block_size:
                reason = "other_adapter"
            else:
                knows = self.num_ghosts and not self.pushed_out and not self.adapter_epoch(adapter_id)
                reason = "never_seen" if knows else "not_cached"
        return {
            "reason": reason,
            "num_tokens": len(tokens),
            "matched_tokens": matched,
            "matched_blocks": blocks,
            "block_size": block_size,
            "adapter_id": adapter_id,
            "session_hash": session_hash,
            "evicted": self._explain_run(run, adapter_id) if run else None,
            "other_adapter": other,
            "other_adapter_tokens": 0 if other is None else depths[other],
            "ghosts": self.num_ghosts,
            "snapshot": self._explain_snapshot(tokens, matched, session_hash, adapter_id),
        }

    def _explain_run(self, run: list[Ghost], adapter_id: int) -> dict[str, Any]:
        def since(number: int) -> int:
            return sum(
                ghost.number >= number and (place[0] == adapter_id or not run[0].by_adapter)
                for place, ghost in self.ghosts.items()
            )

        return {
            "blocks": len(run),
            "evictions_ago": self.num_evicted - run[0].number - 1,
            "ticks_ago": self.clock - run[0].tick,
            "idle_ticks": run[0].tick - run[0].stamp,
            "more_blocks": since(run[0].number),
            "more_blocks_for_all": since(min(ghost.number for ghost in run)),
            "by_adapter": run[0].by_adapter,
        }

    def _explain_snapshot(self, tokens: Tokens, matched: int, session: int, adapter_id: int) -> dict[str, Any]:
        def is_for(of_session: int, is_tail: bool) -> bool:
            return (session != 0 and of_session == session) or not (is_tail or self.hermetic)

        answer: dict[str, Any] = {
            "reason": "no_match",
            "depth": 0,
            "is_spilled": False,
            "is_tail": False,
            "recompute_tokens": 0,
            "passed": [],
            "lost": [],
            "beyond_match": None,
        }
        if matched == 0:
            return answer
        of_prompt = [entry for entry in self.entries if entry.check == (adapter_id, tokens[: entry.depth])]
        of_prompt.sort(key=lambda entry: -entry.depth)
        inside = [entry for entry in of_prompt if entry.depth <= matched]
        found = next((entry for entry in inside if is_for(entry.session, entry.tail)), None)
        above = -1 if found is None else found.depth
        passed = [entry for entry in inside if entry.depth > above]
        there = {entry.check for entry in self.entries}
        lost = [
            lost
            for lost in self.lost.values()
            if lost.adapter_id == adapter_id
            and above < len(lost.prefix) <= matched
            and tokens[: len(lost.prefix)] == lost.prefix
            and (adapter_id, lost.prefix) not in there
            and is_for(lost.session, lost.tail)
        ]
        lost.sort(key=lambda lost: -len(lost.prefix))
        beyond = [entry.depth for entry in of_prompt if entry.depth > matched and is_for(entry.session, entry.tail)]
        answer |= {
            "passed": [{"depth": entry.depth, "is_spilled": entry.spilled, "is_tail": entry.tail} for entry in passed],
            "lost": [
                {"depth": len(lost.prefix), "cause": lost.cause, "ticks_ago": self.clock - lost.tick} for lost in lost
            ],
            "beyond_match": min(beyond, default=None),
        }
        if found is not None:
            return answer | {
                "reason": "found",
                "depth": found.depth,
                "is_spilled": found.spilled,
                "is_tail": found.tail,
                "recompute_tokens": matched - found.depth,
            }
        if lost and (not passed or len(lost[0].prefix) > passed[0].depth):
            return answer | {"reason": "lost"}
        if passed:
            return answer | {"reason": "other_session" if passed[0].tail else "hermetic"}
        return answer | {"reason": "beyond_match" if beyond else "none"}

    def list_nodes(self, adapter_id: int | None = None, block_size: int | None = None) -> list[dict[str, Any]]:
        """What the nodes of ``iter_nodes`` have to be, with tokens as lists and whole prefixes for numbers."""
        nodes = [
            node
            for node in self.nodes.values()
            if adapter_id in (None, node.adapter_id) and block_size in (None, node.block_size)
        ]
        nodes.sort(key=lambda node: (-node.stamp, len(node.prefix)))
        return [
            {
                "prefix": node.prefix,
                "adapter_id": node.adapter_id,
                "block_size": node.block_size,
                "depth": len(node.prefix),
                "tokens": list(node.chunk),
                "block": node.block,
                "disk_block_id": None if node.disk == NONE else node.disk,
                "references": max(0, node.count - 1),
                "is_hidden": node.count == 0,
                "stamp": node.stamp,
                "age": self.clock - node.stamp,
                "children": sum(child.parent is node for child in self.nodes.values()),
                "suffix_tokens": [] if node.suffix is None else list(node.suffix.tokens),
                "suffix_block": None if node.suffix is None else node.suffix.block,
                "snapshots": self._snapshots_on(node),
            }
            for node in nodes
        ]

    def _snapshots_on(self, node: Node) -> tuple[int, ...]:
        def is_on(entry: Entry) -> bool:
            adapter_id, prefix = entry.check
            floor = entry.depth - entry.depth % self.block_size
            return adapter_id == node.adapter_id and prefix[:floor] == node.prefix

        if node.block_size != self.block_size:
            return ()
        return tuple(sorted(entry.depth for entry in self.entries if is_on(entry)))

"""Why a prompt matches as far as it does: what :meth:`RadixTree.explain` answers, in fields, in words and as JSON.

Nothing is found out here; :mod:`metrale_numba.inspection` does that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

__all__ = ["EvictedPrefix", "Explanation", "LostSnapshotInfo", "PassedSnapshot", "SnapshotExplanation"]

_CAUSES: Final = {
    "evicted": "was evicted",
    "dropped": "was evicted as too shallow to be spilled",
    "forgotten": "was spilled, and its stored bytes were given up",
    "replaced": "gave way to a newer tail of its session",
}


class EvictedPrefix(NamedTuple):
    """The blocks right after a match that were cached once and are remembered as evicted.

    How much more room would have kept them is exact for a cache that is always full, as in a replay, while every prompt
    fits into it. It counts blocks and no partial suffixes.

    Attributes
    ----------
    blocks : int
        How many there are in a row, from the end of the match on.
    evictions_ago : int
        Blocks that were evicted after the first of them.
    ticks_ago : int
        How far the clock has gone on since the first of them was evicted. Each insert, and each look-up that matches,
        is a tick.
    idle_ticks : int
        Ticks from its last use to its eviction.
    more_blocks : int
        How many blocks more the cache would have had to hold for the first to be in it now.
    more_blocks_for_all : int
        The same for all of them.
    by_adapter : bool
        Whether it went for its adapter's quota, or by :meth:`RadixTree.evict_from`. Then the two fields above count
        the blocks that this adapter alone would have had to hold more.
    """

    blocks: int
    evictions_ago: int
    ticks_ago: int
    idle_ticks: int
    more_blocks: int
    more_blocks_for_all: int
    by_adapter: bool


class PassedSnapshot(NamedTuple):
    """A snapshot inside a match that the session may not use, deeper than the one that it may.

    Attributes
    ----------
    depth : int
        Tokens that it covers.
    is_spilled : bool
        Whether it is in a tier and not in a slot.
    is_tail : bool
        Whether it is the tail of another session. Else it is hidden by the setting `hermetic`.
    """

    depth: int
    is_spilled: bool
    is_tail: bool


class LostSnapshotInfo(NamedTuple):
    """A snapshot inside a match that the index had once, deeper than the one that is found.

    Attributes
    ----------
    depth : int
        Tokens that it covered.
    cause : str
        ``"evicted"``; ``"dropped"``, as too shallow to be spilled; ``"forgotten"``, for its bytes in the tier were
        given up; or ``"replaced"`` by a newer tail of its session.
    ticks_ago : int
        How far the cache's clock has gone on since then.
    """

    depth: int
    cause: str
    ticks_ago: int


class SnapshotExplanation(NamedTuple):
    """Which snapshot a look-up would find, and why no deeper one.

    Attributes
    ----------
    reason : str
        One of

        * ``"found"``;
        * ``"no_match"``: nothing matches, so none is looked for;
        * ``"none"``: none was registered inside the match;
        * ``"other_session"``: the deepest is the tail of another session;
        * ``"hermetic"``: the deepest is another session's, and each finds its own alone;
        * ``"lost"``: the deepest is in the index no more;
        * ``"beyond_match"``: all are deeper than the match, and so are of no use.
    depth : int
        Tokens that the one found covers; 0 without one.
    is_spilled : bool
        Whether it is in a tier and not in a slot.
    is_tail : bool
        Whether it is a session's tail.
    recompute_tokens : int
        Matched tokens beyond it.
    passed : tuple of PassedSnapshot
        Those that are deeper and not for this session, deepest first.
    lost : tuple of LostSnapshotInfo
        Those that are deeper and are remembered as lost, deepest first.
    beyond_match : int or None
        The depth of the shallowest one of this prompt that is deeper than the match and would be for this session.
    """

    reason: str
    depth: int = 0
    is_spilled: bool = False
    is_tail: bool = False
    recompute_tokens: int = 0
    passed: tuple[PassedSnapshot, ...] = ()
    lost: tuple[LostSnapshotInfo, ...] = ()
    beyond_match: int | None = None


class Explanation(NamedTuple):
    """Where the match of a prompt ends and why, as of the call of :meth:`RadixTree.explain`.

    ``str()`` of it is :meth:`words`.

    Attributes
    ----------
    reason : str
        Why it ends there: one of

        * ``"whole_prompt"``: there is no more of it; also of a prompt without tokens;
        * ``"partial_block"``: what is left is shorter than a block, and partial tails are not shared;
        * ``"tail_not_cached"``: the same where they are shared, but no stored block begins with it;
        * ``"evicted"``: the next block was cached and is remembered as evicted;
        * ``"other_adapter"``: it is cached under another adapter;
        * ``"hidden"``: it is stored, but was released once too often, so that look-ups pass it by;
        * ``"never_seen"``: it was never cached under this adapter;
        * ``"not_cached"``: it is not cached, and whether it ever was is not remembered.
    num_tokens : int
        Tokens of the prompt.
    matched_tokens : int
        Tokens that a look-up would match.
    matched_blocks : int
        Full blocks among them.
    block_size : int
        Tokens per block.
    adapter_id : int
        The adapter asked for.
    session_hash : int
        The session asked for.
    evicted : EvictedPrefix or None
        What is remembered of the blocks after the match; None without ``ghosts=``, too.
    other_adapter : int or None
        The adapter under which most of the prompt is cached, if that is more than under the one asked for.
    other_adapter_tokens : int
        How much that is; 0 if there is none.
    ghosts : int
        Evictions that the cache remembers.
    snapshot : SnapshotExplanation
        The same for the snapshots.
    """

    reason: str
    num_tokens: int
    matched_tokens: int
    matched_blocks: int
    block_size: int
    adapter_id: int
    session_hash: int
    evicted: EvictedPrefix | None
    other_adapter: int | None
    other_adapter_tokens: int
    ghosts: int
    snapshot: SnapshotExplanation

    def __str__(self) -> str:
        return self.words()

    def words(self) -> str:
        """Say it in a few sentences, one to a line."""
        return "\n".join([*self._of_blocks(), *self._of_snapshots()])

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as plain values, those of parts as objects in them."""
        return {
            **self._asdict(),
            "evicted": None if self.evicted is None else self.evicted._asdict(),
            "snapshot": {
                **self.snapshot._asdict(),
                "passed": [passed._asdict() for passed in self.snapshot.passed],
                "lost": [lost._asdict() for lost in self.snapshot.lost],
            },
        }

    def as_json(self) -> str:
        """Give :meth:`as_dict` as one line of JSON."""
        return json.dumps(self.as_dict())

    def _of_blocks(self) -> Iterator[str]:
        blocks = f"{_counted(self.matched_blocks, 'full block')} of {self.block_size:,}"
        if self.block_size == 1:
            blocks = "each token is a block"
        elif self.matched_tokens > self.matched_blocks * self.block_size:
            blocks += " and a part of the next"
        yield f"{self.matched_tokens:,} of {_counted(self.num_tokens, 'token')} match: {blocks}."
        left = self.num_tokens - self.matched_tokens
        match self.reason:
            case "whole_prompt":
                yield "This is the whole prompt."
            case "partial_block":
                yield f"The last {_counted(left, 'token')} fill no block, and partial tails are not shared."
            case "tail_not_cached":
                yield f"The last {_counted(left, 'token')} fill no block, and no stored block begins with them."
            case "hidden":
                yield "The next block is stored, but was released more often than it was held: look-ups pass it by."
            case "never_seen":
                yield f"The next block was never cached under adapter {self.adapter_id}."
            case "not_cached" if self.ghosts:
                yield "The next block is not cached: never seen, or gone for longer than the cache remembers."
            case "not_cached":
                yield "The next block is not cached: never seen, or evicted. A cache with ghosts= could tell which."
        if self.evicted is not None:
            yield from self._of_evicted(self.evicted)
        if self.other_adapter is not None:
            yield f"Adapter {self.other_adapter} has {_counted(self.other_adapter_tokens, 'token')} of this prompt."

    def _of_evicted(self, evicted: EvictedPrefix) -> Iterator[str]:
        yield (
            f"The next block was cached and evicted {_counted(evicted.ticks_ago, 'tick')} of the clock ago, "
            f"{evicted.idle_ticks:,} after its last use; {_counted(evicted.evictions_ago, 'block')} went after it."
        )
        who = f"Adapter {self.adapter_id}" if evicted.by_adapter else "The cache"
        to_hold = "to be allowed" if evicted.by_adapter else "to hold"
        sentence = f"{who} would have had {to_hold} {_counted(evicted.more_blocks, 'block')} more to keep it"
        if evicted.blocks > 1:
            sentence += f", and {evicted.more_blocks_for_all:,} to keep the {evicted.blocks:,} that follow each other"
        yield f"{sentence}."

    def _of_snapshots(self) -> Iterator[str]:
        snapshot = self.snapshot
        match snapshot.reason:
            case "found":
                kind = "tail" if snapshot.is_tail else "snapshot"
                place = "spilled" if snapshot.is_spilled else "in a slot"
                yield (
                    f"The deepest {kind} for the session covers {_counted(snapshot.depth, 'token')} and is {place}; "
                    f"{_counted(snapshot.recompute_tokens, 'matched token')} are beyond it."
                )
            case "no_match":
                yield "Without a match no snapshot is looked for."
            case "none":
                yield "No snapshot is registered inside the match."
            case _:
                yield "No snapshot inside the match is for the session."
        for passed in snapshot.passed:
            why = "it is the tail of another session" if passed.is_tail else "it is another session's (hermetic)"
            yield f"One of {_counted(passed.depth, 'token')} was passed over: {why}."
        for lost in snapshot.lost:
            yield (
                f"One of {_counted(lost.depth, 'token')} {_CAUSES[lost.cause]}, "
                f"{_counted(lost.ticks_ago, 'tick')} of the clock ago."
            )
        if snapshot.beyond_match is not None:
            yield (
                f"One of {_counted(snapshot.beyond_match, 'token')} is registered beyond the match: "
                f"its blocks are not all cached."
            )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"

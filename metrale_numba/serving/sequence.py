"""One request, from the look-up of its prompt to its end: :class:`Sequence`.

What a sequence holds is kept apart from the object that the engine has, in :class:`Holdings`, so that it can be given
back when the engine has lost that object.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from metrale_numba.arguments import as_count, as_tokens
from metrale_numba.errors import MetraleError
from metrale_numba.interface import EMPTY_IDS, NONE, Ids, IdSequence, Tokens

if TYPE_CHECKING:
    from metrale_numba.serving.serving_cache import ServingCache

__all__ = ["Holdings", "Sequence", "SequenceEnded"]


class SequenceEnded(MetraleError, RuntimeError):
    """A sequence was asked for something after its end. Nothing was done."""


def _view(array: Ids) -> Ids:
    view = array[:]
    view.setflags(write=False)
    return view


class Holdings:
    """What a sequence has in the pools and in the cache. Changed with the serving cache's lock held, by its one owner.

    Attributes
    ----------
    tokens : ndarray of uint32
        Room for tokens, of which the first `num_tokens` are the sequence's; they never change.
    table : ndarray of uint32
        A block for each `block_size` tokens; replaced and never written to.
    disks : ndarray of uint32 or None
        The disk block of each, or NONE; replaced and never written to. None without a pool of them.
    held : int
        Tokens whose nodes it holds in the cache, whole blocks.
    slot, slot_tokens : int or None, int
        The slot lent by the look-up, and the depth of the snapshot in it.
    epoch : int
        That of its adapter when it began.
    is_counted : bool
        Whether its request is among those that were counted.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "cached_tokens",
        "disks",
        "epoch",
        "had_snapshot",
        "held",
        "is_counted",
        "is_ended",
        "num_tokens",
        "prompt_tokens",
        "session",
        "slot",
        "slot_tokens",
        "table",
        "tokens",
    )

    def __init__(self, tokens: Ids, session: int, adapter: int, *, has_disks: bool) -> None:
        self.tokens = tokens
        self.num_tokens = tokens.size
        self.session = session
        self.adapter = adapter
        self.epoch = 0
        self.table = EMPTY_IDS
        self.disks: Ids | None = EMPTY_IDS if has_disks else None
        self.held = 0
        self.cached_tokens = 0
        self.slot: int | None = None
        self.slot_tokens = 0
        self.prompt_tokens = tokens.size
        self.had_snapshot = False
        self.is_counted = False
        self.is_ended = False

    def append(self, tokens: Ids) -> None:
        """Put tokens behind the others."""
        end = self.num_tokens + tokens.size
        if end > self.tokens.size:
            # Twice the room, so that a token at a time costs no copy of all before it.
            room = np.empty(max(end, 2 * self.tokens.size), np.uint32)
            room[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = room
        self.tokens[self.num_tokens : end] = tokens
        self.num_tokens = end

    def extend(self, blocks: Ids) -> None:
        """Put blocks behind the others."""
        self.table = np.concatenate([self.table, blocks])
        if self.disks is not None:
            self.disks = np.concatenate([self.disks, np.full(blocks.size, NONE, np.uint32)])

    def disks_in_use(self) -> Ids:
        """List the disk blocks of its blocks."""
        return EMPTY_IDS if self.disks is None else self.disks[self.disks != NONE]


class Sequence:
    """One request: its tokens, its blocks, and what it holds in the cache until it ends.

    :meth:`ServingCache.begin` makes it. Used in a ``with`` statement, it ends at the end of that; otherwise call
    :meth:`finish` or :meth:`abort`. It is for one thread at a time; different sequences are for any threads at once.
    One that was lost without an end is given back, with a :class:`ResourceWarning`.
    """

    __slots__ = ("__weakref__", "_holdings", "_serving")

    def __init__(self, serving: ServingCache, holdings: Holdings) -> None:
        self._serving = serving
        self._holdings = holdings

    def __del__(self) -> None:
        holdings = getattr(self, "_holdings", None)
        if holdings is None or holdings.is_ended or sys.is_finalizing():
            return
        # No call from here: Python may run this inside another call that has the lock.
        self._serving._forgotten.append(holdings)
        warnings.warn(f"a sequence of {holdings.num_tokens} tokens was lost without an end", ResourceWarning, 2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Two objects would both end it.
        raise TypeError("a Sequence cannot be copied or pickled: it is one request")

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def __repr__(self) -> str:
        state = "ended" if self.is_ended else "stale" if self.is_stale else "running"
        return (
            f"<Sequence: {self.num_tokens} tokens, {self.cached_tokens} cached, {self._holdings.table.size} blocks, "
            f"{state}>"
        )

    @property
    def tokens(self) -> Ids:
        """The prompt and what was appended to it: uint32, read-only."""
        return _view(self._holdings.tokens[: self._holdings.num_tokens])

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self._holdings.num_tokens

    @property
    def session(self) -> int:
        """The conversation, or 0."""
        return self._holdings.session

    @property
    def adapter(self) -> int:
        """The adapter under which it is computed."""
        return self._holdings.adapter

    @property
    def cached_tokens(self) -> int:
        """How many tokens had their KV in the cache when it began; it is in the first blocks of the table.

        Rows of these tokens must not be written to, save by a model that recomputes nothing but its state.
        """
        return self._holdings.cached_tokens

    @property
    def compute_from(self) -> int:
        """The first token to compute.

        For a model without recurrent state `cached_tokens`, for a hybrid one the depth of the snapshot: from there to
        `cached_tokens`, only the state is computed, for the KV is there.
        """
        return self._holdings.slot_tokens if self._serving.is_hybrid else self._holdings.cached_tokens

    @property
    def block_table(self) -> Ids:
        """A block for each `block_size` tokens: uint32, read-only, and never changed; a longer one replaces it."""
        return _view(self._holdings.table)

    @property
    def disk_table(self) -> Ids:
        """The disk block of each block in the table, NONE where there is none: uint32, read-only."""
        disks = self._holdings.disks
        return _view(np.full(self._holdings.table.size, NONE, np.uint32) if disks is None else disks)

    @property
    def snapshot_slot(self) -> int | None:
        """The slot with the state after `snapshot_tokens` tokens; lent until :meth:`release_snapshot`, or the end."""
        return self._holdings.slot

    @property
    def snapshot_tokens(self) -> int:
        """The depth of the snapshot that it began with; 0 without one."""
        return self._holdings.slot_tokens

    @property
    def published(self) -> int:
        """How many of its tokens it holds in the cache: whole blocks that nobody can evict while it runs."""
        return self._holdings.held

    @property
    def is_stale(self) -> bool:
        """Whether the cache forgot its adapter, or everything, since it began.

        What it computes is then of no use to others: it may go on, but neither its blocks nor its snapshots enter the
        cache.
        """
        return self._serving._is_stale(self._holdings)

    @property
    def is_ended(self) -> bool:
        """Whether :meth:`finish` or :meth:`abort` was called."""
        return self._holdings.is_ended

    def append(self, tokens: Tokens) -> None:
        """Add tokens behind the others: what was decoded, or the next part of the prompt.

        Changes the sequence only, and takes no block: see :meth:`allocate`.

        Parameters
        ----------
        tokens : sequence of int, shape (n,)
            The tokens.

        Raises
        ------
        SequenceEnded
            After the end.
        TypeError, ValueError
            If `tokens` are no tokens; nothing has changed then.
        """
        self._require_running()
        more = as_tokens(tokens)
        self._holdings.append(more)

    def allocate(self, n: int | None = None) -> Ids:
        """Extend the block table, evicting from the cache what nobody holds if blocks are short.

        Takes references in the pool.

        Parameters
        ----------
        n : int, optional
            How many blocks. Default: as many as the tokens lack.

        Returns
        -------
        ndarray of uint32, shape (n,)
            The new blocks, which are at the end of the table now.

        Raises
        ------
        OutOfBlocks
            If there are not as many, because running sequences hold the rest. Nothing has changed then. End or abort
            a sequence, or try again when one has ended.
        SequenceEnded
            After the end.
        TypeError, ValueError
            If `n` is not a number of blocks; nothing has changed then.
        """
        self._require_running()
        wanted = None if n is None else as_count(n, "n")
        return self._serving._allocate(self._holdings, wanted)

    def set_disk_blocks(self, first: int, ids: IdSequence) -> None:
        """Say in which disk blocks the blocks of the table are stored as well.

        The sequence takes over the caller's reference on each, and gives them to the cache with its next
        :meth:`publish`.

        Parameters
        ----------
        first : int
            The place in the table of the first.
        ids : sequence of int, shape (n,)
            Disk blocks, allocated from the serving cache's `disk_blocks`.

        Raises
        ------
        SequenceEnded
            After the end.
        RefcountError
            If one of them is free.
        TypeError, ValueError
            If there are no such places in the table, one of them has a disk block already, or `ids` are no disk
            blocks; nothing has changed then, and the references are still the caller's.
        """
        self._require_running()
        first = as_count(first, "first")
        blocks = as_tokens(ids, "ids")
        self._serving._set_disk_blocks(self._holdings, first, blocks)

    def publish(self, upto: int) -> int:
        """Let others share what is computed: the first `upto` tokens, whose KV has been written.

        Stores whole blocks in the cache, and holds them until the end; with partial-tail sharing, also the tokens
        behind the last whole block. Call it as often as you like, after each chunk of a prefill and while decoding.
        Does nothing for a stale sequence.

        Parameters
        ----------
        upto : int
            How many tokens are computed.

        Returns
        -------
        int
            `published`. Less than `upto` by what is behind the last whole block, and where a quota allows no more.

        Raises
        ------
        SequenceEnded
            After the end.
        TypeError, ValueError
            If `upto` is not a number of tokens, or more than there are, or more than the table has room for.
            Nothing has changed then.
        """
        self._require_running()
        upto = as_count(upto, "upto", self.num_tokens)
        room = self._holdings.table.size * self._serving.block_size
        if upto > room:
            raise ValueError(f"upto is {upto}, but the block table has room for {room} tokens: allocate first")
        return self._serving._publish(self._holdings, upto)

    def snapshot(self, depth: int, write: Callable[[int], object]) -> bool:
        """Save the recurrent state after `depth` tokens, for every sequence that begins with these.

        Takes a slot, evicting another snapshot if none is free, and hands it to the cache.

        Parameters
        ----------
        depth : int
            How many tokens are in the state.
        write : callable
            Called once with the slot, to copy the state into it; no lock is held meanwhile. What it raises is passed
            on, and the slot is free again.

        Returns
        -------
        bool
            Whether it was saved. Not if every slot is in use, the sequence is stale, or caching is off.

        Raises
        ------
        SequenceEnded
            After the end.
        TypeError, ValueError
            If `depth` is not a number of tokens of this sequence, or `write` cannot be called; nothing has changed
            then.
        """
        self._require_running()
        depth = self._as_depth(depth, "depth")
        _require_callable(write, "write")
        return self._serving._save_snapshot(self._holdings, depth, write)

    def tail_snapshot(
        self,
        depth: int,
        write: Callable[[int], object],
        sibling: tuple[int, Callable[[int], object]] | None = None,
    ) -> bool:
        """Save the recurrent state for the next turn of this conversation alone, in place of its earlier tail.

        As :meth:`snapshot`, under the sequence's session. The session's earlier tail and sibling go when the new tail
        is there, and not before. A look-up finds no snapshot deeper than what it matches, and it matches whole blocks
        unless it ends inside one: take the tail at the last block end, or else a sibling there.

        Parameters
        ----------
        depth : int
            How many tokens are in the state.
        write : callable
            Called once with the slot, to copy the state into it.
        sibling : tuple of int and callable, optional
            The same for a second state, usually at the last whole block, which lives and goes with the tail, but
            which every sequence may use. It is left out if there is no slot for it.

        Returns
        -------
        bool
            Whether the tail was saved. Not, besides the reasons of :meth:`snapshot`, if the sequence has no session.

        Raises
        ------
        SequenceEnded
            After the end.
        TypeError, ValueError
            If an argument is not what it should be; nothing has changed then.
        """
        self._require_running()
        depth = self._as_depth(depth, "depth")
        _require_callable(write, "write")
        if sibling is not None:
            if not isinstance(sibling, tuple) or len(sibling) != 2:
                raise TypeError(f"sibling must be a depth and what writes its state, not {type(sibling).__name__}")
            sibling = (self._as_depth(sibling[0], "sibling[0]"), sibling[1])
            _require_callable(sibling[1], "sibling[1]")
        if self.session == 0:
            # No look-up is ever given a tail of session 0, so it would only keep a slot from others.
            return False
        return self._serving._save_tail(self._holdings, depth, write, sibling)

    def release_snapshot(self) -> None:
        """Give back the slot that was lent at the beginning, once the state has been copied out of it.

        Drops a reference in the pool. Without a slot it does nothing. `compute_from` stays what it was.

        Raises
        ------
        SequenceEnded
            After the end.
        """
        self._require_running()
        self._serving._release_slot(self._holdings)

    def finish(self) -> None:
        """End the sequence: what it published stays in the cache, what it holds is given back.

        Doing it again does nothing.
        """
        self._serving._end(self._holdings, is_abort=False)

    def abort(self) -> None:
        """End the sequence before its time; as :meth:`finish`, but counted apart.

        One that never got its blocks is counted as refused, and its request as none.
        """
        self._serving._end(self._holdings, is_abort=True)

    def _as_depth(self, depth: object, name: str) -> int:
        return as_count(depth, name, self.num_tokens)

    def _require_running(self) -> None:
        if self._holdings.is_ended:
            raise SequenceEnded(f"{self!r} has come to its end")


def _require_callable(write: object, name: str) -> None:
    if not callable(write):
        raise TypeError(f"{name} must be callable with a slot, not {type(write).__name__}")

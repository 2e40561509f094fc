"""The engine: what it is made of, and whose turn it is."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from metrale_numba.arguments import as_count, as_tokens, as_u64, shown
from metrale_numba.engines.transformers.block_store import BlockStore
from metrale_numba.engines.transformers.execution import EngineMemory, Execution
from metrale_numba.engines.transformers.imports import Model, Tensor, torch
from metrale_numba.engines.transformers.model_runner import ModelRunner
from metrale_numba.engines.transformers.requests import Generation, Progress, Request
from metrale_numba.engines.transformers.saved_engine import SavedEngine, save_engine
from metrale_numba.engines.transformers.state_store import StateStore
from metrale_numba.interface import Tokens
from metrale_numba.no_caching import NoPrefixCaching
from metrale_numba.radix_tree import RadixTree
from metrale_numba.serving import OutOfBlocks, ServingCache, TierStore
from metrale_numba.settings import DEFAULT_BLOCK_SIZE

__all__ = ["TransformersEngine", "greedy"]


def greedy(logits: Tensor) -> int:
    """Choose the likeliest token, of equals the first."""
    return int(logits.argmax())


class TransformersEngine:
    """A model, its memory, and the cache that knows what is in it. For one thread.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; it is put into evaluation mode.
    num_blocks : int
        KV blocks. Memory is taken for all of them at once.
    num_slots : int, default 0
        Snapshot slots, likewise. A model with recurrent layers or sliding windows needs at least one; a model without
        has no use for any, and none are made.
    block_size : int, optional
        Tokens per block; default 16. Not with `cache` or `saved`, which have their own.
    cache : RadixTree or NoPrefixCaching, optional
        The index, empty. Default: a new tree.
    saved : str or path-like, optional
        A folder in which :meth:`save` has put what an engine with the same model had cached. Snapshots come back if
        `tier` is the one that it had, and outlived it.
    tier : TierStore, optional
        Where snapshots go that have no slot.
    chunk_tokens : int, default 512
        The most tokens of a prompt that are computed at once, between two turns of the others.
    snapshot_every : int, default 0
        Blocks between two snapshots of a prompt, besides the one at its end and the one where its cached part ends; 0
        for no others.
    continuation : {"auto", "chunk", "token"}, default "auto"
        How the model goes on from a state: with many tokens at once, or one by one. ``"auto"`` tries it out.
    choose : callable, default greedy
        Called with the logits after the last token; gives the next, as any integer or a tensor of one.
    activate_adapter : callable, optional
        Called with the number of an adapter, 0 for the model itself, before the model runs under another than before,
        and in any case when the engine is made and before a call's first prompt. Without it, no prompt may name one.
    max_running : int, default 16
        The most prompts that have blocks at once.
    spill_min_tokens : int, default 0
        Snapshots less deep than this are dropped and not spilled.

    Attributes
    ----------
    serving : ServingCache
        The books.
    memory : EngineMemory
        The tensors.
    runner : ModelRunner
        The model.

    Raises
    ------
    ImportError
        When the module is imported, if PyTorch or transformers are missing.
    ValueError
        If the model cannot be continued exactly, or an argument is not what it should be.
    TypeError
        If an argument is not what it should be.
    FileNotFoundError
        If nothing was saved in `saved`.
    OSError, CacheFileError
        If what was saved cannot be read, or is not what was written.

    Notes
    -----
    The model is known by its class, its configuration and all its weights, which are read once when the engine is made.
    They stay as they are while it is in use, but for what `activate_adapter` does to them.

    The weights of adapters are not known, and what was saved for one is trusted. After those of adapter `n` have
    changed, call ``engine.serving.drop_adapter(n)``; if that was after a save, in the engine that was made from it,
    before its first prompt. Or give the changed adapter a number that none had before: one made of a hash of its
    weights is safe in any case.

    Engines may share a model, also under adapters, as long as nobody but the one engine activates any while
    :meth:`generate` runs.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        num_slots: int = 0,
        *,
        block_size: int | None = None,
        cache: RadixTree | NoPrefixCaching | None = None,
        saved: str | os.PathLike[str] | None = None,
        tier: TierStore | None = None,
        chunk_tokens: int = 512,
        snapshot_every: int = 0,
        continuation: str = "auto",
        choose: Callable[[Tensor], int] = greedy,
        activate_adapter: Callable[[int], object] | None = None,
        max_running: int = 16,
        spill_min_tokens: int = 0,
    ) -> None:
        if sum(given is not None for given in (block_size, cache, saved)) > 1:
            raise ValueError("block_size, cache and saved each say what the block size is; give one of them")
        if not callable(choose):
            raise TypeError(f"choose must be callable, not {shown(choose)}")
        if cache is None:
            cache = RadixTree(block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size)
        elif not isinstance(cache, (RadixTree, NoPrefixCaching)):
            raise TypeError(f"cache must be a RadixTree or a NoPrefixCaching, not {type(cache).__name__}")
        found = None if saved is None else SavedEngine(saved)
        block_size = cache.block_size if found is None else found.block_size
        self.runner = ModelRunner(model, continuation, activate_adapter)
        num_blocks = as_count(num_blocks, "num_blocks")
        num_slots = as_count(num_slots, "num_slots")
        if self.runner.layout.slot_bytes == 0:
            num_slots = 0
        elif num_slots == 0:
            raise ValueError(f"{type(model).__name__} keeps states, so num_slots must be at least 1")
        chunk_tokens = as_count(chunk_tokens, "chunk_tokens")
        snapshot_every = as_count(snapshot_every, "snapshot_every") * block_size
        self._max_running = as_count(max_running, "max_running")
        if chunk_tokens == 0 or self._max_running == 0:
            raise ValueError("chunk_tokens and max_running must be at least 1")
        self._choose = choose
        self.memory = EngineMemory(
            BlockStore(self.runner.layout, num_blocks, block_size), StateStore(self.runner.layout, num_slots)
        )
        options: dict[str, Any] = {
            "slots": num_slots,
            "tier": tier,
            "model": self.runner.fingerprint(),
            "dtype": str(model.dtype),
            "spill_min_tokens": spill_min_tokens,
            "hybrid": self.runner.layout.slot_bytes > 0,
        }
        if found is None:
            self.serving = ServingCache(cache, num_blocks, self.memory, **options)
        else:
            self.serving = ServingCache.load(found.index, num_blocks, self.memory, **options)
            found.restore(self.serving, self.memory.blocks)
        self._execution = Execution(self.runner, self.memory, self.serving, chunk_tokens, snapshot_every)

    def generate(
        self,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        *,
        sessions: Sequence[int] | None = None,
        adapters: Sequence[int] | None = None,
        stop_tokens: Collection[int] = (),
    ) -> list[Generation]:
        """Generate for each prompt. They take turns, a chunk of the prompt or a new token at a time.

        Fills the cache, and returns when all are done. A prompt is let in when the one before it has been computed, so
        that it finds what the two have in common; if there are no blocks for it, when another has ended. Where a
        running one finds none for its next token, the one that came last gives its own up, and goes on from what is
        cached when there is room again.

        Parameters
        ----------
        prompts : sequence of token sequences
            At least one token each.
        max_new_tokens : int
            How many tokens to generate for each, at least 1.
        sessions : sequence of int, optional
            The conversation of each prompt. The next prompt of the same conversation finds the state at the end of
            this turn. Default: none.
        adapters : sequence of int, optional
            What each is computed under. Default: the model itself.
        stop_tokens : collection of int, default ()
            A prompt is done after one of these, which is part of the answer.

        Returns
        -------
        list of Generation
            In the order of the prompts.

        Raises
        ------
        OutOfBlocks
            If a prompt and what is to be generated for it need more blocks than there are, and nothing was done; or
            if blocks are held by sequences that are not this call's.
        TypeError, ValueError
            If an argument is not what it should be, and nothing was done; or if `choose` gave what is no token of the
            model, and all of this call's sequences have ended.
        """
        requests = self._requests(prompts, max_new_tokens, sessions, adapters)
        # As plain numbers: a tensor in a set is equal to nothing but itself.
        stops = frozenset(as_tokens(list(stop_tokens), "stop_tokens").tolist())
        # Another engine may have used the model since, or the weights of the active adapter have changed.
        self.runner.forget_adapter()
        with torch.inference_mode():
            _Turns(self._execution, self._chosen, self._max_running, requests, max_new_tokens, stops).take()
        return [request.result() for request in requests]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is cached to a folder, for an engine that takes over; see the parameter `saved`.

        Changes nothing here. A tier that outlives the process is given the snapshots; without one they are left out.
        Killed at any moment, the folder has the earlier save or this one, whole.

        Parameters
        ----------
        path : str or path-like
            The folder, which is made if it is not there. It is this engine's alone, and as secret as the prompts.

        Raises
        ------
        TypeError, ValueError
            If `path` is not what it should be, or there is nothing to save because caching is off.
        OSError
            If it cannot be written; an earlier save is untouched then.
        """
        save_engine(path, self.serving, self.memory.blocks)

    def _chosen(self, logits: Tensor) -> int:
        # An integer of NumPy or PyTorch is to be found among stop tokens and in an answer's list as any other.
        return as_count(self._choose(logits), "the token that choose gave", self.runner.vocab_size - 1)

    def _requests(
        self,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        sessions: Sequence[int] | None,
        adapters: Sequence[int] | None,
    ) -> list[Request]:
        if as_count(max_new_tokens, "max_new_tokens") == 0:
            raise ValueError("max_new_tokens must be at least 1")
        for name, numbers in (("sessions", sessions), ("adapters", adapters)):
            if numbers is not None and len(numbers) != len(prompts):
                raise ValueError(f"{name} has {len(numbers)} entries for {len(prompts)} prompts")
        requests = []
        for position, prompt in enumerate(prompts):
            tokens = as_tokens(prompt, f"prompts[{position}]")
            if tokens.size == 0:
                raise ValueError(f"prompts[{position}] is empty, and must be at least one token")
            unknown = np.flatnonzero(tokens >= self.runner.vocab_size)
            if unknown.size:
                place = int(unknown[0])
                raise ValueError(
                    f"prompts[{position}][{place}] is {tokens[place]}, outside 0..{self.runner.vocab_size - 1}"
                )
            most = self.runner.most_tokens
            if most is not None and tokens.size + max_new_tokens > most:
                raise ValueError(
                    f"prompts[{position}] has {tokens.size} tokens, and with {max_new_tokens} new ones needs more than "
                    f"the {most} positions of the model"
                )
            # The last new token is handed out and never computed.
            needed = -(-(tokens.size + max_new_tokens - 1) // self.serving.block_size)
            if needed > self.serving.blocks.num_blocks:
                total = self.serving.blocks.num_blocks
                free = self.serving.num_free_blocks
                raise OutOfBlocks(
                    f"prompts[{position}] needs {needed} blocks, and there are {total}", needed, free, total
                )
            session = 0 if sessions is None else as_u64(sessions[position], f"sessions[{position}]")
            adapter = 0 if adapters is None else as_u64(adapters[position], f"adapters[{position}]")
            if adapter and not self.runner.takes_adapters:
                raise ValueError(f"adapters[{position}] is {adapter}, but the engine has no activate_adapter")
            requests.append(Request(tokens.tolist(), session, adapter))
        return requests


class _Turns:
    """The requests of one call: who runs, who waits, and who gives way."""

    def __init__(
        self,
        execution: Execution,
        choose: Callable[[Tensor], int],
        max_running: int,
        requests: list[Request],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
    ) -> None:
        self._execution = execution
        self._choose = choose
        self._max_running = max_running
        self._max_new_tokens = max_new_tokens
        self._stop_tokens = stop_tokens
        self._waiting = deque(requests)
        # In the order in which they were let in. The last gives way first, so the first always gets on.
        self._running: list[Progress] = []
        # Whether blocks are short: nobody is let in then until somebody has ended.
        self._is_full = False
        self._started = perf_counter()

    def take(self) -> None:
        """Give each its turn until all are done; if that fails, end them all."""
        try:
            while self._waiting or self._running:
                earlier = tuple(self._running)
                self._let_in()
                for progress in earlier:
                    # One may have given way to another of this round.
                    if not progress.sequence.is_ended:
                        self._advance(progress)
        finally:
            for progress in self._running:
                progress.sequence.abort()

    def _let_in(self) -> None:
        # One prompt at a time: what it has in common with the next is then computed once.
        while (
            self._waiting
            and not self._is_full
            and len(self._running) < self._max_running
            and not any(progress.computed < progress.sequence.num_tokens - 1 for progress in self._running)
        ):
            request = self._waiting[0]
            try:
                progress = self._execution.begin(request)
            except OutOfBlocks:
                if not self._running:
                    raise
                self._is_full = True
                return
            self._waiting.popleft()
            self._running.append(progress)
            if request.num_preemptions == 0:
                request.cached_tokens = progress.sequence.cached_tokens
                request.compute_from = progress.sequence.compute_from
            self._advance(progress)

    def _advance(self, progress: Progress) -> None:
        request, sequence = progress.request, progress.sequence
        logits = self._execution.compute(progress)
        if progress.computed < sequence.num_tokens:
            return
        token = self._choose(logits)
        request.generated.append(token)
        if len(request.generated) == 1:
            request.seconds_to_first_token = perf_counter() - self._started
        if len(request.generated) == self._max_new_tokens or token in self._stop_tokens:
            self._execution.finish(progress)
            self._running.remove(progress)
            self._is_full = False
            return
        sequence.append([token])
        self._find_room(progress)

    def _find_room(self, progress: Progress) -> None:
        while not progress.sequence.is_ended:
            try:
                progress.sequence.allocate()
                return
            except OutOfBlocks:
                if len(self._running) == 1:
                    raise
            last = self._running.pop()
            last.sequence.abort()
            last.request.num_preemptions += 1
            self._waiting.appendleft(last.request)
            self._is_full = True

"""One prompt on its way through an engine, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from metrale_numba.engines.transformers.imports import Cache, Tensor
from metrale_numba.serving import Sequence

__all__ = ["Generation", "Progress", "Request"]


class Generation(NamedTuple):
    """What was generated for one prompt.

    Attributes
    ----------
    tokens : list of int
        The new tokens.
    cached_tokens : int
        Tokens of the prompt whose KV was in the cache.
    compute_from : int
        The first token of the prompt that was computed: `cached_tokens`, or for a model with states the depth of the
        snapshot that was found.
    seconds_to_first_token : float
        From the call to the first new token, waiting included.
    num_preemptions : int
        How often it had to give its blocks up to others, and go on later.
    """

    tokens: list[int]
    cached_tokens: int
    compute_from: int
    seconds_to_first_token: float
    num_preemptions: int


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what has been generated for it so far.

    Attributes
    ----------
    prompt : list of int
        Its tokens.
    session, adapter : int
        Its conversation, and what it is computed under.
    generated : list of int
        The new tokens.
    earlier : Sequence or None
        The sequence with which it was begun the last time, by which the serving layer knows that it is the same.
    cached_tokens, compute_from, seconds_to_first_token, num_preemptions
        As in :class:`Generation`; of the first time that it was let in.
    """

    prompt: list[int]
    session: int
    adapter: int
    generated: list[int] = field(default_factory=list)
    earlier: Sequence | None = None
    cached_tokens: int = 0
    compute_from: int = 0
    seconds_to_first_token: float = 0.0
    num_preemptions: int = 0

    def result(self) -> Generation:
        """Sum up."""
        return Generation(
            self.generated, self.cached_tokens, self.compute_from, self.seconds_to_first_token, self.num_preemptions
        )


@dataclass(slots=True, eq=False)
class Progress:
    """A request that has blocks: what it holds, its tensors, and how far it is.

    Attributes
    ----------
    request : Request
        What is asked for.
    sequence : Sequence
        What it holds.
    cache : DynamicCache
        Keys, values and states of its computed tokens.
    computed : int
        How many those are.
    prompt_depth : int
        The last end of a block behind which a token is left to compute. The next turn has that much in common with
        this one, whatever becomes of the answer.
    snapshot_depths : frozenset of int
        Where a snapshot is to be taken.
    row : tensor
        The state after `row_depth` tokens: at the last end of a block, as far as it is kept there.
    row_depth : int
        0 if there is no such state.
    prompt_row : tensor or None
        The state after `prompt_depth` tokens, once it is known; for a sequence with a session.
    """

    request: Request
    sequence: Sequence
    cache: Cache
    computed: int
    prompt_depth: int
    snapshot_depths: frozenset[int]
    row: Tensor
    row_depth: int = 0
    prompt_row: Tensor = None

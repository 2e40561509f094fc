"""What a request of a trace is, and what a trace that cannot be read raises.

Relies on nothing but NumPy. Whoever yields a :class:`Request` keeps every promise written there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metrale_numba.errors import MetraleError

__all__ = ["LARGEST_HASH_ID", "TOKENS_PER_HASH_ID", "Request", "TraceError"]

TOKENS_PER_HASH_ID = 512
"""Tokens of the prompt that one hash id of a Mooncake trace or of a workload stands for."""

LARGEST_HASH_ID = 0xFFFF_FFFF
"""An id is spelled out with itself as the first token, and tokens are unsigned 32-bit."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as a trace tells of it: most often not its tokens, but which blocks of them it shares with others.

    Attributes
    ----------
    timestamp : float
        When the request arrived, in milliseconds from the start of the trace.
    input_length : int
        Tokens of the prompt.
    output_length : int
        Tokens generated in answer.
    hash_ids : array of uint32, shape (ceil(input_length / tokens_per_id),)
        One id per `tokens_per_id` tokens of the prompt, in order; where the last of them are fewer, their id may be
        missing. Two prompts of one adapter with an equal id at some place are equal up to there. With `tokens_per_id`
        1 these are the tokens themselves, which say nothing about what stands before them.
    tokens_per_id : int, default 512
        Tokens that one id stands for; the last one may stand for fewer.
    session : int, default 0
        The conversation that the request is a turn of, 1..2^64-1, or 0 for none.
    adapter : int, default 0
        The adapter it is computed under, 0..2^64-1. Prompts of two adapters share nothing.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: npt.NDArray[np.uint32]
    tokens_per_id: int = TOKENS_PER_HASH_ID
    session: int = 0
    adapter: int = 0


class TraceError(MetraleError):
    """A trace that cannot be read: what is wrong, in which file and on which line.

    Parameters
    ----------
    file : str
        The trace as the caller named it.
    line : int or None
        The line, counted from 1; None where the fault is in no single line.
    reason : str
        What is wrong with it.
    """

    def __init__(self, file: str, line: int | None, reason: str) -> None:
        self.file = file
        self.line = line
        self.reason = reason
        super().__init__(f"{file}: {reason}" if line is None else f"{file}:{line}: {reason}")

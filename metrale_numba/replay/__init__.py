"""Play the requests of a trace, or of a made-up chat workload, through a prefix cache and count what happens.

Relies on the :class:`~metrale_numba.interface.PrefixCache` contract alone, so any cache can be played.
Requests are made or read one at a time and never held together; the same requests always give the same counts.
"""

from metrale_numba.replay.player import (
    CallTimes,
    Replay,
    ReplayResult,
    default_block_size,
    prompt_tokens,
    spell,
    tokens_per_block,
)
from metrale_numba.replay.requests import TOKENS_PER_HASH_ID, Request, TraceError
from metrale_numba.replay.traces import TraceReader, open_trace
from metrale_numba.replay.workloads import WORKLOADS, chat_workload, workload

__all__ = [
    "TOKENS_PER_HASH_ID",
    "WORKLOADS",
    "CallTimes",
    "Replay",
    "ReplayResult",
    "Request",
    "TraceError",
    "TraceReader",
    "chat_workload",
    "default_block_size",
    "open_trace",
    "prompt_tokens",
    "spell",
    "tokens_per_block",
    "workload",
]

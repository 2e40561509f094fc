"""Play the requests of a trace, or of a made-up chat workload, through a prefix cache and count what happens.

Relies on the :class:`~metrale_numba.interface.PrefixCache` contract alone, so any cache can be played.
Requests are made or read one at a time and never held together; the same requests always give the same counts.
"""

from metrale_numba.replay.player import CallTimes, Replay, ReplayResult, spell
from metrale_numba.replay.requests import TOKENS_PER_HASH_ID, Request, TraceError, TraceReader
from metrale_numba.replay.workloads import chat_workload

__all__ = [
    "TOKENS_PER_HASH_ID",
    "CallTimes",
    "Replay",
    "ReplayResult",
    "Request",
    "TraceError",
    "TraceReader",
    "chat_workload",
    "spell",
]

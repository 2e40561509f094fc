"""Made-up workloads: requests in the form a trace has, for whoever has no trace.

Relies on NumPy's PCG64 stream, drawn from by `integers` alone. Promises the same requests for the same arguments on
every machine, so that counts taken on them can be written down; and that memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from metrale_numba.replay.requests import Request
from metrale_numba.replay.workloads.agent import agent_workload
from metrale_numba.replay.workloads.chat import chat_workload
from metrale_numba.replay.workloads.few_shot import few_shot_workload
from metrale_numba.replay.workloads.retrieval import retrieval_workload

__all__ = ["WORKLOADS", "agent_workload", "chat_workload", "few_shot_workload", "retrieval_workload", "workload"]

WORKLOADS: Final[dict[str, Callable[..., Iterator[Request]]]] = {
    "chat": chat_workload,
    "agent": agent_workload,
    "retrieval": retrieval_workload,
    "few-shot": few_shot_workload,
}
"""The generators by name. Each takes `seed`, and `requests` and `sessions` as keywords."""


def workload(name: str, seed: int, requests: int, sessions: int, **shape: int | None) -> Iterator[Request]:
    """Make up the requests of a workload.

    Parameters
    ----------
    name : str
        One of :data:`WORKLOADS`.
    seed : int
        Of the generator; 0 or more.
    requests : int
        How many requests to make.
    sessions : int
        Sessions that go on side by side; 1 or more.
    **shape
        What else the generator of that name takes.

    Returns
    -------
    iterator of Request
        In order of arrival; the same for the same arguments.

    Raises
    ------
    ValueError
        If there is no such workload.
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}, but {', '.join(WORKLOADS)}")
    return WORKLOADS[name](seed, requests=requests, sessions=sessions, **shape)

"""Agents: one task in many steps, each adding a tool's output to a growing context, and branches at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from metrale_numba.replay.requests import Request
from metrale_numba.replay.workloads.sessions import Draw, Ids, Text, popularity, side_by_side

__all__ = ["agent_workload"]

# Lengths are in tokens; a pair is the smallest and the largest that is drawn.
_AGENTS = 16
_INSTRUCTION_TOKENS = (2_048, 8_192)
_TASK_TOKENS = (64, 1_024)
_STEPS = (4, 24)
_CALL_TOKENS = (32, 256)
_TOOL_TOKENS = (32, 2_048)
# After one step in so many the task is split up.
_FORK_EVERY = 8
_BRANCHES = (2, 4)
_BRANCH_TASK_TOKENS = (32, 256)
_BRANCH_STEPS = (1, 4)
_REPORT_TOKENS = (128, 512)


def agent_workload(seed: int, *, requests: int, sessions: int) -> Iterator[Request]:
    """Make up the requests of `sessions` agents that are at work side by side, in the form a trace has.

    An agent is of one of 16 kinds, of which the k-th most popular is chosen 1/k as often as the first, and which
    share instructions and descriptions of tools. It takes 4 to 24 steps: each answer calls a tool, and the next prompt
    is the last with the call and what the tool put out. After one step in eight it forks into 2 to 4 branches, which
    share all up to there and take 1 to 4 steps of their own, in any order among each other; what each reports at its
    end goes into the context of the agent, which goes on when all have. A task that is done makes room for a new one.

    Parameters
    ----------
    seed : int
        Of the generator; 0 or more.
    requests : int
        How many requests to make.
    sessions : int
        Agents at work at any time; 1 or more.

    Yields
    ------
    Request
        In order of arrival. Branches are of the session of their agent.
    """
    draw = Draw(seed)
    ids = Ids()
    instructions: list[Text] = []
    for _ in range(_AGENTS):
        text = Text(ids)
        text.add(draw.between(_INSTRUCTION_TOKENS))
        instructions.append(text)
    sums = popularity(_AGENTS)

    def start(number: int) -> _Agent:
        return _Agent(draw, instructions[draw.ranked(sums)].copy(), number)

    return side_by_side(draw, start, requests=requests, sessions=sessions)


class _Thread:
    """A context that grows step by step: an agent's own, or that of one of its branches."""

    def __init__(self, text: Text, steps: int) -> None:
        self.text = text
        self.steps_left = steps


class _Agent:
    def __init__(self, draw: Draw, text: Text, number: int) -> None:
        self._draw = draw
        self._number = number
        text.add(draw.between(_TASK_TOKENS))
        self._trunk = _Thread(text, draw.between(_STEPS))
        self._branches: list[_Thread] = []
        self._reports = 0

    @property
    def is_over(self) -> bool:
        return not self._branches and self._trunk.steps_left == 0

    def ask(self, timestamp: int) -> Request:
        if self._branches:
            return self._ask_branch(timestamp)
        draw = self._draw
        request = self._step(self._trunk, timestamp)
        if self._trunk.steps_left and draw.below(_FORK_EVERY) == 0:
            for _ in range(draw.between(_BRANCHES)):
                branch = _Thread(self._trunk.text.copy(), draw.between(_BRANCH_STEPS))
                branch.text.add(draw.between(_BRANCH_TASK_TOKENS))
                self._branches.append(branch)
        return request

    def _ask_branch(self, timestamp: int) -> Request:
        draw = self._draw
        place = draw.below(len(self._branches))
        branch = self._branches[place]
        if branch.steps_left > 1:
            return self._step(branch, timestamp)
        report = draw.between(_REPORT_TOKENS)
        self._reports += report
        del self._branches[place]
        if not self._branches:
            self._trunk.text.add(self._reports)
            self._reports = 0
        return branch.text.as_request(timestamp, report, self._number)

    def _step(self, thread: _Thread, timestamp: int) -> Request:
        """Ask for the next call of a tool, and add it and what the tool puts out."""
        draw = self._draw
        call = draw.between(_CALL_TOKENS)
        request = thread.text.as_request(timestamp, call, self._number)
        thread.text.add(call + draw.between(_TOOL_TOKENS))
        thread.steps_left -= 1
        return request

"""Few-shot prompts: the examples of a task before each of many short questions."""

from __future__ import annotations

from collections.abc import Iterator

from metrale_numba.replay.requests import Request
from metrale_numba.replay.workloads.sessions import Draw, Ids, Text, popularity, side_by_side

__all__ = ["few_shot_workload"]

# Lengths are in tokens; a pair is the smallest and the largest that is drawn.
_TASKS = 512
_EXAMPLES = (4, 32)
_EXAMPLE_TOKENS = (64, 512)
_QUESTIONS = (1, 16)
_QUESTION_TOKENS = (16, 512)
_ANSWER_TOKENS = (1, 256)
# One question in so many goes on where the last one ended.
_FOLLOW_UP_EVERY = 4


def few_shot_workload(seed: int, *, requests: int, sessions: int) -> Iterator[Request]:
    """Make up the requests of `sessions` programs that ask questions of one kind each, in the form a trace has.

    A kind of question is one of 512 tasks, of which the k-th most popular is chosen 1/k as often as the first. Each
    has 4 to 32 examples, which stand before all its questions. A program asks 1 to 16 questions, and then makes room
    for a new one; one question in four is asked behind the one before and its answer, the others behind the examples.

    Parameters
    ----------
    seed : int
        Of the generator; 0 or more.
    requests : int
        How many requests to make.
    sessions : int
        Programs that ask at any time; 1 or more.

    Yields
    ------
    Request
        In order of arrival.
    """
    draw = Draw(seed)
    ids = Ids()
    tasks: list[Text] = []
    for _ in range(_TASKS):
        text = Text(ids)
        text.add(sum(draw.between(_EXAMPLE_TOKENS) for _ in range(draw.between(_EXAMPLES))))
        tasks.append(text)
    sums = popularity(_TASKS)

    def start(number: int) -> _Program:
        return _Program(draw, tasks[draw.ranked(sums)], number)

    return side_by_side(draw, start, requests=requests, sessions=sessions)


class _Program:
    def __init__(self, draw: Draw, examples: Text, number: int) -> None:
        self._draw = draw
        self._examples = examples
        self._text = examples.copy()
        self._number = number
        self._questions_left = draw.between(_QUESTIONS)

    @property
    def is_over(self) -> bool:
        return self._questions_left == 0

    def ask(self, timestamp: int) -> Request:
        draw = self._draw
        if draw.below(_FOLLOW_UP_EVERY) != 0:
            self._text = self._examples.copy()
        self._text.add(draw.between(_QUESTION_TOKENS))
        answer = draw.between(_ANSWER_TOKENS)
        request = self._text.as_request(timestamp, answer, self._number)
        self._text.add(answer)
        self._questions_left -= 1
        return request

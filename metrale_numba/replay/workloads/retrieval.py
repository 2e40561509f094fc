"""Retrieval: questions about documents that many ask about, in an order that depends on the question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from metrale_numba.replay.requests import TOKENS_PER_HASH_ID, Request
from metrale_numba.replay.workloads.sessions import Draw, Ids, Text, popularity, side_by_side

__all__ = ["retrieval_workload"]

# Lengths are in tokens; a pair is the smallest and the largest that is drawn.
_SYSTEM_PROMPT_TOKENS = (1_024, 2_048)
_DOCUMENTS = 1_000
_DOCUMENT_TOKENS = (256, 4_096)
_DOCUMENTS_FOUND = (2, 5)
_TURNS = (1, 4)
_QUESTION_TOKENS = (16, 256)
_ANSWER_TOKENS = (64, 512)

# As many rows of documents as are told apart: so many take about 30 MB, however long the workload is.
_ROWS_REMEMBERED = 65_536


def retrieval_workload(seed: int, *, requests: int, sessions: int) -> Iterator[Request]:
    """Make up the requests of `sessions` people that ask about documents side by side, in the form a trace has.

    A prompt is the one system prompt, the 2 to 5 documents that were found, in any order, and the question. Of 1,000
    documents the k-th most popular is found 1/k as often as the first. Two prompts share the documents they begin
    with: the same one behind another one is computed anew. Each of 1 to 4 turns adds a question to what was said
    before, with the answer; documents are found for the first. Who has no more questions makes room for another.

    Parameters
    ----------
    seed : int
        Of the generator; 0 or more.
    requests : int
        How many requests to make.
    sessions : int
        People asking at any time; 1 or more.

    Yields
    ------
    Request
        In order of arrival.
    """
    draw = Draw(seed)
    ids = Ids()
    library = _Library(draw, ids)

    def start(number: int) -> _Questions:
        return _Questions(draw, library.find(), number)

    return side_by_side(draw, start, requests=requests, sessions=sessions)


class _Row(NamedTuple):
    """The system prompt and documents behind it, as far as their ids are known."""

    tokens: int
    hash_ids: tuple[range, ...]
    """Ids of the full blocks, a range for each document."""


class _Library:
    def __init__(self, draw: Draw, ids: Ids) -> None:
        self._draw = draw
        self._ids = ids
        self._lengths = [draw.between(_DOCUMENT_TOKENS) for _ in range(_DOCUMENTS)]
        self._sums = popularity(_DOCUMENTS)
        self._system_prompt = self._longer(_Row(0, ()), draw.between(_SYSTEM_PROMPT_TOKENS))
        # By the documents in their order; the one that was not asked for for the longest time is the first.
        self._rows: dict[tuple[int, ...], _Row] = {}

    def find(self) -> Text:
        """Find documents for a question; answers the text that it is asked behind."""
        wanted = self._draw.between(_DOCUMENTS_FOUND)
        found: list[int] = []
        while len(found) < wanted:
            document = self._draw.ranked(self._sums)
            if document not in found:
                found.append(document)
        row = self._system_prompt
        for count in range(1, wanted + 1):
            documents = tuple(found[:count])
            # A row that was forgotten gets new ids, as if a document had been rewritten since.
            known = self._rows.pop(documents) if documents in self._rows else None
            row = known or self._longer(row, self._lengths[documents[-1]])
            self._rows[documents] = row
        while len(self._rows) > _ROWS_REMEMBERED:
            del self._rows[next(iter(self._rows))]
        return Text(self._ids, row.tokens, [hash_id for part in row.hash_ids for hash_id in part])

    def _longer(self, row: _Row, tokens: int) -> _Row:
        end = row.tokens + tokens
        blocks = end // TOKENS_PER_HASH_ID - row.tokens // TOKENS_PER_HASH_ID
        return _Row(end, (*row.hash_ids, self._ids.new(blocks)))


class _Questions:
    def __init__(self, draw: Draw, text: Text, number: int) -> None:
        self._draw = draw
        self._text = text
        self._number = number
        self._turns_left = draw.between(_TURNS)

    @property
    def is_over(self) -> bool:
        return self._turns_left == 0

    def ask(self, timestamp: int) -> Request:
        self._text.add(self._draw.between(_QUESTION_TOKENS))
        answer = self._draw.between(_ANSWER_TOKENS)
        request = self._text.as_request(timestamp, answer, self._number)
        self._text.add(answer)
        self._turns_left -= 1
        return request

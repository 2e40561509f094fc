"""Readers of traces: the requests of a file of JSON lines, in any of three formats that its first line tells apart.

Relies on the lines that :class:`~metrale_numba.replay.trace_files.TraceFile` gives. Holds one line at a time and a
bounded number of chats, and either yields requests that keep every promise of
:class:`~metrale_numba.replay.requests.Request` or raises :class:`~metrale_numba.replay.requests.TraceError` with file
and line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from metrale_numba.replay.requests import LARGEST_HASH_ID, TOKENS_PER_HASH_ID, Request
from metrale_numba.replay.trace_files import TraceFile

__all__ = ["TraceReader", "open_trace"]

# A chat is looked for here when its next turn comes. This many are the chats of hours in the traces there are, and
# fill about 20 MB.
_CHATS_REMEMBERED = 131_072

_LARGEST_LENGTH = 0xFFFF_FFFF
_LARGEST_NAME = 0xFFFF_FFFF_FFFF_FFFF

_JSON_SPACE = " \t\r\n"
_LONGEST_SHOWN = 40

_Fields = Mapping[str, Any]


class TraceReader:
    """The requests of one trace, read as they are asked for; a context manager that closes the file.

    Each line is a JSON object, a request in the format that the first of them is in:

    * Mooncake: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids` (one id per 512 tokens of the
      prompt);
    * Qwen-Bailian: `chat_id`, `parent_chat_id`, `timestamp` (seconds), `input_length`, `output_length`, `type`, `turn`
      and `hash_ids` (one id per 16 tokens of the prompt);
    * tokens: `tokens` or `prompt_token_ids`, and maybe `timestamp` (ms), `session`, `adapter` and `output_tokens`.

    More fields may stand beside them and blank lines between them. Gzip and zstd are known by their first byte or by
    the name's ``.gz`` and ``.zst``. To be iterated once, by one thread.

    Parameters
    ----------
    path : str or path
        The file to read; ``-`` is standard input, which is not closed.

    Raises
    ------
    TraceError
        If the file cannot be opened, is empty, or its name promises gzip and the content breaks that promise.
        Iterating raises it for the first line that is not a request.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = TraceFile(path)
        self._format: _Format | None = None

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Request]:
        requests = 0
        while line := self._file.next_line():
            if not line.isspace():
                yield self._request(line)
                requests += 1
        if requests == 0:
            self._file.refuse(None, "the trace holds no request")

    @property
    def name(self) -> str:
        """The trace as error messages call it."""
        return self._file.name

    @property
    def format(self) -> str | None:
        """The format: ``mooncake``, ``bailian`` or ``tokens``; None until a line was read."""
        return None if self._format is None else self._format.name

    @property
    def tokens_per_id(self) -> int | None:
        """The `tokens_per_id` of every request; None until a line was read."""
        return None if self._format is None else self._format.tokens_per_id

    @property
    def fraction_read(self) -> float | None:
        """How much of the file (of its packed bytes, if so it is) was read, 0 to 1; None for a pipe."""
        return self._file.fraction_read

    def close(self) -> None:
        """Close the file, unless it is standard input. Reading on raises ``ValueError``."""
        self._file.close()

    def _request(self, line: bytes) -> Request:
        try:
            fields = _fields(line)
            if self._format is None:
                self._format = _format_of(fields)
            return self._format.request(fields)
        except _BadLine as fault:
            self._file.refuse(self._file.line, str(fault))


def open_trace(path: str | os.PathLike[str]) -> TraceReader:
    """Open a trace to be read one request at a time.

    Parameters
    ----------
    path : str or path
        The file to read; ``-`` is standard input.

    Returns
    -------
    TraceReader
        To be used as a context manager, and iterated once.

    Raises
    ------
    TraceError
        If the file cannot be opened, or is none that can be a trace.
    """
    return TraceReader(path)


class _BadLine(Exception):  # noqa: N818 - what is bad is its message
    """What is wrong with a line; the reader adds where it stands."""


class _Format(Protocol):
    """Makes requests of the fields of lines, which it is given in their order."""

    name: str
    tokens_per_id: int

    def request(self, fields: _Fields) -> Request: ...


class _Mooncake:
    name = "mooncake"
    tokens_per_id = TOKENS_PER_HASH_ID

    def request(self, fields: _Fields) -> Request:
        _require(fields, ("timestamp", "input_length", "output_length", "hash_ids"))
        timestamp = _timestamp(fields["timestamp"])
        input_length = _length("input_length", fields["input_length"])
        output_length = _length("output_length", fields["output_length"])
        hash_ids = _ids("hash_ids", fields["hash_ids"])
        blocks = -(-input_length // self.tokens_per_id)
        if hash_ids.size != blocks:
            raise _BadLine(
                f"hash_ids has {hash_ids.size} ids, but an input_length of {input_length} tokens "
                f"makes {blocks} blocks of {self.tokens_per_id}"
            )
        return Request(timestamp, input_length, output_length, hash_ids)


class _Bailian:
    name = "bailian"
    tokens_per_id = 16

    def __init__(self) -> None:
        # From a chat to the first of its conversation; the oldest first.
        self._roots: dict[int, int] = {}

    def request(self, fields: _Fields) -> Request:
        # In the order of the published traces.
        _require(
            fields,
            (
                "chat_id",
                "parent_chat_id",
                "timestamp",
                "input_length",
                "output_length",
                "type",
                "turn",
                "hash_ids",
            ),
        )
        chat = _whole("chat_id", fields["chat_id"], 0, _LARGEST_NAME - 1)
        parent = _whole("parent_chat_id", fields["parent_chat_id"], -1, _LARGEST_NAME - 1)
        if parent == chat:
            raise _BadLine(f"parent_chat_id must be another chat or -1, and is {chat}, the chat_id")
        timestamp = _timestamp(fields["timestamp"], milliseconds=1_000)
        input_length = _length("input_length", fields["input_length"])
        output_length = _length("output_length", fields["output_length"])
        if type(fields["type"]) is not str:
            raise _BadLine(f"type must be a string, and is {_shown(fields['type'])}")
        _length("turn", fields["turn"])
        hash_ids = _ids("hash_ids", fields["hash_ids"])

        # A prompt that does not end with a block may come without an id for its end, and what was answered may have
        # ids as well; those come back in the next turn, and are no part of this prompt.
        fewest = input_length // self.tokens_per_id
        blocks = -(-input_length // self.tokens_per_id)
        most = -(-(input_length + output_length) // self.tokens_per_id)
        if not fewest <= hash_ids.size <= most:
            raise _BadLine(
                f"hash_ids has {hash_ids.size} ids, but an input_length of {input_length} tokens makes {blocks} blocks "
                f"of {self.tokens_per_id}, and {most} with the output_length of {output_length}"
            )
        root = self._root(chat, parent)
        # 0 stands for no session, so chat 0 goes by a name that no chat has.
        return Request(
            timestamp,
            input_length,
            output_length,
            hash_ids[:blocks],
            tokens_per_id=self.tokens_per_id,
            session=root or _LARGEST_NAME,
        )

    def _root(self, chat: int, parent: int) -> int:
        """The first chat of a conversation, and note it; that of an unknown parent is the parent."""
        root = chat if parent == -1 else self._roots.get(parent, parent)
        self._roots.pop(chat, None)
        self._roots[chat] = root
        if len(self._roots) > _CHATS_REMEMBERED:
            del self._roots[next(iter(self._roots))]
        return root


class _Tokens:
    name = "tokens"
    tokens_per_id = 1

    def __init__(self) -> None:
        self._timestamp = 0.0

    def request(self, fields: _Fields) -> Request:
        if ("tokens" in fields) == ("prompt_token_ids" in fields):
            both = "tokens" in fields
            raise _BadLine(
                "tokens and prompt_token_ids are two names for one field, and both are there"
                if both
                else "the field tokens, or prompt_token_ids, is missing"
            )
        field = "tokens" if "tokens" in fields else "prompt_token_ids"
        tokens = _ids(field, fields[field])
        # A line without a time came with the one before it.
        if fields.get("timestamp") is not None:
            self._timestamp = _timestamp(fields["timestamp"])
        output_tokens = fields.get("output_tokens")
        if output_tokens is None:
            output_length = 0
        elif type(output_tokens) is list:
            output_length = _ids("output_tokens", output_tokens).size
        elif type(output_tokens) is int:
            output_length = _length("output_tokens", output_tokens)
        else:
            raise _BadLine(f"output_tokens must be a list or an integer of 0 or more, and is {_shown(output_tokens)}")
        return Request(
            self._timestamp,
            tokens.size,
            output_length,
            tokens,
            tokens_per_id=self.tokens_per_id,
            session=_name("session", fields.get("session")),
            adapter=_name("adapter", fields.get("adapter")),
        )


def _format_of(fields: _Fields) -> _Format:
    """The format of a trace, by the fields of its first line."""
    if "hash_ids" not in fields and ("tokens" in fields or "prompt_token_ids" in fields):
        return _Tokens()
    if "chat_id" in fields or "parent_chat_id" in fields:
        return _Bailian()
    if not {"hash_ids", "timestamp", "input_length", "output_length"} & fields.keys():
        raise _BadLine("no format that is known: it has neither hash_ids nor tokens or prompt_token_ids")
    return _Mooncake()


def _fields(line: bytes) -> _Fields:
    try:
        # Without its end: a fault found behind that would be told of as column 1 of the next line.
        fields = _DECODER.decode(line.decode("utf-8").rstrip(_JSON_SPACE))
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise _BadLine(f"not a JSON object but {_shown(fields)}")
    return fields


def _require(fields: _Fields, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in fields:
            raise _BadLine(f"the field {name} is missing")


def _timestamp(value: object, milliseconds: int = 1) -> float:
    """A time in milliseconds, of one that is in units of so many."""
    try:
        # bool is a subclass of int: only the exact type tells them apart.
        if type(value) in (int, float) and value >= 0 and (time := value * float(milliseconds)) < math.inf:  # type: ignore[operator]
            # The product of a decimal fraction is off by its last bits, and nothing is measured finer than this.
            return time if milliseconds == 1 else round(time, 3)
    except OverflowError:
        pass
    raise _BadLine(f"timestamp must be a number of 0 or more, and is {_shown(value)}")


def _length(field: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise _BadLine(f"{field} must be an integer of 0 or more, and is {_shown(value)}")
    if value > _LARGEST_LENGTH:
        raise _BadLine(f"{field} must be at most {_LARGEST_LENGTH}, and is {_shown(value)}")
    return value


def _whole(field: str, value: object, smallest: int, largest: int) -> int:
    if type(value) is not int or not smallest <= value <= largest:
        raise _BadLine(f"{field} must be an integer from {smallest} to {largest}, and is {_shown(value)}")
    return value


def _name(field: str, value: object) -> int:
    """A session or an adapter as a number: itself, or what the text hashes to on every machine; 0 for none."""
    if value is None:
        return 0
    if type(value) is int and 0 <= value <= _LARGEST_NAME:
        return value
    if type(value) is str:
        # JSON can write half of a surrogate pair, which UTF-8 cannot.
        digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1
    raise _BadLine(f"{field} must be a string or an integer from 0 to {_LARGEST_NAME}, and is {_shown(value)}")


def _ids(field: str, value: object) -> npt.NDArray[np.uint32]:
    if type(value) is not list:
        raise _BadLine(f"{field} must be a list, and is {_shown(value)}")
    # Almost every line is sound, so the list is judged whole, and the culprit looked for only if there is one.
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > LARGEST_HASH_ID):
        _refuse_ids(field, value)
    return np.array(value, dtype=np.uint32)


def _refuse_ids(field: str, ids: list[object]) -> NoReturn:
    position, value = next(
        (position, value)
        for position, value in enumerate(ids)
        if type(value) is not int or not 0 <= value <= LARGEST_HASH_ID
    )
    raise _BadLine(f"{field}[{position}] must be an integer from 0 to {LARGEST_HASH_ID}, and is {_shown(value)}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _shown(value: object) -> str:
    """Write a JSON value for a message: as it stands in the line if it is short, cut if it is long."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."

"""What a request of a trace is, and a reader of traces in the Mooncake format (JSON lines, plain or gzip).

Relies on nothing but the standard library and NumPy. The reader holds one line at a time, and either yields
requests that keep every promise of :class:`Request` or raises :class:`TraceError` with file and line.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, NoReturn, cast

import numpy as np
import numpy.typing as npt

from metrale_numba.errors import MetraleError

__all__ = ["LARGEST_HASH_ID", "TOKENS_PER_HASH_ID", "Request", "TraceError", "TraceReader"]

TOKENS_PER_HASH_ID = 512
"""Tokens of the prompt that one hash id stands for; the last id of a prompt may stand for fewer."""

LARGEST_HASH_ID = 0xFFFF_FFFF
"""An id is spelled out with itself as the first token, and tokens are unsigned 32-bit."""

# Room for two million ids, a prompt of a billion tokens. A longer line is no request, and without a bound a
# file without line ends (/dev/zero, a disk image) would be read into memory whole.
_LONGEST_LINE = 16 * 1024 * 1024

_JSON_SPACE = " \t\r\n"

# JSON never starts with this byte, gzip always does. The second magic byte need not be looked at, which
# matters on a pipe, where a look ahead may bring just one byte.
_GZIP_FIRST_BYTE = b"\x1f"

_LONGEST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as a trace tells of it: not its tokens, but which 512-token blocks it shares with others.

    Attributes
    ----------
    timestamp : float
        When the request arrived, in milliseconds from the start of the trace.
    input_length : int
        Tokens of the prompt.
    output_length : int
        Tokens generated in answer.
    hash_ids : array of uint32, shape (ceil(input_length / tokens_per_id),)
        One id per `tokens_per_id` tokens of the prompt. Two prompts with an equal id at some place are equal up to
        there.
    tokens_per_id : int, default 512
        Tokens that one id stands for; the last one may stand for fewer.
    session : int, default 0
        The conversation that the request is a turn of, or 0.
    adapter : int, default 0
        The adapter it is computed under. Prompts of two adapters share nothing.
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


class TraceReader:
    """The requests of one trace, read as they are asked for; a context manager that closes the file.

    Each line is a JSON object with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`
    (one id per 512 tokens of the prompt). More fields may stand beside them and blank lines between them.
    Gzip is known by its first byte or by the name's ``.gz``. To be iterated once, by one thread.

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
        self._from_stdin = os.fspath(path) == "-"
        self._name = "<stdin>" if self._from_stdin else os.fspath(path)
        self._line = 0
        self._size: int | None = None
        try:
            self._file = _standard_input() if self._from_stdin else open(path, "rb")  # noqa: SIM115
        except OSError as error:
            self._refuse(None, f"cannot be opened: {error.strerror or error}")
        try:
            self._look_ahead()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Request]:
        requests = 0
        while line := self._next_line():
            self._line += 1
            if len(line) > _LONGEST_LINE:
                self._refuse(self._line, f"the line is longer than {_LONGEST_LINE:,} bytes")
            if not line.isspace():
                yield self._request(line)
                requests += 1
        if requests == 0:
            self._refuse(None, "the trace holds no request")

    @property
    def name(self) -> str:
        """The trace as error messages call it."""
        return self._name

    @property
    def fraction_read(self) -> float | None:
        """How much of the file (of its compressed bytes, if so it is) was read, 0 to 1; None for a pipe."""
        return None if self._size is None else min(self._file.tell() / self._size, 1.0)

    def close(self) -> None:
        """Close the file, unless it is standard input. Reading on raises ``ValueError``."""
        if not self._from_stdin:
            self._file.close()

    def _look_ahead(self) -> None:
        """Find out what kind of file this is, so that a wrong one is refused before any work is done for it."""
        try:
            status = os.fstat(self._file.fileno())
            first_byte = self._file.peek(1)[:1]
        except OSError as error:
            self._refuse(None, f"cannot be read: {error.strerror or error}")
        if not first_byte:
            self._refuse(None, "the file is empty")
        if stat.S_ISREG(status.st_mode):
            self._size = status.st_size
        packed = first_byte == _GZIP_FIRST_BYTE or self._name.endswith(".gz")
        self._lines: BinaryIO = cast(BinaryIO, gzip.GzipFile(fileobj=self._file)) if packed else self._file

    def _next_line(self) -> bytes:
        try:
            return self._lines.readline(_LONGEST_LINE + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self._refuse(self._line + 1, f"the gzip data is damaged: {error}")
        except OSError as error:
            self._refuse(self._line + 1, f"cannot be read: {error.strerror or error}")

    def _request(self, line: bytes) -> Request:
        try:
            # Without its end: a fault found behind that would be told of as column 1 of the next line.
            fields = _DECODER.decode(line.decode("utf-8").rstrip(_JSON_SPACE))
        except UnicodeDecodeError as error:
            self._refuse(self._line, f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}")
        except json.JSONDecodeError as error:
            self._refuse(self._line, f"not JSON: {error.msg} (column {error.colno})")
        except (ValueError, RecursionError) as error:
            self._refuse(self._line, f"not JSON that can be read: {error}")
        if not isinstance(fields, dict):
            self._refuse(self._line, f"not a JSON object but {_shown(fields)}")
        for field in ("timestamp", "input_length", "output_length", "hash_ids"):
            if field not in fields:
                self._refuse(self._line, f"the field {field} is missing")

        timestamp = fields["timestamp"]
        if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf:
            self._refuse(self._line, f"timestamp must be a number of 0 or more, and is {_shown(timestamp)}")
        for field in ("input_length", "output_length"):
            if type(fields[field]) is not int or fields[field] < 0:
                self._refuse(self._line, f"{field} must be an integer of 0 or more, and is {_shown(fields[field])}")
        input_length = fields["input_length"]
        hash_ids = fields["hash_ids"]
        if type(hash_ids) is not list:
            self._refuse(self._line, f"hash_ids must be a list, and is {_shown(hash_ids)}")
        # Almost every line is sound, so the list is judged whole, and the culprit looked for only if there is one.
        # bool is a subclass of int: only the exact type tells them apart.
        if hash_ids and (set(map(type, hash_ids)) != {int} or min(hash_ids) < 0 or max(hash_ids) > LARGEST_HASH_ID):
            self._refuse_hash_ids(hash_ids)
        if len(hash_ids) != -(-input_length // TOKENS_PER_HASH_ID):
            self._refuse(
                self._line,
                f"hash_ids has {len(hash_ids)} ids, but an input_length of {input_length} tokens "
                f"makes {-(-input_length // TOKENS_PER_HASH_ID)} blocks of {TOKENS_PER_HASH_ID}",
            )
        return Request(timestamp, input_length, fields["output_length"], np.array(hash_ids, dtype=np.uint32))

    def _refuse_hash_ids(self, hash_ids: list[object]) -> NoReturn:
        position, value = next(
            (position, value)
            for position, value in enumerate(hash_ids)
            if type(value) is not int or not 0 <= value <= LARGEST_HASH_ID
        )
        self._refuse(
            self._line,
            f"hash_ids[{position}] must be an integer from 0 to {LARGEST_HASH_ID}, and is {_shown(value)}",
        )

    def _refuse(self, line: int | None, reason: str) -> NoReturn:
        raise TraceError(self._name, line, reason) from None


def _standard_input() -> io.BufferedReader:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return cast(io.BufferedReader, sys.stdin.buffer)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _shown(value: object) -> str:
    """Write a JSON value for a message: as it stands in the line if it is short, cut if it is long."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."

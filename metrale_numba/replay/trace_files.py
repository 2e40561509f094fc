"""The lines of a trace, out of a file or standard input, plain or packed with gzip or zstd.

Relies on the standard library, and on the package zstandard where a trace is packed with zstd. Holds one line and one
piece of the file at a time, whatever is in them. Every failure is a :class:`TraceError`.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import zlib
from types import ModuleType
from typing import BinaryIO, NoReturn, cast

from metrale_numba.replay.requests import TraceError

__all__ = ["TraceFile"]

# Room for two million ids, a prompt of a billion tokens. A longer line is no request, and without a bound a
# file without line ends (/dev/zero, a disk image) would be read into memory whole.
_LONGEST_LINE = 16 * 1024 * 1024

# JSON never starts with either byte, and these files always do. The bytes behind it need not be looked at, which
# matters on a pipe, where a look ahead may bring just one byte.
_GZIP_FIRST_BYTE = b"\x1f"
_ZSTD_FIRST_BYTE = b"\x28"
# What some packers put before the data: 0x184D2A50 to 0x184D2A5F, little-endian. JSON may start with one of the
# first bytes, so here the others have to be there.
_SKIPPABLE_MAGIC_END = b"\x2a\x4d\x18"

# Four bytes of zstd may stand for 128 KiB, so that this many can never fill more than 32 MiB.
_ZSTD_PIECE = 1_024


class TraceFile:
    """One trace, opened for reading line by line; its owner closes it.

    Parameters
    ----------
    path : str or path
        The file to read; ``-`` is standard input, which is not closed.

    Raises
    ------
    TraceError
        If the file cannot be opened, is empty, or is packed with zstd and the package zstandard is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._from_stdin = os.fspath(path) == "-"
        self.name = "<stdin>" if self._from_stdin else os.fspath(path)
        self.line = 0
        self._size: int | None = None
        try:
            self._file = _standard_input() if self._from_stdin else open(path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            self.refuse(None, f"cannot be opened: {error.strerror or error}")
        try:
            self._look_ahead()
        except BaseException:
            self.close()
            raise

    @property
    def fraction_read(self) -> float | None:
        """How much of the file (of its packed bytes, if so it is) was read, 0 to 1; None for a pipe."""
        return None if self._size is None else min(self._file.tell() / self._size, 1.0)

    def next_line(self) -> bytes:
        """Read the next line with its end, and count it; nothing at the end of the trace."""
        try:
            line = self._lines.readline(_LONGEST_LINE + 1)
        except self._damage as error:
            self.refuse(self.line + 1, f"the {self._packer} data is damaged: {error}")
        except OSError as error:
            self.refuse(self.line + 1, f"cannot be read: {error.strerror or error}")
        self.line += bool(line)
        if len(line) > _LONGEST_LINE:
            self.refuse(self.line, f"the line is longer than {_LONGEST_LINE:,} bytes")
        return line

    def close(self) -> None:
        """Close the file, unless it is standard input. Reading on raises ``ValueError``."""
        if not self._from_stdin:
            self._file.close()

    def refuse(self, line: int | None, reason: str) -> NoReturn:
        """Raise the error of a fault in a line, or in no single one."""
        raise TraceError(self.name, line, reason) from None

    def _look_ahead(self) -> None:
        """Find out what kind of file this is, so that a wrong one is refused before any work is done for it."""
        try:
            status = os.fstat(self._file.fileno())
            start = self._file.peek(4)[:4]
        except OSError as error:
            self.refuse(None, f"cannot be read: {error.strerror or error}")
        if not start:
            self.refuse(None, "the file is empty")
        if stat.S_ISREG(status.st_mode):
            self._size = status.st_size
        self._packer = ""
        self._damage: tuple[type[Exception], ...] = ()
        self._lines: BinaryIO = self._file
        if _looks_like_zstd(start):
            self._unpack_zstd()
        elif start[:1] == _GZIP_FIRST_BYTE or self.name.endswith(".gz"):
            self._packer = "gzip"
            self._damage = (EOFError, gzip.BadGzipFile, zlib.error)
            self._lines = cast(BinaryIO, gzip.GzipFile(fileobj=self._file))
        elif self.name.endswith(".zst"):
            self._unpack_zstd()

    def _unpack_zstd(self) -> None:
        try:
            import zstandard  # noqa: PLC0415 - an extra: who reads no such file needs no such package
        except ImportError:
            self.refuse(
                None, "packed with zstd, and the package zstandard is missing: pip install 'metrale-numba[zstd]'"
            )
        self._packer = "zstd"
        self._damage = (EOFError, zstandard.ZstdError)
        self._lines = cast(BinaryIO, io.BufferedReader(_ZstdBytes(self._file, zstandard)))


class _ZstdBytes(io.RawIOBase):
    """The content of a file of zstd frames, one after another.

    The package's own reader takes a frame that was cut off for one that has ended.
    """

    def __init__(self, file: io.BufferedReader, zstandard: ModuleType) -> None:
        self._file = file
        self._unpacker = zstandard.ZstdDecompressor()
        self._frame = self._unpacker.decompressobj()
        self._begun = False
        self._packed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._content:
            if not self._packed:
                self._packed = self._file.read1(_ZSTD_PIECE)
                if not self._packed:
                    if self._begun:
                        raise EOFError("it ends in the middle of a frame")
                    return 0
            self._begun = True
            self._content = memoryview(self._frame.decompress(self._packed))
            self._packed = b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = self._unpacker.decompressobj()
                self._begun = False
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def _looks_like_zstd(start: bytes) -> bool:
    is_skippable = start[1:] == _SKIPPABLE_MAGIC_END and start[0] & 0xF0 == 0x50
    return start[:1] == _ZSTD_FIRST_BYTE or is_skippable


def _standard_input() -> io.BufferedReader:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    return cast(io.BufferedReader, sys.stdin.buffer)

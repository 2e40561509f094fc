"""Keeps curves on disk, beside the compiled kernels, so that one that was worked out before is there at once.

A file's name is a digest of what was played, of how, and of this package's sources: whatever changes, an old curve is
not found. Files are written whole or not at all, and one that cannot be read counts as none.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from metrale_numba.kernels.compile import CACHE_DIRECTORY_VARIABLES
from metrale_numba.replay.curve import HitCurve

__all__ = ["CurveCache", "file_digest"]

_logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_ARRAYS = ("hit_blocks", "hit_tokens", "wanted_blocks")
_NUMBERS = ("requests", "blocks", "tokens", "tokens_per_block")
# What reading a file that is cut short or damaged comes to.
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def file_digest(path: str | os.PathLike[str]) -> str | None:
    """Give a digest of the content of a file.

    Parameters
    ----------
    path : str or path
        The file, which is read to its end.

    Returns
    -------
    str or None
        64 hexadecimal digits; None if it is no regular file, and so cannot be read twice, or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            while piece := file.read(io.DEFAULT_BUFFER_SIZE * 32):
                digest.update(piece)
    except OSError:
        # Whoever plays it will say what is wrong.
        return None
    return digest.hexdigest()


class CurveCache:
    """The curve of one load, on disk if it was worked out before.

    Parameters
    ----------
    identity : mapping
        What the curve depends on beside this package: names and values that ``repr`` tells apart, such as the digest
        of a trace.
    """

    def __init__(self, identity: Mapping[str, object]) -> None:
        described = repr((_sources_digest(), sorted(identity.items())))
        self._name = f"{hashlib.sha256(described.encode()).hexdigest()[:32]}.npz"

    def load(self) -> HitCurve | None:
        """Give the curve that was kept, or None if there is none that can be read.

        Returns
        -------
        HitCurve or None
            Equal to the one that was stored.
        """
        for directory in _directories():
            path = directory / self._name
            try:
                # Read by ourselves: of a damaged file, NumPy may leave the handle open.
                with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
                    numbers = dict(zip(_NUMBERS, kept["numbers"].tolist(), strict=True))
                    return HitCurve(**numbers, **{name: kept[name] for name in _ARRAYS})
            except FileNotFoundError:
                continue
            except _UNREADABLE as error:
                _logger.warning("cannot read a curve, working it out anew: %s: %s", path, error)
        return None

    def store(self, curve: HitCurve) -> None:
        """Keep a curve for the next process; where nothing can be written, that is all that happens.

        Parameters
        ----------
        curve : HitCurve
            The curve, which is not changed.
        """
        content = io.BytesIO()
        numbers = np.array([getattr(curve, name) for name in _NUMBERS], dtype=np.int64)
        np.savez_compressed(content, numbers=numbers, **{name: getattr(curve, name) for name in _ARRAYS})
        for directory in _directories():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                _write(directory / self._name, content.getvalue())
                return
            except OSError as error:
                _logger.debug("cannot keep a curve in %s: %s", directory, error)


def _write(path: Path, content: bytes) -> None:
    """Write a file so that no other process ever sees a part of it."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".unfinished")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def _directories() -> Iterator[Path]:
    """Give the places where curves may be, in the order in which the kernels' are tried."""
    for name in (*CACHE_DIRECTORY_VARIABLES, "XDG_CACHE_HOME"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "metrale_numba" / "curves"
    try:
        yield Path.home() / ".cache" / "metrale_numba" / "curves"
    except RuntimeError as error:
        _logger.debug("no home directory to keep curves in: %s", error)


@cache
def _sources_digest() -> str:
    """What the counts depend on: the sources say more than a version, which stays the same between two releases."""
    digest = hashlib.sha256()
    for source in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(source.relative_to(_PACKAGE)).encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()

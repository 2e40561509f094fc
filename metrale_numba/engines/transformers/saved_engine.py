"""What an engine has cached, in a folder: the index, and the blocks that the index refers to.

The two belong together, so they are written under a new name beside the earlier ones, and a file with that name is put
in place last. Killed at any moment, the folder has the earlier save or the new one, whole. Snapshots are in the tier.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from metrale_numba.engines.transformers.block_store import BlockStore
from metrale_numba.engines.transformers.imports import torch
from metrale_numba.errors import CacheFileError
from metrale_numba.radix_tree import RadixTree
from metrale_numba.serving import ServingCache

__all__ = ["SavedEngine", "save_engine"]

_CURRENT = "current"
_PREFIX = "saved-"


def save_engine(path: str | os.PathLike[str], serving: ServingCache, blocks: BlockStore) -> None:
    """Write an index and its blocks to a folder, which is made if need be, in place of an earlier save."""
    tree = serving.cache
    if not isinstance(tree, RadixTree):
        raise TypeError("caching is off, so there is nothing to save")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        serving.save(fresh / "index")
        with (fresh / "blocks").open("wb") as file:
            ids = torch.from_numpy(np.unique(tree.contents().blocks.physical).astype(np.int64))
            torch.save({"block_size": serving.block_size, "ids": ids, "tensors": blocks.gather(ids)}, file)
            _to_disk(file)
        pointer = fresh / _CURRENT
        with pointer.open("wb") as file:
            file.write(fresh.name.encode())
            _to_disk(file)
        pointer.replace(folder / _CURRENT)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    for other in folder.glob(f"{_PREFIX}*"):
        if other != fresh:
            shutil.rmtree(other, ignore_errors=True)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class SavedEngine:
    """A save that was found in a folder.

    Parameters
    ----------
    path : str or path-like
        The folder.

    Attributes
    ----------
    index : Path
        The file of the index.
    block_size : int
        Tokens per block.

    Raises
    ------
    OSError
        If there is no save.
    CacheFileError
        If its blocks cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        saved = folder / (folder / _CURRENT).read_text()
        self.index = saved / "index"
        self._path = saved / "blocks"
        try:
            self._saved: dict[str, Any] = torch.load(self._path, weights_only=True)
            self.block_size = int(self._saved["block_size"])
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise CacheFileError(f"{self._path} cannot be read as saved blocks: {error}") from error

    def restore(self, blocks: BlockStore) -> None:
        """Bring the blocks back to where they were."""
        try:
            blocks.scatter(self._saved["ids"], self._saved["tensors"])
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise CacheFileError(f"{self._path} has blocks of another form: {error}") from error

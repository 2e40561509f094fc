"""What an engine has cached, in a folder: the index, and the blocks that the index refers to.

The two belong together, so they are written under a new name beside the earlier ones, and a pointer, the file
``current``, is put in place last. Killed at any moment, the folder has the earlier save or the new one, whole.
Snapshots are in the tier.

The pointer has a line for each file, its BLAKE2b digest and its name, as ``b2sum`` writes and checks them. So a file
that is damaged, or of another save, is noticed before it is used.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from metrale_numba.arguments import as_path
from metrale_numba.engines.transformers.block_store import BlockStore
from metrale_numba.engines.transformers.imports import Tensor, torch
from metrale_numba.errors import CacheFileError
from metrale_numba.radix_tree import RadixTree
from metrale_numba.serving import ServingCache

__all__ = ["SavedEngine", "save_engine"]

_CURRENT: Final = "current"
_PREFIX: Final = "saved-"
_FILES: Final = ("index", "blocks")

# Only names that a save makes, so that none leads out of the folder.
_POINTER: Final = re.compile(rb"([0-9a-f]{128})  (saved-\w+)/index\n([0-9a-f]{128})  \2/blocks\n")

_HASHED_AT_ONCE: Final = 2**20


def save_engine(path: str | os.PathLike[str], serving: ServingCache, blocks: BlockStore) -> None:
    """Write an index and its blocks to a folder, which is made if need be, in place of an earlier save."""
    tree = serving.cache
    if not isinstance(tree, RadixTree):
        raise TypeError("caching is off, so there is nothing to save")
    folder = as_path(path)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        serving.save(fresh / "index")
        with (fresh / "blocks").open("wb") as file:
            ids = _blocks_of(tree)
            torch.save({"block_size": serving.block_size, "ids": ids, "tensors": blocks.gather(ids)}, file)
            _to_disk(file)
        pointer = fresh / _CURRENT
        with pointer.open("wb") as file:
            for name in _FILES:
                with (fresh / name).open("rb") as written:
                    file.write(f"{_digest(written)}  {fresh.name}/{name}\n".encode())
            _to_disk(file)
        pointer.replace(folder / _CURRENT)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    for other in folder.glob(f"{_PREFIX}*"):
        if other != fresh:
            shutil.rmtree(other, ignore_errors=True)


def _blocks_of(tree: RadixTree) -> Tensor:
    return torch.from_numpy(np.unique(tree.contents().blocks.physical).astype(np.int64))


def _digest(file: BinaryIO) -> str:
    digest = hashlib.blake2b()
    while part := file.read(_HASHED_AT_ONCE):
        digest.update(part)
    return digest.hexdigest()


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class SavedEngine:
    """A save that was found in a folder, and is what was written.

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
        If there is no save, or it cannot be read.
    CacheFileError
        If one of its files is missing, damaged or of another save; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = as_path(path)
        self._pointer = folder / _CURRENT
        found = _POINTER.fullmatch(self._pointer.read_bytes())
        if found is None:
            raise CacheFileError(f"{self._pointer} is damaged, or was not written by a save")
        saved = folder / found[2].decode()
        self.index = saved / "index"
        self._path = saved / "blocks"
        with self._checked(self.index, found[1]), self._checked(self._path, found[3]) as file:
            try:
                content = torch.load(file, weights_only=True)
                self.block_size = int(content["block_size"])
                self._ids: Tensor = content["ids"]
                self._tensors: list[Tensor] = content["tensors"]
            except (RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
                raise CacheFileError(f"{self._path} cannot be read as saved blocks: {error}") from error

    def restore(self, serving: ServingCache, blocks: BlockStore) -> None:
        """Bring the blocks back to where the loaded index has them.

        Raises
        ------
        CacheFileError
            If they are not those of the index, or of another form; nothing was brought back then.
        """
        tree = serving.cache
        assert isinstance(tree, RadixTree)
        if self.block_size != tree.block_size or not torch.equal(self._ids, _blocks_of(tree)):
            raise CacheFileError(f"{self._path} has other blocks than {self.index} refers to")
        # An assignment would stretch one that is too small, and convert another dtype.
        wanted = [((len(self._ids), *rows.shape[1:]), rows.dtype) for rows in blocks.keys + blocks.values]
        if [(tuple(rows.shape), rows.dtype) for rows in self._tensors] != wanted:
            raise CacheFileError(f"{self._path} has blocks of another form than those of the model")
        blocks.scatter(self._ids, self._tensors)

    def _checked(self, path: Path, digest: bytes) -> BinaryIO:
        try:
            file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CacheFileError(f"{path} is missing, which {self._pointer} names") from error
        try:
            if _digest(file) != digest.decode():
                raise CacheFileError(f"{path} is damaged, or of another save than {self._pointer}")
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

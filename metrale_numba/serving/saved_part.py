"""What the file of a serving cache says beside the index: whose it is, and where the tier has its snapshots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from metrale_numba.arguments import as_count, as_text
from metrale_numba.errors import CacheFileError
from metrale_numba.serving.tier import StoreKey, as_store_key
from metrale_numba.serving.transfers import Identity

_VERSION = 1


class SavedPart(NamedTuple):
    """Whose index it is, the most blocks that were ever in use, and by tier key where the spilled snapshots are."""

    identity: Identity
    most_blocks: int
    stored: dict[int, StoreKey]

    def as_json(self) -> dict[str, Any]:
        """Give it as the description in a file."""
        identity = self.identity
        return {
            "version": _VERSION,
            "model": identity.model,
            "dtype": identity.dtype,
            "rank": identity.rank,
            "most_blocks": self.most_blocks,
            "stored": list(self.stored.values()),
        }

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], meta: Mapping[str, Any]) -> SavedPart:
        """Take it from what a file says.

        Raises
        ------
        CacheFileError
            If the file does not say it, or not in this form.
        """
        name = os.fspath(path)
        part = meta.get("serving")
        if not isinstance(part, dict):
            raise CacheFileError(f"{name} is an index alone, not a serving cache")
        try:
            if part["version"] != _VERSION:
                raise ValueError(f"what it says of its pools is of format {part['version']}, not {_VERSION}")
            identity = Identity(
                as_text(part["model"], "model"), as_text(part["dtype"], "dtype"), as_count(part["rank"], "rank")
            )
            keys = [as_store_key(StoreKey(*fields)) for fields in part["stored"]]
            return cls(identity, as_count(part["most_blocks"], "most_blocks"), {key.key: key for key in keys})
        except (KeyError, TypeError, ValueError) as error:
            raise CacheFileError(f"{name} cannot be read as a saved serving cache: {error}") from error

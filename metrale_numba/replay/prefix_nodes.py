"""A trace as flat arrays: which nodes of the tree of all prefixes each request goes through.

Relies on requests alone, which are read one at a time and not kept. Promises the same numbers for the same
requests. Every block of every prompt takes four bytes, every node of the tree about a hundred while it is built.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metrale_numba.interface import NONE, Ids
from metrale_numba.replay.player import default_block_size, tokens_per_block
from metrale_numba.replay.requests import Request

__all__ = ["PrefixNodes"]

_BITS_OF_AN_ID = 32


class PrefixNodes(NamedTuple):
    """The requests of a trace as paths in the tree of all their prefixes, where a node is one block after all before.

    Nodes are numbered as they first come up, so a parent's number is below its children's. Prompts of two
    adapters have no node in common.
    """

    paths: Ids
    """Nodes of every request, from the first block of its prompt on; request after request."""
    starts: npt.NDArray[np.int64]
    """Where in `paths` each request begins, and at the end their number: one more than there are requests."""
    parents: Ids
    """Parent of each node, or :data:`~metrale_numba.NONE`."""
    prompt_tokens: npt.NDArray[np.int64]
    """Tokens of each request's prompt."""
    block_tokens: npt.NDArray[np.int64]
    """Tokens that a full block of each request stands for."""

    @classmethod
    def of(cls, requests: Iterable[Request], *, block_size: int | None = None) -> PrefixNodes:
        """Read all requests and number the nodes that they go through.

        Parameters
        ----------
        requests : iterable of Request
            The requests, in the order in which they are to be played.
        block_size : int, optional
            Tokens per block, where requests hold tokens; those at a prompt's end that fill none are left out. A hash id
            is a block whatever is given. Default: that of
            :func:`~metrale_numba.replay.default_block_size`.

        Returns
        -------
        PrefixNodes
            Of all of them.
        """
        paths = array("I")
        starts = array("q", [0])
        parents = array("I")
        prompt_tokens = array("q")
        block_tokens = array("q")
        # A child is found under its parent's number and its block's, packed into one key. The first ones of an adapter
        # have a number of the adapter's for a parent, counted down from the mark that ends every list of ids.
        children: dict[int, int] = {}
        roots: dict[int, int] = {}
        numbers: dict[bytes, int] = {}
        for request in requests:
            if block_size is None:
                block_size = default_block_size(request)
            ids = request.hash_ids
            blocks = ids.tolist() if request.tokens_per_id > 1 else _block_numbers(ids, block_size, numbers)
            root = roots.setdefault(request.adapter, NONE - len(roots))
            above = root
            for block in blocks:
                key = above << _BITS_OF_AN_ID | block
                node = children.get(key)
                if node is None:
                    node = children[key] = len(parents)
                    parents.append(NONE if above == root else above)
                paths.append(node)
                above = node
            starts.append(len(paths))
            prompt_tokens.append(request.input_length)
            block_tokens.append(tokens_per_block(request, block_size))
        return cls(
            np.array(paths, dtype=np.uint32),
            np.array(starts, dtype=np.int64),
            np.array(parents, dtype=np.uint32),
            np.array(prompt_tokens, dtype=np.int64),
            np.array(block_tokens, dtype=np.int64),
        )

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return self.starts.size - 1


def _block_numbers(tokens: Ids, block_size: int, numbers: dict[bytes, int]) -> list[int]:
    """Number the full blocks of a prompt: equal ones have the same number, by which they are known in `numbers`."""
    width = block_size * tokens.itemsize
    content = tokens.tobytes()
    ends = range(width, len(content) + 1, width)
    return [numbers.setdefault(content[end - width : end], len(numbers)) for end in ends]

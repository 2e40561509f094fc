"""The KV blocks: for each layer with full attention one tensor of keys and one of values, all taken at the start."""

from __future__ import annotations

import numpy as np

from metrale_numba.engines.transformers.imports import Cache, Tensor, torch
from metrale_numba.engines.transformers.layer_layout import LayerLayout
from metrale_numba.interface import Ids

__all__ = ["BlockStore"]


class BlockStore:
    """Keys and values by block.

    Parameters
    ----------
    layout : LayerLayout
        The layers.
    num_blocks, block_size : int
        How many blocks, and tokens in each.

    Attributes
    ----------
    keys, values : list of tensor, shape (num_blocks, block_size, heads, width)
        One for each layer with full attention, in their order.
    block_bytes : int
        Bytes of one block over all layers.
    """

    def __init__(self, layout: LayerLayout, num_blocks: int, block_size: int) -> None:
        self._layers = layout.attention
        self._block_size = block_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in layout.attention:
            for tensors, shape in ((self.keys, layer.key_shape), (self.values, layer.value_shape)):
                whole = (num_blocks, block_size, *shape)
                tensors.append(torch.zeros(whole, dtype=layer.dtype, device=layer.device))
        self.block_bytes = sum(rows[:1].numel() * rows.element_size() for rows in self.keys + self.values)

    def read(self, table: Ids, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Gather the keys and values of the first tokens of a table. Changes nothing.

        Returns
        -------
        list of (keys, values)
            For each layer, with shape (1, heads, num_tokens, width); new memory.
        """
        wanted = torch.from_numpy(table[: -(-num_tokens // self._block_size)].astype(np.int64))

        def gathered(rows: Tensor) -> Tensor:
            flat = rows[wanted.to(rows.device)].flatten(0, 1)
            return flat[:num_tokens].transpose(0, 1).unsqueeze(0)

        return [(gathered(keys), gathered(values)) for keys, values in zip(self.keys, self.values, strict=True)]

    def write(self, cache: Cache, table: Ids, start: int, stop: int) -> None:
        """Put the keys and values of tokens `start` to `stop` into their blocks, and touch no other rows."""
        if start >= stop:
            return
        positions = np.arange(start, stop)
        blocks = torch.from_numpy(table[positions // self._block_size].astype(np.int64))
        rows = torch.from_numpy(positions % self._block_size)
        for number, layer in enumerate(self._layers):
            filled = cache.layers[layer.index]
            where = (blocks.to(layer.device), rows.to(layer.device))
            self.keys[number][where] = filled.keys[0, :, start:stop].transpose(0, 1)
            self.values[number][where] = filled.values[0, :, start:stop].transpose(0, 1)

    def restore(self, cache: Cache, table: Ids, num_tokens: int) -> None:
        """Fill the attention layers of a new cache with the first tokens of a table."""
        if num_tokens == 0:
            return
        for layer, (keys, values) in zip(self._layers, self.read(table, num_tokens), strict=True):
            cache.layers[layer.index].update(keys, values)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a block to another."""
        for tensor in self.keys + self.values:
            tensor[target, :rows] = tensor[source, :rows]

    def gather(self, ids: Tensor) -> list[Tensor]:
        """Copy whole blocks: for each layer its keys, then for each its values. Changes nothing."""
        return [tensor[ids.to(tensor.device)].cpu() for tensor in self.keys + self.values]

    def scatter(self, ids: Tensor, tensors: list[Tensor]) -> None:
        """Put back what :meth:`gather` gave."""
        for tensor, saved in zip(self.keys + self.values, tensors, strict=True):
            tensor[ids.to(tensor.device)] = saved.to(tensor.device)

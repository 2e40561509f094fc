"""The snapshot slots: one row of bytes for each, in which every state of the model has its place.

A row is all that a tier needs to keep, and says by itself how many tokens a sliding window had seen.
"""

from __future__ import annotations

import numpy as np

from metrale_numba.engines.transformers.imports import Cache, Tensor, torch
from metrale_numba.engines.transformers.layer_layout import LayerLayout, StateField

__all__ = ["StateStore"]


class StateStore:
    """States by slot.

    Parameters
    ----------
    layout : LayerLayout
        The layers.
    num_slots : int
        How many slots.

    Attributes
    ----------
    memory : tensor of uint8, shape (num_slots, slot_bytes)
        A row for each slot.
    slot_bytes : int
        Bytes of a slot.
    """

    def __init__(self, layout: LayerLayout, num_slots: int) -> None:
        self._fields = layout.states
        self._device = layout.device
        self.slot_bytes = layout.slot_bytes
        self.memory = torch.zeros((num_slots, layout.slot_bytes), dtype=torch.uint8, device=layout.device)

    def new_row(self) -> Tensor:
        """Make a row that is in no slot."""
        return torch.zeros(self.slot_bytes, dtype=torch.uint8, device=self._device)

    def tensor(self, row: Tensor, field: StateField) -> Tensor:
        """View one state of a row."""
        return row[field.start : field.stop].view(field.dtype).view(field.shape)

    def save(self, cache: Cache, row: Tensor) -> None:
        """Copy every state of a cache into a row: a new one, or one that has an earlier state of the same sequence."""
        for field in self._fields:
            layer = cache.layers[field.layer]
            place = self.tensor(row, field)
            if field.kind == "conv":
                place.copy_(layer.conv_states[field.state_index])
            elif field.kind == "recurrent":
                place.copy_(layer.recurrent_states[field.state_index])
            elif field.kind == "length":
                place.fill_(layer.cumulative_length)
            else:
                kept = layer.keys if field.kind == "keys" else layer.values
                place[:, :, : kept.shape[2]].copy_(kept)

    def restore(self, row: Tensor, cache: Cache) -> None:
        """Fill the states of a new cache from a row; the cache keeps no view of it."""
        windows: dict[int, dict[str, Tensor]] = {}
        for field in self._fields:
            saved = self.tensor(row, field)
            if field.kind == "conv":
                cache.update_conv_state(saved, field.layer, state_idx=field.state_index)
            elif field.kind == "recurrent":
                cache.update_recurrent_state(saved, field.layer, state_idx=field.state_index)
            else:
                windows.setdefault(field.layer, {})[field.kind] = saved
        for index, window in windows.items():
            layer = cache.layers[index]
            length = int(window["length"])
            layer.update(window["keys"][:, :, :length], window["values"][:, :, :length])
            # The layer has counted the tokens that it still keeps.
            layer.cumulative_length = length

    def read_slot(self, slot: int, into: memoryview) -> None:
        """Copy a slot's bytes out."""
        np.frombuffer(into, np.uint8)[:] = self.memory[slot].cpu().numpy()

    def write_slot(self, slot: int, data: memoryview) -> None:
        """Copy bytes into a slot."""
        # PyTorch warns of read-only memory, which a tier may well hand over.
        self.memory[slot].copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))

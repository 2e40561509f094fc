"""What a model keeps of each token, and what it keeps of a whole prefix: read off a cache that it has filled once.

Full attention keeps keys and values of each token: they go into KV blocks. Recurrent layers and convolutions keep a
state of fixed size, and sliding-window attention keeps the keys and values of its last tokens: those are good for one
depth alone, and go into snapshot slots, each layer whole. A layer of a hybrid model may do both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

from metrale_numba.engines.transformers.imports import Cache, Tensor, cache_utils, torch

__all__ = ["AttentionLayer", "LayerLayout", "StateField", "read_layout"]

# Every state starts at a multiple of this many bytes, so that it can be viewed as any dtype.
_ALIGNMENT: Final = 64

_FULL_ATTENTION: Final = (cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer)
_SLIDING_ATTENTION: Final = (
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)
_STATE_ONLY: Final = (cache_utils.LinearAttentionLayer,)
_NOTHING: Final = (cache_utils.DummyLayer,)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer with full attention: the shapes of one token's keys and values.

    Attributes
    ----------
    index : int
        The layer's place in the model.
    key_shape, value_shape : tuple of int
        Heads and width.
    dtype, device
        Of both.
    """

    index: int
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: Any
    device: Any


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of a snapshot, and where it is in the snapshot's bytes.

    Attributes
    ----------
    layer : int
        The layer's place in the model.
    kind : str
        ``"conv"``, ``"recurrent"``, or of a sliding window ``"keys"``, ``"values"`` or ``"length"``.
    state_index : int
        Which of the layer's states of this kind.
    shape : tuple of int
        With the batch of one in front.
    dtype
        The tensor's.
    start, stop : int
        The bytes.
    """

    layer: int
    kind: str
    state_index: int
    shape: tuple[int, ...]
    dtype: Any
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What goes into blocks and what into slots.

    Attributes
    ----------
    attention : tuple of AttentionLayer
        What blocks hold, in the order of the layers.
    states : tuple of StateField
        What a slot holds, in the order of its bytes.
    slot_bytes : int
        Bytes of a slot; 0 for a model without state.
    device
        Where slots are best kept.
    """

    attention: tuple[AttentionLayer, ...]
    states: tuple[StateField, ...]
    slot_bytes: int
    device: Any


def read_layout(cache: Cache) -> LayerLayout:
    """Read the layout off a cache into which a model has put at least one token. Changes nothing.

    Raises
    ------
    ValueError
        If a layer keeps what could be put neither into blocks nor into slots.
    """
    attention: list[AttentionLayer] = []
    found: list[tuple[int, str, int, tuple[int, ...], Any]] = []
    device = torch.device("cpu")
    for index, layer in enumerate(cache.layers):
        if type(layer) in _NOTHING:
            continue
        if type(layer) not in _FULL_ATTENTION + _SLIDING_ATTENTION + _STATE_ONLY:
            raise ValueError(
                f"layer {index} is a {type(layer).__name__}, of which neither blocks nor slots can be made"
            )
        tensors = _states_of(index, layer)
        if type(layer) in _STATE_ONLY and not tensors:
            raise ValueError(f"layer {index} keeps its state in the model and not in the cache, so sessions would mix")
        # A layer that takes its keys from another has none of its own.
        if type(layer) in _FULL_ATTENTION and layer.keys is not None:
            key_shape = (layer.keys.shape[1], layer.keys.shape[3])
            value_shape = (layer.values.shape[1], layer.values.shape[3])
            attention.append(AttentionLayer(index, key_shape, value_shape, layer.keys.dtype, layer.keys.device))
        elif type(layer) in _SLIDING_ATTENTION and layer.keys is not None:
            window = int(layer.sliding_window) - 1
            found.append((index, "length", 0, (1,), torch.int64))
            for kind, tensor in (("keys", layer.keys), ("values", layer.values)):
                found.append((index, kind, 0, (1, tensor.shape[1], window, tensor.shape[3]), tensor.dtype))
                device = tensor.device
        for kind, state_index, tensor in tensors:
            found.append((index, kind, state_index, tuple(tensor.shape), tensor.dtype))
            device = tensor.device
    states: list[StateField] = []
    end = 0
    for layer_index, kind, state_index, shape, dtype in found:
        stop = end + prod(shape) * dtype.itemsize
        states.append(StateField(layer_index, kind, state_index, shape, dtype, end, stop))
        end = -(-stop // _ALIGNMENT) * _ALIGNMENT
    return LayerLayout(tuple(attention), tuple(states), end, device)


def _states_of(index: int, layer: Any) -> list[tuple[str, int, Tensor]]:
    if not isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        return []
    return [
        (kind, state_index, tensor)
        for kind, tensors in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for state_index, tensor in tensors.items()
        if tensor is not None
    ]

"""How many bytes of KV a model keeps for each token, and of recurrent state for each snapshot, told by its config.

Pure functions over the fields of a Hugging Face ``config.json``; nothing is downloaded or imported. What a config does
not say, or says in a way that is not known here, raises :class:`ModelConfigError`: a size is never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from metrale_numba.errors import MetraleError

__all__ = ["DTYPE_BYTES", "ModelConfigError", "ModelSize", "model_size"]

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
}
"""Bytes of one number, by the names that options take."""

_DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    **{name: name for name in DTYPE_BYTES},
}

# Other names of a field, the usual one first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEAD_WIDTH = ("head_dim", "attention_head_dim", "kv_channels")
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads")
_STATE_HEAD_WIDTH = ("mamba_d_head", "mamba_head_dim")
_STATE_GROUPS = ("mamba_n_groups", "n_groups")
_STATE_WIDTH = ("mamba_d_state", "ssm_state_size")
_KERNEL = ("mamba_d_conv", "conv_kernel")
_DTYPE = ("dtype", "torch_dtype")
_STATE_DTYPE = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

# Fields of models whose layers differ in a way that the rules below do not cover.
_UNKNOWN = (
    "attn_type_list",
    "block_configs",
    "block_types",
    "compress_ratios",
    "global_head_dim",
    "hybrid_layer_pattern",
    "index_head_dim",
    "layers_num_attention_heads",
    "linear_attn_config",
    "ssm_cfg",
)

# What the configs of these models leave out, since it is the default of their class in the transformers library.
_CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6},
    "gemma2": {"sliding_window_pattern": 2},
    "llama4_text": {"no_rope_layer_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}

_FULL, _SLIDING, _MAMBA, _MAMBA_2, _DELTA_NET, _NOTHING = "full", "sliding", "mamba", "mamba2", "delta net", "nothing"
# By the words of `layer_types` and `layers_block_type`. A layer is one or more of the above.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "full_attention": (_FULL,),
    "attention": (_FULL,),
    "sliding_attention": (_SLIDING,),
    "chunked_attention": (_SLIDING,),
    "linear_attention": (_DELTA_NET,),
    "mamba": (_MAMBA_2,),
    "mlp": (_NOTHING,),
    "moe": (_NOTHING,),
}
# By the letters of `hybrid_override_pattern`.
_LETTERS: Mapping[str, tuple[str, ...]] = {"*": (_FULL,), "M": (_MAMBA_2,), "-": (_NOTHING,), "E": (_NOTHING,)}


class ModelConfigError(MetraleError):
    """A config that does not tell how much a model keeps, or not in a way that is known here."""


class ModelSize(NamedTuple):
    """What a model keeps, in bytes of one device of those that share it."""

    attention: str
    """How the heads share keys and values: MHA, GQA, MQA or MLA."""
    kv_dtype: str
    """What KV is kept as: fp32, fp16, bf16 or fp8."""
    full_attention_layers: int
    """Layers that attend to all tokens."""
    sliding_window_layers: int
    """Layers that attend to the last `sliding_window` tokens alone."""
    recurrent_layers: int
    """Layers that keep a state of fixed size; those that attend as well are counted above, too."""
    sliding_window: int | None
    """Tokens that a layer with a sliding window, or with chunks, attends to; None where there is no such layer."""
    kv_bytes_per_token: int
    """KV of one token in all layers that attend, the ones with a sliding window included."""
    sliding_bytes_per_token: int
    """The part of it that is of no use to a sequence once it has gone `sliding_window` tokens further."""
    state_bytes: int
    """Recurrent state of one sequence, which is what a snapshot holds; 0 for a model without."""
    tensor_parallel: int
    """Devices that share the model."""


def model_size(
    config: Mapping[str, Any], *, kv_dtype: str | None = None, state_dtype: str | None = None, tensor_parallel: int = 1
) -> ModelSize:
    """Work out what a model keeps for each token and for each snapshot.

    Parameters
    ----------
    config : mapping
        The fields of the model's ``config.json``. Of a model that sees or hears, those in its ``text_config`` count.
    kv_dtype : str, optional
        What KV is kept as, one of `DTYPE_BYTES`. Default: what the model computes in.
    state_dtype : str, optional
        The same for recurrent state. Default: what the config says of it, else what the model computes in. The last
        inputs of a convolution are kept as the model computes.
    tensor_parallel : int, default 1
        Devices among which heads are shared out. Where there are fewer KV heads than devices, each head is kept by
        several; what MLA keeps is kept by each.

    Returns
    -------
    ModelSize
        The sizes, per device.

    Raises
    ------
    ModelConfigError
        If a field is missing, is not what it should be or not known here, or if the heads cannot be shared out.
    """
    return _Config(config, kv_dtype, state_dtype, tensor_parallel).size()


class _Config:
    """The fields that count, with what they lack filled in."""

    def __init__(
        self, config: Mapping[str, Any], kv_dtype: str | None, state_dtype: str | None, tensor_parallel: int
    ) -> None:
        inner = config.get("text_config")
        fields = dict(inner) if isinstance(inner, Mapping) else dict(config)
        self._type = fields.get("model_type")
        defaults = _CLASS_DEFAULTS.get(str(self._type), {})
        # The type of numbers may stand outside alone.
        outer = {name: config[name] for name in _DTYPE if name in config}
        self._fields: dict[str, Any] = {**defaults, **outer, **fields}
        for name in _UNKNOWN:
            if self._fields.get(name) is not None:
                _refuse(f"what the field {name} says is not worked out here")
        if self._fields.get("is_encoder_decoder") is True:
            _refuse("models of an encoder and a decoder are not worked out here")
        self._devices = tensor_parallel
        self._dtype = self._dtype_of(_DTYPE)
        self._kv_dtype = kv_dtype or self._needed_dtype("KV")
        self._state_dtype = state_dtype or self._dtype_of(_STATE_DTYPE)

    def size(self) -> ModelSize:
        """Sum up all layers."""
        layers = self._layers()
        kinds = [kind for layer in layers for kind in layer]
        full, sliding = kinds.count(_FULL), kinds.count(_SLIDING)
        attention, per_layer = self._attention() if full or sliding else ("none", 0)
        states = {kind: kinds.count(kind) for kind in (_MAMBA, _MAMBA_2, _DELTA_NET)}
        return ModelSize(
            attention=attention,
            kv_dtype=self._kv_dtype,
            full_attention_layers=full,
            sliding_window_layers=sliding,
            recurrent_layers=sum(states.values()),
            sliding_window=self._window() if sliding else None,
            kv_bytes_per_token=(full + sliding) * per_layer,
            sliding_bytes_per_token=sliding * per_layer,
            state_bytes=sum(count * self._state(kind) for kind, count in states.items() if count),
            tensor_parallel=self._devices,
        )

    # -------------------------------------------------------------------------------------------------------- fields

    def _given(self, *names: str) -> Any:
        """Give the first of these fields that says something, or None."""
        return next((self._fields[name] for name in names if self._fields.get(name) is not None), None)

    def _number(self, *names: str, default: int | None = None) -> int:
        """Give a field that must be a positive integer."""
        name = next((name for name in names if self._fields.get(name) is not None), None)
        if name is None:
            if default is None:
                _refuse(f"the field {names[0]} is missing")
            return default
        value = self._fields[name]
        if type(value) is not int or value < 1:
            _refuse(f"{name} must be an integer of 1 or more, and is {value!r}")
        return value

    def _dtype_of(self, names: tuple[str, ...]) -> str | None:
        name = self._given(*names)
        if name is None or name == "auto":
            return None
        # Written as the library prints it, or as the object is named.
        known = _DTYPES.get(str(name).removeprefix("torch."))
        if known is None:
            _refuse(f"{names[0]} is {name!r}, which is none of {', '.join(_DTYPES)}")
        return known

    def _needed_dtype(self, what: str) -> str:
        if self._dtype is None:
            _refuse(f"the field dtype (or torch_dtype) is missing, and nothing else says what {what} is kept as")
        return self._dtype

    # -------------------------------------------------------------------------------------------------------- layers

    def _layers(self) -> list[tuple[str, ...]]:
        """Tell what each layer keeps."""
        pattern = self._given("hybrid_override_pattern")
        if pattern is not None:
            return [self._kind("hybrid_override_pattern", _LETTERS, letter) for letter in str(pattern)]
        count = self._number(*_LAYERS)
        for name in ("layer_types", "layers_block_type"):
            listed = self._given(name)
            if listed is not None:
                if not isinstance(listed, list):
                    _refuse(f"{name} must be a list, and is {listed!r}")
                if len(listed) != count:
                    _refuse(f"{name} has {len(listed)} layers, and num_hidden_layers says {count}")
                layers = [self._kind(name, _KINDS, word) for word in listed]
                break
        else:
            layers = [self._unlisted(layer, count) for layer in range(count)]
        # The last layers of some models read the KV of earlier ones.
        shared = self._number("num_kv_shared_layers", default=0) if self._given("num_kv_shared_layers") else 0
        if shared >= count:
            _refuse(f"num_kv_shared_layers, {shared}, leaves no layer of {count}")
        return layers[: count - shared]

    def _kind(self, field: str, kinds: Mapping[str, tuple[str, ...]], word: object) -> tuple[str, ...]:
        kind = kinds.get(str(word))
        if kind is None:
            _refuse(f"{field} names a layer {word!r}, which is none of {', '.join(kinds)}")
        # Jamba's layers are of the first Mamba, under the name that all others use for the second.
        return (_MAMBA,) if kind == (_MAMBA_2,) and self._type == "jamba" else kind

    def _unlisted(self, layer: int, count: int) -> tuple[str, ...]:
        """Tell what a layer keeps where the config has a rule and no list."""
        if self._type == "falcon_h1":
            return (_FULL, _MAMBA_2)
        if self._given("attn_layer_period") is not None:
            offset = self._fields.get("attn_layer_offset")
            if type(offset) is not int:
                _refuse("the field attn_layer_offset is missing")
            return (_FULL,) if layer % self._number("attn_layer_period") == offset else (_MAMBA,)
        if self._given("attn_layer_indices") is not None:
            return (_FULL,) if layer in self._fields["attn_layer_indices"] else (_MAMBA_2,)
        if self._given("full_attention_interval") is not None:
            return (_DELTA_NET,) if (layer + 1) % self._number("full_attention_interval") else (_FULL,)
        if any(name.startswith(("mamba_", "ssm_", "linear_")) and self._given(name) for name in self._fields):
            _refuse("some layers are recurrent, and the config does not say which")
        chunked = self._given("attention_chunk_size") is not None and self._rotates(layer, count)
        return (_SLIDING,) if chunked or self._slides(layer, count) else (_FULL,)

    def _rotates(self, layer: int, count: int) -> bool:
        """Tell whether a layer of Llama 4 has rotary positions: then it attends within its chunk alone."""
        listed = self._fields.get("no_rope_layers")
        if not listed:
            return (layer + 1) % self._number("no_rope_layer_interval") != 0
        if len(listed) != count:
            _refuse(f"no_rope_layers has {len(listed)} layers, and num_hidden_layers says {count}")
        return bool(listed[layer])

    def _slides(self, layer: int, count: int) -> bool:
        if self._given("sliding_window") is None or self._given("use_sliding_window") is False:
            return False
        if self._given("use_sliding_window") is True:
            # The field keeps the number of layers at the bottom that attend to all.
            return layer >= self._number("max_window_layers", default=count)
        pattern = ("sliding_window_pattern", "_sliding_window_pattern")
        return self._given(*pattern) is None or (layer + 1) % self._number(*pattern) != 0

    def _window(self) -> int:
        return self._number("sliding_window", "attention_chunk_size")

    # ----------------------------------------------------------------------------------------------------- attention

    def _attention(self) -> tuple[str, int]:
        """Give how keys and values are shared, and the bytes of a token in one layer."""
        kv_bytes = DTYPE_BYTES[self._kv_dtype]
        if self._given("kv_lora_rank") is not None:
            return "MLA", (self._number("kv_lora_rank") + self._number("qk_rope_head_dim")) * kv_bytes
        heads = self._number(*_HEADS)
        kv_heads = self._kv_heads(heads)
        if heads % self._devices:
            _refuse(f"num_attention_heads, {heads}, cannot be shared out among {self._devices} devices")
        if kv_heads % self._devices and self._devices % kv_heads:
            _refuse(f"num_key_value_heads, {kv_heads}, cannot be shared out among {self._devices} devices")
        head_width = self._number(*_HEAD_WIDTH, default=0) or self._head_width(heads)
        value_width = self._number("v_head_dim", default=head_width)
        name = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        return name, max(kv_heads // self._devices, 1) * (head_width + value_width) * kv_bytes

    def _head_width(self, heads: int) -> int:
        width = self._number(*_WIDTH)
        if width % heads:
            _refuse(f"hidden_size, {width}, is no multiple of num_attention_heads, {heads}")
        return width // heads

    def _kv_heads(self, heads: int) -> int:
        # One for all heads, but for the newer Falcon models, which say so and how many.
        if self._given("multi_query") is True and not self._given("new_decoder_architecture"):
            return 1
        nested = self._given("attn_config")
        if isinstance(nested, Mapping) and type(nested.get("kv_n_heads")) is int:
            return int(nested["kv_n_heads"])
        return self._number(*_KV_HEADS, default=heads)

    # --------------------------------------------------------------------------------------------------------- state

    def _state(self, kind: str) -> int:
        """Give the bytes of state of one recurrent layer: what the convolution remembers and the state proper."""
        dtype = self._needed_dtype("the state of a convolution")
        channels, kernel, numbers = {_MAMBA: self._mamba, _MAMBA_2: self._mamba_2, _DELTA_NET: self._delta_net}[kind]()
        # Its newest input comes with the token; only those before it are kept.
        return channels * (kernel - 1) * DTYPE_BYTES[dtype] + numbers * DTYPE_BYTES[self._state_dtype or dtype]

    def _mamba(self) -> tuple[int, int, int]:
        width = self._number("mamba_expand") * self._number(*_WIDTH)
        width = self._shared_out(width, "the channels of Mamba")
        return width, self._number("mamba_d_conv"), width * self._number("mamba_d_state")

    def _mamba_2(self) -> tuple[int, int, int]:
        heads, states = self._number(*_STATE_HEADS), self._number(*_STATE_WIDTH)
        if self._given(*_STATE_HEAD_WIDTH) in (None, "auto"):
            head_width = self._number("mamba_expand") * self._number(*_WIDTH) // heads
        else:
            head_width = self._number(*_STATE_HEAD_WIDTH)
        # Heads of one group share some inputs of the state, so a device needs those of one group at least.
        groups = math.ceil(self._number(*_STATE_GROUPS) / self._devices)
        width = self._shared_out(heads, "the heads of Mamba") * head_width
        return width + 2 * groups * states, self._number(*_KERNEL), width * states

    def _delta_net(self) -> tuple[int, int, int]:
        key_heads = self._shared_out(self._number("linear_num_key_heads"), "linear_num_key_heads")
        value_heads = self._shared_out(self._number("linear_num_value_heads"), "linear_num_value_heads")
        key_width, value_width = self._number("linear_key_head_dim"), self._number("linear_value_head_dim")
        channels = 2 * key_heads * key_width + value_heads * value_width
        return channels, self._number("linear_conv_kernel_dim"), value_heads * key_width * value_width

    def _shared_out(self, count: int, name: str) -> int:
        if count % self._devices:
            _refuse(f"{name}, {count}, cannot be shared out among {self._devices} devices")
        return count // self._devices


def _refuse(reason: str) -> NoReturn:
    raise ModelConfigError(reason)

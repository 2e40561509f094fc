"""What models keep, against numbers worked out by hand from the facts in ``data/configs``, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale_numba.replay.model_size import DTYPE_BYTES, ModelConfigError, model_size

CONFIGS = Path(__file__).parent / "data" / "configs"
KEYS_AND_VALUES = 2
BF16 = 2


def config(name: str, **changes: Any) -> dict[str, Any]:
    """The facts about a model, with some changed; a field set to None is left out."""
    fields = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "attention", "kv_bytes"),
    [
        ("llama-2-7b", "MHA", 32 * KEYS_AND_VALUES * 32 * 128 * BF16),
        ("llama-3-8b", "GQA", 131_072),
        ("llama-3-70b", "GQA", 327_680),
        ("llama-4-scout", "GQA", 48 * KEYS_AND_VALUES * 8 * 128 * BF16),
        ("qwen2.5-7b", "GQA", 57_344),
        ("mistral-7b-v0.1", "GQA", 131_072),
        ("mixtral-8x7b", "GQA", 131_072),
        ("phi-3-mini-4k", "MHA", 32 * KEYS_AND_VALUES * 32 * 96 * BF16),
        ("gemma-2-9b", "GQA", 42 * KEYS_AND_VALUES * 8 * 256 * 4),
        ("gemma-3-4b", "GQA", 34 * KEYS_AND_VALUES * 4 * 256 * BF16),
        ("gemma-3-27b", "GQA", 62 * KEYS_AND_VALUES * 16 * 128 * BF16),
        ("gemma-3n-e4b", "GQA", 20 * KEYS_AND_VALUES * 2 * 256 * BF16),
        ("gpt-oss-120b", "GQA", 73_728),
        ("deepseek-v2-lite", "MLA", 27 * (512 + 64) * BF16),
        ("deepseek-v3", "MLA", 70_272),
        ("falcon-7b", "MQA", 32 * KEYS_AND_VALUES * 1 * 64 * BF16),
        ("falcon-40b", "GQA", 60 * KEYS_AND_VALUES * 8 * 64 * BF16),
        ("chatglm3-6b", "GQA", 28 * KEYS_AND_VALUES * 2 * 128 * BF16),
        ("dbrx", "GQA", 40 * KEYS_AND_VALUES * 8 * 128 * BF16),
        ("bamba-9b", "GQA", 12_288),
        ("jamba-v0.1", "GQA", 16_384),
        ("falcon-h1-7b", "GQA", 45_056),
        ("granite-4.0-h-small", "GQA", 16_384),
        ("nemotron-h-8b", "GQA", 16_384),
        ("qwen3-next-80b-a3b", "GQA", 24_576),
    ],
)
def test_kv_of_a_token_is_what_it_is_by_hand(name: str, attention: str, kv_bytes: int) -> None:
    size = model_size(config(name))
    assert (size.attention, size.kv_bytes_per_token) == (attention, kv_bytes)


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [
        ("llama-3-8b", 32, 0, None),
        ("llama-4-scout", 12, 36, 8_192),
        ("qwen2.5-7b", 28, 0, None),
        ("mistral-7b-v0.1", 0, 32, 4_096),
        ("mixtral-8x7b", 32, 0, None),
        ("phi-3-mini-4k", 0, 32, 2_047),
        ("gemma-2-9b", 21, 21, 4_096),
        ("gemma-3-4b", 5, 29, 1_024),
        ("gemma-3-27b", 10, 52, 1_024),
        ("gemma-3n-e4b", 4, 16, 512),
        ("gpt-oss-120b", 18, 18, 128),
        ("deepseek-v3", 61, 0, None),
        ("bamba-9b", 3, 0, None),
        ("jamba-v0.1", 4, 0, None),
        ("falcon-h1-7b", 44, 0, None),
        ("granite-4.0-h-small", 4, 0, None),
        ("nemotron-h-8b", 4, 0, None),
        ("qwen3-next-80b-a3b", 12, 0, None),
    ],
)
def test_layers_are_told_apart_by_what_they_attend_to(name: str, full: int, sliding: int, window: int | None) -> None:
    size = model_size(config(name))
    assert (size.full_attention_layers, size.sliding_window_layers, size.sliding_window) == (full, sliding, window)
    assert size.sliding_bytes_per_token * (full + sliding) == size.kv_bytes_per_token * sliding


@pytest.mark.parametrize(
    ("name", "layers", "convolution", "state"),
    [
        # Channels times the inputs that the convolution looks back on; then heads times width times states.
        ("bamba-9b", 29, (128 * 64 + 2 * 1 * 128) * 3, 128 * 64 * 128),
        ("jamba-v0.1", 28, 2 * 4_096 * 3, 2 * 4_096 * 16),
        ("falcon-h1-7b", 44, (24 * 128 + 2 * 1 * 256) * 3, 24 * 128 * 256),
        ("granite-4.0-h-small", 36, (128 * 64 + 2 * 1 * 128) * 3, 128 * 64 * 128),
        ("nemotron-h-8b", 24, (128 * 64 + 2 * 8 * 128) * 3, 128 * 64 * 128),
        ("qwen3-next-80b-a3b", 36, (2 * 16 * 128 + 32 * 128) * 3, 32 * 128 * 128),
    ],
)
def test_recurrent_state_is_what_it_is_by_hand(name: str, layers: int, convolution: int, state: int) -> None:
    size = model_size(config(name))
    assert (size.recurrent_layers, size.state_bytes) == (layers, layers * (convolution + state) * BF16)


def test_a_model_without_recurrent_layers_has_no_state() -> None:
    size = model_size(config("llama-3-8b"))
    assert (size.recurrent_layers, size.state_bytes) == (0, 0)


def test_what_the_config_says_of_the_state_leaves_the_convolution_alone() -> None:
    layer = (128 * 64 + 2 * 128) * 3 * BF16 + 128 * 64 * 128 * 4
    assert model_size(config("bamba-9b", mamba_ssm_dtype="float32")).state_bytes == 29 * layer


def test_a_type_of_state_that_is_given_counts_more_than_that_of_the_config() -> None:
    fields = config("bamba-9b", mamba_ssm_dtype="float32")
    assert model_size(fields, state_dtype="bf16") == model_size(config("bamba-9b"))


@pytest.mark.parametrize("kv_dtype", DTYPE_BYTES)
def test_kv_is_as_large_as_the_type_that_is_given(kv_dtype: str) -> None:
    size = model_size(config("llama-3-8b"), kv_dtype=kv_dtype)
    assert (size.kv_dtype, size.kv_bytes_per_token) == (kv_dtype, 65_536 * DTYPE_BYTES[kv_dtype])


def test_a_type_of_kv_changes_no_state() -> None:
    assert model_size(config("bamba-9b"), kv_dtype="fp8").state_bytes == model_size(config("bamba-9b")).state_bytes


@pytest.mark.parametrize("name", ["torch.bfloat16", "bfloat16", "bf16"])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_type_is_known_by_each_of_its_names_and_fields(field: str, name: str) -> None:
    fields = {**config("llama-3-8b", torch_dtype=None), field: name}
    assert model_size(fields).kv_bytes_per_token == 131_072


def test_the_type_may_stand_within_the_text_config() -> None:
    fields = config("gemma-3-27b", torch_dtype=None)
    fields["text_config"]["dtype"] = "float32"
    assert model_size(fields).kv_dtype == "fp32"


@pytest.mark.parametrize(("devices", "kv_bytes"), [(1, 327_680), (2, 163_840), (8, 40_960), (16, 40_960)])
def test_devices_share_out_kv_heads_until_each_has_one(devices: int, kv_bytes: int) -> None:
    size = model_size(config("llama-3-70b"), tensor_parallel=devices)
    assert (size.tensor_parallel, size.kv_bytes_per_token) == (devices, kv_bytes)


def test_each_device_keeps_all_of_what_mla_keeps() -> None:
    assert model_size(config("deepseek-v3"), tensor_parallel=8).kv_bytes_per_token == 70_272


@pytest.mark.parametrize(
    ("name", "devices", "state_bytes"),
    [
        # The one group is kept by both.
        ("bamba-9b", 2, 29 * ((64 * 64 + 2 * 1 * 128) * 3 + 64 * 64 * 128) * BF16),
        ("nemotron-h-8b", 2, 24 * ((64 * 64 + 2 * 4 * 128) * 3 + 64 * 64 * 128) * BF16),
        ("jamba-v0.1", 4, 28 * (2_048 * 3 + 2_048 * 16) * BF16),
        ("qwen3-next-80b-a3b", 4, 36 * ((2 * 4 * 128 + 8 * 128) * 3 + 8 * 128 * 128) * BF16),
    ],
)
def test_devices_share_out_the_state(name: str, devices: int, state_bytes: int) -> None:
    assert model_size(config(name), tensor_parallel=devices).state_bytes == state_bytes


def test_a_list_of_layers_says_more_than_the_rule_of_the_model() -> None:
    fields = config("qwen3-next-80b-a3b", layer_types=["full_attention", *["linear_attention"] * 47])
    assert model_size(fields).full_attention_layers == 1


def test_the_word_mamba_means_the_first_mamba_in_jamba() -> None:
    words = ["attention" if layer % 8 == 4 else "mamba" for layer in range(32)]
    assert model_size(config("jamba-v0.1", layers_block_type=words)) == model_size(config("jamba-v0.1"))


def test_a_sliding_window_that_is_used_spares_the_layers_at_the_bottom() -> None:
    size = model_size(config("qwen2.5-7b", use_sliding_window=True, max_window_layers=20))
    assert (size.full_attention_layers, size.sliding_window_layers) == (20, 8)


def test_layers_of_llama_4_with_positions_listed_attend_within_their_chunk() -> None:
    fields = config("llama-4-scout")
    fields["text_config"]["no_rope_layers"] = [1, 0] * 24
    assert model_size(fields).sliding_window_layers == 24


def test_values_may_have_another_width_than_keys() -> None:
    assert model_size(config("llama-3-8b", v_head_dim=64)).kv_bytes_per_token == 32 * 8 * (128 + 64) * BF16


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelConfigError, match=f"the field {field} is missing"):
        model_size(config("llama-3-8b", **{field: None}))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek-v3", "qk_rope_head_dim"),
        ("bamba-9b", "mamba_n_heads"),
        ("bamba-9b", "mamba_d_state"),
        ("bamba-9b", "mamba_n_groups"),
        ("bamba-9b", "mamba_d_conv"),
        ("jamba-v0.1", "mamba_expand"),
        ("jamba-v0.1", "attn_layer_offset"),
        ("qwen3-next-80b-a3b", "linear_num_value_heads"),
    ],
)
def test_a_missing_field_of_a_kind_of_layer_is_named(name: str, field: str) -> None:
    with pytest.raises(ModelConfigError, match=f"the field {field} is missing"):
        model_size(config(name, **{field: None}))


def test_a_config_that_names_no_type_is_refused_unless_one_is_given() -> None:
    with pytest.raises(ModelConfigError, match=r"the field dtype \(or torch_dtype\) is missing"):
        model_size(config("gpt2"))
    assert model_size(config("gpt2"), kv_dtype="fp16").kv_bytes_per_token == 12 * KEYS_AND_VALUES * 768 * 2


def test_a_state_that_no_type_is_known_of_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="nothing else says what the state of a convolution is kept as"):
        model_size(config("bamba-9b", torch_dtype=None), kv_dtype="fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of 1 or more, and is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer of 1 or more, and is True"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads must be an integer of 1 or more, and is \[8, 4\]"),
        ({"torch_dtype": "int4"}, "dtype is 'int4', which is none of"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, and num_hidden_layers says 32"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"layer_types": ["hybrid"] * 32}, "layer_types names a layer 'hybrid', which is none of"),
        ({"hybrid_override_pattern": "M-x"}, "hybrid_override_pattern names a layer 'x', which is none of"),
        ({"sliding_window": 4_096, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be an integer"),
        ({"mamba_d_state": 16}, "some layers are recurrent, and the config does not say which"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers, 32, leaves no layer"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"index_head_dim": 128}, "what the field index_head_dim says is not worked out here"),
        ({"linear_attn_config": {"num_heads": 32}}, "what the field linear_attn_config says is not worked out here"),
        ({"hidden_size": 100}, "hidden_size, 100, is no multiple of num_attention_heads, 32"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        model_size(config("llama-3-8b", **changes))


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("llama-3-8b", 3, "num_attention_heads, 32, cannot be shared out among 3 devices"),
        ("falcon-7b", 2, "num_attention_heads, 71, cannot be shared out among 2 devices"),
        ("gemma-3-4b", 16, "num_attention_heads, 8, cannot be shared out among 16 devices"),
        ("qwen3-next-80b-a3b", 32, "num_attention_heads, 16, cannot be shared out among 32 devices"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused(name: str, devices: int, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        model_size(config(name), tensor_parallel=devices)


def test_kv_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="num_key_value_heads, 8, cannot be shared out among 12 devices"):
        model_size(config("llama-3-8b", num_attention_heads=48, head_dim=128), tensor_parallel=12)


def test_heads_of_mamba_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="the heads of Mamba, 6, cannot be shared out among 4 devices"):
        model_size(config("bamba-9b", mamba_n_heads=6), tensor_parallel=4)

"""Models of a few thousand random weights, one of each kind that the engine treats in a way of its own.

Imported by tests only after they have made sure that transformers is there.
"""

from __future__ import annotations

import functools

import torch
import transformers

VOCAB_SIZE = 200
SLIDING_WINDOW = 24

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_DELTA_RULE = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONFIGS = {
    # Attention alone.
    "llama": {"num_hidden_layers": 2},
    # Mamba-2 layers between attention layers, and both in one layer.
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **_MAMBA2},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 128, **_MAMBA2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
    },
    # Gated delta rule, with a mixture of experts.
    "qwen3_next": {
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **_DELTA_RULE,
    },
    # A convolution and no recurrent state.
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    # Sliding windows alone, and by turns with full attention.
    "mistral": {"num_hidden_layers": 2, "sliding_window": SLIDING_WINDOW},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": SLIDING_WINDOW, "head_dim": 16},
    # Mamba-1, with attention and without.
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "mamba": {"num_hidden_layers": 2, "state_size": 8},
    # Its recurrent state is in the model.
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": SLIDING_WINDOW},
}


@functools.cache
def tiny_model(name, seed=0):
    """Make a model, always the same for a name and seed. Tests leave its weights as they are."""
    config = transformers.CONFIG_MAPPING[name](**{**_COMMON, **CONFIGS[name]})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # As they are made, tokens hardly move the logits, and a wrong state would be within the tolerance.
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model.eval()


def cold_run(model, tokens):
    """Compute all tokens at once, with nothing cached: the logits of each, and the cache afterwards."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(len(tokens))[None],
            cache=cache,
            use_cache=True,
        ).logits
    return logits[0], cache

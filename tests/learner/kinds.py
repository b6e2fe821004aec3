"""Models of many kinds, of a few thousand random weights each, in the way of whoever lays sequences end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
FULL = ["full_attention"] * 2
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")} | {
    f"linear_{name}_head_dim": 8 for name in ("key", "value")
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

RIGHT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 300},
    "gemma3_text": {"sliding_window": 300},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "phi": {},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": MOE,
    "deepseek_v3": {
        **LATENT,
        **MOE,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""By model type, what differs from `SIZES`: kinds that can be sampled and trained."""

WRONG: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**MOE, **DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "mamba": {},
    "gpt_oss": {"layer_types": FULL, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma2": {},
    "stablelm": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "qwen2_moe": {**MOE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
}
"""Kinds that cannot: with convolutions, states, sinks, caps, windows of which only masks know, and attention that is not
transformers' common one."""


def maker(kind: str, dtype: torch.dtype = torch.float32) -> Callable[[int], torch.nn.Module]:
    """From a seed to a model. Weights are as small as `from_config` draws them: what is wrong hardly shows in logits."""
    sizes = SIZES | RIGHT.get(kind, {}) | WRONG.get(kind, {})
    if kind == "falcon":
        del sizes["head_dim"]  # follows from others there

    def make(seed: int) -> torch.nn.Module:
        config = AutoConfig.for_model(kind, **sizes)
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()
        return model

    return make

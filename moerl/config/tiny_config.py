"""The config.json of the tiny random Qwen3-MoE that `model.tiny` describes."""

from __future__ import annotations

from typing import Any

from moerl.config.schema import TinyModel

MAX_POSITIONS = 4096


def tiny_config(tiny: TinyModel, vocab_size: int, *, pad: int = 0, eos: int = 1) -> dict[str, Any]:
    """The fields of config.json.  pad, eos: token ids."""
    return common_fields(tiny, vocab_size, pad=pad, eos=eos) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": tiny.moe_ffn,
        "head_dim": tiny.head_dim,
        "num_experts": tiny.num_experts,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def common_fields(
    tiny: TinyModel, vocab_size: int, *, pad: int = 0, eos: int = 1
) -> dict[str, Any]:
    """The fields that the families of MoE models share."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.moe_ffn * tiny.experts_per_token,  # of dense layers
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "num_experts_per_tok": tiny.experts_per_token,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": tiny.initializer_range,
        "pad_token_id": pad,
        "eos_token_id": eos,
        "bos_token_id": None,
        "dtype": "float32",
    }

"""Tiny random models of sixteen families: their config.json, and their folders.

    python -m tests.helpers.tiny_families FOLDER FAMILY

Each family has the fields that its released checkpoints have and that transformers or SGLang read:
SGLang reads some that transformers does not write (`topk_method`, `scoring_func`,
`moe_layer_freq`).  Sizes come from a `TinyModel`; other fields have the defaults of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moerl.config import load_config
from moerl.config.schema import TinyModel
from moerl.config.tiny_config import MAX_POSITIONS, common_fields, tiny_config
from moerl.data.tiny_model import VOCAB_SIZE, make_model

RECIPE = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny_family.yaml")
"""A short run; its own model is a Qwen3-MoE, `model.path` names one of another family."""
_THETA = 10000.0
_PLAIN = {"rope_type": "default", "rope_theta": _THETA}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": _THETA,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_POSITIONS // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
Fields = dict[str, Any]


def family_config(family: str, tiny: TinyModel, vocab_size: int) -> Fields:
    """The config.json of a family with these sizes."""
    fields = common_fields(tiny, vocab_size) | FAMILY_FIELDS[family](tiny)
    return _inside(fields) if family == "llama4" else fields


def recipe_shape(family: str) -> TinyModel:
    """The sizes of a family's model in runs of RECIPE."""
    grouped = family in ("deepseek_v3", "deepseek_v32")
    change = {"num_experts": 16, "experts_per_token": 4} if grouped else {}
    return replace(load_config(RECIPE).model.tiny, **change)


def make_family_model(
    folder: Path, family: str, shape: TinyModel | None = None, *, seed: int = 0
) -> None:
    """Write a model folder with random weights.  shape: by default that of RECIPE."""
    shape = shape or recipe_shape(family)
    make_model(folder, family_config(family, shape, VOCAB_SIZE), seed)


def _class(model_type: str, name: str) -> Fields:
    return {"model_type": model_type, "architectures": [f"{name}ForCausalLM"]}


def _qwen3_moe(tiny: TinyModel) -> Fields:
    own, shared = tiny_config(tiny, VOCAB_SIZE), common_fields(tiny, VOCAB_SIZE)
    return {name: value for name, value in own.items() if name not in shared}


def _qwen2_moe(tiny: TinyModel) -> Fields:
    return _class("qwen2_moe", "Qwen2Moe") | {
        "moe_intermediate_size": tiny.moe_ffn,
        "shared_expert_intermediate_size": 2 * tiny.moe_ffn,
        "num_experts": tiny.num_experts,
        "norm_topk_prob": False,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(tiny: TinyModel) -> Fields:
    return _class("olmoe", "Olmoe") | {
        # its key norm has hidden_size weights, and SGLang's eps is fixed
        "num_key_value_heads": tiny.num_heads,
        "rms_norm_eps": 1e-5,
        "intermediate_size": tiny.moe_ffn,
        "num_experts": tiny.num_experts,
        "norm_topk_prob": False,
    }


def _mixtral(tiny: TinyModel) -> Fields:
    return _class("mixtral", "Mixtral") | {
        "intermediate_size": tiny.moe_ffn,
        "num_local_experts": tiny.num_experts,
        "sliding_window": None,
    }


def _after_dense_layers(tiny: TinyModel) -> Fields:
    """Routed experts after one dense layer, and shared ones."""
    return {
        "moe_intermediate_size": tiny.moe_ffn,
        "n_routed_experts": tiny.num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }


def _glm4_moe(tiny: TinyModel) -> Fields:
    part = 0.5
    return (
        _class("glm4_moe", "Glm4Moe")
        | _after_dense_layers(tiny)
        | {
            "head_dim": tiny.head_dim,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": part,
            "rope_parameters": _PLAIN | {"partial_rotary_factor": part},
        }
    )


def _deepseek(tiny: TinyModel) -> Fields:
    """Latent attention, and what its classes read of all their models."""
    return _after_dense_layers(tiny) | {
        "num_key_value_heads": tiny.num_heads,
        "q_lora_rank": tiny.hidden_size // 2,
        "kv_lora_rank": tiny.hidden_size // 2,
        "qk_nope_head_dim": tiny.head_dim // 2,
        "qk_rope_head_dim": tiny.head_dim // 4,
        "v_head_dim": tiny.head_dim // 2,
        "moe_layer_freq": 1,
        "rope_parameters": _PLAIN,
    }


def _deepseek_v2(tiny: TinyModel) -> Fields:
    return (
        _class("deepseek_v2", "DeepseekV2")
        | _deepseek(tiny)
        | {
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        }
    )


def _deepseek_v2_lite(tiny: TinyModel) -> Fields:
    return _deepseek_v2(tiny) | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }


def _moonlight(tiny: TinyModel) -> Fields:
    """The class of DeepSeek-V3 with one group, direct queries and plain rotary embeddings."""
    return (
        _class("deepseek_v3", "DeepseekV3")
        | _deepseek(tiny)
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "q_lora_rank": None}
    )


def _kimi_k2(tiny: TinyModel) -> Fields:
    return _moonlight(tiny) | {
        "q_lora_rank": tiny.hidden_size // 2,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }


def _deepseek_v3(tiny: TinyModel) -> Fields:
    # a group is rated by its best two: megatron-core takes that number from these sizes
    return _kimi_k2(tiny) | {"n_group": 4, "topk_group": max(1, tiny.experts_per_token // 2)}


def _deepseek_v32(tiny: TinyModel) -> Fields:
    """Few index heads: many of their scores are exactly 0, so the choice among them is free."""
    return _deepseek_v3(tiny) | {
        **_class("deepseek_v32", "DeepseekV32"),
        "index_topk": 8,
        "index_n_heads": 2,
        "index_head_dim": tiny.head_dim,
    }


def _gpt_oss(tiny: TinyModel) -> Fields:
    kinds = ["sliding_attention", "full_attention"]
    return _class("gpt_oss", "GptOss") | {
        "intermediate_size": tiny.moe_ffn,
        "head_dim": tiny.head_dim,
        "num_local_experts": tiny.num_experts,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "sliding_window": 16,
        "layer_types": [kinds[layer % 2] for layer in range(tiny.num_layers)],
        "rope_parameters": _YARN | {"truncate": False},
    }


def _minimax_m2(tiny: TinyModel) -> Fields:
    return _class("minimax_m2", "MiniMaxM2") | {
        "intermediate_size": tiny.moe_ffn,
        "head_dim": tiny.head_dim,
        "num_local_experts": tiny.num_experts,
        "rotary_dim": tiny.head_dim // 2,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5},
    }


def _ernie4_5_moe(tiny: TinyModel) -> Fields:
    return _class("ernie4_5_moe", "Ernie4_5_Moe") | {
        "moe_intermediate_size": tiny.moe_ffn,
        "moe_num_experts": tiny.num_experts,
        "moe_k": tiny.experts_per_token,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": tiny.num_layers - 1,
        "moe_layer_interval": 1,
        "head_dim": tiny.head_dim,
        "use_bias": False,
        "rms_norm_eps": 1e-5,
    }


def _llama4(tiny: TinyModel) -> Fields:
    return _class("llama4_text", "Llama4") | {
        "intermediate_size": tiny.moe_ffn,
        "intermediate_size_mlp": 2 * tiny.moe_ffn,
        "head_dim": tiny.head_dim,
        "num_local_experts": tiny.num_experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _PLAIN,
    }


def _qwen3_next(tiny: TinyModel) -> Fields:
    return _qwen2_moe(tiny) | {
        **_class("qwen3_next", "Qwen3Next"),
        "head_dim": tiny.head_dim,
        "norm_topk_prob": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": tiny.head_dim // 2,
        "linear_value_head_dim": tiny.head_dim // 2,
        "linear_num_key_heads": tiny.num_heads // 2,
        "linear_num_value_heads": tiny.num_heads,
        "partial_rotary_factor": 0.25,
        "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.25},
    }


def _inside(text: Fields) -> Fields:
    """Llama-4's multimodal config around that of its language model, the only one made."""
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    return {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        **{key: text[key] for key in ("vocab_size", "initializer_range", "dtype")},
        **{key: text[key] for key in ("pad_token_id", "eos_token_id", "bos_token_id")},
        "tie_word_embeddings": False,
    }


FAMILY_FIELDS: dict[str, Callable[[TinyModel], Fields]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v2_lite": _deepseek_v2_lite,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "kimi_k2": _kimi_k2,
    "moonlight": _moonlight,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "llama4": _llama4,
    "qwen3_next": _qwen3_next,
}

if __name__ == "__main__":
    make_family_model(Path(sys.argv[1]), sys.argv[2])

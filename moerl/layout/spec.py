"""ModelSpec: the sizes and switches of one model, read from a Hugging Face config.

Only what decides shapes, names or the forward computation.  A variant that the tables do not cover
is refused here, in one sentence, rather than loaded with tensors missing.
Defaults for absent keys are those of transformers' Qwen3MoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moerl.errors import LayoutError

FAMILIES = ("qwen3_moe",)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # Hugging Face model_type
    vocab_size: int  # without padding
    hidden: int
    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    experts: int  # per MoE layer
    experts_per_token: int
    moe_ffn: int  # inner width of one expert
    moe_layers: tuple[int, ...]  # global 0-based numbers of the layers that route
    tied: bool  # output head and embedding are one tensor
    norm_topk_prob: bool  # gate weights of the chosen experts are divided by their sum
    rms_eps: float
    rope_theta: float
    max_positions: int
    dtype: str  # of the checkpoint: float32, bfloat16, float16

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Read a config.json dict.

    Raises LayoutError for an unknown family, a missing or non-positive size, or an unsupported
    variant of a known family.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise LayoutError(
            f"model_type = {family!r} has no layout; known families: {', '.join(FAMILIES)}"
        )
    layers, hidden = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    _refuse_variants(config)
    spec = ModelSpec(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads"),
        head_dim=_size(config, "head_dim") if config.get("head_dim") else hidden // heads,
        # transformers 5 writes num_local_experts, released checkpoints say num_experts
        experts=_size(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        experts_per_token=_size(config, "num_experts_per_tok"),
        moe_ffn=_size(config, "moe_intermediate_size"),
        moe_layers=tuple(range(layers)),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        max_positions=_size(config, "max_position_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )
    if spec.heads % spec.kv_heads:
        raise LayoutError(
            f"num_attention_heads = {spec.heads} is not a multiple of "
            f"num_key_value_heads = {spec.kv_heads}"
        )
    if spec.experts_per_token > spec.experts:
        raise LayoutError(
            f"num_experts_per_tok = {spec.experts_per_token} exceeds num_experts = {spec.experts}"
        )
    return spec


def padded_vocab(spec: ModelSpec, tp: int, divisible_by: int = 128) -> int:
    """Vocabulary rows Megatron allocates: the next multiple of divisible_by * tp.

    Source: megatron/core/tokenizers/utils/build_tokenizer.py (0.16.1).
    """
    multiple = divisible_by * tp
    return -(-spec.vocab_size // multiple) * multiple


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise LayoutError(f"{key} = {value!r} in the model's config must be a positive integer")
    return value


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """Switches of Qwen3-MoE that change tensors or arithmetic and that no rule covers."""
    allowed: dict[str, tuple[object, ...]] = {
        "mlp_only_layers": (None, []),
        "decoder_sparse_step": (1,),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "hidden_act": ("silu",),
        "quantization_config": (None,),
    }
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            raise LayoutError(
                f"{key} = {value!r} is not supported for qwen3_moe; it must be {values[-1]!r}"
            )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """`rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise LayoutError(f"rope_type = {kind!r} is not supported; it must be 'default'")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))

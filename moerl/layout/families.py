"""Tables per model family: Hugging Face shapes, Megatron-core rules, SGLang rules.

A `Part` is a group of tensors that come together (attention, experts, ...) with both frameworks'
rules: `common_parts`, `attention_parts` and `ffn_parts` have them.  A `Family` says which parts its
layers have.  Sizes in the shape tables are attributes of ModelSpec.  Names under a layer are
relative to it.
Read at megatron-core 0.19.2 (local and Transformer Engine layer specs), sglang 0.5.23 (srt/models),
transformers 5.19.0.
Round trips do not find a wrong table (a k/v swap passes them all): each family needs an outside
oracle, see docs/layout.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moerl.core.errors import LayoutError
from moerl.layout import spec_readers
from moerl.layout.attention_parts import (
    DELTA_NET,
    GQA,
    GQA_GATED,
    GQA_REORDERED,
    INDEXER,
    MLA,
    MLA_DIRECT_Q,
    MLA_Q_LORA,
    O_BIAS,
    QK_NORM,
    QK_NORM_ALL_HEADS,
    QK_NORM_CUT,
    QK_NORM_GATED,
    QKV_BIAS,
    SINKS,
    own_norms,
)
from moerl.layout.common_parts import NORM_DELTA, NORM_DENSE, NORM_GQA, NORM_MLA, NORM_MOE
from moerl.layout.ffn_parts import (
    DENSE,
    EXPERT_BIAS,
    EXPERT_BIAS_ROW,
    EXPERTS,
    GPT_OSS_EXPERTS,
    GPT_OSS_ROUTER,
    LLAMA4_DENSE,
    LLAMA4_EXPERTS,
    LLAMA4_SHARED,
    ROUTER,
    ROUTER_FP32,
    SHARED,
    SHARED_GATE,
    SHARED_GATED,
    expert_bias,
    experts,
    router,
)
from moerl.layout.rules import Part, Rule
from moerl.layout.spec import ModelSpec
from moerl.layout.spec_readers import Config, SpecReader, read_spec

LLAMA4_TEXT = (
    "SGLang's class for it leaves the experts unfilled; use the multimodal form "
    "(model_type llama4, this config as text_config, tensors under language_model.)"
)


@dataclass(frozen=True, slots=True)
class Family:
    """The reader of its config, and the parts of its layers: `every`, then `moe` or `dense`."""

    reader: SpecReader
    every: tuple[Part, ...]
    moe: tuple[Part, ...] = ()
    dense: tuple[Part, ...] = ()
    linear: tuple[Part, ...] = ()
    """In place of `every` in the layers of `linear_layers`."""
    expert_files: str = "rows"
    """Stacked experts in a file: rows [E, rows, cols] as in the tables, or transposed (gpt-oss)."""


# --- families ------------------------------------------------------------------------------------
_QWEN = (NORM_GQA, GQA, QKV_BIAS, QK_NORM)
_MOE, _DENSE = (NORM_MOE, ROUTER, EXPERTS), (NORM_DENSE, DENSE)
_DEEPSEEK = Family(
    spec_readers.DEEPSEEK_V3,
    every=(NORM_MLA, MLA, MLA_Q_LORA, MLA_DIRECT_Q),
    moe=(*_MOE, EXPERT_BIAS, SHARED),
    dense=_DENSE,
)
FAMILY_TABLES: dict[str, Family] = {
    "qwen3_moe": Family(spec_readers.QWEN3_MOE, _QWEN, _MOE, _DENSE),
    "qwen2_moe": Family(spec_readers.QWEN2_MOE, _QWEN, (*_MOE, SHARED_GATED, SHARED_GATE), _DENSE),
    "qwen3_next": Family(
        spec_readers.QWEN3_NEXT,
        (NORM_GQA, GQA_GATED, QK_NORM_GATED),
        (*_MOE, SHARED_GATED, SHARED_GATE),
        linear=(NORM_DELTA, DELTA_NET),
    ),
    "mixtral": Family(
        spec_readers.MIXTRAL,
        (NORM_GQA, GQA),
        (
            NORM_MOE,
            router("block_sparse_moe.gate.weight"),
            experts("block_sparse_moe.experts", "w1", "w3", "w2"),
        ),
    ),
    "olmoe": Family(spec_readers.OLMOE, (NORM_GQA, GQA, QK_NORM_ALL_HEADS), _MOE),
    "deepseek_v2": replace(_DEEPSEEK, reader=spec_readers.DEEPSEEK_V2),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(
        _DEEPSEEK,
        reader=spec_readers.DEEPSEEK_V32,
        every=(NORM_MLA, own_norms(MLA), own_norms(MLA_Q_LORA), INDEXER),
    ),
    "glm4_moe": Family(
        spec_readers.GLM4_MOE, _QWEN, (NORM_MOE, ROUTER_FP32, EXPERTS, EXPERT_BIAS, SHARED), _DENSE
    ),
    "gpt_oss": Family(
        spec_readers.GPT_OSS,
        (NORM_GQA, GQA, QKV_BIAS, O_BIAS, SINKS),
        (NORM_MOE, GPT_OSS_ROUTER, GPT_OSS_EXPERTS),
        expert_files="transposed",
    ),
    "minimax_m2": Family(
        spec_readers.MINIMAX_M2,
        (NORM_GQA, GQA, QK_NORM_CUT),
        (
            NORM_MOE,
            router("block_sparse_moe.gate.weight", sglang_dtype="float32"),
            experts("block_sparse_moe.experts", "w1", "w3", "w2"),
            expert_bias("block_sparse_moe.e_score_correction_bias"),
        ),
    ),
    "ernie4_5_moe": Family(
        spec_readers.ERNIE4_5_MOE, (NORM_GQA, GQA), (*_MOE, EXPERT_BIAS_ROW, SHARED), _DENSE
    ),
    "llama4": Family(
        spec_readers.LLAMA4,
        (NORM_GQA, GQA_REORDERED),
        (NORM_MOE, router("feed_forward.router.weight"), LLAMA4_EXPERTS, LLAMA4_SHARED),
        (NORM_DENSE, LLAMA4_DENSE),
        expert_files="transposed",
    ),
    "qwen3": Family(spec_readers.QWEN3, _QWEN, dense=_DENSE),
    "llama": Family(spec_readers.LLAMA, (NORM_GQA, GQA), dense=_DENSE),
}
FAMILIES = tuple(FAMILY_TABLES)


def model_spec(config: Config) -> ModelSpec:
    """Read a config.json dict.

    Raises LayoutError for an unknown family, a missing or non-positive size, or an unsupported
    variant of a known family.
    """
    family = config.get("model_type")
    if family == "llama4_text":
        raise LayoutError(f"model_type = {family!r} is not supported: {LLAMA4_TEXT}")
    if family not in FAMILY_TABLES:
        raise LayoutError(
            f"model_type = {family!r} has no layout; known families: {', '.join(FAMILIES)}"
        )
    return read_spec(config, family, FAMILY_TABLES[family].reader)


def te_rule(rule: Rule) -> Rule:
    """The same tensor in a layer built from Transformer Engine modules."""
    return replace(rule, local=rule.te or rule.local)

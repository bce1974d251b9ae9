"""Adapters as SGLang's own loader reads them: two tensors per weight, each expert's included.

It has one rank per adapter, scales by alpha / r alone (no rsLoRA), and stacks the factors of the
parts of a fused tensor, all of which must exist; experts need all three projections.  So smaller
ranks are padded with zeros and missing parts are zeros, which changes no product.
Read at SGLang 0.5.23, srt/lora/lora.py and mem_pool.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.core.errors import ModelError
from moerl.layout import ModelSpec, hf_shapes
from moerl.layout.adapters import adapter_shapes, factor_names

_LEAVES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # as SGLang calls them
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
)


def sglang_refusal(spec: ModelSpec, lora: LoraConfig) -> str:
    """Why SGLang cannot load an adapter of this model; empty = it can."""
    for factor in adapter_shapes(hf_shapes(spec), lora.rank_of):
        if factor.split(".")[-2] in ("gate", "router"):
            return f"SGLang has no adapters of routers, such as {factor}"
    if spec.kv_lora and not spec.q_lora:
        return "SGLang looks for q_a_proj next to kv_a_proj_with_mqa, which this model has not"
    return ""


def sglang_form(
    factors: Mapping[str, Tensor], spec: ModelSpec, lora: LoraConfig
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and adapter_config.json.  factors: by Hugging Face name.  Raises ModelError."""
    if refusal := sglang_refusal(spec, lora):
        raise ModelError(f"an adapter for SGLang: {refusal}")
    shapes = hf_shapes(spec)
    factors = {  # one A and B for each expert, also where all of them share one
        f"{module}.lora_{x}": factors[name]
        for module in {name.rpartition(".")[0] for name in adapter_shapes(shapes, lora.rank_of)}
        for x, name in zip("AB", factor_names(module, shared=lora.shares), strict=True)
    }
    rank = max(len(value) for name, value in factors.items() if name.endswith("lora_A"))
    modules = {part for name in factors for part in _together(name.rpartition(".")[0])}
    whole = adapter_shapes(shapes, lambda module: rank if module in modules else 0)
    tensors = {_served_name(name): _padded(factors, name, shape) for name, shape in whole.items()}
    leaves = {name.split(".")[-3] for name in tensors}
    return tensors, {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": lora.scale * rank,
        "target_modules": sorted(leaves),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def _together(module: str) -> list[str]:
    """The modules that SGLang loads together with a module, some of which a model may lack."""
    parent, dot, leaf = module.rpartition(".")  # the head has no parent
    group = next((group for group in _TOGETHER if leaf in group), (leaf,))
    return [f"{parent}{dot}{name}" for name in group]


def _served_name(factor: str) -> str:
    module, _, kind = factor.rpartition(".")
    parent, dot, leaf = module.rpartition(".")
    return f"base_model.model.{parent}{dot}{_LEAVES.get(leaf, leaf)}.{kind}.weight"


def _padded(factors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    value = next(iter(factors.values())).new_zeros(shape)
    if name in factors:
        rows, cols = factors[name].shape
        value[:rows, :cols] = factors[name]
    return value

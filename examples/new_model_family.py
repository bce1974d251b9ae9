"""A model family that moerl does not know: say how its tensors are named, and prove the layout.

    python examples/new_model_family.py

The family is invented: grouped-query attention with a bias on q, k and v and a norm of its own for
queries and keys, and in every layer experts named w1, w3, w2 below `feed_forward`.  All of it is
made of parts that exist; a new kind of tensor is a new `Part` with its Hugging Face shapes, its
Megatron rules and its SGLang rules.

The check runs on shapes: every parameter of every rank is tiled exactly, and every byte of an
engine is covered once, or the tensor that is not is named.  It cannot see a swap of k and v, and it
adds the family to the table of this process only: `moerl check-layout` and `moerl train` start
others, which refuse it.  A family becomes part of moerl with comparisons against transformers,
Megatron-core and SGLang: CONTRIBUTING.md names the files, docs/layout.md explains them.
"""

from __future__ import annotations

from typing import Any

from moerl.config.schema import ParallelConfig
from moerl.layout import model_spec
from moerl.layout.attention_parts import GQA, QK_NORM, QKV_BIAS
from moerl.layout.common_parts import NORM_GQA, NORM_MOE
from moerl.layout.families import FAMILY_TABLES, Family
from moerl.layout.ffn_parts import experts, router
from moerl.layout.spec_readers import Config, SpecReader
from moerl.planning.layout_check import check_layout, describe
from moerl.weight_sync.held_shards import EngineLayout


def read(config: Config) -> dict[str, Any]:
    """Fields of ModelSpec; sizes that every family names alike are read already."""
    return {
        "experts": config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "moe_ffn": config["expert_size"],
        "moe_layers": tuple(range(config["num_hidden_layers"])),
        "norm_topk_prob": True,
        "qkv_bias": True,
        "qk_norm": True,
    }


ACME = Family(
    SpecReader(read),
    every=(NORM_GQA, GQA, QKV_BIAS, QK_NORM),
    moe=(
        NORM_MOE,
        router("feed_forward.gate.weight"),
        experts("feed_forward.experts", "w1", "w3", "w2"),
    ),
)
CONFIG = {
    "model_type": "acme_moe",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "expert_size": 512,
}


if __name__ == "__main__":
    FAMILY_TABLES["acme_moe"] = ACME
    trainer, engines = ParallelConfig(tp=2, pp=2, dp=2, ep=4), EngineLayout(tp=4, ep=2, num=2)
    print(describe(check_layout(model_spec(CONFIG), trainer, engines, "local")))

"""Random layouts of trainer and engines, over tiny models of two kinds."""

from __future__ import annotations

import math
import random
from functools import lru_cache

from moerl.config.schema import ParallelConfig
from moerl.core.errors import MoerlError
from moerl.layout import (
    ModelSpec,
    model_spec,
)
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import (
    TransferPlan,
)

SMALL = {
    "vocab_size": 37,
    "hidden_size": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
}
LATENT = SMALL | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 1,
    "v_head_dim": 3,
}
GROUPED = SMALL | {"model_type": "qwen3_moe", "num_experts": 4, "head_dim": 2}


@lru_cache(maxsize=64)
def spec_of(latent: bool, number: int, tied: bool, layers: int = 2) -> ModelSpec:
    both = {"tie_word_embeddings": tied, "num_hidden_layers": layers}
    if latent:
        return model_spec(LATENT | both | {"q_lora_rank": 4 if number % 2 else None})
    sizes = {"num_key_value_heads": (1, 2, 4, 8)[number], "vocab_size": (3, 37, 64, 150)[number]}
    return model_spec(GROUPED | both | sizes)


def draw(seed: int) -> TransferPlan:
    """A layout that both sides can build; sizes that do not divide are drawn again."""
    rng = random.Random(seed)
    while True:
        tp, pp, ep, etp = (rng.choice(c) for c in ((1, 2, 4), (1, 2), (1, 2, 4), (1, 1, 2)))
        vpp = rng.choice((1, 1, 2)) if pp > 1 else 1
        spec = spec_of(rng.random() < 0.5, rng.randrange(4), rng.random() < 0.3, 2 * vpp)
        dp = math.lcm(tp, ep * etp) // tp * rng.choice((1, 1, 2))
        size = rng.choice((1, 2, 2, 4, 4, 8))
        divides = [n for n in (1, 2, 4, 8) if size % n == 0]
        case = TransferPlan(
            spec,
            ParallelConfig(tp, pp, rng.choice((1, 1, 2)), ep, etp, dp, vpp, vocab_divisible_by=8),
            EngineLayout(size, rng.choice(divides), rng.choice(divides)),
            rng.randrange(9),
            WirePolicy(
                rng.choice(("float32", "bfloat16")), bucket_bytes=rng.choice((24, 160, 4096))
            ),
        )
        try:
            case.receiver(0)
        except MoerlError:
            continue
        return case

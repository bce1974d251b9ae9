"""Seconds a rank needs to plan its own part of a publish: 1,024 trainer ranks, 1,024 engine ranks.

    python bench/layout_plan.py [--ranks 16] [--json]

Shapes of the released models, no weights, one thread.  A trainer rank plans its sends to every
engine, an engine rank its own receives; what all ranks of a process share (tables of shapes, kinds
of layers) is made once and is in the first rank's figure (`first`).  The aim is 1 second per rank.
Seconds are of the process's own CPU, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from moerl.config.schema import ParallelConfig
from moerl.layout import model_spec
from moerl.planning.layout_check import check_layout
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TransferPlan

QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "dtype": "bfloat16",
}
# 61 layers divide into no equal stages: 7 stages of 8 and a last one of 5
V3_TRAINER = ParallelConfig(tp=4, pp=8, ep=32, dp=32, last_stage_layers=5)
CASES = {
    "Qwen3-235B": (QWEN3_235B, ParallelConfig(tp=4, pp=2, ep=8, dp=128)),
    "DeepSeek-V3": (DEEPSEEK_V3, V3_TRAINER),
}
ENGINES = {
    "32 x TP32 EP32": EngineLayout(tp=32, ep=32, num=32),
    "32 x TP32 EP32 DP8": EngineLayout(tp=32, ep=32, dp=8, num=32),
    "32 x TP32": EngineLayout(tp=32, num=32),
    "128 x TP8": EngineLayout(tp=8, num=128),
}


def measure(model: str, engines_name: str, num_ranks: int) -> dict[str, object]:
    config, trainer = CASES[model]
    spec, engines = model_spec(config), ENGINES[engines_name]
    step = max(1, trainer.world_size // num_ranks)
    policy = WirePolicy("bfloat16")
    seconds, pieces, sent = [], [], []
    for rank in range(0, trainer.world_size, step):
        start = time.process_time()
        plans = [
            TransferPlan(spec, trainer, engines, e, policy).sender(rank) for e in range(engines.num)
        ]
        seconds.append(time.process_time() - start)
        pieces.append(sum(len(r.pieces) for plan in plans for r in plan.regions))
        sent.append(sum(plan.num_bytes for plan in plans))
    start = time.process_time()
    TransferPlan(spec, trainer, engines, 0, policy).receiver(engines.tp - 1)
    receiver_s = time.process_time() - start
    start = time.process_time()
    check_layout(spec, trainer, engines)
    return {
        "model": model,
        "trainer_ranks": trainer.world_size,
        "engines": engines_name,
        "planned_ranks": len(seconds),
        "first_s": round(seconds[0], 3),
        "mean_s": round(sum(seconds[1:]) / max(1, len(seconds) - 1), 3),
        "receiver_s": round(receiver_s, 3),
        "pieces_mean": round(sum(pieces) / len(pieces)),
        "sent_max_over_mean": round(max(sent) * len(sent) / sum(sent), 3),
        "check_s": round(time.process_time() - start, 2),
        "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=16, help="trainer ranks to plan (default 16)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    for model in CASES:
        for engines in ENGINES:
            row = measure(model, engines, arguments.ranks)
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"{model:<12} {row['trainer_ranks']} -> {engines:<19}"
                    f"sender {row['mean_s']} s (first {row['first_s']}), "
                    f"receiver {row['receiver_s']} s, "
                    f"{row['pieces_mean']:,} pieces, "
                    f"largest sender {row['sent_max_over_mean']} x mean, "
                    f"proof {row['check_s']} s, peak {row['peak_MiB']} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Traffic and bounds of a publish for four released models in three layouts each.

    python bench/plan_table.py [--json]

Shapes alone, ten seconds on any machine.  Trainer TP4 PP4 EP8, 50 GB/s per rank, every engine is
served by the trainer.  "Attention DP" cuts attention over one rank instead of eight.  With 32 ranks
dense layers and shared experts are cut over 8 (32 would be inside an FP8 block); the head is cut
over all ranks.  Printed: M the model on the wire; traffic of the plan; ratio = bytes of a broadcast
/ planned bytes, into ranks and through cards (8 ranks per node); S the bytes of the largest
receiver; T seconds at line rate.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moerl.config.schema import ParallelConfig
from moerl.layout import model_spec
from moerl.planning.publish_forecast import Links, forecast
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"


class Case(NamedTuple):
    name: str
    dp: int  # data-parallel replicas of the trainer's TP4 PP4
    engines: EngineLayout


CASES = (
    Case("4 x EP8", 2, EngineLayout(8, 8, 1, 4)),
    Case("4 x EP8, attention DP", 2, EngineLayout(8, 8, 8, 4)),
    Case("16 x EP16", 16, EngineLayout(16, 16, 2, 16)),
)
SHAPES = {  # layers of the first and the last pipeline stage; 0 = as many as the others
    "qwen3-30b-a3b": (0, 0, "none"),
    "qwen3-235b-a22b": (23, 23, "none"),
    "deepseek-v3": (16, 0, "fp8_block"),
    "kimi-k2": (16, 0, "fp8_block"),
}


def row(model: str, case: Case) -> dict[str, object]:
    spec = model_spec(json.loads((MODELS / model / "config.json").read_text()))
    first, last, quantization = SHAPES[model]
    trainer = ParallelConfig(tp=4, pp=4, ep=8, dp=case.dp)
    trainer = replace(trainer, first_stage_layers=first, last_stage_layers=last)
    policy = WirePolicy("bfloat16", quantization)
    found = forecast(spec, trainer, case.engines, policy, Links(), direct=case.engines.num)
    return {
        "model": model,
        "layout": f"{trainer.world_size} -> {case.name}",
        "model_GB": round(found.model_bytes / 1e9, 1),
        "planned_GB": round(found.planned_bytes / 1e9),
        "rank_ratio": round(found.rank_ratio, 2),
        "card_ratio": round(found.card_ratio, 2),
        "largest_receiver_GB": round(found.received.high / 1e9, 2),
        "largest_sender_over_mean": round(found.sent.high / found.sent.mean, 3),
        "planned_s": round(found.seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    as_json = parser.parse_args().json
    for model in SHAPES:
        for case in CASES:
            found = row(model, case)
            if as_json:
                print(json.dumps(found), flush=True)
                continue
            print(
                f"{model:<16}{found['layout']:<29}M {found['model_GB']:>6} GB  plan "
                f"{found['planned_GB']:>6,} GB  ratio {found['rank_ratio']:>5} (cards "
                f"{found['card_ratio']})  S {found['largest_receiver_GB']} GB  "
                f"T {found['planned_s']} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""A publish of adapters for four released models: bytes, seconds of the plan and of the merge.

    python bench/lora_sync.py [--json]

Bytes are those of the plan of a recipe's layouts, into all ranks of one engine, in bf16, with
adapters of all projections.  "each" gives experts the rank of the others, "by k" rank / top-k,
"shared" one A of gate and of up and one B of down to all experts of a layer.
Percent are of a publish of whole weights into the same engine.  "plan" is the longest time that a
trainer rank and an engine rank take for it.  The merge (W0 + s B A of an engine rank, at VERIFY and
in the pause of COMMIT) is measured here on a few experts, one thread, and scaled to the rank.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch

from moerl.config import load_config
from moerl.config.lora_settings import LoraConfig
from moerl.layout import ModelSpec
from moerl.planning.publish_forecast import factor_forecast, planned_layouts
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.adapters.low_rank import merge_into
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan

RECIPES = ("qwen3-30b-a3b-lora", "qwen3-235b-a22b", "deepseek-v3-lora", "kimi-k2")
RANKS = (8, 16, 32, 64)
KINDS = ("each", "by k", "shared")
EXPERTS = 2  # that are merged to measure


def adapters(spec: ModelSpec, rank: int, kind: str) -> LoraConfig:
    experts = max(1, rank // spec.experts_per_token) if kind == "by k" else rank
    form = "shared" if kind == "shared" else "per_expert"
    return LoraConfig(rank=rank, ranks={"*.experts.*": experts}, experts=form)


def transfer(recipe: str) -> TransferPlan:
    """A recipe's layouts with unquantised engines, which alone merge factors."""
    config = load_config(recipe)
    args = {k: v for k, v in config.engine.args.items() if k != "quantization"}
    config = replace(config, engine=replace(config.engine, args=args))
    spec, trainer, engine, policy = planned_layouts(config)[0]
    spec, policy = replace(spec, mtp_layers=0), replace(policy, quantization="none")
    return TransferPlan(spec, trainer, replace(engine, num=1), PLAN_ID, policy)


def plan_seconds(weights: TransferPlan, lora: LoraConfig) -> tuple[float, float]:
    """Of the last trainer rank and the last engine rank: (plan of weights, that and of factors)."""
    start = time.process_time()
    weights.sender(weights.trainer.world_size - 1)
    weights.receiver(weights.engine.tp - 1)
    middle = time.process_time()
    plan = FactorPlan(weights, lora)
    plan.sender(weights.trainer.world_size - 1)
    plan.receiver(weights.engine.tp - 1)
    return middle - start, time.process_time() - middle


def merge_rate(spec: ModelSpec, rank: int) -> float:
    """Weights per second."""
    torch.set_num_threads(1)
    base = torch.randn(spec.moe_ffn, spec.hidden).bfloat16()
    a, b = torch.randn(rank, spec.hidden).bfloat16(), torch.randn(spec.moe_ffn, rank).bfloat16()
    out = torch.empty_like(base)
    merge_into(out, base, a, b, 1.0)
    start = time.process_time()
    for _ in range(EXPERTS):
        merge_into(out, base, a, b, 1.0)
    return EXPERTS * base.numel() / (time.process_time() - start)


def row(recipe: str) -> dict[str, object]:
    weights = transfer(recipe)
    spec, engine = weights.spec, weights.engine
    whole = sum(weights.totals().received_bytes)
    found: dict[str, object] = {"model": load_config(recipe).model.path.rpartition("/")[2]}
    found["engine"] = f"tp {engine.tp} ep {engine.ep}, {whole / 1e9:.1f} GB"
    merged = 0
    for rank in RANKS:
        for label in KINDS:
            lora = adapters(spec, rank, label)
            sent = factor_forecast(spec, engine, lora, weights.policy.dtype)
            share = sent.engine_bytes / whole
            found[f"{rank} {label}"] = f"{sent.engine_bytes / 1e9:.3g} GB {share:.2%}"
            merged = sent.merged
    of_weights, of_factors = plan_seconds(weights, adapters(spec, 32, "by k"))
    found["plan of weights"] = f"{of_weights:.2f} s"
    found["plan of factors"] = f"{of_factors:.2f} s"
    for rank in (4, 32):
        rate = merge_rate(spec, rank)
        found[f"merge at rank {rank}"] = f"{rate / 1e6:.0f} M/s, {merged / rate:.0f} s a rank"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    rows = [row(recipe) for recipe in RECIPES]
    if parser.parse_args().json:
        print(json.dumps(rows))
        return
    for found in rows:
        print(" | ".join(f"{key} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()

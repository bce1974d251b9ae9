"""The forecast of a publish: known figures, published anchors, the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config import load_config
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.layout import hf_shapes, model_spec, sglang_tiles
from moerl.layout.adapters import adapter_shapes, module_of
from moerl.planning.memory import engine_memory
from moerl.planning.publish_forecast import (
    Links,
    factor_forecast,
    forecast,
    merging_memory,
    planned_layouts,
)
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import PLAN_ID, TRAINER, TransferPlan
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
BF16, FP8 = WirePolicy("bfloat16"), WirePolicy("bfloat16", "fp8_block")
SMALL, LARGE = EngineLayout(8, 8, 1, 4), EngineLayout(32, 32, 4, 8)


def shapes(name: str) -> dict[str, object]:
    config: dict[str, object] = json.loads(
        (ROOT / f"configs/models/{name}/config.json").read_text()
    )
    return config


@pytest.mark.parametrize(
    ("model", "first", "last", "engines", "policy", "planned_gb", "ratio", "largest_gb"),
    [
        # an earlier planner that shares no code with this one, 32 and 256 trainer ranks
        ("qwen3-30b-a3b", 0, 0, SMALL, BF16, 246, 7.95, 7.68),
        ("qwen3-235b-a22b", 23, 23, SMALL, BF16, 1887, 7.97, 59.0),
        ("qwen3-235b-a22b", 23, 23, LARGE, BF16, 4193, 28.7, 16.4),
        ("deepseek-v3", 16, 0, SMALL, FP8, 2724, 7.91, 85.1),
        ("kimi-k2", 16, 0, SMALL, FP8, 4151, 7.93, 130),
    ],
)
def test_known_figures(
    model: str,
    first: int,
    last: int,
    engines: EngineLayout,
    policy: WirePolicy,
    planned_gb: float,
    ratio: float,
    largest_gb: float,
) -> None:
    """Within 1 %: that planner cut the head over attention's ranks and counted no scales."""
    dp = engines.world_size // 16
    trainer = ParallelConfig(4, 4, 1, 8, 1, dp, 1, first, last)
    found = forecast(model_spec(shapes(model)), trainer, engines, policy, Links())
    assert found.planned_bytes / 1e9 == pytest.approx(planned_gb, rel=0.01)
    assert found.rank_ratio == pytest.approx(ratio, rel=0.01)
    assert found.received.high / 1e9 == pytest.approx(largest_gb, rel=0.01)
    assert found.card_ratio == pytest.approx(ratio / min(8, engines.tp), rel=0.01)
    assert found.sent.high <= 1.2 * found.sent.mean


def test_relays_bound_the_trainer_and_save_time() -> None:
    """16 ranks cannot feed 32 engines of 8 at the rate at which those could receive."""
    spec = model_spec(shapes("qwen3-30b-a3b"))
    trainer, engines = ParallelConfig(tp=2, ep=8, dp=8), EngineLayout(8, 8, 1, 32)
    alone = forecast(spec, trainer, engines, BF16, Links(), direct=32)
    relayed = forecast(spec, trainer, engines, BF16, Links())
    served = sum(hop.src == TRAINER for hop in relayed.hops)
    assert 1 <= served < 32
    assert relayed.seconds < alone.seconds / 2
    assert relayed.sent.high <= alone.sent.high / 4
    assert relayed.planned_bytes == alone.planned_bytes
    with pytest.raises(ConfigError, match="--direct = 33"):
        forecast(spec, trainer, engines, BF16, Links(), direct=33)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moerl", "plan", *args],
        capture_output=True,
        text=True,
        timeout=patience(300),
        cwd=ROOT,
    )


RELEASED = {
    "qwen3-30b-a3b": 3,
    "qwen3-235b-a22b": 5,
    "deepseek-v3": 5,
    "glm-4.5-air": 5,
    "gpt-oss-120b": 5,
    "kimi-k2": 5,
}  # recipe: traffic of a broadcast against the plan's, at least


@pytest.mark.parametrize("recipe", RELEASED)
def test_every_recipe_of_a_released_model_is_forecast(recipe: str) -> None:
    done = run(recipe, "--json", "--nic-gb-s", "25", "--efficiency", "0.5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted_s"] == pytest.approx(2 * found["seconds"])
    assert found["rank_ratio"] > RELEASED[recipe]
    assert len(found["hops"]) == found["engines"]


def test_the_command_forecasts_a_step_of_each_topology() -> None:
    done = run("qwen3-30b-a3b-node8")
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("steps of 8 GPUs") :].splitlines()
    seconds = {line[:28].strip(): float(line[28:].split()[0]) for line in table[1:4]}
    assert set(seconds) == {"turns", "divided 4 + 4 (this recipe)", "hybrid, 4 awake"}
    assert list(seconds.values()) == sorted(seconds.values())
    assert min(seconds.values()) > 10.0
    assert "assumed: answers of 2,048 tokens" in table[-1]
    slower = run("qwen3-30b-a3b-node8", "sampling.max_new_tokens=16384").stdout
    assert "answers of 4,096 tokens" in slower
    more = slower[slower.index("steps of 8 GPUs") :].splitlines()[1:4]
    assert min(float(line[28:].split()[0]) for line in more) > 1.5 * min(seconds.values())
    assert "steps of 1 GPUs" in run("olmoe-1gpu").stdout


def test_a_topology_that_the_cluster_refuses_is_not_forecast() -> None:
    """Turns are for one machine; `in_place` keeps the KV cache at a publish."""
    table = run("qwen3-30b-a3b").stdout.split("steps of 32 GPUs")[1]
    assert "divided 16 + 16" in table
    assert "turns" not in table
    assert "hybrid" not in table
    again = [line.split()[-1] for line in table.splitlines() if line.startswith("divided")]
    assert "0%" not in again
    kept = run("qwen3-30b-a3b", "rollout.in_flight_mode=in_place").stdout
    rows = [line for line in kept.splitlines() if line.startswith("divided")]
    assert len(rows) == len(again)
    assert {line.split()[-1] for line in rows} == {"0%"}


def test_the_command_prints_bounds_and_refuses_in_one_sentence() -> None:
    done = run("qwen3-30b-a3b", "engine.count=32")
    assert done.returncode == 0, done.stderr
    for line in (
        "an engine rank receives, GB ",
        "through network cards",
        "seconds: ",
        "buffers: ",
        "relay: ",
        "round 1",
        "memory: the layout DOES NOT FIT the cluster: engine.count = 32",
    ):
        assert line in done.stdout
    assert "memory: an engine rank fits: " in run("qwen3-30b-a3b").stdout
    for args, message in (
        (("quickstart",), "model.path = ''"),
        (
            ("kimi-k2", "engine.tp=48", "engine.args.attn_dp_size=1"),
            "does not divide into 48 equal parts",
        ),
        (("kimi-k2", "--efficiency", "2"), "--efficiency = 2"),
        (
            ("kimi-k2", "engine.tp=32", "engine.args.ep_size=32"),
            "whole 128 x 128 blocks",
        ),
    ):
        refused = run(*args)
        assert refused.returncode == 2
        (line,) = refused.stderr.strip().splitlines()
        assert message in line


def test_the_forecast_of_factors_is_what_their_plan_sends() -> None:
    """Control: whole weights are a hundred times as much."""
    done = run("qwen3-30b-a3b-lora", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    config = load_config("qwen3-30b-a3b-lora")
    spec, trainer, engine, policy = planned_layouts(config)[0]
    plan = FactorPlan(TransferPlan(spec, trainer, engine, PLAN_ID, policy), config.lora)
    sent = [plan.receiver(rank).num_bytes for rank in range(engine.tp)]
    assert report["factors"]["engine_bytes"] == sum(sent)
    assert report["factors"]["received"]["high"] == max(sent)
    assert report["engine_bytes"] > 100 * sum(sent)
    plans = [sglang_tiles(spec, engine.tp, rank, engine.ep) for rank in range(engine.tp)]
    boxes = [
        [
            len(tile.hf_box[0]) * len(tile.hf_box[1])
            for local in named.values()
            for tile in local.tiles
            if config.lora.rank_of(module_of(tile.hf))
        ]
        for named in plans
    ]
    assert report["factors"]["merged"] == max(map(sum, boxes))
    assert report["factors"]["largest"] == max(map(max, boxes))


def test_the_command_says_how_long_an_engine_merges() -> None:
    """Bytes of the largest rank's W0 over the rate of its place; none for adapter slots."""
    found = {}
    for base, rate in (("host", 50e9), ("device", 1250e9)):
        text = run("qwen3-30b-a3b-node8", "lora.rank=32", f"lora.base={base}").stdout
        match = re.search(r"merges up to ([\d,]+) weights,.* in ([\d.e-]+) s each", text)
        assert match, text
        weights, found[base] = int(match[1].replace(",", "")), float(match[2])
        assert found[base] == pytest.approx(2 * weights / rate, rel=0.05)
    assert found["device"] < found["host"]


def test_an_engine_that_merges_keeps_w0_and_factors() -> None:
    """In host memory, or on its device; W0 is nearly what a publish of whole weights stages."""
    config = load_config("qwen3-30b-a3b-lora")
    spec, _, engine, policy = planned_layouts(config)[0]
    found = factor_forecast(spec, engine, config.lora, "bfloat16")
    weights, bucket, factors = 30_500_000_000, policy.bucket_bytes, round(found.received.high)
    whole = engine_memory(spec, engine, weights, 0, "bfloat16", bucket=bucket)
    host, device = (
        merging_memory(whole, found, replace(config.lora, base=place), "bfloat16", bucket)
        for place in ("host", "device")
    )
    assert host.host == factors + 2 * found.merged
    assert 0.9 * weights < host.host < weights
    assert host.update == factors + 2 * min(bucket, factors) + 2 * 2 * found.largest
    assert device.host == factors
    assert device.update - host.update == 2 * found.merged - 2 * 2 * found.largest
    assert (host.weights, host.kv) == (whole.weights, whole.kv)


def test_an_engine_with_adapter_slots_gets_whole_factors_and_keeps_no_w0() -> None:
    """Control: one that merges keeps W0, and each of its ranks gets a part of some factors."""
    config = load_config("qwen3-30b-a3b-lora")
    spec, _, engine, policy = planned_layouts(config)[0]
    attention = ["*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"]
    merges = replace(config.lora, targets=attention, ranks={})
    slots = replace(merges, delivery="adapter")
    found = {
        lora.delivery: factor_forecast(spec, engine, lora, "bfloat16") for lora in (merges, slots)
    }
    shapes = adapter_shapes(hf_shapes(spec), slots.rank_of)
    assert found["adapter"].received.low == found["adapter"].received.high
    assert found["adapter"].received.high == 2 * sum(a * b for a, b in shapes.values())
    assert found["merged"].received.high < found["adapter"].received.high
    assert found["adapter"].merged == 0 < found["merged"].merged
    bucket, factors = policy.bucket_bytes, round(found["adapter"].received.high)
    whole = engine_memory(spec, engine, 30_500_000_000, 0, "bfloat16", bucket=bucket)
    memory = merging_memory(whole, found["adapter"], slots, "bfloat16", bucket)
    assert (memory.host, memory.update) == (factors, factors + 2 * min(bucket, factors))


def test_the_command_needs_no_heavy_package() -> None:
    code = (
        "import sys; from moerl.planning import publish_forecast;"
        "sys.exit(bool({'torch', 'sglang', 'ray', 'megatron'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

"""Memory by phase where engine and trainer take turns, and the smallest set that gives way."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config import load_config, resolve
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.layout import model_spec
from moerl.planning.colocated import NCCL, ORDER, copied_out, phase_bytes, smallest_set
from moerl.planning.dry_run import describe
from moerl.planning.memory import (
    RUNTIME,
    EngineMemory,
    OptimizerBytes,
    TrainerMemory,
    Training,
    engine_memory,
    trainer_memory,
)
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TransferPlan

GB, BUCKET, ROOM = 1e9, 16 * 2**20, 0.97 * 80e9
CONFIG = Path(__file__).parents[2] / "configs/models/qwen3-30b-a3b/config.json"
SPEC = model_spec(json.loads(CONFIG.read_text()))
TP4 = ParallelConfig(tp=4, dp=2, ep=8)
ON_HOST = OptimizerBytes(0, 16)
LORA = LoraConfig(rank=32, ranks={"*.experts.*": 4})


def sides(
    engine: EngineLayout, kv_tokens: int, **training: object
) -> tuple[TrainerMemory, EngineMemory]:
    """Qwen3-30B-A3B on 8 GPUs, full recompute."""
    settings = Training(tokens=8192, recompute="full", bucket=BUCKET)
    (rank,) = trainer_memory(SPEC, TP4, replace(settings, **training))
    policy = WirePolicy("bfloat16")
    received = max(TransferPlan(SPEC, TP4, engine, 0, policy, "te").totals().received_bytes)
    return rank, engine_memory(SPEC, engine, received, kv_tokens, "bfloat16", bucket=BUCKET)


def test_phases_are_sums_of_their_parts() -> None:
    trainer, engine = sides(EngineLayout(tp=8, ep=8), 100_000)
    sizes = [trainer.weights, trainer.gradients, trainer.optimizer, engine.weights]
    assert [size / GB for size in sizes] == pytest.approx([8.0, 16.1, 45.9, 7.7], abs=0.1)
    none, every = (phase_bytes(trainer, engine, moves, gpu=True) for moves in ((), ORDER))
    assert sum(none.train) - sum(every.train) == engine.total
    assert none.hand_over[1] - every.hand_over[1] == trainer.gradients + trainer.optimizer
    assert none.generate[1] - every.generate[1] == trainer.static
    assert sum(every.train) == trainer.total + NCCL + RUNTIME + engine.update
    assert copied_out(trainer, ORDER) == trainer.weights + trainer.optimizer
    assert copied_out(trainer, ORDER[:3]) == 0, "gradients are thrown away"
    bare = phase_bytes(trainer, engine, ORDER, gpu=False)
    assert bare.train == (0, trainer.total)


def test_the_smallest_set_comes_first() -> None:
    """A full optimizer of 45.9 GB fits no 80 GB beside NCCL; on the host it need not move."""
    small, large = EngineLayout(tp=8, ep=8), EngineLayout(tp=2, ep=2)
    assert smallest_set(*sides(small, 100_000), ROOM, adapters=False) is None
    host = sides(large, 100_000, optimizer=ON_HOST)
    assert smallest_set(*host, ROOM, adapters=False) == ("gradients", "kv_cache")
    trainer, engine = longer = sides(large, 300_000, optimizer=ON_HOST)
    moves = smallest_set(*longer, ROOM, adapters=False)
    assert moves == ("gradients", "kv_cache")
    assert phase_bytes(trainer, engine, moves, gpu=True).most <= ROOM
    assert phase_bytes(trainer, engine, moves[:-1], gpu=True).most > ROOM, "control: one less"
    lora = smallest_set(*sides(large, 300_000, lora=LORA), ROOM, adapters=True)
    assert lora == ("gradients", "kv_cache")
    longest = sides(large, 600_000, optimizer=OptimizerBytes())
    assert smallest_set(*longest, 110e9, adapters=False) == ORDER[:4]


def text_of(recipe: str, *overrides: str) -> str:
    return describe(resolve(load_config(recipe, list(overrides))), [])


def test_the_dry_run_prints_the_phases() -> None:
    text = text_of("quickstart-colocated")
    assert "gives way: gradients, kv_cache, engine_weights (the sizes of the devices" in text
    rows = re.findall(
        r"^│ (train|hand over|generate) +│ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │$", text, re.M
    )
    assert [name for name, *_ in rows] == ["train", "hand over", "generate"]
    assert float(rows[0][1]) == 0, "the engine has given everything"
    assert "gives way: gradients, kv_cache (turn.moves)" in text_of(
        "quickstart-colocated", "turn.moves=[gradients,kv_cache]"
    )
    assert "in turns" not in text_of("quickstart")


def test_what_fits_in_no_phase_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"would hold .* in one phase"):
        text_of("olmoe-1gpu", "cluster.colocated=turns", "cluster.nodes.all.device_gb=10")

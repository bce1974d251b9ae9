"""`moerl check-layout`: its counts hold rank by rank, and broken tables are refused by name."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.cli import app
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, LayoutError
from moerl.engine.weight_layout import stated_layout
from moerl.layout import (
    Rule,
    families,
    flat,
    megatron_tiles,
    model_spec,
    sglang_tiles,
    shards,
    whole,
)
from moerl.planning.layout_check import check_layout
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TransferPlan
from tests.helpers.command_line import moerl

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = json.loads((ROOT / "tests/data/layout_families.json").read_text())
SERVED = CONFIGS["qwen3_moe"] | {"mlp_only_layers": []}  # SGLang knows no dense layers there
TRAINER, ENGINES = ParallelConfig(tp=2, pp=2, ep=4, dp=2, vpp=2), EngineLayout(4, 2, 2, 3)


@pytest.mark.parametrize("family", CONFIGS)
def test_counts_are_those_of_the_expanded_ranks(family: str) -> None:
    spec = model_spec(CONFIGS[family])
    trainer = TRAINER if spec.experts else replace(TRAINER, ep=1, dp=1)
    engines = ENGINES if spec.experts else replace(ENGINES, ep=1)
    report = check_layout(spec, trainer, engines)
    held = [
        4 * sum(math.prod(x.shape) for x in megatron_tiles(spec, trainer, rank).values())
        for rank in range(trainer.world_size)
    ]
    assert (report.trainer_bytes.low, report.trainer_bytes.high) == (min(held), max(held))
    assert report.trainer_bytes.mean == sum(held) / len(held)
    live = [
        sum(
            math.prod(x.shape) * (2 if x.dtype == "bfloat16" else 4)
            for x in sglang_tiles(spec, 4, r, engines.ep, 2).values()
        )
        for r in range(4)
    ]
    assert (report.engine_bytes.low, report.engine_bytes.high) == (min(live), max(live))
    policy = WirePolicy("float32")
    plans = [
        [TransferPlan(spec, trainer, engines, e, policy).sender(rank) for e in range(engines.num)]
        for rank in range(trainer.world_size)
    ]
    boxes = [sum(len(r.pieces) for plan in mine for r in plan.regions) for mine in plans]
    assert (report.parts.low, report.parts.high) == (min(boxes), max(boxes))
    sent = [sum(plan.num_bytes for plan in mine) for mine in plans]
    assert (report.sent_bytes.low, report.sent_bytes.high) == (min(sent), max(sent))


def change(rules: tuple[Rule, ...], local: str, **fields: object) -> tuple[Rule, ...]:
    """The rules with one of them changed, or left out where no field is given."""
    assert any(rule.local.endswith(local) for rule in rules), local
    return tuple(
        replace(rule, **fields) if rule.local.endswith(local) else rule
        for rule in rules
        if fields or not rule.local.endswith(local)
    )


@pytest.mark.parametrize(
    ("side", "local", "fields", "message"),
    [
        ("megatron", "linear_proj.weight", {}, "o_proj.weight: sources hold 0 of"),
        ("megatron", "linear_fc2.weight", {}, r"experts.0.down_proj.weight: sources hold 0 of"),
        (
            "megatron",
            "linear_fc1.weight",
            {"hf": ("mlp.x.{e}",) * 2},
            r"experts.0.gate_proj.weight: sources hold 0 of",
        ),
        ("sglang", "w13_weight", {"hf": ("mlp.up.{e}",) * 2}, r"names .*mlp\.up\.0"),
        (
            "megatron",
            "linear_qkv.weight",
            {"cut": whole, "hf": ("self_attn.q_proj.weight",) * 3},
            "k_proj.weight: sources hold 0 of",
        ),
        ("megatron", "router.weight", {"hf": ("input_layernorm.weight",)}, r"mlp\.gate\.weight"),
        ("sglang", "mlp.gate.weight", {"cut": flat, "pad_vocab": True}, "does not"),
    ],
)
def test_broken_tables_are_refused(
    monkeypatch: pytest.MonkeyPatch, side: str, local: str, fields: dict, message: str
) -> None:
    """Negative controls, each against the real table of Qwen3-MoE."""
    family = families.FAMILY_TABLES["qwen3_moe"]

    def broken(parts: tuple) -> tuple:
        return tuple(
            replace(part, **{side: change(getattr(part, side), local, **fields)})
            if any(rule.local.endswith(local) for rule in getattr(part, side))
            else part
            for part in parts
        )

    wrong = replace(family, every=broken(family.every), moe=broken(family.moe))
    assert wrong != family
    monkeypatch.setitem(shards.FAMILY_TABLES, "qwen3_moe", wrong)
    spec = model_spec(CONFIGS["qwen3_moe"])
    with pytest.raises(LayoutError, match=message):
        check_layout(spec, ParallelConfig(tp=2, ep=2), EngineLayout(2))


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return moerl("check-layout", *args)


def test_the_command_prints_a_table_and_refuses_in_one_sentence(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SERVED))
    done = run(
        *(str(tmp_path), "--parallel", "tp=2,pp=2,ep=4,etp=1,vpp=2,dp=2", "--engine"),
        "tp=4,ep=2,dp=1,count=256,moe_runner_backend=triton,quantization=none,dtype=bfloat16",
    )
    assert done.returncode == 0, done.stderr
    assert "exact: " in done.stdout
    assert "8 trainer ranks, 1,024 engine ranks" in done.stdout
    for line in ("trainer weights, MiB", "engine weights, MiB", "whole plan: "):
        assert line in done.stdout
    identity = stated_layout({"tp": "4", "ep": "2", "dtype": "bfloat16"}, SERVED)
    assert f"engine weight layout {identity.fingerprint()}: " in done.stdout
    refused = run(str(tmp_path / "none"))
    assert (refused.returncode, refused.stdout) == (2, "")
    (sentence,) = refused.stderr.strip().splitlines()
    assert "there is no such file" in sentence


REFUSED = [
    ("--parallel ep=3", "trainer.parallel.ep = 3 .* num_experts = 8"),
    ("--parallel tp=0", "trainer.parallel.tp = 0 .* at least 1"),
    ("--parallel tp=two", "--parallel tp = 'two' .* a whole number"),
    ("--parallel xp=2", "--parallel xp = '2' .* names are tp, pp, cp, ep"),
    ("--parallel tp=2,tp=2", "--parallel = 'tp=2' .* each name once"),
    ("--engine tp", "--engine = 'tp' .* NAME=VALUE"),
    ("--engine tp=4,ep=3", "engine.tp = 4 .* ep = 3"),
    ("--engine count=0", "engine.count = 0 .* at least 1"),
    ("--engine moe_runner_backend=marlin", "= 'marlin' .* never compared .* allowed: 'triton'"),
    ("--engine quantization=fp8", "quantization = 'fp8' .* quant_method is None"),
    ("--engine dtype=float64", "engine.dtype = 'float64' .* allowed: 'float32'"),
    ("--engine sglang=0.6.0", "sglang = '0.6.0' .* allowed: '0.5.23'"),
    ("--engine enable_eplb=true", "enable_eplb = True .* allowed: False"),
    ("--engine SGLANG_USE_AITER=1", "SGLANG_USE_AITER = True .* must be off"),
    ("--engine enable_epbl=true", "did you mean enable_eplb"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_is_not_known_is_refused_with_field_value_and_what_is_allowed(
    tmp_path: Path, options: str, sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SERVED))
    with pytest.raises(ConfigError, match=sentence):
        app(["check-layout", str(tmp_path), *options.split()], standalone_mode=False)


def test_a_quantised_checkpoint_is_served_quantised() -> None:
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}
    fp8 = SERVED | {"quantization_config": stored}
    with pytest.raises(ConfigError, match=r"weight_block_size = \[128, 64\]"):
        stated_layout({}, fp8)
    stored["weight_block_size"] = [128, 128]
    assert stated_layout({}, fp8).quantization == "fp8_block"
    assert stated_layout({"quantization": "none"}, fp8).quantization == "none"


def test_an_engine_of_fp8_blocks_holds_what_it_is_sent() -> None:
    wide = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256}
    spec = model_spec(SERVED | wide)
    trainer, engines = ParallelConfig(ep=2, dp=2), EngineLayout(2)
    report = check_layout(spec, trainer, engines, "local", "bfloat16", "fp8_block")
    plan = TransferPlan(spec, trainer, engines, 0, WirePolicy("bfloat16", "fp8_block"))
    received = [plan.receiver(rank).num_bytes for rank in range(2)]
    assert (report.engine_bytes.low, report.engine_bytes.high) == (min(received), max(received))
    plain = check_layout(spec, trainer, engines, "local", "bfloat16")
    assert report.engine_bytes.mean < 0.6 * plain.engine_bytes.mean

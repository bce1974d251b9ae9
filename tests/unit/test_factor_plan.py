"""Only factors travel: what an engine rank merges is, bit by bit, the part of the merged model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.core.errors import ConfigError, LayoutError
from moerl.weight_sync.adapters.engine_adapters import EngineAdapters
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.adapters.low_rank import merge_into
from moerl.weight_sync.held_shards import EngineLayout
from tests.helpers.factor_case import EVERY, LORA, MESHES, Case, random_tensor

DEFAULT = (("qwen3_moe", "pp2-ep2-to-tp2"), ("deepseek_v3", "tp2-etp2-to-tp2-ep2"))
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe")
CASES = [
    pytest.param(
        family,
        mesh,
        marks=() if (family, mesh) in DEFAULT else pytest.mark.full,
        id=f"{family}-{mesh}",
    )
    for family in FAMILIES
    for mesh in MESHES
]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_engine_ranks_merge_what_the_trainer_has(family: str, mesh: str) -> None:
    case = Case.make(family, mesh)
    engine = case.plan.weights.engine
    for dst in range(engine.tp):
        live, want, sent, found, moved = case.publish(dst)
        wrong = [name for name in live if not torch.equal(_bits(live[name]), _bits(want[name]))]
        assert not wrong
        assert found == sent, "digests of the merged weights"
        held = case.plan.factors(dst).values()
        assert moved == 4 * sum(torch.Size(local.shape).numel() for local in held), "and no more"


def test_bf16_weights_are_rounded_once() -> None:
    case = Case.make("qwen3_moe", "pp2-ep2-to-tp2", torch.bfloat16)
    live, want, sent, found, _ = case.publish(1)
    assert all(torch.equal(live[name], want[name]) for name in live)
    assert found == sent


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_factors_that_experts_share_travel_once(family: str, mesh: str) -> None:
    case, whole = (
        Case.make(family, mesh, wanted=replace(EVERY, experts=name))
        for name in ("shared", "per_expert")
    )
    for dst in range(case.plan.weights.engine.tp):
        live, want, sent, found, moved = case.publish(dst)
        assert all(torch.equal(_bits(live[name]), _bits(want[name])) for name in live)
        assert found == sent
        held = case.plan.factors(dst)
        assert moved == 4 * sum(torch.Size(local.shape).numel() for local in held.values())
        assert len(held) < len(whole.plan.factors(dst))
    name = next(name for name in held if re.search(r"experts\.\D.*lora_A", name))
    *_, sent, found, _ = case.publish(0, flip=name)
    assert found != sent, "one other bit of a shared factor"


@pytest.mark.parametrize(
    "factor",
    ["self_attn.q_proj.lora_B", "mlp.experts.3.down_proj.lora_A", "mlp.experts.2.up_proj.lora_B"],
)
def test_one_other_bit_of_a_factor_is_noticed_before_anything_is_written(factor: str) -> None:
    case = Case.make("qwen3_moe", "tp2-dp2-ep4-to-one")
    *_, sent, found, _ = case.publish(0, flip=f"model.layers.2.{factor}")
    assert found != sent


def test_an_engine_with_another_base_is_noticed() -> None:
    case = Case.make("qwen3_moe", "tp2-dp2-ep4-to-one")
    case.base["model.norm.weight"] = case.base["model.norm.weight"] + 1
    *_, sent, found, _ = case.publish(0)
    assert found != sent


def test_a_part_of_a_weight_has_the_bits_of_the_whole() -> None:
    """A product of matrices, which sums as its sizes suggest, has not."""
    base, a, b = (
        random_tensor(n, s, torch.float32)
        for n, s in (("w", (96, 1536)), ("a", (32, 1536)), ("b", (96, 32)))
    )
    whole, part = torch.empty_like(base), torch.empty(7, 333)
    merge_into(whole, base, a, b, 0.7)
    merge_into(part, base[11:18, 500:833], a[:, 500:833], b[11:18], 0.7)
    assert torch.equal(part, whole[11:18, 500:833])
    torch.testing.assert_close(whole, base + 0.7 * (b @ a), rtol=1e-5, atol=1e-5)


def test_both_ends_name_the_same_plan_and_other_adapters_have_another() -> None:
    plan = Case.make("qwen3_moe", "pp2-ep2-to-tp2").plan
    assert plan.sender(0).plan_id == plan.receiver(1).plan_id == plan.id != plan.weights.id
    changes: list[dict[str, Any]] = [{"alpha": 1}, {"experts": "shared"}]
    for other in (replace(LORA, **change) for change in changes):
        assert replace(plan, lora=other).id != plan.id


def test_what_cannot_be_merged_is_refused() -> None:
    plan = Case.make("qwen3_moe", "pp2-ep2-to-tp2").plan
    fp8 = replace(plan.weights, policy=replace(plan.weights.policy, quantization="fp8_block"))
    with pytest.raises(ConfigError, match=r"lora\.send"):
        FactorPlan(fp8, LORA)
    live = {"model.norm.weight": torch.ones(4)}
    with pytest.raises(LayoutError, match="lacks it"):
        EngineAdapters(plan.weights.spec, EngineLayout(), 0, LORA, live)

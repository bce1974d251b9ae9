"""Only factors travel: what an engine rank merges is, bit by bit, the part of the merged model."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.errors import ConfigError, LayoutError
from moerl.layout import ModelSpec, Named, at, hf_shapes, megatron_tiles, model_spec, sglang_tiles
from moerl.layout.adapters import adapter_shapes, adapter_tiles
from moerl.types import PolicyVersion
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.commit_copies import CommitCopies
from moerl.weight_sync.engine_adapters import EngineAdapters
from moerl.weight_sync.factor_plan import FactorPlan
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.low_rank import merge_into
from moerl.weight_sync.merged_totals import MergedTotals
from moerl.weight_sync.packed_buckets import BucketKey, BucketPacker
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.staged_targets import check_targets
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan
from tests.helpers import dither_oracle
from tests.helpers.sync_peers import PlainModel
from tests.helpers.trainer_support import ROOT

V1 = PolicyVersion(0, 1)
LORA = LoraConfig(rank=3, alpha=4.5, ranks={"*.experts.*": 2})
# Mixtral's experts are w1, w2, w3
EVERY = replace(LORA, targets=[*LORA.targets, "*.experts.*", "*.gate", "lm_head"])
DEFAULT = (("qwen3_moe", "pp2-ep2-to-tp2"), ("deepseek_v3", "tp2-etp2-to-tp2-ep2"))
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe")
MESHES = {
    "pp2-ep2-to-tp2": (ParallelConfig(pp=2, dp=2, ep=2), EngineLayout(tp=2)),
    "tp2-etp2-to-tp2-ep2": (ParallelConfig(tp=2, etp=2), EngineLayout(tp=2, ep=2)),
    "tp2-dp2-ep4-to-one": (ParallelConfig(tp=2, dp=2, ep=4), EngineLayout()),
}
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
Tensors = dict[str, Tensor]


def _spec(family: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / "tests/data/layout_families.json").read_text())[family])


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=chance).to(dtype)


def _part(named: Named, whole: Mapping[str, Tensor], dtype: torch.dtype) -> Tensors:
    """What a rank holds of whole tensors; padding is 0."""
    held = {}
    for name, local in named.items():
        kept = getattr(torch, local.dtype) if local.dtype else dtype
        held[name] = torch.zeros(local.shape, dtype=kept)
        for tile in local.tiles:
            held[name][at(tile.box)] = whole[tile.hf][at(tile.hf_box)].to(kept)
    return held


def _sum(base: Tensor, a: Tensor, b: Tensor, name: str, seed: int | None) -> Tensor:
    """base + scale * b @ a by numpy, in fp32, one rank after the other; rounded once.

    seed: of the dither; None = to the nearest.
    """
    total = np.zeros(base.shape, np.float32)
    for row, column in zip(a.float().numpy(), b.float().numpy().T, strict=True):
        total += np.outer(column, row)
    merged = total * np.float32(LORA.scale) + base.float().numpy()
    if seed is not None:
        return dither_oracle.rounded(merged, name, seed)
    return torch.from_numpy(merged).to(base.dtype)


@dataclass
class Case:
    """Both ends of a publish, without processes."""

    plan: FactorPlan
    dtype: torch.dtype
    base: Tensors
    factors: Tensors
    merged: Tensors

    @classmethod
    def make(
        cls,
        family: str,
        mesh: str,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        wanted: LoraConfig = LORA,
    ) -> Case:
        """seed: of the trainer's dither."""
        spec, (trainer, engine) = _spec(family), MESHES[mesh]
        policy = WirePolicy(str(dtype).removeprefix("torch."), bucket_bytes=4096)
        lora = wanted if seed is None else replace(wanted, rounding="dither")
        plan = FactorPlan(TransferPlan(spec, trainer, engine, PLAN_ID, policy), lora)
        shapes = hf_shapes(spec)
        base = {name: _random(name, shape, dtype) for name, shape in shapes.items()}
        factors = {
            name: _random(name, shape, dtype)
            for name, shape in adapter_shapes(shapes, lora.rank_of, shared=lora.shares).items()
        }
        merged = dict(base)
        for name in (n for n in adapter_shapes(shapes, lora.rank_of) if n.endswith(".lora_A")):
            module = name.removesuffix(".lora_A")
            weight, outer = f"{module}.weight", re.sub(r"\.experts\.\d+", ".experts", module)
            a, b = (
                factors.get(f"{module}.lora_{x}", factors.get(f"{outer}.lora_{x}")) for x in "AB"
            )
            assert a is not None, module
            assert b is not None, module
            merged[weight] = _sum(base[weight], a, b, module, seed)
        return cls(plan, dtype, base, factors, merged)

    @property
    def spec(self) -> ModelSpec:
        return self.plan.weights.spec

    def packers(self) -> Iterator[tuple[int, BucketPacker]]:
        """Of every trainer rank, which holds the merged weights and its factors."""
        trainer = self.plan.weights.trainer
        for rank in range(trainer.world_size):
            live = _part(megatron_tiles(self.spec, trainer, rank), self.merged, self.dtype)
            lora = self.plan.lora
            tiles = adapter_tiles(self.spec, trainer, rank, lora.rank_of, shared=lora.shares)
            live |= _part(tiles, self.factors, self.dtype)
            snapshot = WeightSnapshot()
            snapshot.store(live, V1)
            totals = MergedTotals(self.plan.weights.sender(rank), snapshot)
            packer = BucketPacker(self.plan.sender(rank), snapshot, totals.total)
            packer.join()
            yield rank, packer

    def publish(self, dst: int, flip: str = "") -> tuple[Tensors, Tensors, int, int, int]:
        """(served, wanted, digest of the senders, of the engine rank, bytes) of an engine rank.

        flip: one bit of this factor is another one.
        """
        plan, engine = self.plan.receiver(dst), self.plan.weights.engine
        staging, sent, moved = torch.empty(plan.staging_bytes, dtype=torch.uint8), 0, 0
        starts = {r.src: start for r, start in zip(plan.regions, plan.starts, strict=True)}
        for rank, packer in self.packers():
            for region in (r for r in packer.plan.regions if r.dst == dst):
                for number, bucket in enumerate(region.buckets):
                    packed = packer.take(BucketKey(dst, number), V1, 0.0)
                    staging[starts[rank] + bucket.offset :][: bucket.num_bytes] = packed.data
                    packer.give_back(packed)
                    moved += bucket.num_bytes
                assert packer.merged is not None
                sent += packer.merged(dst, V1)
        named = sglang_tiles(self.spec, engine.tp, dst, engine.ep)
        live = _part(named, self.base, self.dtype)
        adapters = EngineAdapters(self.spec, engine, dst, self.plan.lora, live)
        check_targets(plan, adapters.factors)
        CommitCopies(plan, plan.starts, staging, adapters.factors).run()
        if flip:
            adapters.factors[flip].view(-1).view(torch.uint8)[-1] ^= 1
        found = adapters.total(self.plan.weights.receiver(dst), live)
        before = _part(named, self.base, self.dtype)
        assert all(torch.equal(live[name], before[name]) for name in live), "VERIFY writes nothing"
        model = PlainModel(live)
        adapters.commit(model, "0.1")
        adapters.commit(model, "0.1")  # from W0 each time
        return live, _part(named, self.merged, self.dtype), sent % 2**64, found, moved


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


@pytest.mark.parametrize(("family", "mesh"), DEFAULT)
def test_a_dither_has_the_same_bits_on_both_sides(family: str, mesh: str) -> None:
    case = Case.make(family, mesh, torch.bfloat16, seed=0)
    for dst in range(2):
        live, want, sent, found, _ = case.publish(dst)
        assert all(torch.equal(_bits(live[name]), _bits(want[name])) for name in live)
        assert found == sent
    *_, sent, found, _ = Case.make(family, mesh, torch.bfloat16, seed=1).publish(0)
    assert found != sent, "a trainer with another seed"


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
        _random(n, s, torch.float32)
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
    changes: list[dict[str, Any]] = [{"alpha": 1}, {"rounding": "dither"}, {"experts": "shared"}]
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

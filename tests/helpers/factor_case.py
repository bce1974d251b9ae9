"""Both ends of a publish of factors without processes, and what an engine rank is to serve."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.types import PolicyVersion
from moerl.layout import ModelSpec, Named, at, hf_shapes, megatron_tiles, model_spec, sglang_tiles
from moerl.layout.adapters import adapter_shapes, adapter_tiles
from moerl.weight_sync.adapters.engine_adapters import EngineAdapters
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.adapters.merged_totals import MergedTotals
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.commit_copies import CommitCopies, check_targets
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.packed_buckets import BucketKey, BucketPacker
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan
from tests.helpers.sync_peers import PlainModel
from tests.helpers.trainer_support import ROOT

V1 = PolicyVersion(0, 1)
LORA = LoraConfig(rank=3, alpha=4.5, ranks={"*.experts.*": 2})
# Mixtral's experts are w1, w2, w3
EVERY = replace(LORA, targets=[*LORA.targets, "*.experts.*", "*.gate", "lm_head"])
MESHES = {
    "pp2-ep2-to-tp2": (ParallelConfig(pp=2, dp=2, ep=2), EngineLayout(tp=2)),
    "tp2-etp2-to-tp2-ep2": (ParallelConfig(tp=2, etp=2), EngineLayout(tp=2, ep=2)),
    "tp2-dp2-ep4-to-one": (ParallelConfig(tp=2, dp=2, ep=4), EngineLayout()),
}
Tensors = dict[str, Tensor]


def _spec(family: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / "tests/data/layout_families.json").read_text())[family])


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=chance).to(dtype)


def part_of(named: Named, whole: Mapping[str, Tensor], dtype: torch.dtype) -> Tensors:
    """What a rank holds of whole tensors; padding is 0."""
    held = {}
    for name, local in named.items():
        kept = getattr(torch, local.dtype) if local.dtype else dtype
        held[name] = torch.zeros(local.shape, dtype=kept)
        for tile in local.tiles:
            held[name][at(tile.box)] = whole[tile.hf][at(tile.hf_box)].to(kept)
    return held


def _sum(base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """base + scale * b @ a by numpy, in fp32, one rank after the other; rounded once."""
    total = np.zeros(base.shape, np.float32)
    for row, column in zip(a.float().numpy(), b.float().numpy().T, strict=True):
        total += np.outer(column, row)
    merged = total * np.float32(LORA.scale) + base.float().numpy()
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
        wanted: LoraConfig = LORA,
    ) -> Case:
        spec, (trainer, engine) = _spec(family), MESHES[mesh]
        policy = WirePolicy(str(dtype).removeprefix("torch."), bucket_bytes=4096)
        plan = FactorPlan(TransferPlan(spec, trainer, engine, PLAN_ID, policy), wanted)
        shapes = hf_shapes(spec)
        base = {name: random_tensor(name, shape, dtype) for name, shape in shapes.items()}
        factors = {
            name: random_tensor(name, shape, dtype)
            for name, shape in adapter_shapes(shapes, wanted.rank_of, shared=wanted.shares).items()
        }
        merged = dict(base)
        for name in (n for n in adapter_shapes(shapes, wanted.rank_of) if n.endswith(".lora_A")):
            module = name.removesuffix(".lora_A")
            weight, outer = f"{module}.weight", re.sub(r"\.experts\.\d+", ".experts", module)
            a, b = (
                factors.get(f"{module}.lora_{x}", factors.get(f"{outer}.lora_{x}")) for x in "AB"
            )
            assert a is not None, module
            assert b is not None, module
            merged[weight] = _sum(base[weight], a, b)
        return cls(plan, dtype, base, factors, merged)

    @property
    def spec(self) -> ModelSpec:
        return self.plan.weights.spec

    def packers(self) -> Iterator[tuple[int, BucketPacker]]:
        """Of every trainer rank, which holds the merged weights and its factors."""
        trainer = self.plan.weights.trainer
        for rank in range(trainer.world_size):
            live = part_of(megatron_tiles(self.spec, trainer, rank), self.merged, self.dtype)
            lora = self.plan.lora
            tiles = adapter_tiles(self.spec, trainer, rank, lora.rank_of, shared=lora.shares)
            live |= part_of(tiles, self.factors, self.dtype)
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
        live = part_of(named, self.base, self.dtype)
        adapters = EngineAdapters(self.spec, engine, dst, self.plan.lora, live)
        check_targets(plan, adapters.factors)
        CommitCopies(plan, plan.starts, staging, adapters.factors).run()
        if flip:
            adapters.factors[flip].view(-1).view(torch.uint8)[-1] ^= 1
        found = adapters.total(self.plan.weights.receiver(dst), live)
        before = part_of(named, self.base, self.dtype)
        assert all(torch.equal(live[name], before[name]) for name in live), "VERIFY writes nothing"
        model = PlainModel(live)
        adapters.commit(model, "0.1")
        adapters.commit(model, "0.1")  # from W0 each time
        return live, part_of(named, self.merged, self.dtype), sent % 2**64, found, moved

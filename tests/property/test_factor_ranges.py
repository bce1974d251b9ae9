"""The plan of factors in closed form is the one that enumerates every factor of every rank."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moerl.config.lora_settings import LoraConfig
from moerl.layout.adapters import adapter_tiles
from moerl.layout.tiles import Box, Tile, local_box, meet, num_elements
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.buckets import Piece, Region
from moerl.weight_sync.deliveries import Keyed
from moerl.weight_sync.transfer_plan import region_of
from moerl.weight_sync.wire_formats import ITEMSIZE, PLAIN
from tests.helpers.random_layouts import draw

NUM_LAYOUTS = 4
LORAS = (
    LoraConfig(rank=3),
    LoraConfig(rank=3, ranks={"*.experts.*": 2, "*.layers.1.*.experts.2.*": 5, "*.layers.0.*": 1}),
    LoraConfig(rank=2, targets=["*.experts.[13].up_proj", "*.o_proj", "*.kv_b_proj"]),
    LoraConfig(rank=2, targets=["*_proj", "*.mlp.gate", "lm_head"], experts="shared"),
)
Regions = list[tuple[Region, ...]]


def enumerated(plan: FactorPlan) -> Iterator[tuple[int, int, Keyed]]:
    """(trainer rank, engine rank, piece) of the whole plan, from the factors of every rank."""
    weights, policy = plan.weights, plan.weights.policy
    held: dict[str, dict[Box, tuple[Tile, list[int]]]] = defaultdict(dict)
    for rank in range(weights.trainer.world_size):
        tiles = adapter_tiles(
            weights.spec, weights.trainer, rank, plan.lora.rank_of, shared=plan.lora.shares
        )
        for name, local in tiles.items():
            (tile,) = local.tiles
            held[name].setdefault(tile.hf_box, (tile, []))[1].append(rank)
    for dst in range(weights.engine.tp):
        for name, local in plan.factors(dst).items():
            (want,) = local.tiles
            for tile, ranks in held[name].values():
                whole = meet(tile.hf_box, want.hf_box)
                width = ITEMSIZE[policy.dtype]
                for box in PLAIN.cut(whole, policy.dtype, policy.bucket_bytes) if whole else ():
                    src = ranks[zlib.crc32(f"{name} {box} {dst}".encode()) % len(ranks)]
                    places = (local_box(tile, box), local_box(want, box))
                    size = num_elements(box) * width
                    piece = Piece(
                        name, box, name, places[0], name, places[1], policy.dtype, size, 0, False
                    )
                    yield src, dst, ((name, tuple(part.start for part in places[1])), piece)


def by_enumeration(plan: FactorPlan) -> tuple[Regions, Regions]:
    """Regions of every sender and of every receiver."""
    pieces: dict[tuple[int, int], list[Keyed]] = defaultdict(list)
    for src, dst, keyed in enumerated(plan):
        pieces[src, dst].append(keyed)

    def made(regions: tuple[Region, ...], rank: int, end: int) -> tuple[Region, ...]:
        ends = {pair for pair in pieces if pair[end] == rank}
        ends |= {(region.src, region.dst) for region in regions}
        policy = plan.weights.policy
        return tuple(region_of(*pair, pieces.get(pair, []), policy) for pair in sorted(ends))

    trainer, engine = plan.weights.trainer, plan.weights.engine
    senders = [made(plan.weights.sender(r).regions, r, 0) for r in range(trainer.world_size)]
    return senders, [made(plan.weights.receiver(r).regions, r, 1) for r in range(engine.tp)]


def in_closed_form(plan: FactorPlan) -> tuple[Regions, Regions]:
    trainer, engine = plan.weights.trainer, plan.weights.engine
    senders = [plan.sender(rank).regions for rank in range(trainer.world_size)]
    return senders, [plan.receiver(rank).regions for rank in range(engine.tp)]


@pytest.mark.parametrize("lora", LORAS, ids=["all", "ranks", "some", "shared"])
def test_ranges_are_the_enumeration(lora: LoraConfig) -> None:
    """Control: the plan of other ranks differs."""
    for seed in range(NUM_LAYOUTS):
        weights = draw(seed)
        plan = FactorPlan(weights, lora)
        wanted = by_enumeration(plan)
        assert in_closed_form(plan) == wanted, f"seed {seed}: {weights}"
        assert in_closed_form(FactorPlan(weights, replace(lora, rank=4, ranks={}))) != wanted

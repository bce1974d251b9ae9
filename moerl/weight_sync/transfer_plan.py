"""The transfer plan, and the relay schedule between engines.

    plan.sender(rank)      a trainer rank's part: one region per engine rank that it sends to
    plan.receiver(rank)    an engine rank's part: one region per trainer rank that sends to it

A plan lists the pieces that each trainer rank sends to each rank of one engine.  Both ends derive
the same regions from the same inputs (the fields of `TransferPlan`); equal `plan.id` means equal
inputs.  No rank derives the parts of other ranks.  Regions: `buckets`; the closed form:
`deliveries`.

Relay: the trainer sends to `direct` engines.  Then every engine that has verified the version may
send it to one other engine per round, rank to equal rank, so the number of holders doubles.  The
trainer's egress is `direct` copies for any number of engines; the price is a depth of
1 + log2(engines / direct) rounds.

All engines of a run plan with one id (`PLAN_ID`): equal layouts with equal ids give equal regions.
So the trainer packs a bucket once for all of them, and a staging buffer is forwarded in one piece,
unchanged, and its digests stay valid.  Ids of their own would rotate the pieces that replicas
cannot share equally: 0.2 % of the largest sender's bytes with Qwen3-30B-A3B and four engines.

Rejected: pieces in trainer order (engines do not know it), a chain of relays, a plan per hop.
Idea: the expert-aware planners of Awex and checkpoint-engine; rotation and both ends are ours.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from moerl.config.schema import ParallelConfig
from moerl.layout.shards import LayerSpec, coords_of, sglang_tiles
from moerl.layout.spec import ModelSpec
from moerl.weight_sync.buckets import ALIGN, Bucket, Piece, Region, WirePolicy
from moerl.weight_sync.deliveries import (
    Holding,
    Keyed,
    Tables,
    deliveries,
    offset_of,
    pieces_of,
    tables_of,
)
from moerl.weight_sync.held_shards import EngineLayout

SCHEME = 1  # part of the plan's id; raise it when order, rotation or cuts change


@dataclass(frozen=True, slots=True)
class SenderPlan:
    """Part of trainer rank `rank` for one engine.  Engine ranks that get nothing have no region."""

    plan_id: str
    rank: int
    regions: tuple[Region, ...]  # by engine rank, ascending

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self.regions)


@dataclass(frozen=True, slots=True)
class ReceiverPlan:
    """Part of engine rank `rank`: its regions, and padding and hooks that complete its weights."""

    plan_id: str
    rank: int
    regions: tuple[Region, ...]  # by trainer rank, ascending
    starts: tuple[int, ...]  # offset of each region in the staging buffer, multiples of ALIGN
    padding: tuple[tuple[str, int], ...]  # (parameter, first row): SGLang keeps 0 from that row on
    hooks: tuple[str, ...]  # SGLang functions to run after the pieces are in place, in order

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank receives."""
        return sum(region.num_bytes for region in self.regions)

    @property
    def staging_bytes(self) -> int:
        """Size of the staging buffer: num_bytes, and at most ALIGN - 1 more per region."""
        return self.starts[-1] + self.regions[-1].num_bytes if self.regions else 0


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Bytes of one engine's plan, counted without making the plan."""

    sent_bytes: tuple[int, ...]  # by trainer rank
    sent_parts: tuple[int, ...]  # a box with its scales counts once
    received_bytes: tuple[int, ...]  # by engine rank


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Transfer from a trainer to one engine; `engine.num` does not matter.

    Its methods raise ConfigError or LayoutError when sizes do not divide, or a cut is inside an
    fp8 block.
    """

    spec: ModelSpec
    trainer: ParallelConfig
    engine: EngineLayout
    engine_id: int
    policy: WirePolicy
    layer_spec: LayerSpec = "local"

    @property
    def id(self) -> str:
        """16 hex digits, equal in every process for equal inputs."""
        inputs = {
            "scheme": SCHEME,
            "spec": asdict(self.spec),
            "trainer": asdict(self.trainer),
            "engine": asdict(replace(self.engine, num=1)),
            "engine_id": self.engine_id,
            "policy": asdict(self.policy),
            "layer_spec": self.layer_spec,
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    def sender(self, rank: int) -> SenderPlan:
        """The regions that trainer rank `rank` sends."""
        where = coords_of(self.trainer, rank)

        def mine(holding: Holding) -> Iterable[int]:
            axis = where.etp if holding.experts else where.tp
            return (where.ep if holding.experts else 0,) if axis in holding.same else ()

        regions: dict[int, list[Keyed]] = defaultdict(list)
        for found in deliveries(self._tables(), where.pp, self.engine_id, mine, src=rank):
            regions[found.part.rank] += pieces_of(found)
        made = tuple(region_of(rank, dst, regions[dst], self.policy) for dst in sorted(regions))
        return SenderPlan(self.id, rank, made)

    def receiver(self, rank: int) -> ReceiverPlan:
        """The regions that engine rank `rank` receives."""
        trainer, engine = self.trainer, self.engine

        def every(holding: Holding) -> Iterable[int]:
            return range(trainer.ep) if holding.experts else (0,)

        regions: dict[int, list[Keyed]] = defaultdict(list)
        for stage in range(trainer.pp):
            for found in deliveries(self._tables(), stage, self.engine_id, every, dst=rank):
                regions[found.src] += pieces_of(found)
        made = tuple(region_of(src, rank, regions[src], self.policy) for src in sorted(regions))
        named = sglang_tiles(self.spec, engine.tp, rank, engine.ep, engine.dp)
        return ReceiverPlan(
            plan_id=self.id,
            rank=rank,
            regions=made,
            starts=starts_of(region.num_bytes for region in made),
            padding=tuple((n, t.shape[0] - t.pad_rows) for n, t in named.items() if t.pad_rows),
            hooks=post_load_hooks(self.spec, self.policy),
        )

    def totals(self) -> TransferTotals:
        """Sums over the parts of all ranks; takes a second for thousands of ranks."""
        tables = self._tables()
        sent, parts = [0] * self.trainer.world_size, [0] * self.trainer.world_size
        for ranks, by_turn in tables.by_turn:
            offset = offset_of(self.engine_id, len(ranks))
            for turn, (num_bytes, num_parts) in enumerate(by_turn):
                rank = ranks[(turn + offset) % len(ranks)]
                sent[rank] += num_bytes
                parts[rank] += num_parts
        return TransferTotals(tuple(sent), tuple(parts), tables.received)

    def _tables(self) -> Tables:
        alone = replace(self.engine, num=1)
        return tables_of(self.spec, self.trainer, alone, self.policy, self.layer_spec)


def post_load_hooks(spec: ModelSpec, policy: WirePolicy) -> tuple[str, ...]:
    """Functions of SGLang's model loader that derive other tensors from the received weights.

    post_load_weights     latent attention keeps w_kc and w_vc, copies of kv_b_proj's halves
    postprocess_weights   block-quantised layers may requantise or transpose their scales;
                          restore_weights_before_loading must undo that first
    Unquantised layers of the other families are used as received.
    Source: sglang 0.5.23, srt/models/deepseek_common/deepseek_weight_loader.py,
    srt/model_executor/model_runner_components/weight_updater.py (begin/end_weight_update).
    """
    latent = ("post_load_weights",) if spec.kv_lora else ()
    if policy.quantization == "none":
        return latent
    return ("restore_weights_before_loading", *latent, "postprocess_weights")


def starts_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Offsets of regions in a staging buffer.  sizes: bytes of each."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGN) * ALIGN
    return tuple(starts)


def region_of(src: int, dst: int, keyed: Iterable[Keyed], policy: WirePolicy) -> Region:
    """Pieces in wire order, in buckets; without pieces no bucket."""
    pieces: list[Piece] = []
    buckets: list[Bucket] = []
    first = start = offset = 0
    for _, piece in sorted(keyed, key=itemgetter(0)):
        if offset > start and offset + piece.num_bytes - start > policy.bucket_bytes:
            buckets.append(Bucket(start, offset - start, first, len(pieces)))
            first, start = len(pieces), offset
        pieces.append(piece._replace(offset=offset))
        offset += piece.num_bytes
    if pieces:
        buckets.append(Bucket(start, offset - start, first, len(pieces)))
    return Region(src, dst, tuple(pieces), tuple(buckets), offset)


TRAINER = -1
PLAN_ID = 0  # `TransferPlan.engine_id` of every engine of a run


class Hop(NamedTuple):
    """One transfer of a whole version; hops of a round run at the same time."""

    round: int
    src: int  # engine id, or TRAINER
    dst: int  # engine id


def relay_schedule(engine_ids: Sequence[int], direct: int) -> tuple[Hop, ...]:
    """Hops that bring a version to every engine once, ordered by round.

    direct: number of engines that the trainer serves in round 0: the first of engine_ids.
    """
    assert direct >= 1 or not engine_ids, f"direct = {direct}: the trainer serves one at least"
    hops = [Hop(0, TRAINER, engine) for engine in engine_ids[:direct]]
    waiting = list(engine_ids[direct:])
    while waiting:
        number = hops[-1].round + 1
        holders = [hop.dst for hop in hops]
        hops += [Hop(number, src, dst) for src, dst in zip(holders, waiting, strict=False)]
        waiting = waiting[len(holders) :]
    return tuple(hops)


def num_rounds(hops: Sequence[Hop]) -> int:
    """Rounds after round 0: how often a version is relayed."""
    return hops[-1].round if hops else 0

"""The transfer plan of low-rank adapters: only the factors travel.

The two factors of a weight are two more tensors in Hugging Face coordinates.  A trainer rank holds
the columns of A and the rows of B that belong to its part of the weight, an engine rank wants the
columns and rows of its own part; boxes are matched like boxes of weights, whatever PP, TP, ETP and
EP of both sides.  Regions, buckets, staging and digests work as in `transfer_plan`.

Of ranks that hold the same box, a hash of (factor, box, engine rank) names the sender: both ends
know it without a count over other ranks.  Factors are small, so the balance of
`deliveries` would not pay.

Each region of the plan of the weights has one here, be it empty: its sender states the digest
of the engine rank after the merge (`merged_totals`).  Of replicas, one may send factors alone.
Rejected: rules of factors in the tables (two more for each of a family's, for the same boxes).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moerl.config.lora_settings import LoraConfig
from moerl.core.errors import ConfigError
from moerl.layout.adapters import engine_factors, whole_factors
from moerl.layout.shards import hf_shapes, sglang_tiles
from moerl.layout.tiles import Box, Named, meet, num_elements
from moerl.weight_sync.adapters.factor_tables import Factor, FactorTables, WantedFactor
from moerl.weight_sync.buckets import Piece
from moerl.weight_sync.deliveries import Keyed
from moerl.weight_sync.transfer_plan import (
    ReceiverPlan,
    SenderPlan,
    TransferPlan,
    region_of,
    starts_of,
)
from moerl.weight_sync.wire_formats import ITEMSIZE, PLAIN


@dataclass(frozen=True, slots=True)
class FactorPlan:
    """Factors from a trainer to the engine of `weights`, which is the plan of whole weights."""

    weights: TransferPlan
    lora: LoraConfig

    def __post_init__(self) -> None:
        if self.weights.policy.quantization != "none":
            raise ConfigError(
                "lora.send",
                self.lora.send,
                "engines with quantised weights cannot merge factors; use weights",
            )

    @property
    def id(self) -> str:
        """16 hex digits, equal in every process for equal inputs."""
        lora = self.lora  # a whole number may be an integer on one side
        inputs = [self.weights.id, lora.rank, float(lora.scale), lora.targets, lora.ranks]
        inputs += [lora.experts, lora.delivery]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    def sender(self, rank: int) -> SenderPlan:
        """The regions that trainer rank `rank` sends."""
        tables, own = self._tables(), defaultdict[int, list[Keyed]](list)
        for factor in tables.of_trainer(rank):
            for dst, want in tables.receivers(factor):
                for src, keyed in self._pieces(tables, factor, dst, want):
                    if src == rank:
                        own[dst].append(keyed)
        dsts = own.keys() | {region.dst for region in self.weights.sender(rank).regions}
        made = tuple(region_of(rank, dst, own[dst], self.weights.policy) for dst in sorted(dsts))
        return SenderPlan(self.id, rank, made)

    def receiver(self, rank: int) -> ReceiverPlan:
        """The regions that engine rank `rank` receives; their pieces fill `factors(rank)`."""
        tables, pieces = self._tables(), defaultdict[int, list[Keyed]](list)
        for factor in tables.of_engine(rank):
            want = factor.target.parts.wanted[rank]
            for src, keyed in self._pieces(tables, factor, rank, want):
                pieces[src].append(keyed)
        whole = self.weights.receiver(rank)
        srcs = pieces.keys() | {region.src for region in whole.regions}
        made = tuple(region_of(src, rank, pieces[src], self.weights.policy) for src in sorted(srcs))
        starts = starts_of(region.num_bytes for region in made)
        return replace(whole, plan_id=self.id, regions=made, starts=starts, padding=())

    def factors(self, rank: int) -> Named:
        """The factors that engine rank `rank` merges, or gives to its adapter slots."""
        spec, engine = self.weights.spec, self.weights.engine
        if self.lora.serves_adapters:
            return whole_factors(spec, self.lora.rank_of, shared=self.lora.shares)
        named = sglang_tiles(spec, engine.tp, rank, engine.ep, engine.dp)
        shapes = hf_shapes(spec)
        return engine_factors(named, self.lora.rank_of, shapes, shared=self.lora.shares)

    def _tables(self) -> FactorTables:
        weights = self.weights
        return FactorTables(weights.spec, weights.trainer, weights.engine, self.lora)

    def _pieces(
        self, tables: FactorTables, factor: Factor, dst: int, want: WantedFactor
    ) -> Iterator[tuple[int, Keyed]]:
        """(trainer rank, piece) of each piece of a factor for engine rank `dst`."""
        dtype, ranks = self.weights.policy.dtype, range(factor.target.rank)
        parts, name = factor.target.parts, factor.name
        wanted = (ranks, want.cols) if factor.is_a else (want.rows, ranks)
        for part, places in (parts.cols if factor.is_a else parts.rows).items():
            held = (ranks, part) if factor.is_a else (part, ranks)
            whole = meet(held, wanted)
            for box in self._cut(whole) if whole else ():
                turn = zlib.crc32(f"{name} {box} {dst}".encode())
                senders = tables.holders(factor, places)
                dst_box = _inside(wanted, box)
                piece = Piece(
                    hf=name,
                    hf_box=box,
                    src_name=name,
                    src_box=_inside(held, box),
                    dst_name=name,
                    dst_box=dst_box,
                    dtype=dtype,
                    num_bytes=num_elements(box) * ITEMSIZE[dtype],
                    offset=0,
                    is_scale=False,
                )
                starts = tuple(part.start for part in dst_box)
                yield senders[turn % len(senders)], ((name, starts), piece)

    def _cut(self, box: Box) -> Iterator[Box]:
        policy = self.weights.policy
        return PLAIN.cut(box, policy.dtype, policy.bucket_bytes)


def _inside(whole: Box, box: Box) -> Box:
    """A box in the coordinates of a tensor that holds `whole`."""
    moved = zip(whole, box, strict=True)
    return tuple(range(b.start - w.start, b.stop - w.start) for w, b in moved)

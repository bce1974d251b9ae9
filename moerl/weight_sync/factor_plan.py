"""The transfer plan of low-rank adapters: only the factors travel.

The two factors of a weight are two more tensors in Hugging Face coordinates.  A trainer rank holds
the columns of A and the rows of B that belong to its part of the weight, an engine rank wants those
that belong to its own; the boxes are matched as those of weights are, whatever PP, TP, ETP and EP
of both sides.  Regions, buckets, staging and digests are those of `transfer_plan`.

Of ranks that hold the same box, the one that a hash of (factor, box, engine rank) names sends it:
both ends know it without a count over other ranks.  Factors are small, so the balance of
`deliveries` would not pay.

Each region of the plan of the weights has one here, be it empty: its sender says what the engine
rank will hold after the merge (`merged_totals`).
Rejected: rules of factors in the tables (two more for each of a family's, for the same boxes).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from moerl.config.lora_settings import LoraConfig
from moerl.errors import ConfigError
from moerl.layout.adapters import adapter_tiles, engine_factors
from moerl.layout.shards import coords_of, hf_shapes, sglang_tiles
from moerl.layout.tiles import Box, Named, Tile, local_box, meet, num_elements
from moerl.weight_sync.buckets import ITEMSIZE, Piece, cut
from moerl.weight_sync.deliveries import Keyed
from moerl.weight_sync.transfer_plan import (
    ReceiverPlan,
    SenderPlan,
    TransferPlan,
    region_of,
    starts_of,
)

Holders = dict[str, dict[Box, tuple[Tile, list[int]]]]
"""Factor -> box -> its tile, and the trainer ranks that hold it."""


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
        inputs += [lora.rounding, lora.experts]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]

    def sender(self, rank: int) -> SenderPlan:
        """What trainer rank `rank` sends."""
        stage = coords_of(self.weights.trainer, rank).pp
        holders = self._holders([stage])
        made, known = [], {region.dst for region in self.weights.sender(rank).regions}
        # a rank may send a factor that experts share to where it sends no weight
        for dst in range(self.weights.engine.tp) if self.lora.shares else sorted(known):
            own = [keyed for src, keyed in self._pieces(holders, dst) if src == rank]
            if own or dst in known:
                made.append(region_of(rank, dst, own, self.weights.policy))
        return SenderPlan(self.id, rank, tuple(made))

    def receiver(self, rank: int) -> ReceiverPlan:
        """What engine rank `rank` receives; its pieces fill `factors(rank)`."""
        holders = self._holders(range(self.weights.trainer.pp))
        pieces: dict[int, list[Keyed]] = defaultdict(list)
        for src, keyed in self._pieces(holders, rank):
            pieces[src].append(keyed)
        whole = self.weights.receiver(rank)
        known = {region.src for region in whole.regions}
        extra = pieces.keys() - known
        assert self.lora.shares or not extra, f"trainer ranks {extra} send no weight to {rank}"
        made = tuple(
            region_of(src, rank, pieces.get(src, []), self.weights.policy)
            for src in sorted(known | extra)
        )
        return replace(whole, plan_id=self.id, regions=made, starts=starts_of(made), padding=())

    def factors(self, rank: int) -> Named:
        """The factors that engine rank `rank` merges."""
        spec, engine = self.weights.spec, self.weights.engine
        named = sglang_tiles(spec, engine.tp, rank, engine.ep, engine.dp, engine.dense_tp)
        shapes = hf_shapes(spec)
        return engine_factors(named, self.lora.rank_of, shapes, shared=self.lora.shares)

    def _holders(self, stages: Iterable[int]) -> Holders:
        spec, trainer = self.weights.spec, self.weights.trainer
        known: dict[tuple[int, ...], Named] = {}
        holders: Holders = defaultdict(dict)
        for stage in stages:
            first = stage * trainer.stage_size
            for rank in range(first, first + trainer.stage_size):
                at = coords_of(trainer, rank)
                key = (at.pp, at.tp, at.etp, at.ep)  # data-parallel ranks hold the same
                if key not in known:
                    known[key] = adapter_tiles(
                        spec, trainer, rank, self.lora.rank_of, shared=self.lora.shares
                    )
                for name, local in known[key].items():
                    (tile,) = local.tiles
                    holders[name].setdefault(tile.hf_box, (tile, []))[1].append(rank)
        return holders

    def _pieces(self, holders: Holders, dst: int) -> Iterator[tuple[int, Keyed]]:
        """(trainer rank, piece) of what engine rank `dst` gets of these factors."""
        policy = self.weights.policy
        for name, local in self.factors(dst).items():
            (want,) = local.tiles
            for held, ranks in holders.get(name, {}).values():
                whole = meet(held.hf_box, want.hf_box)
                for box in self._cut(whole) if whole else ():
                    turn = zlib.crc32(f"{name} {box} {dst}".encode())
                    piece = Piece(
                        hf=name,
                        hf_box=box,
                        src_name=name,
                        src_box=local_box(held, box),
                        dst_name=name,
                        dst_box=local_box(want, box),
                        dtype=policy.dtype,
                        num_bytes=num_elements(box) * ITEMSIZE[policy.dtype],
                        offset=0,
                        is_scale=False,
                    )
                    starts = tuple(part.start for part in piece.dst_box)
                    yield ranks[turn % len(ranks)], ((name, starts), piece)

    def _cut(self, box: Box) -> Iterator[Box]:
        policy = self.weights.policy
        return cut(box, ITEMSIZE[policy.dtype], policy.bucket_bytes, quantised=False)

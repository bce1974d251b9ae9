"""Which box of which trainer rank goes to which box of which engine rank, in closed form.

    layers of one kind have equal rules   so boxes are matched once per kind, not once per layer
    experts of a layer are equal          so they are matched once, for expert 0, then counted
    equal boxes form one source           a group of replicas that every rank can enumerate

Piece number k of a size is sent by replica (k + start of the size + offset of the engine) % n.
Sizes start where the next larger one ended, so a group is balanced to within its largest piece;
boxes above `bucket_bytes` are cut at rows first, which bounds that piece.  The offset spreads
engines by the golden ratio and depends on the engine's own id only, so engines may join and leave.

Rejected: the replica that sent least (needs the plans of all ranks), rotation by tensor number.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError
from moerl.layout.rules import Layer, Place, Rule, Shard
from moerl.layout.shards import LayerSpec, hf_shapes
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Box, Tile, local_box, meet, num_elements
from moerl.weight_sync.buckets import Piece, WirePolicy
from moerl.weight_sync.held_shards import (
    ROOT,
    EngineLayout,
    Engines,
    held_by,
    is_expert,
    sent_layers,
)
from moerl.weight_sync.wire_formats import FORMATS, ITEMSIZE


# --- tables: one kind of layer, matched once ------------------------------------------------------
class _Part(NamedTuple):
    """The part of a box for one engine rank, in coordinates of expert 0: one or two pieces."""

    rank: int  # engine rank
    hf: str  # name inside the layer, with {e}
    hf_box: Box
    src: str
    src_box: Box
    dst: str
    dst_box: Box
    dst_stacked: bool  # the leading dim of dst_box is the expert's slot
    dtype: str
    quantization: str
    num_bytes: int  # including the scales
    order: int  # position among the parts of equal size of its entry


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """Parts of one box: all parts, or for an expert the parts of one expert rank of the engine."""

    by_rank: Mapping[int, Sequence[_Part]]  # by engine rank
    by_size: tuple[tuple[int, Sequence[_Part]], ...]  # (bytes, parts of that size by their order)


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One box of one rule, and which ranks of the tp (etp) axis hold it."""

    experts: bool
    same: tuple[int, ...]
    src_stacked: bool
    entries: tuple[_Entry, ...]  # one entry; for experts one per expert rank of the engine


class _Group(NamedTuple):
    """The replicas that hold equal boxes: a coset of the trainer's mesh."""

    stage: int
    experts: bool
    ep: int
    same: tuple[int, ...]


class Tables:
    """The part of a transfer plan that is the same for all ranks."""

    def __init__(
        self,
        spec: ModelSpec,
        trainer: ParallelConfig,
        engine: EngineLayout,
        policy: WirePolicy,
        layer_spec: LayerSpec,
    ) -> None:
        self.spec, self.trainer, self.engine, self.policy = spec, trainer, engine, policy
        self._shapes, self._engines = hf_shapes(spec), Engines(spec, engine)
        self._kinds: dict[object, tuple[Holding, ...]] = {}
        self._groups: dict[_Group, tuple[tuple[int, ...], dict[int, int]]] = {}
        per_holder = max(1, spec.experts // engine.ep)
        self._experts = [
            [
                (e, *divmod(e, per_holder))
                for e in Shard(ep, trainer.ep).part(spec.experts, "experts")
            ]
            for ep in range(trainer.ep)
        ]
        self.stages = [
            [
                (prefix + layer.prefix, layer.number, self._holdings(place, layer))
                for prefix, place, layer in sent_layers(
                    spec, trainer, stage * trainer.stage_size, layer_spec
                )
                if self._engines.rules(layer.number)
            ]
            for stage in range(trainer.pp)
        ]
        self.totals = [self._totals(stage) for stage in range(trainer.pp)]

    def prefix(self, number: int) -> str:
        return self._engines.prefix(number)

    def experts_of(self, holding: Holding, ep: int) -> Sequence[tuple[int, int, int]]:
        """(expert, its expert rank on the engine, its slot in it), by slot on the trainer."""
        return self._experts[ep] if holding.experts else ((0, 0, 0),)

    def group(self, group: _Group) -> tuple[tuple[int, ...], dict[int, int]]:
        """(ranks in turn order, where each size starts)."""
        if group not in self._groups:
            ranks = tuple(self._ranks(group))
            starts, at = {}, 0
            totals = self.totals[group.stage][group]
            for size in sorted(totals, reverse=True):
                starts[size] = at
                at = (at + totals[size]) % len(ranks)
            self._groups[group] = ranks, starts
        return self._groups[group]

    @cached_property
    def by_turn(self) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
        """For each group: its ranks, and (bytes, parts) that each turn sends."""
        found = []
        for stage in self.totals:
            for group, sizes in stage.items():
                ranks, starts = self.group(group)
                sums = [(0, 0)] * len(ranks)
                for size, count in sizes.items():
                    each, more = divmod(count, len(ranks))
                    for i in range(len(ranks)):
                        turn, mine = (starts[size] + i) % len(ranks), each + (i < more)
                        sums[turn] = sums[turn][0] + mine * size, sums[turn][1] + mine
                found.append((ranks, sums))
        return found

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Bytes received, by engine rank."""
        sums = [0] * self.engine.tp
        for stage in range(self.trainer.pp):
            for _, entry, times in self.entries(stage):
                for rank, parts in entry.by_rank.items():
                    sums[rank] += times * sum(part.num_bytes for part in parts)
        return tuple(sums)

    def _ranks(self, group: _Group) -> Iterator[int]:
        layout = self.trainer
        first = group.stage * layout.stage_size
        inner = layout.etp * layout.ep if group.experts else layout.tp
        first += group.ep * layout.etp
        for base in range(first, first + layout.stage_size, inner):
            yield from (base + i for i in group.same)

    def _totals(self, stage: int) -> dict[_Group, Counter[int]]:
        """How many parts of each size a group sends in all."""
        totals: dict[_Group, Counter[int]] = defaultdict(Counter)
        for group, entry, times in self.entries(stage):
            for size, parts in entry.by_size:
                totals[group][size] += times * len(parts)
        return totals

    def entries(self, stage: int) -> Iterator[tuple[_Group, _Entry, int]]:
        """(group, entry, count) of a stage: count is the number of experts, 1 outside experts."""
        for holding in (h for _, _, holdings in self.stages[stage] for h in holdings):
            for ep in range(self.trainer.ep) if holding.experts else (0,):
                group = _Group(stage, holding.experts, ep, holding.same)
                ref_counts = Counter(holder for _, holder, _ in self.experts_of(holding, ep))
                for holder, times in ref_counts.items():
                    yield group, holding.entries[holder], times

    def _holdings(self, place: Place, layer: Layer) -> tuple[Holding, ...]:
        kind = (layer.rules, self._engines.rules(layer.number), layer.number == ROOT)
        if kind not in self._kinds:
            made = (h for rule in layer.rules for h in self._of_rule(rule, place, layer.number))
            self._kinds[kind] = tuple(made)
        return self._kinds[kind]

    def _of_rule(self, rule: Rule, place: Place, number: int) -> Iterator[Holding]:
        experts = is_expert(rule)
        size = (place.etp if experts else place.tp).size
        ref_counts: dict[Tile, list[int]] = defaultdict(list)
        for i in range(size):
            local = held_by(self.spec, self._shapes, rule, number, Shard(i, size), place.vocab_rows)
            for tile in local.tiles:
                ref_counts[tile].append(i)
        if len({tile[:2] for tile in ref_counts}) < len(ref_counts):
            raise LayoutError(f"{rule.local}: ranks keep one box of {rule.hf} in different places")
        for tile, same in ref_counts.items():
            wants = list(self._wants(number, experts, tile.hf))
            entries = tuple(
                self._entry(rule, number, tile, [w for w in wants if w.holder == holder])
                for holder in range(self.engine.ep if experts else 1)
            )
            if any(entry.by_size for entry in entries):
                stacked = experts and "{e}" not in rule.local
                yield Holding(experts, tuple(same), stacked, entries)

    def _wants(self, number: int, experts: bool, hf: str) -> Iterator[_Want]:
        for rank, place, rule, local in self._engines.locals(number):
            if is_expert(rule) == experts:
                for tile in local.tiles:
                    if tile.hf == hf:
                        yield _Want(rank, place.ep.rank if experts else 0, rule, tile)

    def _entry(self, rule: Rule, number: int, held: Tile, wants: Iterable[_Want]) -> _Entry:
        by_rank: dict[int, list[_Part]] = defaultdict(list)
        by_size: dict[int, list[_Part]] = defaultdict(list)
        prefix = "" if number == ROOT else self.spec.layer_prefix(number)
        template = next(hf for hf in rule.hf if prefix + hf.format(e=0) == held.hf)
        for want in wants:
            whole = meet(held.hf_box, want.tile.hf_box)
            if whole is None:
                continue
            form = self.policy.format_of(template)
            dtype = form.dtype(want.rule.dtype or self.policy.dtype)
            for box in form.cut(whole, dtype, self.policy.bucket_bytes):
                dst_box = local_box(want.tile, box)
                form.check(held.hf, self._shapes[held.hf], box, dst_box)
                size = form.num_bytes(box, dtype)
                part = _Part(
                    rank=want.rank,
                    hf=template,
                    hf_box=box,
                    src=rule.local,
                    src_box=local_box(held, box),
                    dst=want.rule.local,
                    dst_box=dst_box,
                    dst_stacked=is_expert(want.rule) and "{e}" not in want.rule.local,
                    dtype=dtype,
                    quantization=form.name,
                    num_bytes=size,
                    order=len(by_size[size]),
                )
                by_rank[want.rank].append(part)
                by_size[size].append(part)
        return _Entry(by_rank, tuple(by_size.items()))


class _Want(NamedTuple):
    rank: int
    holder: int  # expert rank of the engine; 0 for tensors outside experts
    rule: Rule
    tile: Tile


@lru_cache(maxsize=8)
def tables_of(
    spec: ModelSpec,
    trainer: ParallelConfig,
    engine: EngineLayout,
    policy: WirePolicy,
    layer_spec: LayerSpec,
) -> Tables:
    return Tables(spec, trainer, engine, policy, layer_spec)


# --- deliveries ----------------------------------------------------------------------------------
class Delivery(NamedTuple):
    src: int  # trainer rank
    part: _Part
    src_prefix: str
    dst_prefix: str  # of names in the engine, and of Hugging Face names
    number: int  # layer number
    src_stacked: bool
    expert: int
    slot: int  # slot of the expert on the trainer rank
    dst_slot: int


def deliveries(
    tables: Tables,
    stage: int,
    engine_id: int,
    eps: Callable[[Holding], Iterable[int]],
    src: int | None = None,
    dst: int | None = None,
) -> Iterator[Delivery]:
    """Deliveries of a stage from trainer rank `src`, or to engine rank `dst`; exactly one is given.

    eps: the expert ranks of the trainer to visit for a holding, 0 for tensors outside experts; the
    turns of all other expert ranks are counted as well.
    """
    turns: dict[_Group, _Turns] = {}
    for src_prefix, number, holdings in tables.stages[stage]:
        names = (src_prefix, tables.prefix(number), number)
        for holding, ep in ((held, ep) for held in holdings for ep in eps(held)):
            group = _Group(stage, holding.experts, ep, holding.same)
            if group not in turns:
                turns[group] = _Turns(*tables.group(group), engine_id)
            turn = turns[group]
            for slot, (expert, holder, dst_slot) in enumerate(tables.experts_of(holding, ep)):
                entry = holding.entries[holder]
                at = (*names, holding.src_stacked, expert, slot, dst_slot)
                for rank, part in turn.to(entry, dst) if src is None else turn.of(entry, src):
                    yield Delivery(rank, part, *at)
                turn.advance(entry)


class _Turns:
    """Which replica of a group sends the next part of each size."""

    def __init__(self, ranks: tuple[int, ...], starts: Mapping[int, int], engine_id: int) -> None:
        self._ranks = ranks
        offset = offset_of(engine_id, len(ranks))
        self._next = {size: start + offset for size, start in starts.items()}

    def to(self, entry: _Entry, dst: int | None) -> Iterator[tuple[int, _Part]]:
        """(sender, part) of everything that engine rank `dst` gets of a box."""
        for part in entry.by_rank.get(dst, ()) if dst is not None else ():
            turn = self._next[part.num_bytes] + part.order
            yield self._ranks[turn % len(self._ranks)], part

    def of(self, entry: _Entry, src: int) -> Iterator[tuple[int, _Part]]:
        """(sender, part) of everything that trainer rank `src` sends of a box."""
        place, num = self._ranks.index(src), len(self._ranks)
        for size, parts in entry.by_size:
            for part in parts[(place - self._next[size]) % num :: num]:
                yield src, part

    def advance(self, entry: _Entry) -> None:
        """Count the turns of a box: each of its parts takes one, also parts for other receivers."""
        for size, parts in entry.by_size:
            self._next[size] += len(parts)


def offset_of(engine_id: int, replicas: int) -> int:
    """First replica of an engine: spread by the golden ratio (40503 / 2^16).

    Rejected: a hash of the id (16 engines on 8 replicas: up to 3.0 times the mean start at one
    replica, here 1.5), the id modulo the replicas (engines 0, 2, 4 ... start at half of them).
    """
    return (engine_id * 40503 * replicas >> 16) % replicas


Keyed = tuple[tuple[object, ...], Piece]


def pieces_of(at: Delivery) -> Iterator[Keyed]:
    """(sort key, piece) in wire order, which both ends derive alone.

    Sorted by item size (large first, so that no item is misaligned), layer, engine tensor, box.
    """
    part = at.part
    dst_box = _at_slot(part.dst_box, part.dst_stacked, at.dst_slot)
    weight = Piece(
        hf=at.dst_prefix + part.hf.format(e=at.expert),
        hf_box=part.hf_box,
        src_name=at.src_prefix + part.src.format(e=at.slot),
        src_box=_at_slot(part.src_box, at.src_stacked, at.slot),
        dst_name=at.dst_prefix + part.dst.format(e=at.dst_slot),
        dst_box=dst_box,
        dtype=part.dtype,
        num_bytes=num_elements(part.hf_box) * ITEMSIZE[part.dtype],
        offset=0,
        is_scale=False,
        quantization=part.quantization,
    )
    yield _key(at.number, weight), weight
    form, lead = FORMATS[part.quantization], len(dst_box) - len(part.hf_box)
    if (scales := form.scale_box(dst_box[lead:])) is not None:
        scale = weight._replace(
            dst_name=weight.dst_name + form.scale_suffix,
            dst_box=(*dst_box[:lead], *scales),
            dtype=form.scale_dtype,
            num_bytes=num_elements(scales) * ITEMSIZE[form.scale_dtype],
            is_scale=True,
        )
        yield _key(at.number, scale), scale


def _key(number: int, piece: Piece) -> tuple[object, ...]:
    starts = tuple(r.start for r in piece.dst_box)
    return -ITEMSIZE[piece.dtype], number, piece.dst_name, starts


def _at_slot(box: Box, stacked: bool, slot: int) -> Box:
    return (range(slot, slot + 1), *box[1:]) if stacked else box

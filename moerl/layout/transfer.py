"""The transfer plan: what each trainer rank sends to each rank of one engine, seen from both ends.

    plan_sender    a trainer rank's part: one region per engine rank that it sends to
    plan_receiver  an engine rank's part: one region per trainer rank that sends to it

A *region* is everything that one rank sends to one rank for one version: pieces back to back.  A
*piece* is a box of one Hugging Face tensor in the dtype of the wire, contiguous, in row-major order
of the box; the sender casts and quantises, the receiver only copies.  Both ends derive the same
regions from the same five inputs (model, trainer, engine, engine id, policy); `plan_id` says
whether the inputs are the same.  Nobody makes the plan of anybody else:

    layers of a kind hold equal rules    so boxes are met once per kind, not once per layer
    experts are alike                    so they are met once, for expert 0, and then counted off
    equal boxes are one source           held by a group of replicas that any rank can enumerate

Piece number k of a size goes to replica (k + start of the size + offset of the engine) % n.  Sizes
start where the next larger one ended, so a group is balanced to within its largest piece; boxes
above `bucket_bytes` are cut at rows first, which bounds that piece.  The offset spreads engines by
the golden ratio and depends on the engine's own id: another engine may come or go.

Block-quantised wire: a piece consists of whole 128 x 128 blocks (the last ones of a tensor may be
smaller), with its scales as a second piece.  A cut inside a block is refused: no sender could know
the block's maximum, and SGLang refuses to build such a layer as well.

Rejected: giving each piece to the replica that sent least (needs everybody's plan), rotation by
tensor number (all large tensors can meet on one replica), pieces in the order of the trainer (an
engine would have to know it), sending the blocks around a cut (bytes that nobody asked for).
Idea: the expert-aware planners of Awex and checkpoint-engine; rotation and both ends are ours.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import NamedTuple

from moerl.errors import ConfigError, LayoutError
from moerl.layout.placement import Flavor, ParallelLayout, hf_shapes, sglang_tiles
from moerl.layout.plan import ROOT, EngineLayout, Engines, held_by, is_expert, sent_layers
from moerl.layout.rules import Layer, Place, Rule, Shard
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Box, Tile, full_box, local_box, meet, num_elements

SCHEME = 1  # goes into plan_id; a change of order, rotation or cuts raises it
BLOCK = 128  # rows and columns that share one scale
ALIGN = 16  # bytes; regions start at multiples of it in a staging segment
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
SCALE_SUFFIX = "_scale_inv"  # SGLang's name of a block-quantised weight's scales
_QUANTISED = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")


@dataclass(frozen=True, slots=True)
class WirePolicy:
    """What the engine wants to receive, and how it is cut."""

    dtype: str  # of the engine's weights; tensors that it keeps in fp32 travel in fp32
    quantization: str = "none"  # or fp8_block: projections in fp8 with fp32 scales per block
    bucket_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError("engine.dtype", self.dtype, "use float32, bfloat16 or float16")
        if self.quantization not in ("none", "fp8_block"):
            raise ConfigError("sync.quantization", self.quantization, "use none or fp8_block")
        if self.bucket_bytes < 1:
            raise ConfigError("sync.bucket_bytes", self.bucket_bytes, "must be at least 1")


class Piece(NamedTuple):
    """One box, from a trainer's tensor to an engine's."""

    hf: str  # Hugging Face name; of the weight, for scales too
    hf_box: Box  # of the weight
    src_name: str  # as megatron_tiles names it
    src_box: Box  # of the weight, for scales too: the sender derives them from it
    dst_name: str  # as SGLang's named_parameters() names it
    dst_box: Box  # same extents as what travels, but for leading dims of extent 1
    dtype: str  # on the wire
    num_bytes: int
    offset: int  # inside the region
    is_scale: bool


class Bucket(NamedTuple):
    """Consecutive pieces [first, stop) of a region: what is sent, acknowledged, checked at once."""

    offset: int  # inside the region
    num_bytes: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Region:
    """All that trainer rank `src` sends to engine rank `dst`, in wire order."""

    src: int
    dst: int
    pieces: tuple[Piece, ...]
    buckets: tuple[Bucket, ...]
    num_bytes: int


def delta_start(region: Region) -> int:
    """Where deltas of a region stand, counted from its start, in a segment that takes deltas.

    Such a segment has twice the bytes and its regions start at twice their `starts`.
    """
    return -(-region.num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class SenderPlan:
    """Of trainer rank `rank`, towards one engine.  Ranks that get nothing have no region."""

    plan_id: str
    rank: int
    regions: tuple[Region, ...]  # by engine rank, ascending

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self.regions)


@dataclass(frozen=True, slots=True)
class ReceiverPlan:
    """Of engine rank `rank`: what arrives from whom, and what else makes the weights complete."""

    plan_id: str
    rank: int
    regions: tuple[Region, ...]  # by trainer rank, ascending
    starts: tuple[int, ...]  # of each region in the staging segment, multiples of ALIGN
    padding: tuple[tuple[str, int], ...]  # (parameter, first row): from there on SGLang keeps 0
    hooks: tuple[str, ...]  # SGLang functions to run after the pieces are in place, in order

    @property
    def num_bytes(self) -> int:
        """Exactly what this rank needs: the bytes that travel."""
        return sum(region.num_bytes for region in self.regions)

    @property
    def staging_bytes(self) -> int:
        """Of the segment: num_bytes, and at most ALIGN - 1 more per region."""
        return self.starts[-1] + self.regions[-1].num_bytes if self.regions else 0


def plan_sender(
    spec: ModelSpec,
    trainer: ParallelLayout,
    engine: EngineLayout,
    engine_id: int,
    rank: int,
    policy: WirePolicy,
    flavor: Flavor = "local",
) -> SenderPlan:
    """What trainer rank `rank` sends to engine `engine_id`; `engine.num` does not matter.

    Raises ConfigError or LayoutError when sizes do not divide, or a cut is inside an fp8 block.
    """
    tables = _tables(spec, trainer, replace(engine, num=1), policy, flavor)
    where = trainer.coords(rank)

    def mine(holding: _Holding) -> Iterable[int]:
        axis = where.etp if holding.experts else where.tp
        return (where.ep if holding.experts else 0,) if axis in holding.same else ()

    regions: dict[int, list[_Keyed]] = defaultdict(list)
    for found in _deliveries(tables, where.pp, engine_id, mine, src=rank):
        regions[found.part.rank] += _pieces(found)
    made = tuple(_region(rank, dst, regions[dst], policy) for dst in sorted(regions))
    return SenderPlan(plan_id(spec, trainer, engine, engine_id, policy, flavor), rank, made)


def plan_receiver(
    spec: ModelSpec,
    trainer: ParallelLayout,
    engine: EngineLayout,
    engine_id: int,
    rank: int,
    policy: WirePolicy,
    flavor: Flavor = "local",
) -> ReceiverPlan:
    """What rank `rank` of engine `engine_id` receives; raises as plan_sender does."""
    tables = _tables(spec, trainer, replace(engine, num=1), policy, flavor)

    def every(holding: _Holding) -> Iterable[int]:
        return range(trainer.ep) if holding.experts else (0,)

    regions: dict[int, list[_Keyed]] = defaultdict(list)
    for stage in range(trainer.pp):
        for found in _deliveries(tables, stage, engine_id, every, dst=rank):
            regions[found.src] += _pieces(found)
    made = tuple(_region(src, rank, regions[src], policy) for src in sorted(regions))
    starts, end = [], 0
    for region in made:
        starts.append(end)
        end += -(-region.num_bytes // ALIGN) * ALIGN
    named = sglang_tiles(spec, engine.tp, rank, engine.ep, engine.dp, engine.dense_tp)
    return ReceiverPlan(
        plan_id=plan_id(spec, trainer, engine, engine_id, policy, flavor),
        rank=rank,
        regions=made,
        starts=tuple(starts),
        padding=tuple((n, t.shape[0] - t.pad_rows) for n, t in named.items() if t.pad_rows),
        hooks=post_load_hooks(spec, policy),
    )


def plan_id(
    spec: ModelSpec,
    trainer: ParallelLayout,
    engine: EngineLayout,
    engine_id: int,
    policy: WirePolicy,
    flavor: Flavor = "local",
) -> str:
    """16 hex digits, in every process the same for the same inputs; `engine.num` is left out."""
    inputs = {
        "scheme": SCHEME,
        "spec": asdict(spec),
        "trainer": asdict(trainer),
        "engine": asdict(replace(engine, num=1)),
        "engine_id": engine_id,
        "policy": asdict(policy),
        "flavor": flavor,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Tally:
    """Bytes of one engine's plan, counted without making it."""

    sent_bytes: tuple[int, ...]  # by trainer rank
    sent_parts: tuple[int, ...]  # a box with its scales counts once
    received_bytes: tuple[int, ...]  # by engine rank


def tally(
    spec: ModelSpec,
    trainer: ParallelLayout,
    engine: EngineLayout,
    engine_id: int,
    policy: WirePolicy,
    flavor: Flavor = "local",
) -> Tally:
    """The sums of all ranks' plans, for thousands of ranks in a second; raises as plan_sender."""
    tables = _tables(spec, trainer, replace(engine, num=1), policy, flavor)
    sent, parts = [0] * trainer.world_size, [0] * trainer.world_size
    for ranks, by_turn in tables.by_turn:
        offset = _offset(engine_id, len(ranks))
        for turn, (num_bytes, num_parts) in enumerate(by_turn):
            rank = ranks[(turn + offset) % len(ranks)]
            sent[rank] += num_bytes
            parts[rank] += num_parts
    return Tally(tuple(sent), tuple(parts), tables.received)


def wire_bytes(hf: str, shape: Sequence[int], policy: WirePolicy) -> int:
    """Of a whole Hugging Face tensor in the dtype that most engines keep it in."""
    box = full_box(shape)
    if _is_quantised(hf, policy):
        return num_elements(box) + ITEMSIZE["float32"] * num_elements(_blocks(box))
    return num_elements(box) * ITEMSIZE[policy.dtype]


def post_load_hooks(spec: ModelSpec, policy: WirePolicy) -> tuple[str, ...]:
    """Functions of SGLang's model loader that derive other tensors from the written ones.

    post_load_weights     latent attention keeps w_kc and w_vc, copies of kv_b_proj's halves
    postprocess_weights   block-quantised layers may requantise or transpose their scales; the
                          layer must be brought back by restore_weights_before_loading first
    Unquantised layers of the other families are used as they are written.
    Source: sglang 0.5.23, srt/models/deepseek_common/deepseek_weight_loader.py,
    srt/model_executor/model_runner_components/weight_updater.py (begin/end_weight_update).
    """
    latent = ("post_load_weights",) if spec.kv_lora else ()
    if policy.quantization == "none":
        return latent
    return ("restore_weights_before_loading", *latent, "postprocess_weights")


# --- tables: one kind of layer, met once ---------------------------------------------------------
class _Part(NamedTuple):
    """What a box gives to one engine rank, in the coordinates of expert 0; one or two pieces."""

    rank: int  # of the engine
    hf: str  # name inside the layer, with {e}
    hf_box: Box
    src: str
    src_box: Box
    dst: str
    dst_box: Box
    dst_stacked: bool  # the leading dim of its box is the expert's slot
    dtype: str
    num_bytes: int  # with the scales
    order: int  # among the parts of equal size of its entry


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """Parts of one box: all of them, or for an expert those of one expert rank of the engine."""

    by_rank: Mapping[int, Sequence[_Part]]  # of the engine
    by_size: tuple[tuple[int, Sequence[_Part]], ...]  # (bytes, parts of that size by their order)


@dataclass(frozen=True, slots=True, eq=False)
class _Holding:
    """One box of one rule, and which ranks of the tp (etp) axis hold it."""

    experts: bool
    same: tuple[int, ...]
    src_stacked: bool
    entries: tuple[_Entry, ...]  # one; for experts by expert rank of the engine


class _Group(NamedTuple):
    """The replicas that hold equal boxes: a coset of the trainer's mesh."""

    stage: int
    experts: bool
    ep: int
    same: tuple[int, ...]


class _Tables:
    """Everything that does not depend on who asks."""

    def __init__(
        self,
        spec: ModelSpec,
        trainer: ParallelLayout,
        engine: EngineLayout,
        policy: WirePolicy,
        flavor: Flavor,
    ) -> None:
        self.spec, self.trainer, self.engine, self.policy = spec, trainer, engine, policy
        self._shapes, self._engines = hf_shapes(spec), Engines(spec, engine)
        self._kinds: dict[object, tuple[_Holding, ...]] = {}
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
                    spec, trainer, stage * trainer.stage_size, flavor
                )
                if self._engines.rules(layer.number)
            ]
            for stage in range(trainer.pp)
        ]
        self.totals = [self._totals(stage) for stage in range(trainer.pp)]

    def prefix(self, number: int) -> str:
        return self._engines.prefix(number)

    def experts_of(self, holding: _Holding, ep: int) -> Sequence[tuple[int, int, int]]:
        """(expert, its expert rank on the engine, its slot there), by slot on the trainer."""
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
        """Of each group: its ranks, and (bytes, parts) that each turn sends."""
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
        """Bytes by engine rank."""
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
        """(group, entry, how often) of a stage: often for experts, once for the rest."""
        for holding in (h for _, _, holdings in self.stages[stage] for h in holdings):
            for ep in range(self.trainer.ep) if holding.experts else (0,):
                group = _Group(stage, holding.experts, ep, holding.same)
                holders = Counter(holder for _, holder, _ in self.experts_of(holding, ep))
                for holder, times in holders.items():
                    yield group, holding.entries[holder], times

    def _holdings(self, place: Place, layer: Layer) -> tuple[_Holding, ...]:
        kind = (layer.rules, self._engines.rules(layer.number), layer.number == ROOT)
        if kind not in self._kinds:
            made = (h for rule in layer.rules for h in self._of_rule(rule, place, layer.number))
            self._kinds[kind] = tuple(made)
        return self._kinds[kind]

    def _of_rule(self, rule: Rule, place: Place, number: int) -> Iterator[_Holding]:
        experts = is_expert(rule)
        size = (place.etp if experts else place.tp).size
        holders: dict[Tile, list[int]] = defaultdict(list)
        for i in range(size):
            local = held_by(self.spec, self._shapes, rule, number, Shard(i, size), place.vocab_rows)
            for tile in local.tiles:
                holders[tile].append(i)
        if len({tile[:2] for tile in holders}) < len(holders):
            raise LayoutError(f"{rule.local}: ranks keep one box of {rule.hf} in different places")
        for tile, same in holders.items():
            wants = list(self._wants(number, experts, tile.hf))
            entries = tuple(
                self._entry(rule, number, tile, [w for w in wants if w.holder == holder])
                for holder in range(self.engine.ep if experts else 1)
            )
            if any(entry.by_size for entry in entries):
                stacked = experts and "{e}" not in rule.local
                yield _Holding(experts, tuple(same), stacked, entries)

    def _wants(self, number: int, experts: bool, hf: str) -> Iterator[_Want]:
        for rank, place, rule, local in self._engines.locals(number):
            if is_expert(rule) == experts:
                for tile in local.tiles:
                    if tile.hf == hf:
                        yield _Want(rank, place.ep.rank if experts else 0, rule, tile)

    def _entry(self, rule: Rule, number: int, held: Tile, wants: Iterable[_Want]) -> _Entry:
        by_rank: dict[int, list[_Part]] = defaultdict(list)
        by_size: dict[int, list[_Part]] = defaultdict(list)
        prefix = "" if number == ROOT else f"model.layers.{number}."
        template = next(hf for hf in rule.hf if prefix + hf.format(e=0) == held.hf)
        for want in wants:
            whole = meet(held.hf_box, want.tile.hf_box)
            if whole is None:
                continue
            quantised = _is_quantised(template, self.policy)
            dtype = want.rule.dtype or self.policy.dtype
            dtype = "float8_e4m3fn" if quantised else dtype
            for box in _cut(whole, ITEMSIZE[dtype], self.policy.bucket_bytes, quantised):
                dst_box = local_box(want.tile, box)
                size = num_elements(box) * ITEMSIZE[dtype]
                if quantised:
                    _check_blocks(held.hf, self._shapes[held.hf], box, dst_box)
                    size += ITEMSIZE["float32"] * num_elements(_blocks(box))
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
                    num_bytes=size,
                    order=len(by_size[size]),
                )
                by_rank[want.rank].append(part)
                by_size[size].append(part)
        return _Entry(by_rank, tuple(by_size.items()))


class _Want(NamedTuple):
    rank: int
    holder: int  # expert rank of the engine; 0 for what belongs to no expert
    rule: Rule
    tile: Tile


@lru_cache(maxsize=8)
def _tables(
    spec: ModelSpec,
    trainer: ParallelLayout,
    engine: EngineLayout,
    policy: WirePolicy,
    flavor: Flavor,
) -> _Tables:
    return _Tables(spec, trainer, engine, policy, flavor)


# --- cuts ----------------------------------------------------------------------------------------
def _cut(box: Box, itemsize: int, limit: int, quantised: bool) -> Iterator[Box]:
    """Equal runs of rows, of at most `limit` bytes; never less than one row, or row of blocks."""
    rows, *rest = box
    multiple = BLOCK if quantised else 1
    row_bytes = itemsize * num_elements(tuple(rest))
    most = max(multiple, limit // max(1, row_bytes) // multiple * multiple)
    runs = -(-len(rows) // most)
    step = -(-len(rows) // runs // multiple) * multiple
    for first in range(0, len(rows), step):
        yield (rows[first : first + step], *rest)


def _is_quantised(hf: str, policy: WirePolicy) -> bool:
    """Projections are; embedding, head, norms, routers and gates stay in the engine's dtype."""
    return policy.quantization != "none" and hf.endswith(_QUANTISED)


def _check_blocks(name: str, shape: Sequence[int], box: Box, dst_box: Box) -> None:
    lead = len(dst_box) - len(box)
    whole = len(box) == 2 and all(
        r.step == 1 and r.start % BLOCK == 0 and (r.stop % BLOCK == 0 or r.stop == size)
        for r, size in zip(box, shape, strict=True)
    )
    if not whole or any(r.start % BLOCK for r in dst_box[lead:]):
        raise LayoutError(
            f"{name}: {box} of {tuple(shape)} does not consist of whole {BLOCK} x {BLOCK} blocks; "
            "use fewer ranks on the axis that cuts it, or quantization none"
        )


def _blocks(box: Box) -> Box:
    """The scales of a box of whole blocks."""
    return tuple(range(r.start // BLOCK, -(-r.stop // BLOCK)) for r in box)


# --- deliveries ----------------------------------------------------------------------------------
class _Delivery(NamedTuple):
    src: int  # trainer rank
    part: _Part
    src_prefix: str
    dst_prefix: str
    number: int  # of the layer
    src_stacked: bool
    expert: int
    slot: int  # of the expert on the trainer rank
    dst_slot: int


def _deliveries(
    tables: _Tables,
    stage: int,
    engine_id: int,
    eps: Callable[[_Holding], Iterable[int]],
    src: int | None = None,
    dst: int | None = None,
) -> Iterator[_Delivery]:
    """Deliveries of a stage from trainer rank `src`, or to engine rank `dst`; one of them is given.

    eps: the expert ranks of the trainer to visit for a holding, 0 for what belongs to no expert.
    The turns of everybody else's are counted all the same.
    """
    seen: dict[tuple[_Group, int], int] = defaultdict(int)
    for src_prefix, number, holdings in tables.stages[stage]:
        names = (src_prefix, tables.prefix(number), number)
        for holding in holdings:
            for ep in eps(holding):
                group = _Group(stage, holding.experts, ep, holding.same)
                ranks, starts = tables.group(group)
                offset = _offset(engine_id, len(ranks))
                my_turn = ranks.index(src) - offset if src is not None else 0
                for slot, (expert, holder, dst_slot) in enumerate(tables.experts_of(holding, ep)):
                    entry = holding.entries[holder]
                    at = (*names, holding.src_stacked, expert, slot, dst_slot)
                    for part in entry.by_rank.get(dst, ()) if dst is not None else ():
                        size = part.num_bytes
                        turn = seen[group, size] + part.order + starts[size] + offset
                        yield _Delivery(ranks[turn % len(ranks)], part, *at)
                    for size, parts in entry.by_size:
                        if src is not None:
                            first = my_turn - seen[group, size] - starts[size]
                            for part in parts[first % len(ranks) :: len(ranks)]:
                                yield _Delivery(src, part, *at)
                        seen[group, size] += len(parts)


def _offset(engine_id: int, replicas: int) -> int:
    """First replica of an engine: spread by the golden ratio (40503 / 2^16)."""
    return (engine_id * 40503 * replicas >> 16) % replicas


_Keyed = tuple[tuple[object, ...], Piece]


def _pieces(at: _Delivery) -> Iterator[_Keyed]:
    """(place in the wire order, piece): large items first, so that none is misaligned; then by
    layer, engine tensor and box, which both ends know."""
    part = at.part
    dst_box = _at_slot(part.dst_box, part.dst_stacked, at.dst_slot)
    prefix = "" if at.number == ROOT else f"model.layers.{at.number}."
    weight = Piece(
        hf=prefix + part.hf.format(e=at.expert),
        hf_box=part.hf_box,
        src_name=at.src_prefix + part.src.format(e=at.slot),
        src_box=_at_slot(part.src_box, at.src_stacked, at.slot),
        dst_name=at.dst_prefix + part.dst.format(e=at.dst_slot),
        dst_box=dst_box,
        dtype=part.dtype,
        num_bytes=num_elements(part.hf_box) * ITEMSIZE[part.dtype],
        offset=0,
        is_scale=False,
    )
    yield _key(at.number, weight), weight
    if part.dtype == "float8_e4m3fn":
        lead = len(dst_box) - len(part.hf_box)
        scale = weight._replace(
            dst_name=weight.dst_name + SCALE_SUFFIX,
            dst_box=(*dst_box[:lead], *_blocks(dst_box[lead:])),
            dtype="float32",
            num_bytes=num_elements(_blocks(part.hf_box)) * ITEMSIZE["float32"],
            is_scale=True,
        )
        yield _key(at.number, scale), scale


def _key(number: int, piece: Piece) -> tuple[object, ...]:
    starts = tuple(r.start for r in piece.dst_box)
    return -ITEMSIZE[piece.dtype], number, piece.dst_name, starts


def _at_slot(box: Box, stacked: bool, slot: int) -> Box:
    return (range(slot, slot + 1), *box[1:]) if stacked else box


def _region(src: int, dst: int, keyed: list[_Keyed], policy: WirePolicy) -> Region:
    pieces: list[Piece] = []
    buckets: list[Bucket] = []
    first = start = offset = 0
    for _, piece in sorted(keyed, key=itemgetter(0)):
        if offset > start and offset + piece.num_bytes - start > policy.bucket_bytes:
            buckets.append(Bucket(start, offset - start, first, len(pieces)))
            first, start = len(pieces), offset
        pieces.append(piece._replace(offset=offset))
        offset += piece.num_bytes
    buckets.append(Bucket(start, offset - start, first, len(pieces)))
    return Region(src, dst, tuple(pieces), tuple(buckets), offset)

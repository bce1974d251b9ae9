"""What one trainer rank sends to all engines, derived without the plan of any other rank.

`join` compares every rank with every other; with a thousand on each side that is millions of ops
in every process.  Here a rank derives only what it sends, from three facts:

    layers of a kind hold equal rules    so boxes are met once per kind, not once per layer
    experts are alike                    so they are met once, for expert 0, and then counted off
    replicas are a coset of the mesh     so which replica sends is a rotation all can compute

Op number k of a group of n replicas goes to replica (k + offset of the engine) % n; k counts the
pieces of equal size, so each replica sends its share of every size.  The offset spreads engines by
the golden ratio.  What an engine receives depends on its own index only: another engine may join or
leave without a new plan for the rest.
Rejected: giving each op to the replica that sent least (needs all ops in every process), rotation
by tensor number alone (period and size pattern can line up: all large tensors on one replica).
Idea: the expert-aware planners of Awex and checkpoint-engine; the rotation is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moerl.errors import ConfigError
from moerl.layout.placement import (
    Coords,
    Flavor,
    ParallelLayout,
    hf_shapes,
    megatron_places,
    sglang_places,
)
from moerl.layout.rules import Layer, Place, Rule, Shard, expand
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Box, Local, Op, Tile, local_box, meet, num_elements

Shapes = Mapping[str, tuple[int, ...]]
ROOT = -1  # number of the "layer" outside all layers


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`num` equal engines; rank r of engine e is receiver e * tp + r."""

    tp: int = 1
    ep: int = 1
    dp: int = 1  # data-parallel attention
    num: int = 1
    dense_tp: int = 0
    """Ranks that cut dense layers and shared experts; 0 = tp.  For forecasts: a live engine with
    another value (SGLang's moe_dense_tp_size, shared experts beside an all-to-all) is refused."""

    def __post_init__(self) -> None:
        for name, lowest in (("tp", 1), ("ep", 1), ("dp", 1), ("num", 1), ("dense_tp", 0)):
            if getattr(self, name) < lowest:
                raise ConfigError(
                    f"engine.{name}", getattr(self, name), f"must be at least {lowest}"
                )
        if self.tp % self.ep or self.tp % self.dp or self.tp % (self.dense_tp or 1):
            raise ConfigError(
                "engine.tp",
                self.tp,
                f"must be a multiple of ep = {self.ep}, dp = {self.dp} and "
                f"dense_tp = {self.dense_tp}",
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.num


class Held(NamedTuple):
    """A tile of one rule on one shard, in the coordinates of expert 0 of one layer."""

    local: str  # name inside the layer, with {e} where experts have names of their own
    tile: Tile
    stacked: bool  # the leading dim of its box is the expert's slot


class Want(NamedTuple):
    """A tile that rank `rank` of every engine needs."""

    rank: int
    held: Held


class Piece(NamedTuple):
    """What one source tile gives to one receiver."""

    want: Want
    src_box: Box
    dst_box: Box


@dataclass(frozen=True, slots=True)
class _Send:
    """A source tile of a kind of layer: its pieces, and this rank's turn among the replicas."""

    held: Held
    pieces: tuple[tuple[Piece, ...], ...]  # by size; for experts, those of one expert rank
    replicas: int
    turn: int
    group: tuple[object, ...]  # same for all replicas, and for nobody else


def is_expert(rule: Rule) -> bool:
    return "{e}" in rule.hf[0]


def held_by(
    spec: ModelSpec, shapes: Shapes, rule: Rule, number: int, shard: Shard, vocab_rows: int
) -> Local:
    """The rule's local tensor on one shard: of expert 0 alone, in layer `number` or at the root."""
    layers = () if number == ROOT else (Layer(number, "", (rule,)),)
    alone = Place(
        first=(rule,) if number == ROOT else (),
        layers=layers,
        last=(),
        tp=shard,
        etp=shard,
        ep=Shard(0, max(1, spec.experts)),
        vocab_rows=vocab_rows,
    )
    (local,) = expand(spec, shapes, alone).values()
    return local


class Engines:
    """What the ranks of one engine hold, asked per layer."""

    def __init__(self, spec: ModelSpec, layout: EngineLayout) -> None:
        self.spec, self.layout, self._shapes = spec, layout, hf_shapes(spec)
        self._ranks = [
            [
                _by_number(place)
                for place in sglang_places(
                    spec, layout.tp, rank, layout.ep, layout.dp, layout.dense_tp
                )
            ]
            for rank in range(layout.tp)
        ]
        self._cache: dict[tuple[Rule, Shard, int], Local] = {}

    def rules(self, number: int) -> tuple[Rule, ...]:
        """All rules of a layer, of every rank alike; () for a layer that engines do not have."""
        return tuple(
            r for _, layers in self._ranks[0] if number in layers for r in layers[number].rules
        )

    def prefix(self, number: int) -> str:
        return next(layers[number].prefix for _, layers in self._ranks[0] if number in layers)

    def locals(self, number: int) -> Iterator[tuple[int, Place, Rule, Local]]:
        """Of a layer, each rank's tensors (rank, place, rule, local), with expert 0 for all."""
        for rank, places in enumerate(self._ranks):
            for place, layers in places:
                for rule in layers[number].rules if number in layers else ():
                    yield rank, place, rule, self._local(rule, number, place)

    def wants(self, number: int) -> tuple[list[Want], list[list[Want]]]:
        """Of a layer: (dense tiles of all ranks, tiles of an expert by the rank that holds it)."""
        dense: list[Want] = []
        experts: list[list[Want]] = [[] for _ in range(self.layout.ep)]
        for rank, place, rule, local in self.locals(number):
            into = experts[place.ep.rank] if is_expert(rule) else dense
            into += (Want(rank, held) for held in _helds(rule, local))
        return dense, experts

    def _local(self, rule: Rule, number: int, place: Place) -> Local:
        shard = place.etp if is_expert(rule) else place.tp
        key = (rule, shard, number)
        if key not in self._cache:
            vocab_rows = place.vocab_rows
            self._cache[key] = held_by(self.spec, self._shapes, rule, number, shard, vocab_rows)
        return self._cache[key]


def plan_rank(
    spec: ModelSpec,
    trainer: ParallelLayout,
    engines: EngineLayout,
    rank: int,
    flavor: Flavor = "local",
) -> list[Op]:
    """Everything trainer rank `rank` sends; over all ranks, every engine element exactly once.

    Op.dst is a receiver as EngineLayout numbers them.  A tensor that two pipeline stages hold (a
    tied head) is sent by the first.  Raises ConfigError or LayoutError when sizes do not divide.
    """
    targets, where = Engines(spec, engines), trainer.coords(rank)
    turns: dict[tuple[object, ...], int] = defaultdict(int)
    offsets: dict[int, dict[int, list[int]]] = {}
    sends: dict[object, list[_Send]] = {}
    ops: list[Op] = []
    for prefix, place, layer in sent_layers(spec, trainer, rank, flavor):
        wanted = targets.rules(layer.number)
        kind = (layer.rules, wanted, layer.number == ROOT)
        if kind not in sends:
            sends[kind] = list(_sends(spec, trainer, where, place, layer, targets))
        names = (prefix + layer.prefix, targets.prefix(layer.number) if wanted else "")
        mine = place.ep.part(spec.experts, "experts") if spec.experts else range(0)
        for send in sends[kind]:
            engine_of = offsets.setdefault(send.replicas, _offsets(engines.num, send.replicas))
            if send.group[0] == "dense":
                for e, piece in _turns(send.pieces, send, turns, engine_of):
                    ops.append(_op(rank, names, send, piece, e * engines.tp, 0, 0))
                continue
            per_engine_rank = spec.experts // engines.ep
            for slot, expert in enumerate(mine):
                holder, dst_slot = divmod(expert, per_engine_rank)
                pieces = send.pieces[holder :: engines.ep]
                for e, piece in _turns(pieces, send, turns, engine_of):
                    ops.append(_op(rank, names, send, piece, e * engines.tp, slot, dst_slot))
    return ops


def sent_layers(
    spec: ModelSpec,
    trainer: ParallelLayout,
    rank: int,
    flavor: Flavor,
    *,
    keep_copies: bool = False,
) -> Iterator[tuple[str, Place, Layer]]:
    """(prefix, place, layer) of a rank; what is outside the layers comes as a layer numbered ROOT.

    Without root tensors that an earlier stage or chunk holds as well, unless keep_copies.
    """
    seen: set[tuple[str, ...]] = set()
    if trainer.coords(rank).pp > 0 and not keep_copies:
        for _, place in megatron_places(spec, trainer, 0, flavor):
            seen |= {rule.hf for rule in place.first}
    for prefix, place in megatron_places(spec, trainer, rank, flavor):
        root = [rule for rule in (*place.first, *place.last) if rule.hf not in seen]
        yield prefix, place, Layer(ROOT, "", tuple(root))
        seen |= set() if keep_copies else {rule.hf for rule in root}
        for layer in place.layers:
            yield prefix, place, layer


def _sends(
    spec: ModelSpec,
    trainer: ParallelLayout,
    where: Coords,
    place: Place,
    layer: Layer,
    targets: Engines,
) -> Iterator[_Send]:
    shapes = hf_shapes(spec)
    dense, experts = targets.wants(layer.number)
    for rule in layer.rules:
        shard = place.etp if is_expert(rule) else place.tp
        every = [
            held_by(spec, shapes, rule, layer.number, Shard(i, shard.size), place.vocab_rows)
            for i in range(shard.size)
        ]
        for held in _helds(rule, every[shard.rank]):
            box = (held.tile.hf, held.tile.hf_box)
            same = [i for i, local in enumerate(every) if box in {t[:2] for t in local.tiles}]
            if is_expert(rule):
                repeats = trainer.stage_size // (trainer.ep * trainer.etp)
                turn = where.edp * len(same) + same.index(where.etp)
                group: tuple[object, ...] = ("expert", tuple(same))
                by_holder = [_by_size(_pieces(held, wants)) for wants in experts]
                classes = max(map(len, by_holder))
                pieces = tuple(
                    by_holder[g][c] if c < len(by_holder[g]) else ()
                    for c in range(classes)
                    for g in range(len(experts))
                )
            else:
                repeats = trainer.stage_size // trainer.tp
                turn = where.dp * trainer.cp + where.cp
                turn = turn * len(same) + same.index(where.tp)
                group = ("dense", tuple(same))
                pieces = tuple(_by_size(_pieces(held, dense)))
            if any(pieces):
                yield _Send(held, pieces, repeats * len(same), turn, group)


def _turns(
    pieces: Sequence[Sequence[Piece]],
    send: _Send,
    turns: dict[tuple[object, ...], int],
    engine_of: Mapping[int, Sequence[int]],
) -> Iterator[tuple[int, Piece]]:
    """(engine, piece) for the pieces that are this replica's to send."""
    for same_size in pieces:
        if not same_size:
            continue
        key = (*send.group, num_elements(same_size[0].src_box))
        first = send.turn - turns[key]
        turns[key] += len(same_size)
        for k, piece in enumerate(same_size):
            for engine in engine_of.get((first - k) % send.replicas, ()):
                yield engine, piece


def _offsets(num_engines: int, replicas: int) -> dict[int, list[int]]:
    """Engines by their offset among the replicas, spread by the golden ratio (40503 / 2^16)."""
    engines: dict[int, list[int]] = defaultdict(list)
    for engine in range(num_engines):
        engines[(engine * 40503 * replicas >> 16) % replicas].append(engine)
    return dict(engines)


def _op(
    rank: int,
    names: tuple[str, str],
    send: _Send,
    piece: Piece,
    base: int,
    slot: int,
    dst_slot: int,
) -> Op:
    held = piece.want.held
    return Op(
        rank,
        names[0] + send.held.local.format(e=slot),
        _at_slot(piece.src_box, send.held.stacked, slot),
        base + piece.want.rank,
        names[1] + held.local.format(e=dst_slot),
        _at_slot(piece.dst_box, held.stacked, dst_slot),
    )


def _at_slot(box: Box, stacked: bool, slot: int) -> Box:
    return (range(slot, slot + 1), *box[1:]) if stacked else box


def _pieces(held: Held, wants: Iterable[Want]) -> Iterator[Piece]:
    for want in wants:
        if want.held.tile.hf == held.tile.hf:
            part = meet(held.tile.hf_box, want.held.tile.hf_box)
            if part is not None:
                yield Piece(want, local_box(held.tile, part), local_box(want.held.tile, part))


def _by_size(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    sizes: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        sizes[num_elements(piece.src_box)].append(piece)
    return [tuple(same) for _, same in sorted(sizes.items())]


def _helds(rule: Rule, local: Local) -> list[Held]:
    stacked = is_expert(rule) and "{e}" not in rule.local
    return [Held(rule.local, tile, stacked) for tile in local.tiles]


def _by_number(place: Place) -> tuple[Place, dict[int, Layer]]:
    root = Layer(ROOT, "", (*place.first, *place.last))
    return place, {layer.number: layer for layer in (root, *place.layers)}

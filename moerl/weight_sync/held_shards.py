"""The shards of trainer and engine ranks, per kind of layer and for one expert.

The transfer plan and the layout check ask the same three questions:

    sent_layers    which layers does a stage of the trainer hold?
    Engines        which tensors of a layer does each rank of an engine hold?
    held_by        which boxes of one rule are on shard i of n, for expert 0?

Layers of one kind have equal rules and experts are equal, so the cost does not grow with ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.layout.rules import Layer, Place, Rule, Shard, expand
from moerl.layout.shards import LayerSpec, coords_of, hf_shapes, megatron_places, sglang_places
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Local

Shapes = Mapping[str, tuple[int, ...]]
ROOT = -1  # number of the "layer" outside all layers


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`num` equal engines; rank r of engine e is receiver e * tp + r."""

    tp: int = 1
    ep: int = 1
    dp: int = 1  # data-parallel attention
    num: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "dp", "num"):
            if getattr(self, name) < 1:
                setting = "count" if name == "num" else name
                raise ConfigError(f"engine.{setting}", getattr(self, name), "must be at least 1")
        if self.tp % self.ep or self.tp % self.dp:
            problem = f"must be a multiple of ep = {self.ep} and dp = {self.dp}"
            raise ConfigError("engine.tp", self.tp, problem)

    @property
    def world_size(self) -> int:
        return self.tp * self.num


def is_expert(rule: Rule) -> bool:
    return "{e}" in rule.hf[0]


def held_by(
    spec: ModelSpec, shapes: Shapes, rule: Rule, number: int, shard: Shard, vocab_rows: int
) -> Local:
    """The rule's local tensor on one shard: of expert 0 only, in layer `number` or at the root."""
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
    """Tensors of the ranks of one engine, per layer."""

    def __init__(self, spec: ModelSpec, layout: EngineLayout) -> None:
        self.spec, self.layout, self._shapes = spec, layout, hf_shapes(spec)
        self._ranks = [
            [
                _by_number(place)
                for place in sglang_places(spec, layout.tp, rank, layout.ep, layout.dp)
            ]
            for rank in range(layout.tp)
        ]
        self._cache: dict[tuple[Rule, Shard, int], Local] = {}

    def rules(self, number: int) -> tuple[Rule, ...]:
        """The rules of a layer, equal on all ranks; () for a layer that engines do not have."""
        return tuple(
            r for _, layers in self._ranks[0] if number in layers for r in layers[number].rules
        )

    def prefix(self, number: int) -> str:
        return next(layers[number].prefix for _, layers in self._ranks[0] if number in layers)

    def locals(self, number: int) -> Iterator[tuple[int, Place, Rule, Local]]:
        """(rank, place, rule, local) of a layer's tensors on each rank; expert 0 for all."""
        for rank, places in enumerate(self._ranks):
            for place, layers in places:
                for rule in layers[number].rules if number in layers else ():
                    yield rank, place, rule, self._local(rule, number, place)

    def _local(self, rule: Rule, number: int, place: Place) -> Local:
        shard = place.etp if is_expert(rule) else place.tp
        key = (rule, shard, number)
        if key not in self._cache:
            vocab_rows = place.vocab_rows
            self._cache[key] = held_by(self.spec, self._shapes, rule, number, shard, vocab_rows)
        return self._cache[key]


def sent_layers(
    spec: ModelSpec,
    trainer: ParallelConfig,
    rank: int,
    layer_spec: LayerSpec,
    *,
    keep_copies: bool = False,
) -> Iterator[tuple[str, Place, Layer]]:
    """(prefix, place, layer) of a rank; tensors outside the layers form a layer numbered ROOT.

    Root tensors that an earlier stage or chunk holds too are left out unless keep_copies.
    """
    seen: set[tuple[str, ...]] = set()
    if coords_of(trainer, rank).pp > 0 and not keep_copies:
        for _, place in megatron_places(spec, trainer, 0, layer_spec):
            seen |= {rule.hf for rule in place.first}
    for prefix, place in megatron_places(spec, trainer, rank, layer_spec):
        root = [rule for rule in (*place.first, *place.last) if rule.hf not in seen]
        yield prefix, place, Layer(ROOT, "", tuple(root))
        seen |= set() if keep_copies else {rule.hf for rule in root}
        for layer in place.layers:
            yield prefix, place, layer


def _by_number(place: Place) -> tuple[Place, dict[int, Layer]]:
    root = Layer(ROOT, "", (*place.first, *place.last))
    return place, {layer.number: layer for layer in (root, *place.layers)}

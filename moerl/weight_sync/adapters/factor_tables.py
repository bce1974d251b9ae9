"""Who holds which part of a weight's factors, in closed form.

Layers of one kind have equal rules and experts are equal, as in `deliveries`, so the parts of a
weight are computed once for each kind, for expert 0.  Only the rank of the factors may differ:
`lora.ranks` can name single layers and experts.  A trainer rank walks through the weights that it
holds, an engine rank through the weights of the engine, each for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.layout.adapters import factor_names, hull, module_of, projections
from moerl.layout.rules import Rule, Shard
from moerl.layout.shards import coords_of, hf_shapes
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Box
from moerl.weight_sync.held_shards import (
    ROOT,
    EngineLayout,
    Engines,
    held_by,
    is_expert,
    sent_layers,
)


class WantedFactor(NamedTuple):
    """Rows of B and columns of A of an engine rank."""

    holder: int  # its expert rank; 0 for weights outside experts
    rows: range
    cols: range


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of one weight on the ranks of the trainer's tp (etp) axis and on engine ranks."""

    cols: dict[range, list[int]]  # of A
    rows: dict[range, list[int]]  # of B
    wanted: dict[int, WantedFactor]  # by engine rank


class AdaptedWeight(NamedTuple):
    """One weight that has factors, of one layer, or one expert's."""

    module: str  # Hugging Face name
    rank: int  # of its factors
    stage: int
    expert: int | None
    parts: Parts


class Factor(NamedTuple):
    """A or B of a target, or of all experts of its layer."""

    name: str  # Hugging Face name
    target: AdaptedWeight
    is_a: bool
    is_shared: bool


class FactorTables:
    """Of one trainer, one engine and one choice of targets."""

    def __init__(
        self, spec: ModelSpec, trainer: ParallelConfig, engine: EngineLayout, lora: LoraConfig
    ) -> None:
        self.spec, self.trainer, self.engine, self._lora = spec, trainer, engine, lora
        self._shapes, self._engines = hf_shapes(spec), Engines(spec, engine)
        self._parts: dict[object, Parts] = {}

    def of_trainer(self, rank: int) -> Iterator[Factor]:
        """The factors of a trainer rank that engines have, too."""
        where = coords_of(self.trainer, rank)
        return self._factors(self._targets(where.pp, self._experts(where.ep, self.trainer.ep)))

    def of_engine(self, rank: int) -> Iterator[Factor]:
        return self._factors(self.targets(rank))

    def targets(self, rank: int) -> Iterator[AdaptedWeight]:
        """The weights that an engine rank merges."""
        engine = self.engine
        own = self._experts(rank // (engine.tp // engine.ep), engine.ep)
        for stage in range(self.trainer.pp):
            yield from (t for t in self._targets(stage, own) if rank in t.parts.wanted)

    def holders(self, factor: Factor, places: Sequence[int]) -> list[int]:
        """Trainer ranks at these places of the tp (etp) axis, ascending."""
        layout, first, expert = self.trainer, 0, factor.target.expert
        if expert is None:
            inner = layout.tp
        elif factor.is_shared:
            inner = layout.etp
        else:
            inner = layout.etp * layout.ep
            first = expert // (self.spec.experts // layout.ep) * layout.etp
        stage = factor.target.stage * layout.stage_size
        every = range(stage + first, stage + layout.stage_size, inner)
        return [base + place for base in every for place in places]

    def receivers(self, factor: Factor) -> Iterator[tuple[int, WantedFactor]]:
        """(engine rank, its part)."""
        holder, expert = 0, factor.target.expert
        if expert is not None:
            holder = expert // (self.spec.experts // self.engine.ep)
        wanted = factor.target.parts.wanted.items()
        return ((r, want) for r, want in wanted if factor.is_shared or want.holder == holder)

    def _factors(self, targets: Iterable[AdaptedWeight]) -> Iterator[Factor]:
        seen: set[str] = set()
        for target in targets:
            names = factor_names(target.module, shared=self._lora.shares)
            for name in names:
                is_shared = not name.startswith(f"{target.module}.")
                if not is_shared or name not in seen:
                    yield Factor(name, target, name == names[0], is_shared)
                if is_shared:
                    seen.add(name)

    def _experts(self, number: int, ranks: int) -> range:
        return Shard(number, ranks).part(self.spec.experts, "experts")

    def _targets(self, stage: int, experts: range) -> Iterator[AdaptedWeight]:
        first = stage * self.trainer.stage_size
        for _, place, layer in sent_layers(self.spec, self.trainer, first, "local"):
            known = self._engines.rules(layer.number)
            prefix = "" if layer.number == ROOT else self.spec.layer_prefix(layer.number)
            for rule, name in ((r, n) for r in layer.rules if known for n in r.hf):
                weight = prefix + name.format(e=0)
                if len(self._shapes[weight]) != 2:
                    continue
                size = (place.etp if is_expert(rule) else place.tp).size
                key = (layer.rules, known, layer.number == ROOT, name)
                parts = None  # the key is long: it is hashed once, not for each expert
                for expert in experts if is_expert(rule) else (None,):
                    module = prefix + module_of(name.format(e=expert))
                    if rank := self._lora.rank_of(module):
                        if parts is None:
                            local = _Weight(rule, weight, layer.number, size, place.vocab_rows)
                            parts = self._known(key, local)
                        yield AdaptedWeight(module, rank, stage, expert, parts)

    def _known(self, key: object, weight: _Weight) -> Parts:
        if key not in self._parts:
            self._parts[key] = self._split(weight)
        return self._parts[key]

    def _split(self, weight: _Weight) -> Parts:
        cols: dict[range, list[int]] = defaultdict(list)
        rows: dict[range, list[int]] = defaultdict(list)
        own = module_of(weight.name)
        for place in range(weight.size):
            shard = Shard(place, weight.size)
            local = held_by(
                self.spec, self._shapes, weight.rule, weight.number, shard, weight.vocab_rows
            )
            for part in projections(local, lambda module: module == own, self._shapes):
                cols[part.cols].append(place)
                rows[part.rows].append(place)
        return Parts(cols, rows, dict(self._wanted(weight)))

    def _wanted(self, weight: _Weight) -> Iterator[tuple[int, WantedFactor]]:
        boxes: dict[tuple[int, int], list[Box]] = defaultdict(list)
        for rank, place, rule, local in self._engines.locals(weight.number):
            if is_expert(rule) == is_expert(weight.rule):
                holder = place.ep.rank if is_expert(rule) else 0
                held = [tile.hf_box for tile in local.tiles if tile.hf == weight.name]
                boxes[rank, holder] += held
        for (rank, holder), held in boxes.items():
            if held and self._lora.serves_adapters:  # SGLang cuts an adapter for each rank
                rows, cols = map(range, self._shapes[weight.name])
                yield rank, WantedFactor(holder, rows, cols)
            elif held:
                rows, cols = (hull(part) for part in zip(*held, strict=True))
                yield rank, WantedFactor(holder, rows, cols)


class _Weight(NamedTuple):
    """Expert 0 of a kind, or the weight outside experts."""

    rule: Rule
    name: str
    number: int  # of a layer of the kind
    size: int  # of the trainer's axis that cuts it
    vocab_rows: int

"""Proves from shapes alone that a model fits a trainer layout and an engine layout.

For every kind of layer and every distinct shard of it, with expert 0 for all experts:

    every local tensor is tiled exactly           on the trainer and on the engine
    the trainer's distinct boxes cover            every whole Hugging Face tensor, and
    every engine tile, each element once
    every layer is in one model chunk             and every expert on one expert rank

Equal shards are checked once, so thousands of ranks take a second.  Byte counts come from
the same tables, sizes of the plan from the counts of the transfer plan.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError
from moerl.layout.rules import Layer, Place, Rule, Shard
from moerl.layout.shards import LayerSpec, chunk_layers, coords_of, hf_shapes
from moerl.layout.spec import ModelSpec
from moerl.layout.tiles import Local, Named, Tile, check_covers, full_box, join
from moerl.planning.printout import grid
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import (
    ROOT,
    EngineLayout,
    Engines,
    held_by,
    is_expert,
    sent_layers,
)
from moerl.weight_sync.transfer_plan import TransferPlan

Stages = list[list[tuple[str, Place, Layer]]]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Spread:
    """Smallest, mean and largest value over ranks."""

    low: float
    mean: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        found = list(values)
        return Spread(min(found), sum(found) / len(found), max(found))

    @property
    def values(self) -> tuple[float, float, float]:
        return self.low, self.mean, self.high


@dataclass(frozen=True, slots=True)
class Report:
    """Result of the proof, with counts.

    Bytes are of live tensors, padding included (except in fp8 engines), unless named sent.
    """

    tensors: int  # Hugging Face tensors
    kinds: int  # kinds of layers, the root included
    trainer_ranks: int
    engine_ranks: int
    trainer_bytes: Spread
    engine_bytes: Spread
    sent_bytes: Spread  # per trainer rank, one publication to all engines
    parts: Spread  # boxes per trainer rank, one publication to all engines


def check_layout(
    spec: ModelSpec,
    trainer: ParallelConfig,
    engines: EngineLayout,
    layer_spec: LayerSpec = "local",
    engine_dtype: str = "",
    quantization: str = "none",
) -> Report:
    """Prove the layouts and count.  Raises ConfigError or LayoutError naming axis or tensor.

    engine_dtype, quantization: of the engines' weights and of the bytes on the wire (`WirePolicy`);
    "" = the checkpoint's dtype.
    """
    stages = _stages(spec, trainer, layer_spec)
    targets = Engines(spec, engines)
    _check_division(spec, trainer, engines)
    kinds = _kinds(stages, targets)
    for ref_counts in kinds:
        _prove(spec, ref_counts, targets)
    dtype = engine_dtype or spec.dtype
    policy = WirePolicy(dtype if dtype in ITEMSIZE else "bfloat16", quantization)
    counts = [
        TransferPlan(spec, trainer, engines, e, policy, layer_spec).totals()
        for e in range(engines.num)
    ]
    sent = map(sum, zip(*(count.sent_bytes for count in counts), strict=True))
    parts = map(sum, zip(*(count.sent_parts for count in counts), strict=True))
    return Report(
        tensors=len(hf_shapes(spec)),
        kinds=len(kinds),
        trainer_ranks=trainer.world_size,
        engine_ranks=engines.world_size,
        trainer_bytes=trainer_bytes(spec, trainer, layer_spec),
        engine_bytes=(
            _engine_bytes(spec, targets, ITEMSIZE[policy.dtype])
            if quantization == "none"
            else Spread.of(counts[0].received_bytes)
        ),
        sent_bytes=Spread.of(sent),
        parts=Spread.of(parts),
    )


def describe(report: Report) -> str:
    """One line per quantity: smallest, mean and largest rank."""
    rows = [
        ("per rank", "min", "mean", "max"),
        ("trainer weights, MiB", *_mebibytes(report.trainer_bytes)),
        ("engine weights, MiB", *_mebibytes(report.engine_bytes)),
        ("sent to engines, MiB", *_mebibytes(report.sent_bytes)),
        ("boxes sent", *(f"{value:,.0f}" for value in report.parts.values)),
    ]
    total = report.parts.mean * report.trainer_ranks
    return "\n".join(
        (
            f"exact: {report.tensors:,} tensors in {report.kinds} kinds of layers, "
            f"{report.trainer_ranks:,} trainer ranks, {report.engine_ranks:,} engine ranks",
            *grid(rows, 22, 14, 14, 14),
            f"whole plan: {total:,.0f} boxes, "
            f"{report.sent_bytes.mean * report.trainer_ranks / 2**20:,.2f} MiB",
        )
    )


def _mebibytes(spread: Spread) -> list[str]:
    return [f"{value / 2**20:,.2f}" for value in spread.values]


def _stages(spec: ModelSpec, trainer: ParallelConfig, layer_spec: LayerSpec) -> Stages:
    return [
        list(sent_layers(spec, trainer, stage * trainer.stage_size, layer_spec, keep_copies=True))
        for stage in range(trainer.pp)
    ]


# --- proof ---------------------------------------------------------------------------------------
def _check_division(spec: ModelSpec, trainer: ParallelConfig, engines: EngineLayout) -> None:
    """Every layer is in one chunk, every expert on one rank of each side's expert axis."""
    layers = [
        number
        for stage in range(trainer.pp)
        for chunk in range(trainer.vpp)
        for number in chunk_layers(spec.layers, trainer, stage, chunk)
    ]
    if sorted(layers) != list(range(spec.layers)):
        raise LayoutError(f"model chunks hold layers {sorted(layers)}, not each layer once")
    for size, side in ((trainer.ep, "trainer"), (engines.ep, "engine")):
        parts = [Shard(r, size).part(spec.experts, f"{side} experts") for r in range(size)]
        if [expert for part in parts for expert in part] != list(range(spec.experts)):
            raise LayoutError(f"{side} ranks hold experts {parts}, not each expert once")


def _kinds(stages: Stages, targets: Engines) -> list[list[tuple[Place, Layer]]]:
    """One example of each kind of layer, with all its holders; the root has several stages."""
    kinds: dict[object, list[tuple[Place, Layer]]] = defaultdict(list)
    number_of: dict[int, object] = {}
    for _, place, layer in (held for stage in stages for held in stage):
        # a prediction layer has two halves that form one layer of the checkpoint
        kind: object = ROOT if layer.number == ROOT else (layer.rules, targets.rules(layer.number))
        kind = number_of.setdefault(layer.number, kind)
        if not kinds[kind] or kinds[kind][0][1].number == layer.number:
            kinds[kind].append((place, layer))
    return list(kinds.values())


def _prove(spec: ModelSpec, ref_counts: list[tuple[Place, Layer]], targets: Engines) -> None:
    number = ref_counts[0][1].number
    rules = [rule for _, layer in ref_counts for rule in layer.rules]
    for experts in (False, True):
        sources: dict[int, Named] = {}
        for place, layer in ref_counts:
            shard = place.etp if experts else place.tp
            for i in range(shard.size):
                named = {
                    rule.local: held_by(
                        spec, hf_shapes(spec), rule, number, Shard(i, shard.size), place.vocab_rows
                    )
                    for rule in layer.rules
                    if is_expert(rule) == experts
                }
                _check_exact(named)
                sources[len(sources)] = named
        sinks: dict[int, Named] = {ROOT: _whole(spec, number, rules, experts)}
        for rank, _, rule, local in targets.locals(number):
            if is_expert(rule) == experts:
                sinks.setdefault(rank, {})[rule.local] = local
        for named in sinks.values():
            _check_exact(named)
        join(sources, sinks)


def _whole(spec: ModelSpec, number: int, rules: list[Rule], experts: bool) -> Named:
    """The whole Hugging Face tensors of a layer: of expert 0, or all others."""
    shapes = hf_shapes(spec)
    if experts:
        prefix = spec.layer_prefix(number)
        names = [prefix + hf.format(e=0) for rule in rules if is_expert(rule) for hf in rule.hf]
    else:
        names = _layer_names(spec, number, rules)
    return {
        name: Local(shapes[name], (Tile(name, full_box(shapes[name]), full_box(shapes[name])),))
        for name in names
    }


def _layer_names(spec: ModelSpec, number: int, rules: list[Rule]) -> list[str]:
    """Names of a layer, or of the root, without expert tensors."""
    if number == ROOT:
        return [name for name in hf_shapes(spec) if "model.layers." not in name]
    prefix = spec.layer_prefix(number)
    of_experts = {
        prefix + hf.format(e=expert)
        for rule in rules
        if is_expert(rule)
        for hf in rule.hf
        for expert in range(spec.experts)
    }
    names = (name for name in hf_shapes(spec) if name.startswith(prefix))
    return [name for name in names if name not in of_experts]


def _check_exact(named: Named) -> None:
    check_covers(named, {name: local.shape for name, local in named.items()})


# --- bytes ---------------------------------------------------------------------------------------
def trainer_bytes(
    spec: ModelSpec, trainer: ParallelConfig, layer_spec: LayerSpec = "local"
) -> Spread:
    """Bytes of live weights per trainer rank, padding included.

    Ranks of a stage differ by tp, and in their experts by etp.
    """
    dense, expert = stage_bytes(spec, trainer, layer_spec)
    where = (coords_of(trainer, rank) for rank in range(trainer.world_size))
    return Spread.of(dense[at.pp][at.tp] + expert[at.pp][at.etp] for at in where)


def stage_bytes(
    spec: ModelSpec, trainer: ParallelConfig, layer_spec: LayerSpec = "local"
) -> tuple[list[list[int]], list[list[int]]]:
    """Bytes of live weights: (by stage and tp rank, without experts), (experts, by stage and etp).

    In the checkpoint's dtype, one expert-parallel rank's share of the experts.
    """
    stages, itemsize = _stages(spec, trainer, layer_spec), ITEMSIZE.get(spec.dtype, 2)
    sizes: dict[tuple[Rule, Shard, bool], int] = {}

    def size(rule: Rule, place: Place, number: int, shard: Shard) -> int:
        key = (rule, shard, number == ROOT)
        if key not in sizes:
            local = held_by(spec, hf_shapes(spec), rule, number, shard, place.vocab_rows)
            repeats = spec.experts // trainer.ep if is_expert(rule) else 1
            sizes[key] = repeats * _nbytes(local, itemsize)
        return sizes[key]

    def total(stage: int, axis_size: int, i: int, experts: bool) -> int:
        return sum(
            size(rule, place, layer.number, Shard(i, axis_size))
            for _, place, layer in stages[stage]
            for rule in layer.rules
            if is_expert(rule) == experts
        )

    dense = [[total(p, trainer.tp, i, False) for i in range(trainer.tp)] for p in range(trainer.pp)]
    expert = [
        [total(p, trainer.etp, i, True) for i in range(trainer.etp)] for p in range(trainer.pp)
    ]
    return dense, expert


def engine_bytes(spec: ModelSpec, layout: EngineLayout, itemsize: int) -> float:
    """Bytes of the live weights of the largest rank of one engine."""
    return _engine_bytes(spec, Engines(spec, layout), itemsize).high


def _engine_bytes(spec: ModelSpec, targets: Engines, itemsize: int) -> Spread:
    ranks = [0] * targets.layout.tp
    repeats = Counter(targets.rules(number) for number in range(spec.layers))
    examples = {targets.rules(number): number for number in range(spec.layers)}
    for number, times in ((ROOT, 1), *((examples[kind], n) for kind, n in repeats.items())):
        for rank, _, rule, local in targets.locals(number):
            experts = spec.experts // targets.layout.ep if is_expert(rule) else 1
            ranks[rank] += times * experts * _nbytes(local, itemsize)
    return Spread.of(ranks)


def _nbytes(local: Local, itemsize: int) -> int:
    return math.prod(local.shape) * ITEMSIZE.get(local.dtype, itemsize)

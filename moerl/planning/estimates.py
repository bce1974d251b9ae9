"""Estimates of a run from shapes: memory of each process, and bytes of a publish.

The lines of a dry run about them.  `moerl.planning.memory` and the transfer plan count the bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.algorithms import borrows_policy, followers_of, ref_models_of, teachers_of
from moerl.config.checks import MODEL_MAKERS
from moerl.config.clusters import (
    Placement,
    TrainerSlot,
    is_local,
    is_shared,
    placement,
    sleeping_engines,
    takes_turns,
)
from moerl.config.schema import ParkedPart
from moerl.config.task_mixture import longest_row, reward_models_of
from moerl.config.tiny_config import tiny_config
from moerl.core.errors import ConfigError
from moerl.layout import ModelSpec, model_spec
from moerl.planning.colocated import copied_out, shared_table, turns_table
from moerl.planning.layout_check import Spread
from moerl.planning.memory import (
    EngineMemory,
    TrainerMemory,
    Training,
    engine_memory,
    ref_model_memory,
    trainer_memory,
    training_of,
    with_teachers,
)
from moerl.planning.printout import GB, TextTable, gb, of_room, verdict
from moerl.planning.publish_forecast import (
    FactorForecast,
    Layouts,
    auto_transport,
    factor_forecast,
    merging_memory,
    planned_layouts,
    shapes_of,
    transport_line,
)
from moerl.runtime.machine import host_memory, visible_gpus
from moerl.weight_sync.buckets import ROUND
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TransferPlan, TransferTotals


def estimates(config: Config, placed: Placement) -> list[str | TextTable]:
    """Memory and transfer plan, from shapes."""
    layouts = planned_layouts(config, model_shapes(config))
    spec = layouts[0][0]
    training, ref_models, ranks = _trainer_ranks(config, placed, layouts)
    tables = [_trainer_table("a trainer rank", ranks, placed.trainers[0])]
    if config.ref_models.placement == "separate":
        alone = [
            ref_model_memory(model, config.ref_models.parallel, training) for model in ref_models
        ]
        tables.append(_trainer_table("a reference rank", _beside(alone), placed.ref_models[0]))
    sizes, group = _engine_sizes(config, layouts), placed.trainers[0].node.group
    sides = _largest(ranks, sizes)
    if is_shared(config.cluster):
        tables.append(shared_table(config, group.device_gb, *sides))
    if takes_turns(config.cluster):
        moves, table = turns_table(config, group, *sides)
        tables.append(table)
        ranks = tuple(replace(rank, parked=copied_out(rank, moves)) for rank in ranks)
    return [
        *tables,
        *(_engine_line(config, size, placed) for size in sizes),
        *_teacher_lines(config),
        *_host_lines(config, placed, ranks, sizes, spec),
        *(_transfer_lines(config, size) for size in sizes),
        transport_line(config, auto_transport(config, model_shapes(config))),
        "`moerl plan RECIPE` forecasts a publish: bytes, seconds and buffers",
    ]


def check_colocated(config: Config) -> tuple[ParkedPart, ...]:
    """Raises ConfigError where engine and trainer do not fit their GPU; returns what gives way."""
    placed, layouts = placement(config), planned_layouts(config, model_shapes(config))
    _, _, ranks = _trainer_ranks(config, placed, layouts)
    group = placed.trainers[0].node.group
    sides = _largest(ranks, _engine_sizes(config, layouts))
    if takes_turns(config.cluster):
        if importlib.util.find_spec("torch_memory_saver") is None:
            where = "the package torch-memory-saver is missing: tools/setup.sh --gpu installs it"
            raise ConfigError("cluster.colocated", "turns", where)
        return turns_table(config, group, *sides)[0]
    shared_table(config, group.device_gb, *sides)
    return ()


def _trainer_ranks(
    config: Config, placed: Placement, layouts: Sequence[Layouts]
) -> tuple[Training, list[ModelSpec], tuple[TrainerMemory, ...]]:
    """Settings, further models, and memory of the trainer's ranks."""
    spec, trainer, *_ = layouts[0]
    training = training_of(config, gpu=placed.trainers[0].node.group.devices > 0)
    ref_models = ref_model_specs(config)
    own = config.ref_models.placement == "separate"
    ranks = trainer_memory(
        spec,
        trainer,
        training,
        ref_models=[] if own else ref_models,
        critic=config.algorithm.advantage == "gae",
    )
    if takes_turns(config.cluster):  # which publish from the weights themselves
        ranks = tuple(replace(rank, snapshot=0) for rank in ranks)
    followers = list(followers_of(config.algorithm).values())
    return training, ref_models, with_teachers(ranks, training, followers)


def _teacher_lines(config: Config) -> list[str]:
    """Where each teacher is, and which version it has."""
    separate, found = config.ref_models.placement == "separate", []
    for teacher in teachers_of(config.algorithm):
        version = teacher.path
        if teacher.follows:
            version = f"version t - {teacher.lag} of the policy, exchanged every {teacher.every}"
            version += f", mean with ema {teacher.ema:g}" if teacher.ema else ""
        where = "reference ranks" if separate else "trainer ranks"
        if borrows_policy(config, teacher):
            where += ", as adapters of the trained model"
        tasks = ", ".join(teacher.tasks) or "all tasks"
        found.append(f"teacher {teacher.name}: {version}; on {where}; {teacher.weight:g} x {tasks}")
    return found


def _engine_sizes(config: Config, layouts: Sequence[Layouts]) -> list[_Size]:
    return [
        _Size(engines, TransferPlan(spec, trainer, engines, 0, policy).totals(), config, spec)
        for spec, trainer, engines, policy in layouts
    ]


def _largest(
    ranks: Sequence[TrainerMemory], sizes: Sequence[_Size]
) -> tuple[TrainerMemory, EngineMemory]:
    """The largest rank of either side."""
    engine = max((size.memory for size in sizes), key=lambda one: one.total + one.update)
    return max(ranks, key=lambda rank: rank.total), engine


def _beside(models: Sequence[Sequence[TrainerMemory]]) -> list[TrainerMemory]:
    """First reference model of a rank, plus the weights of the others in `others`."""
    return [
        replace(stages[0], others=sum(other.weights for other in stages[1:]))
        for stages in zip(*models, strict=True)
    ]


class _Size:
    """Engines of one size: memory of a rank, and bytes of one publish."""

    def __init__(
        self, engines: EngineLayout, totals: TransferTotals, config: Config, spec: ModelSpec
    ) -> None:
        self.engines, self.sent = engines, Spread.of(totals.sent_bytes)
        self.received = max(totals.received_bytes)
        tokens, dtype = config.engine.max_total_tokens, config.engine.dtype
        bucket, on_device = config.sync.bucket_bytes, config.sync.transport == "cuda_ipc"
        self.memory = engine_memory(
            spec, engines, self.received, tokens, dtype, bucket=bucket, stages_on_device=on_device
        )
        self.factors: FactorForecast | None = None
        if (lora := config.lora).sends_factors:
            self.factors = factor_forecast(spec, engines, lora, dtype)
            self.memory = merging_memory(self.memory, self.factors, lora, dtype, bucket)
        elif takes_turns(config.cluster) and len(sleeping_engines(config)) == config.engine.count:
            # staging takes a round of each trainer rank
            room = ROUND * bucket * config.trainer.parallel.world_size
            self.memory = replace(self.memory, host=min(self.memory.host, room))


def model_shapes(config: Config) -> dict[str, Any]:
    """The config.json of the model, or of the tiny model that a start would make."""
    model = config.model
    is_to_be_made = model.path in MODEL_MAKERS and not Path(model.path).exists()
    if not model.path or (model.tiny.enabled and is_to_be_made):
        return tiny_config(model.tiny, vocab_size=128)  # its tokenizer has fewer tokens
    return shapes_of(model.path)


def ref_model_specs(config: Config) -> list[ModelSpec]:
    """Shapes of the models that only score; a folder that does not exist counts as the student."""
    return [
        model_spec(shapes_of(path) if path and Path(path).exists() else model_shapes(config))
        for path in (*ref_models_of(config).values(), *reward_models_of(config))
    ]


def _trainer_table(who: str, ranks: Sequence[TrainerMemory], slot: TrainerSlot) -> TextTable:
    room = slot.node.group.device_gb
    names = ["weights", "gradients", "optimizer", "activations", "head", "replay", "others"]
    names += ["device_base", "buckets", "runtime"]
    names = [name for name in names if any(getattr(rank, name) for rank in ranks)] + ["total"]
    return TextTable(
        f"memory of {who}{of_room(room)}",
        ("stage", "parameters", *("W0" if name == "device_base" else name for name in names)),
        [
            (
                str(rank.stage),
                f"{rank.parameters / 1e9:.3g}e9",
                *(gb(getattr(rank, name)) for name in names),
            )
            for rank in _edge_stages(ranks)
        ],
        left=0,
        note=verdict(who, max(rank.total for rank in ranks), room),
        tight=True,  # all columns of a large run fit the width
    )


def _edge_stages(ranks: Sequence[TrainerMemory]) -> list[TrainerMemory]:
    """First, largest and last stage, without repetition."""
    largest = max(ranks, key=lambda rank: rank.total)
    by_stage = {rank.stage: rank for rank in (ranks[0], largest, ranks[-1])}
    return [by_stage[stage] for stage in sorted(by_stage)]


def _engine_line(config: Config, size: _Size, placed: Placement) -> str:
    engine = size.memory
    group = placed.engines[0].node.group
    static = group.device_gb * config.engine.mem_fraction_static
    if takes_turns(config.cluster):  # the table of phases has it
        static = 0.0
    asked = config.engine.max_total_tokens
    if not asked:  # SGLang takes what the weights leave
        engine = replace(engine, kv=max(0, round(static * GB) - engine.weights))
    tokens = f"{asked or engine.kv // engine.kv_token:,} tokens of {engine.kv_token:,} bytes"
    if not asked:
        tokens = f"SGLang decides: about {tokens}" if static else "SGLang decides"
    if size.engines.dp > 1:
        tokens += f", others on each of {size.engines.dp} attention ranks"
    line = (
        f"memory of an engine rank, tp {size.engines.tp}: weights {gb(engine.weights)} GB, "
        f"KV cache {gb(engine.kv)} GB ({tokens}), a publish {gb(engine.update)} GB"
    )
    if static:
        line += f"; mem_fraction_static leaves {static:.3g} GB of {group.device_gb:g}"
    line += verdict("\nan engine rank", engine.total, static)
    if config.sync.transport == "cuda_ipc":
        return line + verdict("\nan engine rank in a publish", engine.total + engine.update, static)
    return line + verdict("\na publish", engine.update, static and group.device_gb - static)


@dataclass(frozen=True, slots=True)
class RecordBytes:
    """Bytes of routes with the longest rows.  waiting: of all groups that may wait or run."""

    rollout: int
    step: int
    waiting: int


def record_bytes(config: Config, spec: ModelSpec) -> RecordBytes:
    rollout = config.rollout
    routes = len(spec.moe_layers) * spec.experts_per_token * (config.replay.routing == "R3")
    group = longest_row(config) * routes * rollout.group_size
    depth = rollout.buffer_depth if rollout.admission == "bounded" else rollout.max_lag
    groups = rollout.groups_per_step * (depth + 1) + rollout.max_groups_in_flight
    return RecordBytes(group // rollout.group_size, rollout.groups_per_step * group, groups * group)


def _host_lines(
    config: Config,
    placed: Placement,
    ranks: Sequence[TrainerMemory],
    sizes: Sequence[_Size],
    spec: ModelSpec,
) -> list[str]:
    """Host memory per node: the trainer's copies and offloaded optimizer, staging, records."""
    record = record_bytes(config, spec)
    engine_nodes = {slot.node.name for slot in placed.engines}
    records = record.waiting / max(1, len(engine_nodes))
    staged = {name: _staging(config, placed, sizes, name) for name in engine_nodes}
    needs = {node.name: 0.0 for node in placed.nodes}
    needs |= {name: staging + records for name, staging in staged.items()}
    rank = max(ranks, key=lambda rank: rank.host)
    for slot in placed.trainers:
        needs[slot.node.name] += len(slot.ranks) * rank.host
    own = _own_memory_gb(config, placed)
    lines = [
        "host memory, GB per node, at most" + (f"; this machine has {own:.3g} GB:" if own else ":"),
        f"  trainer: {_copies(rank, max(len(slot.ranks) for slot in placed.trainers))}",
        f"  engine: staging {gb(max(staged.values()))}, records in {config.cluster.blob_dir} "
        f"{gb(records)} ({record.rollout / 1e6:.3g} MB of routes a rollout)",
        f"  all: {gb(max(needs.values()))}",
    ]
    if config.stream.keep_steps:
        lines.append(f"stream in the run directory: routes of a step {gb(record.step)} GB at most")
    for node in placed.nodes:
        room = min(filter(None, (node.group.memory_gb, own)), default=0.0)
        marked = verdict(f"host memory of {node.name}", needs[node.name], room)
        lines += [marked.strip()] if marked else []
    return lines


def _copies(rank: TrainerMemory, ranks: int) -> str:
    """The copies that the ranks of a node keep; the first and the third always."""
    parts = {
        "weight snapshot of a publish": rank.snapshot,
        "optimizer": rank.offloaded,
        "copy of a checkpoint": rank.checkpoint,
        "copies for teachers": rank.teachers,
        "parked parts": rank.parked,
        "W0 of adapters": rank.base,
    }
    always = ("weight snapshot of a publish", "copy of a checkpoint")
    return ", ".join(
        f"{name} {gb(ranks * size)}" for name, size in parts.items() if size or name in always
    )


def _own_memory_gb(config: Config, placed: Placement) -> float:
    """Host memory of this machine where it is the node; 0 on another machine, such as a login node.

    A local cluster is this machine, unless it lacks the GPUs.
    """
    (node, *others) = placed.nodes
    if others or not is_local(config.cluster):
        return 0.0
    if node.group.devices > len(visible_gpus()):
        return 0.0
    return host_memory() / GB


def _staging(config: Config, placed: Placement, sizes: Sequence[_Size], node: str) -> float:
    """Bytes that the engines of a node hold of the next version, and of W0."""
    host = {size.engines.tp: size.engines.tp * size.memory.host for size in sizes}
    tp_of = config.engine.sizes
    slots = [slot for slot in placed.engines if slot.node.name == node]
    return sum(host[tp_of[slot.engine]] for slot in slots) / config.engine.nodes


def _transfer_lines(config: Config, size: _Size) -> str:
    engines = size.engines
    if size.factors is not None:
        use = "merge them" if size.factors.merged else "keep them in adapter slots"
        return (
            f"a publish over {config.sync.transport}: factors of "
            f"{gb(size.factors.received.high)} GB into each of {engines.num} x {engines.tp} "
            f"engine ranks, which {use}; weights would be {gb(size.received)} GB"
        )
    return (
        f"a publish over {config.sync.transport}: {gb(size.received)} GB into each of "
        f"{engines.num} x {engines.tp} engine ranks, {gb(engines.num * size.sent.mean)} GB (mean) "
        "out of each trainer rank"
    )

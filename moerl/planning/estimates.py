"""Estimates of a run from shapes: memory of each process, and bytes of a publish.

The lines of a dry run about them.  `moerl.planning.memory` and the transfer plan count the bytes.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moerl.config import Config
from moerl.config.algorithms import borrows_policy, followers_of, ref_models_of, teachers_of
from moerl.config.checks import MODEL_MAKERS
from moerl.config.clusters import (
    Placement,
    TrainerSlot,
    is_local,
    is_shared,
    moved_parts,
    placement,
    sleeping_engines,
    takes_turns,
)
from moerl.config.schema import MovedPart
from moerl.config.task_mixture import longest_row, reward_models_of
from moerl.config.tiny_config import tiny_config
from moerl.core.errors import ConfigError
from moerl.layout import ModelSpec, model_spec
from moerl.planning.layout_check import Spread
from moerl.planning.memory import (
    TrainerMemory,
    Training,
    engine_memory,
    ref_model_memory,
    trainer_memory,
    training_of,
    with_teachers,
)
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
from moerl.planning.shared_gpus import check_shares, shared_rows
from moerl.planning.turn_phases import (
    ORDER,
    ROOM,
    PhaseBytes,
    copied_out,
    phase_bytes,
    smallest_set,
)
from moerl.runtime.machine import host_memory, visible_gpus
from moerl.weight_sync.buckets import ROUND
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TransferPlan, TransferTotals

_GB = 1e9
_WIDTH = 110


def estimates(config: Config, placed: Placement) -> list[str]:
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
    sizes = _engine_sizes(config, layouts)
    if is_shared(config.cluster):
        tables.append(_shared_table(config, placed, ranks, sizes))
    if takes_turns(config.cluster):
        plan = _turn_plan(config, placed, ranks, sizes)
        tables.append(_turns_table(config, placed, plan))
        ranks = tuple(replace(rank, parked=copied_out(rank, plan.moves)) for rank in ranks)
    return [
        *tables,
        *(_engine_line(config, size, placed) for size in sizes),
        *_teacher_lines(config),
        _host_lines(config, placed, ranks, sizes, len(spec.moe_layers) * spec.experts_per_token),
        *(_transfer_lines(config, size) for size in sizes),
        transport_line(config, auto_transport(config, model_shapes(config))),
        "`moerl plan RECIPE` forecasts a publish: bytes, seconds and buffers",
    ]


def check_colocated(config: Config) -> tuple[MovedPart, ...]:
    """Raises ConfigError where engine and trainer do not fit their GPU; returns what gives way."""
    placed, layouts = placement(config), planned_layouts(config, model_shapes(config))
    _, _, ranks = _trainer_ranks(config, placed, layouts)
    sizes = _engine_sizes(config, layouts)
    if takes_turns(config.cluster):
        if importlib.util.find_spec("torch_memory_saver") is None:
            where = "the package torch-memory-saver is missing: tools/setup.sh --gpu installs it"
            raise ConfigError("cluster.colocated", "turns", where)
        return _turn_plan(config, placed, ranks, sizes).moves
    _shared_table(config, placed, ranks, sizes)
    return ()


def _shared_table(
    config: Config, placed: Placement, ranks: Sequence[TrainerMemory], sizes: Sequence[_Size]
) -> str:
    room, engines = placed.trainers[0].node.group.device_gb, [size.memory for size in sizes]
    check_shares(config, room, ranks, engines)
    table = Table(title="memory of a shared GPU, GB" + (f" of {room:g}" if room else ""))
    for column in ("purpose", "engine", "trainer"):
        table.add_column(column, justify="left" if column == "purpose" else "right")
    for purpose, *held in shared_rows(ranks, engines):
        table.add_row(purpose, *(_gb(one) if one else "" for one in held))
    return rendered(table)


@dataclass(frozen=True, slots=True)
class _TurnPlan:
    """The parts that give way in turns, the reason, and bytes by phase."""

    moves: tuple[MovedPart, ...]
    why: str
    found: PhaseBytes


def _turn_plan(
    config: Config, placed: Placement, ranks: Sequence[TrainerMemory], sizes: Sequence[_Size]
) -> _TurnPlan:
    """By the settings, else the smallest set that fits.  Raises ConfigError where none does."""
    room = placed.trainers[0].node.group.device_gb
    trainer = max(ranks, key=lambda rank: rank.total)
    engine = max((size.memory for size in sizes), key=lambda one: one.total + one.update)
    moves: tuple[MovedPart, ...] | None = moved_parts(config)
    why = "turn.moves" if config.turn.moves else "the sizes of the devices are not known"
    if room and not config.turn.moves:
        room_bytes = ROOM * room * _GB
        moves = smallest_set(trainer, engine, room_bytes, adapters=bool(config.lora.rank))
        why = "the smallest set with which every phase fits"
    on_gpu = placed.trainers[0].node.group.devices > 0
    found = phase_bytes(trainer, engine, ORDER if moves is None else moves, gpu=on_gpu)
    if room and (moves is None or found.most > ROOM * room * _GB):
        raise ConfigError(
            "cluster.colocated",
            "turns",
            f"a device of {room:g} GB would hold {_gb(found.most)} GB in one phase: lower "
            "trainer.max_tokens_per_microbatch or engine.max_total_tokens, keep the optimizer on "
            "the host (trainer.optimizer_args.optimizer_cpu_offload), or train by lora.rank",
        )
    return _TurnPlan(moves or ORDER, why, found)


def _turns_table(config: Config, placed: Placement, plan: _TurnPlan) -> str:
    room = placed.trainers[0].node.group.device_gb
    table = Table(title="memory of a device in turns, GB" + (f" of {room:g}" if room else ""))
    for column in ("phase", "engine", "trainer", "both"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase, held in asdict(plan.found).items():
        table.add_row(phase.replace("_", " "), *map(_gb, (*held, sum(held))))
    told = f"gives way: {', '.join(plan.moves)} ({plan.why})"
    awake = sorted(config.engine.sizes.keys() - sleeping_engines(config))
    return rendered(table) + told + (f"; engines {awake} never sleep" if awake else "")


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


def _trainer_table(who: str, ranks: Sequence[TrainerMemory], slot: TrainerSlot) -> str:
    room = slot.node.group.device_gb
    title = f"memory of {who}, GB" + (f" of {room:g}" if room else "")
    table = Table(title=title, padding=0)  # all columns of a large run fit the width
    columns = ["weights", "gradients", "optimizer", "activations", "head", "replay", "others"]
    columns += ["device_base", "buckets", "runtime"]
    columns = [c for c in columns if any(getattr(rank, c) for rank in ranks)]
    for column in ("stage", "parameters", *columns, "total"):
        table.add_column(column.replace("device_base", "W0"), justify="right")
    for found in _telling(ranks):
        cells = [_gb(getattr(found, column)) for column in columns]
        table.add_row(str(found.stage), f"{found.parameters / 1e9:.3g}e9", *cells, _gb(found.total))
    return rendered(table) + _verdict(who, max(r.total for r in ranks), room)


def _telling(ranks: Sequence[TrainerMemory]) -> list[TrainerMemory]:
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
        engine = replace(engine, kv=max(0, round(static * _GB) - engine.weights))
    tokens = f"{asked or engine.kv // engine.kv_token:,} tokens of {engine.kv_token:,} bytes"
    if not asked:
        tokens = f"SGLang decides: about {tokens}" if static else "SGLang decides"
    if size.engines.dp > 1:
        tokens += f", others on each of {size.engines.dp} attention ranks"
    line = (
        f"memory of an engine rank, tp {size.engines.tp}: weights {_gb(engine.weights)} GB, "
        f"KV cache {_gb(engine.kv)} GB ({tokens})"
    )
    line += f", a publish {_gb(engine.update)} GB"
    if static:
        line += f"; mem_fraction_static leaves {static:.3g} GB of {group.device_gb:g}"
    line += _verdict("\nan engine rank", engine.total, static)
    if config.sync.transport == "cuda_ipc":
        return line + _verdict(
            "\nan engine rank in a publish", engine.total + engine.update, static
        )
    return line + _verdict("\na publish", engine.update, static and group.device_gb - static)


def _verdict(who: str, need: float, room_gb: float) -> str:
    """A line that marks a need above the room; estimates never refuse a start."""
    if not room_gb or need <= room_gb * _GB:
        return ""
    return f"{who} DOES NOT FIT: {_gb(need)} GB of {room_gb:.3g} GB\n"


def _host_lines(
    config: Config,
    placed: Placement,
    ranks: Sequence[TrainerMemory],
    sizes: Sequence[_Size],
    routes: int,
) -> str:
    """Host memory per node: the trainer's copies and offloaded optimizer, staging, records."""
    rollout = config.rollout
    tokens = longest_row(config)
    depth = rollout.buffer_depth if rollout.admission == "bounded" else rollout.max_lag
    groups = rollout.groups_per_step * (depth + 1) + rollout.max_groups_in_flight
    record = tokens * routes * (config.replay.routing == "R3")
    waiting = groups * rollout.group_size * record
    engine_nodes = {slot.node.name for slot in placed.engines}
    rank = max(ranks, key=lambda rank: rank.host)
    each = max(len(slot.ranks) for slot in placed.trainers)
    trainer = f"  trainer: weight snapshot of a publish {_gb(each * rank.snapshot)}"
    if rank.offloaded:
        trainer += f", optimizer {_gb(each * rank.offloaded)}"
    trainer += f", copy of a checkpoint {_gb(each * rank.checkpoint)}"
    if rank.teachers:
        trainer += f", copies for teachers {_gb(each * rank.teachers)}"
    if rank.parked:
        trainer += f", parked parts {_gb(each * rank.parked)}"
    if rank.base:
        trainer += f", W0 of adapters {_gb(each * rank.base)}"
    staged = {name: _staging(config, placed, sizes, name) for name in engine_nodes}
    records = waiting / max(1, len(engine_nodes))
    needs = {node.name: staged.get(node.name, 0.0) for node in placed.nodes}
    for name in engine_nodes:
        needs[name] += records
    for slot in placed.trainers:
        needs[slot.node.name] += len(slot.ranks) * rank.host
    own = _own_memory_gb(config, placed)
    lines = [
        "host memory, GB per node, at most" + (f"; this machine has {own:.3g} GB:" if own else ":"),
        trainer,
        f"  engine: staging {_gb(max(staged.values()))}, records in {config.cluster.blob_dir} "
        f"{_gb(records)} ({record / 1e6:.3g} MB of routes a rollout)",
        f"  all: {_gb(max(needs.values()))}",
    ]
    if config.stream.keep_steps:
        routes_of_step = rollout.groups_per_step * rollout.group_size * record
        lines.append(
            f"stream in the run directory: routes of a step {_gb(routes_of_step)} GB at most"
        )
    for node in placed.nodes:
        who = f"host memory of {node.name}"
        room = min(filter(None, (node.group.memory_gb, own)), default=0.0)
        lines += filter(None, [_verdict(who, needs[node.name], room).strip()])
    return "\n".join(lines)


def _own_memory_gb(config: Config, placed: Placement) -> float:
    """Host memory of this machine where it is the node; 0 on another machine, such as a login node.

    A local cluster is this machine, unless it lacks the GPUs.
    """
    (node, *others) = placed.nodes
    if others or not is_local(config.cluster):
        return 0.0
    if node.group.devices > len(visible_gpus()):
        return 0.0
    return host_memory() / _GB


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
            f"{_gb(size.factors.received.high)} GB into each of {engines.num} x {engines.tp} "
            f"engine ranks, which {use}; weights would be {_gb(size.received)} GB"
        )
    return (
        f"a publish over {config.sync.transport}: {_gb(size.received)} GB into each of "
        f"{engines.num} x {engines.tp} engine ranks, {_gb(engines.num * size.sent.mean)} GB (mean) "
        "out of each trainer rank"
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.3g}"


def rendered(table: Table) -> str:
    """The text of a table, as wide as the printout."""
    out = io.StringIO()
    Console(file=out, width=_WIDTH, force_terminal=False, color_system=None).print(table)
    return out.getvalue()

"""`moerl train RECIPE --dry-run`: print the processes of a run and their nodes.

Runs on a login node: needs neither torch, ray nor sglang, and reads only the model's config.json.
Estimates (`moerl.planning.memory`), placement (`moerl.config.clusters`) and commands
(`moerl.launch.cluster.node_commands`) come from the functions that a real start uses.
"""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moerl.config import Config
from moerl.config.algorithms import ref_models_of
from moerl.config.checks import MODEL_MAKERS, check_model_sizes
from moerl.config.clusters import (
    VISIBLE,
    Node,
    Placement,
    TrainerSlot,
    engine_gpus,
    is_local,
    mapped_gpus,
    placement,
    starts_on_cuda,
    visible_devices,
)
from moerl.config.engine_context import check_context
from moerl.config.load import printed
from moerl.config.lora_checks import check_quantised_base
from moerl.config.schema import ParallelConfig
from moerl.config.secret_values import hide, hide_override
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import TaskEntry, entries_of, longest_row
from moerl.config.task_tables import SOURCES
from moerl.config.tiny_config import tiny_config
from moerl.config.validate import read_section
from moerl.engine import feature_table
from moerl.engine.host.server_args import check_planned_layout
from moerl.launch.cluster.node_commands import host_of, node_commands, torchrun
from moerl.launch.line_checks import line_checks, model_tokenizer
from moerl.launch.run_context import RunContext, ref_model_command, trainer_command
from moerl.layout import ModelSpec, model_spec
from moerl.planning import gpu_choices
from moerl.planning.layout_check import Spread
from moerl.planning.memory import (
    TrainerMemory,
    engine_memory,
    ref_model_memory,
    trainer_memory,
    training_of,
)
from moerl.planning.publish_forecast import (
    FactorForecast,
    auto_transport,
    factor_forecast,
    merging_memory,
    planned_layouts,
    shapes_of,
    transport_line,
)
from moerl.runtime.run_dir import RunDir
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TransferPlan, TransferTotals

_GB = 1e9
_WIDTH = 110


def describe(config: Config, recipe: Sequence[str]) -> str:
    """The whole printout.  recipe: arguments of `moerl train`.

    Raises ConfigError for a setting that a start would refuse before starting a process.
    """
    for name, value in config.engine.args.items():
        feature_table.check(name, value, replay=config.replay.routing == "R3")
    recipe = [hide_override(word) for word in recipe]
    config = read_section(Config, hide(asdict(config)))
    placed, shapes = placement(config), model_shapes(config)
    max_positions = model_spec(shapes).max_positions
    check_context(config, max_positions)
    if not config.checkpoint.start:  # a start makes a folder of unquantised weights
        check_quantised_base(config, shapes)
    for tp in sorted({config.engine.tp, *config.engine.tp_each}):
        check_model_sizes(config.trainer.parallel, tp, shapes)
        check_planned_layout(
            replace(config.engine, tp=tp),
            shapes,
            cuda=starts_on_cuda(config, placed),
            routing=config.replay.routing == "R3",
        )
    prompts = prompt_lines(config, max_positions)
    sections = [
        printed(config),
        process_table(config, placed),
        *device_lines(config, placed),
        _commands(config, placed, recipe, shapes),
        _ports(config, placed),
        *gpu_choices.lines(config, placed, shapes),
        *_estimates(config, placed),
        *prompts,
    ]
    return "\n".join(sections)


# --- prompts -------------------------------------------------------------------------------------
def prompt_lines(config: Config, max_positions: int) -> list[str]:
    """A line for each file of prompts, checked as at a start.  Raises ConfigError."""
    if not any(SOURCES[entry.name].files for entry in entries_of(config)):
        return []
    with model_tokenizer(config) as tokenizer:
        found = line_checks(config, tokenizer, max_positions)
        found.begin(lambda _: None)
    counted = "" if tokenizer else "; tokens are not counted: the model's tokenizer is not here"
    return [
        one.summary() or f"{one.task.path}: {one.lines:,} lines can be used{counted}"
        for one in found.checks
        if one.lines
    ]


# --- processes -----------------------------------------------------------------------------------
def process_table(config: Config, placed: Placement) -> str:
    """The table of `process_rows`."""
    table = Table(title=f"processes of {config.cluster.name}, {len(placed.nodes)} node(s)")
    for column in ("node", "process", "numbers", "count", "GPUs", "purpose"):
        table.add_column(column)
    for _, of_node in groupby(process_rows(config, placed), key=lambda row: row[0]):
        for index, (node, *cells) in enumerate(of_node):
            table.add_row("" if index else node, *cells)
        table.add_section()
    return _rendered(table)


def process_rows(config: Config, placed: Placement) -> list[tuple[str, ...]]:
    """(node, process, numbers, count, GPUs, purpose) of each kind of process; equal nodes share."""
    rows = {node.name: _processes(config, placed, node.name) for node in placed.nodes}
    shared: list[tuple[str, ...]] = []
    for _, alike in groupby(rows, key=lambda name: [(row[0], *row[2:]) for row in rows[name]]):
        names = list(alike)
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        for process, numbers, *rest in rows[names[0]]:
            more = " .." if len(names) > 1 and numbers else ""
            shared.append((label, process, numbers + more, *rest))
    return shared


def _agent_line(task: TaskEntry) -> str:
    tokens, wall_s = task.sampled_limit, task.wall_limit_s
    limits = f"{task.turn_limit} turns, {tokens} tokens, {wall_s:g} s each"
    played_by = " ".join(task.agent.command) or f"environment {task.environment}"
    played_by = f"remote workers, port {task.agent.port}" if task.agent.port else played_by
    return f"{played_by}; at most {limits}; reward: {task.reward or 'its own'}"


def _agents(config: Config, task: TaskEntry) -> str:
    """Largest number of processes at a time."""
    rollout = config.rollout
    if task.kind is TaskKind.ENVIRONMENT:
        return str(task.environment_workers)
    if task.agent.port:
        return "any"
    most = rollout.max_groups_in_flight * rollout.group_size * rollout.oversample
    return str(task.agent.workers or f"<= {most}")


def _processes(config: Config, placed: Placement, name: str) -> list[tuple[str, ...]]:
    """(process, index, count, GPUs, purpose) rows of one node."""
    engine, parallel = config.engine, config.trainer.parallel
    workers = sum(task.scorer_workers for task in entries_of(config))
    head = " and fp32 head" if config.model.fp32_lm_head else ""
    rows: list[tuple[str, ...]] = []
    if placed.controller.name == name:
        rows += [
            ("moerl train", "", "1", "", "ends whatever is left when the root is gone"),
            ("root", "", "1", "", "starts and watches everything, writes the report"),
            ("controller (Ray)", "", "1", "", "produce, score and learn loops; headers only"),
            ("scorer (Ray)", "", "1", "", f"rewards in {workers} worker(s)"),
        ]
    playing = [task for task in entries_of(config) if task.kind.speaks_messages]
    for task in playing if placed.controller.name == name else ():
        which = f"agents {task.label}".strip()
        rows.append((which, "", _agents(config, task), "", _agent_line(task)))
    slots = [slot for slot in placed.engines if slot.node.name == name]
    heads = [slot for slot in slots if slot.part == 0]
    if heads and not is_local(config.cluster):
        rows.append(("records (Ray)", "", "1", "", "serves sealed records by byte range"))
    for tp in sorted({engine.sizes[slot.engine] for slot in slots}):
        sized = [slot for slot in slots if engine.sizes[slot.engine] == tp]
        span = f" over {engine.nodes} nodes" if engine.nodes > 1 else ""
        for process, alike, does in (
            ("engine (Ray)", [s for s in sized if s.part == 0], "host and SGLang server"),
            ("part (Ray)", [s for s in sized if s.part], "SGLang server of further ranks"),
        ):
            devices = _numbers(d for slot in alike for d in slot.devices)
            which = _numbers(slot.engine for slot in alike)
            what = f"tp {tp}{span}, {engine.dtype}{head}, {does}"
            rows += [(process, which, str(len(alike)), devices, what)] if alike else []
    for trainer in (slot for slot in placed.trainers if slot.node.name == name):
        count, devices = str(len(trainer.ranks)), _numbers(trainer.devices)
        what = f"{_sizes(parallel)}, {config.trainer.dtype}{head}"
        rows.append(("trainer rank", _numbers(trainer.ranks), count, devices, what))
    for slot in (slot for slot in placed.ref_models if slot.node.name == name):
        count, devices = str(len(slot.ranks)), _numbers(slot.devices)
        what = f"{', '.join(ref_models_of(config))}: {_sizes(config.ref_models.parallel)}"
        rows.append(("reference rank", _numbers(slot.ranks), count, devices, what))
    return rows


def _sizes(parallel: ParallelConfig) -> str:
    return " ".join(
        f"{axis} {getattr(parallel, axis)}" for axis in ("tp", "pp", "cp", "dp", "ep", "etp")
    )


def _numbers(values: Iterable[int]) -> str:
    found = sorted(values)
    if not found:
        return ""
    whole = found == list(range(found[0], found[-1] + 1))
    if whole and len(found) > 2:
        return f"{found[0]}-{found[-1]}"
    return ",".join(map(str, found))


# --- commands and ports --------------------------------------------------------------------------
def _commands(
    config: Config, placed: Placement, recipe: Sequence[str], shapes: Mapping[str, Any]
) -> str:
    lines = ["commands"]
    if is_local(config.cluster):
        run = RunDir(Path(config.run.root) / config.run.name)
        address = config.cluster.address
        context, controller_endpoint = _local_context(config, run), f"tcp://{address}:PORT"
        command = shlex.join(trainer_command(context, controller_endpoint))
        lines += [f"  {shlex.join(['moerl', 'train', *recipe])}", "starts", f"  {command}"]
        if placed.ref_models:
            lines.append(f"  {shlex.join(ref_model_command(context, controller_endpoint, 0))}")
    elif config.cluster.launcher == "slurm":
        groups = groupby(node.name.rpartition("-")[0] for node in placed.nodes)
        nodes = ", ".join(f"{len(list(group))} x {name}" for name, group in groups)
        lines.append(f"  tools/launch/slurm.sbatch submits itself ({nodes}):")
        lines.append(f"  {shlex.join(['tools/launch/slurm.sbatch', *recipe])}")
    elif config.cluster.launcher == "kuberay":
        lines.append("  examples/kubernetes.yaml starts them in pods:")
    if not is_local(config.cluster):
        for name, commands in node_commands(config, placed, recipe).items():
            lines += [f"  {name}: {command}" for command in commands]
        command = shlex.join(torchrun(config, placed, placed.trainers[0]))
        lines += ["the first torchrun.sh runs:", f"  {command}"]
    return "\n".join([*lines, *_engine_commands(config, placed, shapes)])


def _engine_commands(config: Config, placed: Placement, shapes: Mapping[str, Any]) -> list[str]:
    """Commands of the engine hosts; ports and token are chosen on the node."""
    lines = []
    sizes = config.engine.sizes
    folder = Path(config.model.path or Path(config.run.root) / config.run.name / "model")
    for tp in sorted(set(sizes.values())):
        args = gpu_choices.engine_arguments(config, placed, tp, folder, shapes)
        job = {"parent": "PID", "args": args, "token": "TOKEN"}
        which = _numbers(engine for engine in sizes if sizes[engine] == tp)
        lines += [
            f"engine {which}: python -m moerl.engine.plugin.server_process, its job on stdin:",
            f"  {json.dumps(job)}",
        ]
    return lines


def _local_context(config: Config, run: RunDir) -> RunContext:
    return RunContext(
        config=config,
        run=run,
        model_path=Path(config.model.path or run.root / "model"),
        hf_config={},
        token="",
        incarnation=0,
        node="local",
        blob_dir=Path(config.cluster.blob_dir) / "moerl-RUN",
    )


def _ports(config: Config, placed: Placement) -> str:
    if is_local(config.cluster):
        return f"ports: free ones on {config.cluster.address} (docs/clusters.md lists them)"
    ports, head = config.cluster.ports, host_of(placed.controller)
    first = host_of(placed.trainers[0].node)
    table = Table(
        title=f"ports on {config.cluster.interface}, all behind tokens but NCCL's and gloo's"
    )
    for column in ("port", "listens on", "connects"):
        table.add_column(column)
    table.add_row(str(ports.controller), f"controller on {head}", "trainer rank 0")
    table.add_row(str(ports.ray), f"Ray's head on {head}", "engine nodes")
    table.add_row(str(ports.blobs), "records, each engine node", "trainer ranks, controller")
    table.add_row(str(ports.rendezvous), f"torchrun on {first}", "trainer nodes")
    if placed.ref_models:
        where = f"torchrun on {host_of(placed.ref_models[0].node)}"
        table.add_row(str(ports.ref_models), where, "reference nodes")
    table.add_row("free", f"{config.sync.transport} stagings, each engine rank", "trainer ranks")
    table.add_row("free", "NCCL or gloo of the trainer, trainer nodes", "trainer ranks")
    return _rendered(table)


# --- estimates -----------------------------------------------------------------------------------
def _estimates(config: Config, placed: Placement) -> list[str]:
    """Memory and transfer plan, from shapes."""
    layouts = planned_layouts(config, model_shapes(config))
    spec, trainer, _, policy = layouts[0]
    training = training_of(config, gpu=placed.trainers[0].node.group.devices > 0)
    ref_models = _ref_model_shapes(config)
    own = config.ref_models.placement == "separate"
    ranks = trainer_memory(
        spec,
        trainer,
        training,
        ref_models=[] if own else ref_models,
        critic=config.algorithm.advantage == "gae",
    )
    tables = [_trainer_table("a trainer rank", ranks, placed.trainers[0])]
    if own:
        alone = [
            ref_model_memory(model, config.ref_models.parallel, training) for model in ref_models
        ]
        tables.append(_trainer_table("a reference rank", _beside(alone), placed.ref_models[0]))
    sizes = [
        _Size(engines, TransferPlan(spec, trainer, engines, 0, policy).totals(), config, spec)
        for _, _, engines, _ in layouts
    ]
    return [
        *tables,
        *(_engine_line(config, size, placed) for size in sizes),
        _host_lines(config, placed, ranks, sizes, len(spec.moe_layers) * spec.experts_per_token),
        *(_transfer_lines(config, size) for size in sizes),
        transport_line(config, auto_transport(config, model_shapes(config))),
        "`moerl plan RECIPE` forecasts a publish: bytes, seconds and buffers",
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


def model_shapes(config: Config) -> dict[str, Any]:
    """The config.json of the model, or of the tiny model that a start would make."""
    model = config.model
    is_to_be_made = model.path in MODEL_MAKERS and not Path(model.path).exists()
    if not model.path or (model.tiny.enabled and is_to_be_made):
        return tiny_config(model.tiny, vocab_size=128)  # its tokenizer has fewer tokens
    return shapes_of(model.path)


def _ref_model_shapes(config: Config) -> list[ModelSpec]:
    """Shapes of reference and teacher; a folder that does not exist counts as the student."""
    return [
        model_spec(shapes_of(path) if path and Path(path).exists() else model_shapes(config))
        for path in ref_models_of(config).values()
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
    return _rendered(table) + _verdict(who, max(r.total for r in ranks), room)


def _telling(ranks: Sequence[TrainerMemory]) -> list[TrainerMemory]:
    """First, largest and last stage, without repetition."""
    largest = max(ranks, key=lambda rank: rank.total)
    by_stage = {rank.stage: rank for rank in (ranks[0], largest, ranks[-1])}
    return [by_stage[stage] for stage in sorted(by_stage)]


def _engine_line(config: Config, size: _Size, placed: Placement) -> str:
    engine = size.memory
    group = placed.engines[0].node.group
    static = group.device_gb * config.engine.mem_fraction_static
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
    return line + _verdict("\na publish", engine.update, group.device_gb - static)


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
    if rank.base:
        trainer += f", W0 of adapters {_gb(each * rank.base)}"
    staged = {name: _staging(config, placed, sizes, name) for name in engine_nodes}
    records = waiting / max(1, len(engine_nodes))
    needs = {node.name: staged.get(node.name, 0.0) for node in placed.nodes}
    for name in engine_nodes:
        needs[name] += records
    for slot in placed.trainers:
        needs[slot.node.name] += len(slot.ranks) * rank.host
    lines = [
        "host memory, GB per node, at most:",
        trainer,
        f"  engine: staging {_gb(max(staged.values()))}, records in {config.cluster.blob_dir} "
        f"{_gb(records)} ({record / 1e6:.3g} MB of routes a rollout)",
    ]
    for node in placed.nodes:
        who = f"host memory of {node.name}"
        lines += filter(None, [_verdict(who, needs[node.name], node.group.memory_gb).strip()])
    return "\n".join(lines)


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


def _rendered(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=_WIDTH, force_terminal=False, color_system=None).print(table)
    return out.getvalue()


# --- GPUs of each process -------------------------------------------------------------------------
def device_lines(config: Config, placed: Placement) -> list[str]:
    """One line per engine, and per kind of rank and node; none without GPUs."""
    if is_local(config.cluster):
        environment: Mapping[str, str] = os.environ
        engines = [
            f"  engine {slot.engine}: {visible_devices(slot.devices)[VISIBLE]}"
            for slot in placed.engines
            if slot.devices
        ]
    else:
        environment, engines = {}, _dealt(placed)
    jobs = (("trainer", placed.trainers), ("reference", placed.ref_models))
    ranks = [line for job, slots in jobs for line in _ranks(job, slots, environment)]
    ranks += _mapped(config, placed, environment)
    return [f"devices, as {VISIBLE}:", *engines, *ranks] if engines or ranks else []


def _dealt(placed: Placement) -> list[str]:
    """On a cluster Ray chooses the node of an engine, and which of its GPUs it gets."""
    each = " or ".join(map(str, sorted({len(slot.devices) for slot in placed.engines})))
    nodes = [node for node in placed.nodes if engine_gpus(placed, node)]
    return [
        f"  engines on {_label(list(alike))}: {','.join(map(str, gpus))}; each gets {each} of them "
        "from Ray"
        for gpus, alike in groupby(nodes, key=lambda node: engine_gpus(placed, node))
    ]


def _ranks(job: str, slots: Sequence[TrainerSlot], environment: Mapping[str, str]) -> list[str]:
    """Lines of the ranks of one job.  environment: of the process that starts them."""
    lines = []
    for gpus, alike in groupby(slots, key=lambda slot: slot.devices):
        if gpus:
            label = _label([slot.node for slot in alike])
            named = visible_devices(gpus, environment)[VISIBLE]
            lines.append(f"  {job} ranks on {label}: {named}; local rank 0 has the first")
    return lines


def _mapped(config: Config, placed: Placement, environment: Mapping[str, str]) -> list[str]:
    """GPUs behind a rank's own GPUs in its variable; it computes on its own GPUs only."""
    slot = placed.trainers[0]
    others = mapped_gpus(config, placed, slot)
    if not others:
        return []
    every = visible_devices((*slot.devices, *others), environment)[VISIBLE].split(",")
    behind = ",".join(every[len(slot.devices) :])
    return [f"  trainer ranks also see {behind} behind their own, to write weights into (cuda_ipc)"]


def _label(nodes: Sequence[Node]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} .. {nodes[-1].name}"

"""`moerl train RECIPE --dry-run`: print the processes of a run and their nodes.

Runs on a login node: needs neither torch, ray nor sglang, and reads only the model's config.json.
Estimates (`moerl.planning.estimates`), placement (`moerl.config.clusters`) and commands
(`moerl.launch.cluster.node_commands`) come from the functions that a real start uses.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.algorithms import ref_models_of
from moerl.config.checks import check_model_sizes
from moerl.config.clusters import (
    VISIBLE,
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
from moerl.config.secret_values import hide, hide_override
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import TaskEntry, entries_of, reward_models_of
from moerl.config.task_tables import SOURCES
from moerl.config.validate import read_section
from moerl.data.shared_prefix import check_shared
from moerl.engine import feature_table
from moerl.engine.host.server_args import check_planned_layout
from moerl.launch.bundle_check import check_bundle
from moerl.launch.cluster.node_commands import host_of, node_commands, torchrun
from moerl.launch.folder_checks import check_folders
from moerl.launch.line_checks import line_checks, model_tokenizer
from moerl.launch.reward_trial import try_rewards
from moerl.launch.run_context import RunContext, ref_model_command, trainer_command
from moerl.layout import model_spec
from moerl.planning import gpu_choices
from moerl.planning.disks import disk_lines
from moerl.planning.estimates import estimates, model_shapes, ref_model_specs
from moerl.planning.printout import TextTable, axes, numbers, span
from moerl.runtime.run_dir import RunDir


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
    check_bundle(config, shapes)
    if config.trainer.share_prompts:
        for spec in (model_spec(shapes), *ref_model_specs(config)):
            check_shared(spec)
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
    unchecked = check_folders(config, starts=False)
    prompts = prompt_lines(config, max_positions)
    sections = [
        printed(config),
        process_table(config, placed),
        *device_lines(config, placed),
        _commands(config, placed, recipe, shapes),
        _ports(config, placed),
        *gpu_choices.lines(config, placed, shapes),
        *estimates(config, placed),
        *disk_lines(config),
        *unchecked,
        *prompts,
    ]
    return "\n".join(map(str, sections))


# --- prompts -------------------------------------------------------------------------------------
def prompt_lines(config: Config, max_positions: int) -> list[str]:
    """A line for each file of prompts, checked as at a start, and about own rewards.

    Raises ConfigError.
    """
    entries = entries_of(config)
    if not any(SOURCES[entry.name].files or entry.own_rewards for entry in entries):
        return []
    with model_tokenizer(config) as tokenizer:
        found = line_checks(config, tokenizer, max_positions)
        found.begin(lambda _: None)
        tried = try_rewards(found.training, here=is_local(config.cluster))
    counted = "" if tokenizer else "; tokens are not counted: the model's tokenizer is not here"
    files = [
        one.summary() or f"{one.task.path}: {one.lines:,} lines can be used{counted}"
        for one in found.checks
        if one.lines
    ]
    return [*files, *found.overlaps(), *tried]


# --- processes -----------------------------------------------------------------------------------
def process_table(config: Config, placed: Placement) -> TextTable:
    """The table of `process_rows`."""
    rows: list[tuple[str, ...]] = []
    for _, of_node in groupby(process_rows(config, placed), key=lambda row: row[0]):
        (first, *others) = of_node
        rows += [first, *(("", *cells) for _, *cells in others), ()]
    title = f"processes of {config.cluster.name}, {len(placed.nodes)} node(s)"
    return TextTable(
        title, ("node", "process", "numbers", "count", "GPUs", "purpose"), rows, left=6
    )


def process_rows(config: Config, placed: Placement) -> list[tuple[str, ...]]:
    """(node, process, numbers, count, GPUs, purpose) of each kind of process; equal nodes share."""
    rows = {node.name: _processes(config, placed, node.name) for node in placed.nodes}
    shared: list[tuple[str, ...]] = []
    for _, alike in groupby(rows, key=lambda name: [(row[0], *row[2:]) for row in rows[name]]):
        names = list(alike)
        for process, which, *rest in rows[names[0]]:
            more = " .." if len(names) > 1 and which else ""
            shared.append((span(names), process, which + more, *rest))
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
    playing = [task for task in entries_of(config) if task.kind.uses_chat]
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
            devices = numbers(d for slot in alike for d in slot.devices)
            which = numbers(slot.engine for slot in alike)
            what = f"tp {tp}{span}, {engine.dtype}{head}, {does}"
            rows += [(process, which, str(len(alike)), devices, what)] if alike else []
    for trainer in (slot for slot in placed.trainers if slot.node.name == name):
        count, devices = str(len(trainer.ranks)), numbers(trainer.devices)
        what = f"{axes(parallel)}, {config.trainer.dtype}{head}"
        rows.append(("trainer rank", numbers(trainer.ranks), count, devices, what))
    for slot in (slot for slot in placed.ref_models if slot.node.name == name):
        count, devices = str(len(slot.ranks)), numbers(slot.devices)
        models = [*ref_models_of(config), *(Path(one).name for one in reward_models_of(config))]
        what = f"{', '.join(models)}: {axes(config.ref_models.parallel)}"
        rows.append(("reference rank", numbers(slot.ranks), count, devices, what))
    return rows


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
        which = numbers(engine for engine in sizes if sizes[engine] == tp)
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


def _ports(config: Config, placed: Placement) -> str | TextTable:
    if is_local(config.cluster):
        return f"ports: free ones on {config.cluster.address} (docs/clusters.md lists them)"
    ports, head = config.cluster.ports, host_of(placed.controller)
    first = host_of(placed.trainers[0].node)
    rows = [
        (str(ports.controller), f"controller on {head}", "trainer rank 0"),
        (str(ports.ray), f"Ray's head on {head}", "engine nodes"),
        (str(ports.blobs), "records, each engine node", "trainer ranks, controller"),
        (str(ports.rendezvous), f"torchrun on {first}", "trainer nodes"),
        ("free", f"{config.sync.transport} stagings, each engine rank", "trainer ranks"),
        ("free", "NCCL or gloo of the trainer, trainer nodes", "trainer ranks"),
    ]
    if placed.ref_models:
        where = f"torchrun on {host_of(placed.ref_models[0].node)}"
        rows.insert(4, (str(ports.ref_models), where, "reference nodes"))
    title = f"ports on {config.cluster.interface}, all behind tokens but NCCL's and gloo's"
    return TextTable(title, ("port", "listens on", "connects"), rows, left=3)


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
        f"  engines on {span([node.name for node in alike])}: {','.join(map(str, gpus))}; "
        f"each gets {each} of them from Ray"
        for gpus, alike in groupby(nodes, key=lambda node: engine_gpus(placed, node))
    ]


def _ranks(job: str, slots: Sequence[TrainerSlot], environment: Mapping[str, str]) -> list[str]:
    """Lines of the ranks of one job.  environment: of the process that starts them."""
    lines = []
    for gpus, alike in groupby(slots, key=lambda slot: slot.devices):
        if gpus:
            label = span([slot.node.name for slot in alike])
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

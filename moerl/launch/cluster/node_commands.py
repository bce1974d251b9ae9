"""The exact commands of a run on several nodes, one per node; `--dry-run` prints them.

Every node gets the run directory and nothing else: it is on a file system that all of them mount,
and holds the resolved configuration, where the controller listens (`endpoints`) and, readable by
its owner only, the run's secrets.  So no secret is ever on a command line, and a node that comes
back finds the controller wherever it is now.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TypeVar

from moerl.config.clusters import Node, Placement, TrainerSlot
from moerl.config.schema import Config
from moerl.errors import ConfigError

TRAINER_JOBS = ("trainer", "ref_models")
_Seat = TypeVar("_Seat", Node, TrainerSlot)


def node_commands(config: Config, placed: Placement, recipe: Sequence[str]) -> dict[str, list[str]]:
    """{node name: commands}; recipe: what follows `moerl train` on the controller's node."""
    root = f"{config.run.root}/{config.run.name}"
    engines = [node for node in placed.nodes if node.has("engine")]
    commands: dict[str, list[str]] = {}
    for node in placed.nodes:
        mine = []
        if node is placed.controller:
            mine.append(shlex.join(["moerl", "train", *recipe]))
        elif node.has("engine"):
            mine.append(f"tools/launch/engine_node.sh {root} {engines.index(node)}")
        for job in TRAINER_JOBS:
            for slot in slots_of(placed, job):
                if slot.node is node:
                    which = "" if job == "trainer" else f" {job}"
                    mine.append(f"tools/launch/torchrun.sh {root} {slot.node_rank}{which}")
        commands[node.name] = mine
    return commands


def torchrun(
    config: Config, placed: Placement, slot: TrainerSlot, address: str = "", job: str = "trainer"
) -> list[str]:
    """One node's part of a trainer.  address: its own, where the scheduler named it.

    Agents of torchrun meet at the trainer's first node.  A rank that ends, or a node that comes
    back, starts all ranks again: they ask the controller anew which checkpoint to continue from.
    """
    slots, ports = slots_of(placed, job), config.cluster.ports
    port = ports.rendezvous if job == "trainer" else ports.ref_models
    command = ["python", "-m", "torch.distributed.run"]
    command += ["--nnodes", str(len(slots))]
    command += ["--nproc-per-node", str(len(slot.ranks)), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{host_of(slots[0].node)}:{port}"]
    command += ["--rdzv-id", config.run.name + ("" if job == "trainer" else f"-{job}")]
    command += ["--rdzv-conf", f"is_host={int(slot.node_rank == 0)},join_timeout=3600"]
    command += ["--max-restarts", str(config.supervision.max_restarts)]
    if slot.devices:
        command += ["--numa-binding", "node"]  # cores and memory beside each rank's GPU
    if address or slot.node.address:
        command += ["--local-addr", address or slot.node.address]
    command += ["-m", "moerl.trainer.main", "--run-dir", f"{config.run.root}/{config.run.name}"]
    return command if job == "trainer" else [*command, f"--{job.replace('_', '-')}"]


def slots_of(placed: Placement, job: str) -> tuple[TrainerSlot, ...]:
    """Nodes of the trainer, or of the reference ranks."""
    return placed.trainers if job == "trainer" else placed.ref_models


def nth(nodes: Sequence[_Seat], index: int, kind: str) -> _Seat:
    """The one that a script was started for, counted from 0.  Raises ConfigError."""
    if not 0 <= index < len(nodes):
        raise ConfigError("INDEX", index, f"the run has {len(nodes)} {kind} node(s), from 0 on")
    return nodes[index]


def host_of(node: Node) -> str:
    """Its address, or its name in capitals where only the scheduler knows it."""
    return node.address or node.name.upper()

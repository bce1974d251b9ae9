"""The commands of a run on several nodes, one list per node; `--dry-run` prints them.

Every node mounts the run directory.  It holds the resolved configuration, the controller's address
(`endpoints`), and, readable by its owner only, the run's secrets: so no secret is on a command
line, and a node that reconnects finds the controller's current address.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from moerl.config.clusters import Node, Placement, TrainerSlot
from moerl.config.schema import Config
from moerl.core.errors import ConfigError
from moerl.runtime.run_dir import RunDir

_ENGINE_NODE, _TORCHRUN = "tools/launch/engine_node.sh", "tools/launch/torchrun.sh"
TRAINER_JOBS = ("trainer", "ref_models")
_Slot = TypeVar("_Slot", Node, TrainerSlot)


def node_commands(config: Config, placed: Placement, recipe: Sequence[str]) -> dict[str, list[str]]:
    """{node name: commands}; recipe: arguments of `moerl train` on the controller's node."""
    root = f"{config.run.root}/{config.run.name}"
    engines = [node for node in placed.nodes if node.has("engine")]
    commands: dict[str, list[str]] = {}
    for node in placed.nodes:
        mine = []
        if node is placed.controller:
            mine.append(shlex.join(["moerl", "train", *recipe]))
        elif node.has("engine"):
            mine.append(shlex.join([_ENGINE_NODE, root, str(engines.index(node))]))
        for job in TRAINER_JOBS:
            for slot in slots_of(placed, job):
                if slot.node is node:
                    which = [] if job == "trainer" else [job]
                    mine.append(shlex.join([_TORCHRUN, root, str(slot.node_rank), *which]))
        commands[node.name] = mine
    return commands


def torchrun(
    config: Config, placed: Placement, slot: TrainerSlot, address: str = "", job: str = "trainer"
) -> list[str]:
    """torchrun command of one trainer node.  address: of this node, if the scheduler names it.

    torchrun agents meet at the trainer's first node, which writes into the endpoints folder where
    it listens (`moerl.distributed.elastic_rendezvous`).  When a rank ends or a node returns, all
    ranks restart and ask the controller for the checkpoint to load.
    """
    slots, ports = slots_of(placed, job), config.cluster.ports
    port = ports.rendezvous if job == "trainer" else ports.ref_models
    root = f"{config.run.root}/{config.run.name}"
    command = ["python", "-m", "moerl.distributed.torchrun"]
    command += ["--nnodes", str(len(slots))]
    command += ["--nproc-per-node", str(len(slot.ranks))]
    command += ["--rdzv-endpoint", str(RunDir(Path(root)).endpoints.store(job))]
    command += ["--rdzv-id", config.run.name + ("" if job == "trainer" else f"-{job}")]
    command += ["--rdzv-conf", f"slot={slot.node_rank},port={port},join_timeout=3600"]
    command += ["--max-restarts", str(config.supervision.max_restarts)]
    if address or slot.node.address:
        command += ["--local-addr", address or slot.node.address]
    command += ["-m", "moerl.trainer.main", "--run-dir", root]
    return command if job == "trainer" else [*command, f"--{job.replace('_', '-')}"]


def slots_of(placed: Placement, job: str) -> tuple[TrainerSlot, ...]:
    """Nodes of the trainer, or of the reference ranks."""
    return placed.trainers if job == "trainer" else placed.ref_models


def nth(nodes: Sequence[_Slot], index: int, kind: str) -> _Slot:
    """Node `index` of `kind`, from 0.  Raises ConfigError."""
    if not 0 <= index < len(nodes):
        raise ConfigError("INDEX", index, f"the run has {len(nodes)} {kind} node(s), from 0 on")
    return nodes[index]


def host_of(node: Node) -> str:
    """Address of a node, or its name in capitals as a placeholder."""
    return node.address or node.name.upper()

"""The exact commands of a run on several nodes, one per node; `--dry-run` prints them.

Every node gets the run directory and nothing else: it is on a file system that all of them mount,
and holds the resolved configuration, where the controller listens (`board`) and, readable by
its owner only, the run's secrets.  So no secret is ever on a command line, and a node that comes
back finds the controller wherever it is now.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from moerl.config.clusters import Node, Placement, TrainerSeat
from moerl.config.schema import Config

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "launch"


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
        for seat in placed.trainers:
            if seat.node is node:
                mine.append(f"tools/launch/torchrun.sh {root} {seat.node_rank}")
        commands[node.name] = mine
    return commands


def torchrun(config: Config, placed: Placement, seat: TrainerSeat, address: str = "") -> list[str]:
    """One trainer node's part of the gang.  address: its own, where the scheduler named it.

    Agents of torchrun meet at the first trainer node.  A rank that ends, or a node that comes back,
    starts all ranks again: they ask the controller anew which checkpoint to continue from.
    """
    first = placed.trainers[0].node
    command = ["python", "-m", "torch.distributed.run"]
    command += [
        "--nnodes",
        str(len(placed.trainers)),
    ]
    command += ["--nproc-per-node", str(len(seat.ranks)), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{host_of(first)}:{config.cluster.ports.rendezvous}"]
    command += ["--rdzv-id", config.run.name]
    command += ["--rdzv-conf", f"is_host={int(seat.node_rank == 0)},join_timeout=3600"]
    command += ["--max-restarts", str(config.supervision.max_restarts)]
    if seat.devices:
        command += ["--numa-binding", "node"]  # cores and memory beside each rank's GPU
    if address or seat.node.address:
        command += ["--local-addr", address or seat.node.address]
    command += ["-m", "moerl.trainer.main", "--run-dir", f"{config.run.root}/{config.run.name}"]
    return command


def host_of(node: Node) -> str:
    """Its address, or its name in capitals where only the scheduler knows it."""
    return node.address or node.name.upper()

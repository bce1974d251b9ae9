"""Helper of `tools/launch/slurm.sbatch`: options of sbatch, and the role of each node.

    python -m moerl.launch.cluster.slurm_job options RECIPE [key=value ...] --run NAME
    python -m moerl.launch.cluster.slurm_job plan --hosts a,b,c -- RECIPE [key=value ...] --run NAME

Prints one answer per line, so that the script needs no parser.  An existing run is resumed, as a
requeued job requires.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from moerl.config import Config, load_config, resolve
from moerl.config.clusters import Node, nodes, placement
from moerl.config.load import load_saved
from moerl.core.errors import ConfigError, MoerlError, printable
from moerl.launch.cluster.node_commands import TRAINER_JOBS, slots_of


def main(arguments: Sequence[str]) -> int:
    what, *rest = arguments
    try:
        _one_line_each(rest)
        lines = options(rest) if what == "options" else plan(rest[1], rest[3:])
    except MoerlError as error:
        print(f"moerl: {printable(error)}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _one_line_each(arguments: Sequence[str]) -> None:
    """The script reads one answer per line: a line break in a setting would add an answer."""
    for word in arguments:
        if "\n" in word or "\r" in word:
            raise ConfigError(word.partition("=")[0], word, "a line break cannot be passed on")


def options(arguments: Sequence[str]) -> list[str]:
    """Options of sbatch: one equal node per node of the cluster, requeued when preempted."""
    config, name = _read(arguments)
    found = nodes(config.cluster)
    devices = max(node.group.devices for node in found)
    asked = [
        f"--job-name=moerl-{name}",
        f"--nodes={len(found)}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        "--signal=B:TERM@120",
    ]
    if devices:
        asked.append(f"--gpus-per-node={devices}")
    return [*asked, *(f"--{key}={value}" for key, value in config.cluster.slurm.items())]


def plan(hosts: str, arguments: Sequence[str]) -> list[str]:
    """`engine=HOST`, `trainer=HOST`, `ref_models=HOST`, `setting=ARGUMENT`, `run_dir=PATH` lines.

    A setting is an argument of `moerl train`.  Raises ConfigError when the allocation's number of
    nodes differs from the cluster's.
    """
    config, name = _read(arguments)
    found, named = nodes(config.cluster), hosts.split(",")
    if len(found) != len(named):
        raise ConfigError(
            "cluster.nodes", len(found), f"the allocation has {len(named)} nodes: {hosts}"
        )
    order = sorted(found, key=lambda node: not node.has("engine"))  # engines first, stable
    host_of = {node.name: host for node, host in zip(order, named, strict=True)}
    lines = [f"engine={host_of[node.name]}" for node in order if node.has("engine")]
    placed = placement(config)
    for job in TRAINER_JOBS:
        lines += [f"{job}={host_of[slot.node.name]}" for slot in slots_of(placed, job)]
    run_dir = Path(config.run.root) / name
    addresses = _addresses(config, found, host_of)
    resumes = (run_dir / "config.yaml").is_file()
    recipe = ["--resume", str(run_dir)] if resumes else [*_without_run(arguments), "--run", name]
    lines += [f"setting={item}" for item in _in_order(recipe, addresses, resumes)]
    return [*lines, f"run_dir={run_dir}"]


def _in_order(recipe: list[str], addresses: list[str], resumes: bool) -> list[str]:
    """Order of arguments: RECIPE stays first, settings follow; --resume takes no RECIPE."""
    return [*recipe, *addresses] if resumes else [recipe[0], *addresses, *recipe[1:]]


def _addresses(config: Config, found: Sequence[Node], host_of: dict[str, str]) -> list[str]:
    """Settings with the addresses of this allocation's nodes."""
    settings = []
    for group in config.cluster.nodes:
        mine = [_resolve(host_of[n.name]) for n in found if n.name.rpartition("-")[0] == group]
        settings.append(f"cluster.nodes.{group}.hosts=[{','.join(mine)}]")
    return settings


def _resolve(host: str) -> str:
    """Address of a host name; a name that does not resolve is returned unchanged."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def _read(arguments: Sequence[str]) -> tuple[Config, str]:
    """(configuration, run name) from the arguments of `moerl train`."""
    if "--resume" in arguments:
        folder = Path(arguments[arguments.index("--resume") + 1])
        return resolve(load_saved(folder / "config.yaml")), folder.name
    recipe, *settings = _without_run(arguments)
    config = resolve(load_config(recipe, settings))
    if config.cluster.launcher == "local":
        raise ConfigError("cluster.launcher", "local", "add cluster=slurm")
    if "--run" in arguments:
        return config, arguments[arguments.index("--run") + 1]
    raise ConfigError("--run", "", "required: a requeued job finds its run by this name")


def _without_run(arguments: Sequence[str]) -> list[str]:
    if "--run" not in arguments:
        return list(arguments)
    at = arguments.index("--run")
    return [*arguments[:at], *arguments[at + 2 :]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

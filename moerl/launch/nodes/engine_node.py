"""Engine node of a run: `python -m moerl.launch.nodes.engine_node RUN_DIR INDEX`.

Waits until the run's endpoints folder names Ray's head, joins it with the slots planned for this
node, and ends its processes when the run is over, when the run's root process gave no sign of life
for a lease (`lease`), or when this process gets SIGTERM.  The token is passed in the environment of
the only child that needs it.

A node outside the configuration joins a running run with `--slots N [--gpus G]`: it requests N
engines, and removes them before it stops.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from moerl.config import Config
from moerl.config.clusters import Node, engine_gpus, own_address, placement, visible_devices
from moerl.config.load import load_saved
from moerl.core.errors import ConfigError, MoerlError, TrainerError, printable
from moerl.launch.cluster.node_commands import nth
from moerl.launch.nodes.control_api import request
from moerl.launch.nodes.lease import LeaseReader, RunEnded
from moerl.launch.nodes.ray_nodes import ENGINE_SLOT, slots
from moerl.runtime.process_tree import Orphans, die_with_parent, end_descendants
from moerl.runtime.reaper import become_subreaper
from moerl.runtime.run_dir import RunDir

_LOOK_S = 1.0
_GRACE_S = 5.0
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Exit status: 0 when the run ended, 1 when it is lost or Ray ended under it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="runs/NAME, as moerl train makes it")
    parser.add_argument("index", type=int, nargs="?", help="index of this engine node, from 0")
    parser.add_argument("--slots", type=int, default=0, help="engines of an unconfigured node")
    parser.add_argument("--gpus", type=int, default=0, help="with --slots")
    parser.add_argument("--leave-s", type=float, default=120.0, help="seconds for engines to leave")
    parser.add_argument(
        "--wait-s", type=float, default=600.0, help="wait for the controller's node, seconds"
    )
    args = parser.parse_args()
    if (args.index is None) == (args.slots < 1):
        parser.error("give INDEX, or --slots for a node outside the configuration")
    run = RunDir(args.run_dir)
    become_subreaper()
    for signum in _ENDINGS:
        signal.signal(signum, _leave)
    print(f"moerl: waits up to {args.wait_s:g} s for {run.endpoints.folder}", file=sys.stderr)
    lease = LeaseReader(run.endpoints.lease)
    try:
        lease.wait(args.wait_s)
        return _join(run, args, lease)
    except RunEnded as end:
        print(f"moerl: {end}", file=sys.stderr)
        return 0
    except MoerlError as error:
        print(f"moerl: {printable(error)}", file=sys.stderr)
        return 1


def _join(run: RunDir, args: argparse.Namespace, lease: LeaseReader) -> int:
    """Offer this node to the run's Ray until either ends.

    Raises RunEnded when the run is over, MoerlError when it is lost or refuses this node.
    """
    address, token = _head(run, lease, args.wait_s)
    config, mine = load_saved(run.config), []
    if args.slots and config.engine.nodes > 1:
        raise ConfigError(
            "--slots", args.slots, "engines of this run span several nodes, which it has to name"
        )
    node = None if args.index is None else nth(_engine_nodes(config), args.index, "engine")
    offer: tuple[dict[str, float], Sequence[int]] = (
        ({ENGINE_SLOT: float(args.slots)}, range(args.gpus))
        if node is None
        else (slots(config, node), engine_gpus(placement(config), node))
    )
    scratch = Path(tempfile.mkdtemp(prefix="moerl-ray-", dir="/tmp"))  # short: it holds sockets
    child = subprocess.Popen(
        _command(config, offer, address, scratch),
        env=_environment(token) | visible_devices(offer[1]),
        preexec_fn=die_with_parent,
    )
    try:
        for _ in range(args.slots):
            mine.append(request(run, args.wait_s, do="add", tp=0))
        _until_over(run, child, (address, token), lease)
        print("moerl: Ray ended on this node", file=sys.stderr)
        return 1
    except (RunEnded, TrainerError):
        mine.clear()  # requests stay unanswered now
        raise
    finally:
        for signum in _ENDINGS:
            signal.signal(signum, signal.SIG_IGN)  # a second signal must not interrupt cleanup
        _remove_engines(run, mine, args.leave_s)
        end_descendants(_GRACE_S)
        shutil.rmtree(scratch, ignore_errors=True)


def _head(run: RunDir, lease: LeaseReader, wait_s: float) -> tuple[str, str]:
    """(HOST:PORT, token) of Ray's head.  Raises TrainerError after wait_s, or as the lease does."""
    deadline = time.monotonic() + wait_s
    while True:
        lease.check()
        try:
            return run.endpoints.read_ray(0.0)
        except TrainerError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _until_over(
    run: RunDir, child: subprocess.Popen[bytes], head: tuple[str, str], lease: LeaseReader
) -> None:
    """Return when Ray ended on this node.  Raises RunEnded or TrainerError when the run is over."""
    orphans, has_ended = Orphans(), False
    while not has_ended:
        has_ended = child.poll() is not None  # maybe because the run is over: look once more
        lease.check()
        if not run.endpoints.names_ray(*head):
            raise RunEnded("the run has ended")
        orphans.collect()  # of engines that were restarted here
        time.sleep(_LOOK_S)


def _engine_nodes(config: Config) -> list[Node]:
    return [node for node in placement(config).nodes if node.has("engine")]


def _remove_engines(run: RunDir, engines: list[int], limit_s: float) -> None:
    """Remove the engines that this node added, if the run is still running."""
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(MoerlError):
        for engine in engines:
            request(run, limit_s, do="remove", engine=engine)
        while engines and time.monotonic() < deadline:
            there = {row["engine"] for row in request(run, limit_s, do="list")}
            engines = [engine for engine in engines if engine in there]
            time.sleep(_LOOK_S)


def _command(
    config: Config, offer: tuple[dict[str, float], Sequence[int]], address: str, scratch: Path
) -> list[str]:
    """`ray start` command.  offer: (resources, GPUs)."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}"]
    command += [f"--node-ip-address={own_address(config.cluster)}", "--num-cpus=0"]
    command += [f"--num-gpus={len(offer[1])}", f"--resources={json.dumps(offer[0])}"]
    return [*command, "--disable-usage-stats", f"--temp-dir={scratch}", "--block"]


def _environment(token: str) -> dict[str, str]:
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_worker_niceness": "0"}
    return dict(os.environ) | ray


def _leave(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())

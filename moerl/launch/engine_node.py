"""One more engine node of a run: `python -m moerl.launch.engine_node RUN_DIR INDEX`.

Waits until the run's board names Ray's head, joins it with the seats planned for this node, and
ends what it started when the head is gone from the board or this process is told to stop.  The
token travels in the environment of the one child that needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from moerl.config.clusters import placement
from moerl.config.load import load_saved
from moerl.config.network import own_address
from moerl.launch.processes import become_subreaper, end_descendants
from moerl.launch.ray_nodes import gpus, seats
from moerl.rundir import RunDir

_LOOK_S = 1.0
_GRACE_S = 5.0


def main() -> int:
    """Exit status: 0 when the run ended, 1 when Ray ended under it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("index", type=int, help="this node among the engine nodes, from 0")
    parser.add_argument("--wait-s", type=float, default=600.0, help="for the controller's node")
    args = parser.parse_args()
    run = RunDir(args.run_dir)
    become_subreaper()
    signal.signal(signal.SIGTERM, _leave)
    address, token = run.board.read_ray(args.wait_s)
    scratch = Path(f"/tmp/moerl-engine-{os.getpid()}")
    child = subprocess.Popen(_command(run, args.index, address, scratch), env=_environment(token))
    try:
        while child.poll() is None and run.board.names_ray(address, token):
            time.sleep(_LOOK_S)
        return 0 if child.poll() is None else 1
    finally:
        end_descendants(_GRACE_S)
        shutil.rmtree(scratch, ignore_errors=True)


def _command(run: RunDir, index: int, address: str, scratch: Path) -> list[str]:
    config = load_saved(run.config)
    node = [node for node in placement(config).nodes if node.has("engine")][index]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}"]
    command += [f"--node-ip-address={own_address(config.cluster)}", "--num-cpus=0"]
    command += [f"--num-gpus={gpus(node)}", f"--resources={json.dumps(seats(config, node))}"]
    return [*command, "--disable-usage-stats", f"--temp-dir={scratch}", "--block"]


def _environment(token: str) -> dict[str, str]:
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_worker_niceness": "0"}
    return dict(os.environ) | ray


def _leave(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())

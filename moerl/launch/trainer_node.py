"""One trainer node of a run: `python -m moerl.launch.trainer_node RUN_DIR INDEX [GANG]`.

Runs this node's part of torchrun, from the run's resolved configuration, until the gang is done.
torchrun itself starts the ranks again when one ends; when an agent of it loses the others for too
long it ends, and is started again here, so that a node that was cut off finds back.  A new opening
of the board asks for a new gang (the supervisor gave this one up, or the run was resumed), however
alive the ranks are here: they are ended and started again.  The run's end is seen on the board too:
this process waits for a controller to be posted, and ends when there is none.  It ends only what it
started.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO

from moerl.config import Config
from moerl.config.clusters import TrainerSeat, placement
from moerl.config.load import load_saved
from moerl.config.network import own_address
from moerl.errors import MoerlError
from moerl.launch.commands import GANGS, seats_of, torchrun
from moerl.launch.processes import become_subreaper, end_descendants
from moerl.rundir import RunDir

_GRACE_S, _LOOK_S = 5.0, 0.5


def main() -> int:
    """Exit status: 0 when the gang is done or the run is over, 1 when this node gave up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("index", type=int, help="this node among those of the gang, from 0")
    parser.add_argument("gang", nargs="?", default="trainer", choices=GANGS)
    parser.add_argument("--wait-s", type=float, default=600.0, help="for the controller's node")
    args = parser.parse_args()
    become_subreaper()
    signal.signal(signal.SIGTERM, _leave)
    run = RunDir(args.run_dir)
    try:
        return _until_done(run, args.gang, args.index, args.wait_s)
    except MoerlError as error:
        print(f"moerl: {error}", file=sys.stderr)
        return 1
    finally:
        end_descendants(_GRACE_S)


def _until_done(run: RunDir, gang: str, index: int, wait_s: float) -> int:
    start = run.board.read(wait_s)[2]
    config = load_saved(run.config)
    seat = seats_of(placement(config), gang)[index]
    name = f"torchrun-{index}.log" if gang == "trainer" else f"torchrun-{gang}-{index}.log"
    attempts, limit = 0, config.supervision.max_restarts + 1
    with (run.logs / name).open("ab") as log:
        while attempts < limit:
            code = _torchrun(
                _command(config, seat, gang), _environment(config, seat), log, run, start
            )
            if code == 0:
                return 0
            end_descendants(_GRACE_S)
            attempts += code is not None
            why = "is asked for anew" if code is None else f"ended with {code}"
            print(f"moerl: torchrun {why}, attempt {attempts} of {limit}", file=sys.stderr)
            time.sleep(config.supervision.backoff_s)
            before, start = start, run.board.read(wait_s)[2]  # raises when the run is over
            attempts = attempts if start == before else 0
    run.board.give_up(f"{gang} node {index}: torchrun ended {limit} times, see {run.logs / name}")
    return 1


def _torchrun(
    command: list[str], environment: dict[str, str], log: IO[bytes], run: RunDir, start: str
) -> int | None:
    """Its exit status; None, and it is told to end, when the board asks for another gang."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
    )
    while (code := process.poll()) is None:
        if run.board.start() not in ("", start):
            process.terminate()
            return None
        time.sleep(_LOOK_S)
    return code


def _command(config: Config, seat: TrainerSeat, gang: str) -> list[str]:
    command = torchrun(config, placement(config), seat, own_address(config.cluster), gang)
    return [sys.executable, *command[1:]]


def _environment(config: Config, seat: TrainerSeat) -> dict[str, str]:
    """Launcher settings of the ranks of this node; nothing here changes what is computed."""
    interface = config.cluster.interface
    env = dict(os.environ) | config.cluster.environment
    env |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if seat.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, seat.devices))
    if seat.node.group.rdma:
        env["NCCL_IB_HCA"] = ",".join(seat.node.group.rdma)
    return env | {
        "OMP_NUM_THREADS": str(config.trainer.cpu_threads),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _leave(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

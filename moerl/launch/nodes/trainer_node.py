"""One trainer node of a run: `python -m moerl.launch.nodes.trainer_node RUN_DIR INDEX
[TRAINER_JOB]`.

Runs this node's part of torchrun, from the run's resolved configuration, until the trainer is done.
torchrun itself starts the ranks again when one ends; when an agent of it loses the others for too
long it ends, and is started again here, so that a node that was cut off finds back.  A new opening
of the endpoints folder asks for a new trainer (the supervisor gave this one up, or the run was
resumed), however alive the ranks are here: they are ended and started again.  The run's end is seen
on the endpoints folder too: this process waits for a controller to be posted, and ends when there
is none.  It ends only what it started.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from moerl.config import Config
from moerl.config.clusters import TrainerSlot, placement
from moerl.config.load import load_saved
from moerl.config.network import own_address
from moerl.errors import MoerlError, TrainerError
from moerl.launch.cluster.node_commands import TRAINER_JOBS, nth, slots_of, torchrun
from moerl.launch.nodes.process_tree import become_subreaper, die_with_parent, end_descendants
from moerl.launch.run_context import rank_environment
from moerl.observe.metrics import read_rows
from moerl.run_dir import RunDir, newest_incarnation

_GRACE_S, _LOOK_S = 5.0, 0.5
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Exit status: 0 when the trainer is done or the run is over, 1 when this node gave up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="runs/NAME, as moerl train makes it")
    parser.add_argument("index", type=int, help="this node among those of the trainer, from 0")
    parser.add_argument("trainer", nargs="?", default="trainer", choices=TRAINER_JOBS)
    parser.add_argument(
        "--wait-s", type=float, default=600.0, help="seconds for the controller's node to be there"
    )
    args = parser.parse_args()
    become_subreaper()
    for signum in _ENDINGS:
        signal.signal(signum, _leave)
    run = RunDir(args.run_dir)
    print(f"moerl: waits up to {args.wait_s:g} s for {run.endpoints.folder}", file=sys.stderr)
    try:
        start = run.endpoints.read(args.wait_s)[2]
        with _slot_taken(run, f"{args.job}-{args.index}", args.wait_s):
            return _until_done(run, args.job, args.index, start, args.wait_s)
    except MoerlError as error:
        print(f"moerl: {error}", file=sys.stderr)
        return 1
    finally:
        for signum in _ENDINGS:
            signal.signal(signum, signal.SIG_IGN)  # a second one must not stop this
        end_descendants(_GRACE_S)


@contextlib.contextmanager
def _slot_taken(run: RunDir, name: str, wait_s: float) -> Iterator[None]:
    """One process a slot: a second torchrun for it would take the place of ranks that train.

    Raises TrainerError when another one keeps it for longer than wait_s.
    """
    deadline = time.monotonic() + wait_s
    with (run.endpoints.folder / f"{name}.lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise TrainerError(f"{name} of this run is served by {file.read()}") from None
                time.sleep(_LOOK_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}")
        file.flush()
        yield


def _until_done(run: RunDir, job: str, index: int, start: str, wait_s: float) -> int:
    """torchrun, again and again.  start: the opening of the endpoints folder that asks for it."""
    failures, seen = 0, _last_step(run)
    while True:
        config = load_saved(run.config)  # another opening may bring another layout
        slot = nth(slots_of(placement(config), job), index, job)
        name = f"torchrun-{index}.log" if job == "trainer" else f"torchrun-{job}-{index}.log"
        with (run.logs / name).open("ab") as log:
            command, environment = _command(config, slot, job), _environment(config, slot)
            code = _torchrun(command, environment, log, run, start)
        end_descendants(_GRACE_S)
        is_wanted = code != 0 or (job == "ref_models" and _falls_back(run, start))
        if (not is_wanted and _opening(run, start) in (start, "")) or run.endpoints.was_done(start):
            return 0
        if code:
            failures = 1 if _last_step(run) > seen else failures + 1
            seen = _last_step(run)
            print(f"moerl: torchrun ended with {code}, failure {failures}", file=sys.stderr)
            time.sleep(config.supervision.backoff_s)
        if failures > config.supervision.max_restarts:
            run.endpoints.give_up(
                f"{job} node {index}: torchrun ended {failures} times, see {name}"
            )
            _await_answer(run, f"{job} node {index}", start, wait_s)
        before, start = start, run.endpoints.read(wait_s)[2]  # raises when the run is over
        failures = failures if start == before else 0


def _await_answer(run: RunDir, name: str, start: str, wait_s: float) -> None:
    """The supervisor decides what becomes of the run; it has closed the endpoints folder within
    seconds.

    Raises TrainerError when nobody does: its node is lost.
    """
    deadline = time.monotonic() + wait_s
    while _opening(run, start) == start:
        if time.monotonic() > deadline:
            raise TrainerError(f"{name} gave up and nobody has answered within {wait_s:g} s")
        time.sleep(_LOOK_S)


def _falls_back(run: RunDir, start: str) -> bool:
    """Whether a new trainer wants scores again, after reference ranks were told that all are
    there.
    """
    trainer = newest_incarnation(run)
    while _opening(run, start) == start and not run.endpoints.was_done(start):
        if newest_incarnation(run) != trainer:
            return True
        time.sleep(_LOOK_S)
    return False


def _torchrun(
    command: list[str], environment: dict[str, str], log: IO[bytes], run: RunDir, start: str
) -> int | None:
    """Its exit status; None, and it is told to end, when the endpoints folder no longer asks for
    it.

    It is told as well when this process dies: nobody would watch the endpoints folder for it then.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        preexec_fn=die_with_parent,
    )
    unwanted = 0
    while (code := process.poll()) is None:
        unwanted = unwanted + 1 if _opening(run, start) != start else 0
        if unwanted == 2:  # seen twice: file servers stumble
            process.terminate()
            return None
        time.sleep(_LOOK_S)
    return code


def _opening(run: RunDir, known: str) -> str:
    """The present opening of the endpoints folder; the one known while its file system does not
    answer.
    """
    try:
        return run.endpoints.start()
    except OSError:
        return known


def _last_step(run: RunDir) -> int:
    rows = read_rows(run.metrics) if run.metrics.exists() else []
    return rows[-1]["step"] if rows else -1


def _command(config: Config, slot: TrainerSlot, job: str) -> list[str]:
    command = torchrun(config, placement(config), slot, own_address(config.cluster), job)
    return [sys.executable, *command[1:]]


def _environment(config: Config, slot: TrainerSlot) -> dict[str, str]:
    """Launcher settings of the ranks of this node, which talk to those of other nodes."""
    env = rank_environment(config, slot) | {"NCCL_SOCKET_IFNAME": config.cluster.interface}
    if slot.node.group.rdma:
        env["NCCL_IB_HCA"] = ",".join(slot.node.group.rdma)
    return env


def _leave(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())

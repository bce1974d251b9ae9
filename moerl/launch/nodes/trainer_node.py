"""Trainer node of a run: `python -m moerl.launch.nodes.trainer_node RUN_DIR INDEX [JOB]`.

Runs this node's torchrun until the trainer is done; JOB is trainer or ref_models.

- torchrun restarts the ranks when one ends. When its agent loses the others it ends, and this
  process starts it again, so that a disconnected node can rejoin.
- Each opening of the endpoints folder asks for a new trainer (the supervisor ended the old one, or
  the run was resumed): running ranks are ended and started again.
- This process waits for a controller's address in the endpoints folder, and ends when the run is
  over, or when the run's root process gave no sign of life for a lease (`lease`). It ends only
  processes that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from moerl.config import Config
from moerl.config.clusters import TrainerSlot, own_address, placement
from moerl.config.load import load_saved
from moerl.core.errors import MoerlError, TrainerError, printable
from moerl.distributed.torchrun import TorchrunJob
from moerl.launch.cluster.node_commands import TRAINER_JOBS, nth, slots_of, torchrun
from moerl.launch.nodes.lease import LeaseReader, RunEnded
from moerl.launch.run_context import rank_environment
from moerl.observe.metrics import read_rows
from moerl.runtime.process_tree import Orphans, end_descendants
from moerl.runtime.reaper import become_subreaper
from moerl.runtime.run_dir import RunDir, newest_incarnation

_GRACE_S, _LOOK_S = 5.0, 0.5
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Exit status: 0 when the trainer is done or the run is over, 1 after too many failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="runs/NAME, as moerl train makes it")
    parser.add_argument("index", type=int, help="index of this trainer node, from 0")
    parser.add_argument("job", nargs="?", default="trainer", choices=TRAINER_JOBS)
    parser.add_argument(
        "--wait-s", type=float, default=600.0, help="wait for the controller's node, seconds"
    )
    args = parser.parse_args()
    become_subreaper()
    for signum in _ENDINGS:
        signal.signal(signum, _leave)
    run = RunDir(args.run_dir)
    print(f"moerl: waits up to {args.wait_s:g} s for {run.endpoints.folder}", file=sys.stderr)
    lease = LeaseReader(run.endpoints.lease)
    try:
        lease.wait(args.wait_s)
        start = _next_opening(run, lease, args.wait_s)
        with _slot_taken(run, f"{args.job}-{args.index}", args.wait_s, lease):
            return _until_done(run, args.job, args.index, start, args.wait_s, lease)
    except RunEnded as end:
        print(f"moerl: {end}", file=sys.stderr)
        return 0
    except MoerlError as error:
        print(f"moerl: {printable(error)}", file=sys.stderr)
        return 1
    finally:
        for signum in _ENDINGS:
            signal.signal(signum, signal.SIG_IGN)  # a second signal must not interrupt cleanup
        end_descendants(_GRACE_S)


@contextlib.contextmanager
def _slot_taken(run: RunDir, name: str, wait_s: float, lease: LeaseReader) -> Iterator[None]:
    """Lock a slot: a second torchrun for it would replace ranks that are training.

    Raises TrainerError when another process holds it for longer than wait_s, or as the lease does.
    """
    deadline = time.monotonic() + wait_s
    with (run.endpoints.folder / f"{name}.lock").open("a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise TrainerError(f"{name} of this run is served by {file.read()}") from None
                lease.check()
                time.sleep(_LOOK_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}")
        file.flush()
        yield


def _next_opening(run: RunDir, lease: LeaseReader, wait_s: float) -> str:
    """Wait for an opening of the endpoints folder.

    Raises RunEnded when the run is over, TrainerError when it is lost or after wait_s.
    """
    missing = f"{run.endpoints.folder} names no controller after {wait_s:g} s"
    return lease.until(lambda: _opening(run, ""), wait_s, missing)


def _until_done(
    run: RunDir, job: str, index: int, start: str, wait_s: float, lease: LeaseReader
) -> int:
    """Restart torchrun until the trainer is done.  start: opening of the endpoints folder.

    Raises RunEnded when the run is over, TrainerError when it is lost.
    """
    failures, seen = 0, _last_step(run)
    while True:
        config = load_saved(run.config)  # another opening may have another layout
        slot = nth(slots_of(placement(config), job), index, job)
        name = f"torchrun-{index}.log" if job == "trainer" else f"torchrun-{job}-{index}.log"
        command, environment = _command(config, slot, job), rank_environment(config, slot)
        code = _torchrun(command, environment, run.logs / name, run, start, lease)
        end_descendants(_GRACE_S)
        is_wanted = code != 0 or (job == "ref_models" and _falls_back(run, start, lease))
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
            _await_answer(run, f"{job} node {index}", start, wait_s, lease)
        before, start = start, _next_opening(run, lease, wait_s)
        failures = failures if start == before else 0


def _await_answer(run: RunDir, name: str, start: str, wait_s: float, lease: LeaseReader) -> None:
    """Wait for the supervisor, which closes the endpoints folder within seconds of a failure.

    Raises TrainerError after wait_s, or as the lease does.
    """
    missing = f"{name} failed, and no supervisor answered within {wait_s:g} s"
    lease.until(lambda: _opening(run, start) != start, wait_s, missing)


def _falls_back(run: RunDir, start: str, lease: LeaseReader) -> bool:
    """True if a restarted trainer needs reference scores again."""
    trainer = newest_incarnation(run)
    while _opening(run, start) == start and not run.endpoints.was_done(start):
        if newest_incarnation(run) != trainer:
            return True
        lease.check()
        time.sleep(_LOOK_S)
    return False


def _torchrun(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    run: RunDir,
    start: str,
    lease: LeaseReader,
) -> int | None:
    """Exit status of torchrun; None, after SIGTERM, when the endpoints folder ends this opening.

    torchrun gets SIGTERM when this process dies too.  Raises as the lease does; the caller ends
    torchrun then.
    """
    torchrun_job = TorchrunJob(command, environment, log, ends_with_parent=True)
    unwanted, orphans = 0, Orphans()
    while (code := torchrun_job.poll()) is None:
        lease.check()
        orphans.collect()
        unwanted = unwanted + 1 if _opening(run, start) != start else 0
        if unwanted == 2:  # seen twice, because file servers have short failures
            torchrun_job.terminate()
            return None
        time.sleep(_LOOK_S)
    return code


def _opening(run: RunDir, known: str) -> str:
    """Current opening of the endpoints folder; `known` while its file system fails."""
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


def _leave(signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())

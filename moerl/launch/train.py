"""`moerl train` on one machine: prepare, run under a supervisor, report how it ended.

One process at a time writes a run directory.  The report is written after failures too, and no
process outlives the run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from moerl.config import Config, save_config
from moerl.core.errors import MoerlError, cause_of, printable
from moerl.launch.prepare import prepare
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.signal_watch import INTERRUPT, SignalWatch
from moerl.launch.supervision.supervisor import Supervisor
from moerl.observe.console import Console
from moerl.observe.metrics import read_rows
from moerl.observe.perfetto import write_trace
from moerl.observe.report import held_out_words, reward_gain, write_report
from moerl.runtime.process_tree import end_descendants
from moerl.runtime.run_dir import RunDir

log = logging.getLogger(__name__)

_GRACE_S = 2.0


def train(config: Config, *, resume: bool, scratch: Path, reset_optimizer: bool = False) -> int:
    """Run to the last step; returns the exit status.  Prints the cause of a failure last.

    scratch: folder of this start for Ray's sockets; the caller removes it.
    """
    run = RunDir(Path(config.run.root) / config.run.name)
    run.create()
    logging.basicConfig(
        filename=run.logs / "root.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    with _only_one(run), _own_output(run) as (out, err):
        plan = prepare(config, run, resume=resume, reset_optimizer=reset_optimizer)
        save_config(plan.config, run.config)
        console = Console(config.run.console, config.run.steps, out)
        console.restore(read_rows(run.metrics))
        signals = SignalWatch(lambda: _end_at_once(run, err))
        supervisor = Supervisor(plan, console, scratch, signals)
        try:
            summary = supervisor.run()
        except Exception as error:
            log.exception("the run failed")
            cause, summary = cause_of(error), {}
        else:
            cause = ""
        finally:
            _close_endpoints(run)
        end_descendants(grace_s=_GRACE_S)
        kept = _tidy(supervisor.plan, is_done=not cause, has_steps=bool(read_rows(run.metrics)))
        return _close(plan, console, summary, cause, kept, err)


def _end_at_once(run: RunDir, err: IO[str]) -> None:
    """A signal came and the main thread hangs.  Called in another thread."""
    with (run.logs / "root.log").open("a", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    _close_endpoints(run)
    end_descendants(grace_s=_GRACE_S)
    print(f"moerl: {INTERRUPT}; its root process hung, see {run.logs / 'root.log'}", file=err)
    print(f"moerl: continue with: moerl train --resume {run.root}", file=err, flush=True)
    os._exit(130)


def _close_endpoints(run: RunDir) -> None:
    """Other nodes leave the run: at once, or after a lease when the file system fails."""
    for close in (run.endpoints.close, run.endpoints.close_ray, run.endpoints.close_lease):
        try:
            close()
        except OSError as error:
            log.warning("the endpoints folder is not closed: %s", error)


def _tidy(plan: RunContext, *, is_done: bool, has_steps: bool) -> str:
    """Remove journal and blobs unless a resume can use them; then return a sentence about them."""
    if plan.records is not None:
        return ""
    if is_done or not has_steps:  # with `shared`, segments are in the run directory
        for folder in (plan.journal_dir, plan.run.journal, plan.blob_dir):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        return ""
    num_bytes = sum(path.stat().st_size for path in plan.blob_dir.glob("*"))
    return f"{num_bytes / 2**20:.1f} MiB of finished rollouts wait in {plan.blob_dir}"


def _close(
    plan: RunContext,
    console: Console,
    numbers: dict[str, float],
    cause: str,
    kept: str,
    err: IO[str],
) -> int:
    """Write the report and print the summary.  kept: a sentence about what a resume would use."""
    run = plan.run
    try:
        write_report(run, plan.config, numbers)
        write_trace(run)
    except (OSError, MoerlError) as error:  # what was trained is not lost by it
        log.exception("report and timeline")
        print(f"moerl: the report or timeline was not written: {cause_of(error)}", file=err)
    rows = read_rows(run.metrics)
    words: dict[str, object] = {}
    if gain := reward_gain(rows):
        words["reward"] = f"{gain[0]:.3f} (first tenth) -> {gain[1]:.3f} (last tenth)"
    if held_out := held_out_words(rows):
        words["held-out reward"] = " -> ".join(held_out) + ", 95 % intervals"
    words |= {name: f"{value:,.0f}" for name, value in numbers.items()}
    if not cause and run.hf.is_dir():
        words["trained model"] = run.hf
    words |= {"report": run.report, "timeline (ui.perfetto.dev)": run.perfetto}
    console.close(words)
    if cause:
        print(f"moerl: {printable(cause)}", file=err)
        if kept:
            print(f"moerl: {kept}", file=err)
        print(
            f"moerl: logs are in {run.logs}; continue with: moerl train --resume {run.root}",
            file=err,
            flush=True,
        )
        return 130 if cause == INTERRUPT else 1
    return 0


@contextlib.contextmanager
def _only_one(run: RunDir) -> Iterator[None]:
    """Lock the run directory.  Raises MoerlError when another process holds it."""
    with (run.root / ".lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MoerlError(f"{run.root} is in use by another moerl process") from error
        yield


@contextlib.contextmanager
def _own_output(run: RunDir) -> Iterator[tuple[IO[str], IO[str]]]:
    """(stdout, stderr) of the terminal; output of children and libraries goes to logs/output.log.

    The descriptors themselves are swapped, because Ray's daemons inherit them.
    """
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((run.logs / "output.log").open("ab"))
        ours = []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            copy = os.dup(stream.fileno())
            ours.append(
                stack.enter_context(os.fdopen(copy, "w", encoding=stream.encoding, buffering=1))
            )
            os.dup2(log.fileno(), stream.fileno())
        try:
            yield ours[0], ours[1]
        finally:
            for stream, own in zip((sys.stdout, sys.stderr), ours, strict=True):
                stream.flush()
                os.dup2(own.fileno(), stream.fileno())

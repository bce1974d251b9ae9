"""`moerl train` on one machine: start everything, watch everything, end everything.

The root process starts Ray (engines, scorer, controller), then the trainer gang through torchrun,
and looks at all of them twice a second.  The first failure ends the run with its cause in one
sentence; with `supervision.max_restarts: 0` nothing is restarted, `--resume` continues from the
last checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from moerl.config import Config, save_config
from moerl.errors import EngineError, MoerlError, TrainerError
from moerl.launch.actors import ControllerActor, EngineActor, ScorerActor, place
from moerl.launch.plan import RunPlan, trainer_command, trainer_environment
from moerl.launch.prepare import prepare
from moerl.launch.processes import end_descendants
from moerl.observe.console import Console
from moerl.observe.metrics import read_rows
from moerl.observe.report import reward_gain, write_report
from moerl.rollout.controller import cause_of
from moerl.rundir import RunDir
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)

_POLL_S = 0.5
_GRACE_S = 2.0


class Interrupted(MoerlError):
    """Ctrl-C or SIGTERM."""


def train(config: Config, *, resume: bool, scratch: Path) -> int:
    """Run to the last step; returns the exit status.  Prints the cause of a failure last.

    scratch: a folder of this start alone, for Ray's sockets; the caller removes it.
    """
    run = RunDir(Path(config.run.root) / config.run.name)
    run.create()
    logging.basicConfig(
        filename=run.logs / "root.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    with _only_one(run), _own_output(run) as (out, err):
        plan = prepare(config, run, resume=resume, scratch=scratch)
        save_config(plan.config, run.config)
        console = Console(config.run.console, config.run.steps, out)
        console.restore(read_rows(run.metrics))
        supervisor = _Supervisor(plan, console, scratch)
        try:
            summary = supervisor.run()
        except Exception as error:
            log.exception("the run failed")
            cause, summary = cause_of(error), {}
        else:
            cause = ""
        end_descendants(grace_s=_GRACE_S)
        supervisor.close()
        return _close(plan, console, summary, cause, err)


def _close(
    plan: RunPlan, console: Console, numbers: dict[str, float], cause: str, err: IO[str]
) -> int:
    """Report and last words."""
    run = plan.run
    write_report(run, plan.config, numbers)
    rows = read_rows(run.metrics)
    words: dict[str, object] = {}
    if gain := reward_gain(rows):
        words["reward"] = f"{gain[0]:.3f} (first tenth) -> {gain[1]:.3f} (last tenth)"
    words |= {name: f"{value:,.0f}" for name, value in numbers.items()}
    if not cause:
        words["trained model"] = run.hf
    words["report"] = run.report
    console.close(words)
    if cause:
        print(f"moerl: {cause}", file=err)
        print(
            f"moerl: logs are in {run.logs}; continue with: moerl train --resume {run.root}",
            file=err,
            flush=True,
        )
        return 130 if cause == _INTERRUPT else 1
    return 0


_INTERRUPT = "the run was interrupted"


class _Supervisor:
    """Starts the processes of one run and raises the first failure."""

    def __init__(self, plan: RunPlan, console: Console, scratch: Path) -> None:
        self.plan, self.console, self.scratch = plan, console, scratch
        self._trainer: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._watches: dict[Any, str] = {}
        self._interrupted = False

    def run(self) -> dict[str, float]:
        """Train to the end.  Returns numbers measured outside the steps."""
        self._start_ray()
        self._catch_signals()
        plan = self.plan
        self.engines = [place(EngineActor, plan, i) for i in range(plan.config.engine.count)]
        self.scorer = place(ScorerActor, plan)
        self.controller = place(ControllerActor, plan, self.engines, self.scorer)
        endpoint = self._get(self.controller.open.remote(), "controller")
        self._watches[self.controller.watch.remote()] = "controller"
        self._start_trainer(endpoint)
        self._start_engines()
        self._write_pids()
        self._watch_until_trained()
        return self._measure()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    # --- start --------------------------------------------------------------------------------
    def _start_ray(self) -> None:
        self.console.wait("ray")
        ray.init(
            address="local",  # never another run's cluster
            num_cpus=0,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self.scratch / "ray"),
        )
        self.console.ready("ray")

    def _start_trainer(self, endpoint: str) -> None:
        self.console.wait("trainer")
        self._log = (self.plan.run.logs / "trainer.log").open("ab")
        self._trainer = subprocess.Popen(
            trainer_command(self.plan, endpoint),
            env=trainer_environment(self.plan),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def _start_engines(self) -> None:
        starts: dict[Any, str] = {}
        for index, engine in enumerate(self.engines):
            self.console.wait(f"engine {index}")
            starts[engine.start.remote(PolicyVersion(0, 0))] = f"engine {index}"
        while starts:
            ready, _ = ray.wait(list(starts), timeout=_POLL_S)
            for ref in ready:
                name = starts.pop(ref)
                self._get(ref, name)
                self.console.ready(name)
            self._look_at_watches(timeout_s=0)
            self._look_at_trainer()
        for index, engine in enumerate(self.engines):
            self._watches[engine.watch.remote()] = f"engine {index}"
        self._get(self.controller.engines_started.remote(), "controller")

    def _write_pids(self) -> None:
        """Who is who, for a person and for the tests that end one of them."""
        pids = {"root": os.getpid(), "controller": self._pid(self.controller)}
        pids |= {f"engine-{i}-host": self._pid(e) for i, e in enumerate(self.engines)}
        for index, engine in enumerate(self.engines):
            status = self._get(engine.status.remote(), f"engine {index}")
            pids[f"engine-{index}"] = status.pid
        if self._trainer is not None:
            pids["trainer"] = self._trainer.pid
        (self.plan.run.root / "pids.json").write_text(json.dumps(pids))

    def _pid(self, actor: Any) -> int:
        return self._get(actor.pid.remote(), "an actor")

    # --- watch --------------------------------------------------------------------------------
    def _watch_until_trained(self) -> None:
        waiting_for_trainer = True
        while True:
            self._look_at_watches(timeout_s=_POLL_S)
            status, rows = self._get(self.controller.poll.remote(), "controller", timeout_s=30.0)
            if rows and waiting_for_trainer:
                self.console.ready("trainer")
                waiting_for_trainer = False
            for row in rows:
                self.console.step(row)
            self.console.status(status)
            if self._look_at_trainer():
                _, rows = self._get(self.controller.poll.remote(), "controller", timeout_s=30.0)
                for row in rows:
                    self.console.step(row)
                return

    def _look_at_watches(self, timeout_s: float) -> None:
        """Raises the failure of the first actor that ended."""
        ready, _ = ray.wait(list(self._watches), timeout=timeout_s)
        for ref in ready:
            self._get(ref, self._watches[ref])
            raise EngineError(f"{self._watches[ref]} ended without a cause")

    def _look_at_trainer(self) -> bool:
        """True when the gang ended well; raises TrainerError with its cause otherwise.

        Every loop that waits comes by here, so an interrupt is noticed here too.
        """
        if self._interrupted:
            raise Interrupted(_INTERRUPT)
        assert self._trainer is not None
        code = self._trainer.poll()
        if code is None:
            return False
        if code == 0:
            return True
        for ref, name in self._watches.items():
            if name == "controller":  # the gang may have told the controller why
                with contextlib.suppress(ray.exceptions.GetTimeoutError):
                    self._get(ref, name, timeout_s=1.0)
        ending = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise TrainerError(f"the trainer ended with {ending}: {self._trainer_cause()}")

    def _trainer_cause(self) -> str:
        path = self.plan.run.logs / "trainer.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        lines = [line.strip() for line in lines if line.strip()]
        causes = [line for line in lines if re.match(r"(\[rank\d+\]: )?(\w+\.)*\w+Error: ", line)]
        return (causes or lines or [f"nothing in {path}"])[-1]

    def _measure(self) -> dict[str, float]:
        """Engines alone, after training; and the same while training, from the metrics."""
        rows = read_rows(self.plan.run.metrics)
        rates = [r["perf/rollout_tokens_per_s"] for r in rows if "perf/rollout_tokens_per_s" in r]
        numbers = {}
        if rates:
            numbers["engine tokens/s while training"] = sum(rates) / len(rates)
        seconds = self.plan.config.observe.engine_alone_s
        if seconds > 0:
            self.console.wait("engine alone, measured")
            numbers["engine tokens/s alone"] = self._get(
                self.controller.measure_engines.remote(seconds), "controller"
            )
            self.console.ready("engine alone, measured")
        return numbers

    # --- plumbing -----------------------------------------------------------------------------
    def _get(self, ref: Any, name: str, timeout_s: float | None = None) -> Any:
        """The result of a remote call; a failure becomes one of our own errors."""
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MoerlError):
                raise cause from None
            raise EngineError(f"{name}: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            raise EngineError(f"the process of {name} died") from error
        except ray.exceptions.GetTimeoutError:
            raise
        except RayError as error:
            raise EngineError(f"{name}: {error}") from error

    def _catch_signals(self) -> None:
        def stop(_signum: int, _frame: FrameType | None) -> None:
            self._interrupted = True  # an exception raised here would surface inside Ray

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)


@contextlib.contextmanager
def _only_one(run: RunDir) -> Iterator[None]:
    """Two processes never write one run directory."""
    with (run.root / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MoerlError(f"{run.root} is in use by another moerl process") from error
        yield


@contextlib.contextmanager
def _own_output(run: RunDir) -> Iterator[tuple[IO[str], IO[str]]]:
    """(stdout, stderr) for this file alone; what children and libraries print goes to a log.

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

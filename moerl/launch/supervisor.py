"""Starts the processes of one run, watches them, and starts again what dies.

The root process starts Ray (engines, scorer, controller), then the trainer gang through torchrun,
and looks at all of them twice a second.

- An engine that dies is started again beside the others; what it had finished of its requests goes
  on elsewhere, and the next publish brings it to the current version.
- A trainer that dies is started again from its newest checkpoint as a new incarnation; engines and
  finished rollouts stay, the steps after the checkpoint are trained again.
- The controller's death ends the run, as does a failure before the first step (a mistake to show)
  and `supervision.max_restarts` restarts of one process without a new step in between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from moerl.errors import EngineError, MoerlError, TrainerError
from moerl.launch.actors import ControllerActor, EngineActor, ScorerActor, place
from moerl.launch.plan import GANG, RunPlan, trainer_command, trainer_environment
from moerl.launch.prepare import next_incarnation
from moerl.launch.processes import end_descendants
from moerl.observe.console import Console
from moerl.observe.metrics import read_rows
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)

INTERRUPT = "the run was interrupted"
_POLL_S = 0.5
_GRACE_S = 2.0


class Interrupted(MoerlError):
    """Ctrl-C or SIGTERM."""


class Supervisor:
    """Starts the processes of one run and raises the first failure."""

    def __init__(self, plan: RunPlan, console: Console, scratch: Path) -> None:
        self.plan, self.console, self.scratch = plan, console, scratch
        self._trainer: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._watches: dict[Any, str] = {}  # calls that return only when their process ended
        self._starts: dict[Any, int] = {}  # engines that are being started again
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}  # restarts to come
        self._restarts: Counter[str] = Counter()  # since the last new step
        self._steps = 0  # the furthest step of this start
        self._interrupted = False

    def run(self) -> dict[str, float]:
        """Train to the end.  Returns numbers measured outside the steps.

        Raises MoerlError with the first cause that ends the run.
        """
        self._start_ray()
        self._catch_signals()
        plan = self.plan
        self.engines = [place(EngineActor, plan, i) for i in range(plan.config.engine.count)]
        self.scorer = place(ScorerActor, plan)
        self.controller = place(ControllerActor, plan, self.engines, self.scorer)
        self._endpoint = self._get(self.controller.open.remote(), "controller")
        self._watches[self.controller.watch.remote()] = "controller"
        self._start_trainer()
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

    def _start_trainer(self) -> None:
        self.console.wait("trainer")
        self.close()
        self._log = (self.plan.run.logs / "trainer.log").open("ab")
        self._trainer = subprocess.Popen(
            trainer_command(self.plan, self._endpoint),
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
            self._look_at_trainer()  # before the first step its end is the run's
        for index, engine in enumerate(self.engines):
            self._watches[engine.watch.remote()] = f"engine {index}"
        self._get(self.controller.engines_started.remote(), "controller")

    def _write_pids(self) -> None:
        """Who is who, for a person and for the tests that end one of them."""
        pids = {"root": os.getpid(), "controller": self._pid(self.controller)}
        for index, engine in enumerate(self.engines):
            if index in self._starts.values() or f"engine {index}" in self._due:
                continue  # not there now
            status = self._get(engine.status.remote(), f"engine {index}")
            pids[f"engine-{index}"] = status.pid
            pids[f"engine-{index}-host"] = self._pid(engine)
        if self._trainer is not None:
            pids["trainer"] = self._trainer.pid
        (self.plan.run.root / "pids.json").write_text(json.dumps(pids))

    def _pid(self, actor: Any) -> int:
        return self._get(actor.pid.remote(), "an actor")

    # --- watch --------------------------------------------------------------------------------
    def _watch_until_trained(self) -> None:
        trained = False
        while not trained:
            self._look_at_watches(timeout_s=_POLL_S)
            self._look_at_starts()
            trained = self._look_at_trainer()
            self._restart_what_is_due()
            status, rows = self._get(self.controller.poll.remote(), "controller", timeout_s=30.0)
            self.console.status(status)
            for row in rows:
                self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        """A new step: the trainer is up, and earlier deaths are forgiven."""
        self.console.ready("trainer")
        self.console.step(row)
        if row["step"] >= self._steps:
            self._steps = row["step"] + 1
            self._restarts.clear()

    def _look_at_watches(self, timeout_s: float) -> None:
        """Raises the failure of the first process that ended and is not started again."""
        ready, _ = ray.wait(list(self._watches), timeout=timeout_s)
        for ref in ready:
            name = self._watches.pop(ref)
            try:
                self._get(ref, name)
                raise EngineError(f"{name} ended without a cause")
            except EngineError as error:
                if not name.startswith("engine "):
                    raise
                self._engine_died(int(name.removeprefix("engine ")), error)

    def _look_at_starts(self) -> None:
        """Engines that are up again join; those that failed to start are tried again."""
        ready, _ = ray.wait(list(self._starts), timeout=0) if self._starts else ([], [])
        for ref in ready:
            index = self._starts.pop(ref)
            try:
                self._get(ref, f"engine {index}")
            except EngineError as error:
                self._engine_died(index, error)
                continue
            engine = self.engines[index]
            self._watches[engine.watch.remote()] = f"engine {index}"
            self._get(self.controller.engine_back.remote(index, engine), "controller")
            self.console.ready(f"engine {index}")
            self._write_pids()

    def _engine_died(self, index: int, error: EngineError) -> None:
        self._schedule(f"engine {index}", error, lambda: self._start_engine_again(index))
        self._get(self.controller.engine_lost.remote(index), "controller")
        if isinstance(error.__cause__, RayActorError):  # the host itself, not only its server
            self.engines[index] = place(EngineActor, self.plan, index)

    def _start_engine_again(self, index: int) -> None:
        self.console.wait(f"engine {index}")
        self._starts[self.engines[index].start.remote(PolicyVersion(0, 0))] = index

    def _look_at_trainer(self) -> bool:
        """True when the gang ended well; raises TrainerError when its end is the run's.

        Every loop that waits comes by here, so an interrupt is noticed here too.
        """
        if self._interrupted:
            raise Interrupted(INTERRUPT)
        if self._trainer is None:
            return False  # its restart is due soon
        code = self._trainer.poll()
        if code is None or code == 0:
            return code == 0
        for ref, name in self._watches.items():
            if name == "controller":  # the gang may have told the controller why
                with contextlib.suppress(ray.exceptions.GetTimeoutError):
                    self._get(ref, name, timeout_s=1.0)
        ending = f"signal {-code}" if code < 0 else f"exit status {code}"
        cause = f"the trainer ended with {ending}: {self._trainer_cause()}"
        self._schedule("trainer", TrainerError(cause), self._start_trainer_again)
        self._trainer = None
        return False

    def _start_trainer_again(self) -> None:
        end_descendants(_GRACE_S, mark=(GANG, str(self.plan.incarnation)))
        found = self.plan.run.latest_checkpoint()
        self.plan = replace(
            self.plan,
            incarnation=next_incarnation(self.plan.run, resume=True),
            checkpoint=found[1] if found else None,
        )
        self._start_trainer()
        self._write_pids()

    def _schedule(self, name: str, error: MoerlError, restart: Callable[[], None]) -> None:
        """Start `name` again after a pause, or raise `error` when that is not allowed any more."""
        supervision = self.plan.config.supervision
        if self._steps == 0 or self._restarts[name] >= supervision.max_restarts:
            raise error
        self._restarts[name] += 1
        pause_s = supervision.backoff_s * 2 ** (self._restarts[name] - 1)
        self._due[name] = (time.monotonic() + pause_s, restart)
        log.error("%s died, restart %d: %s", name, self._restarts[name], error)
        self.console.event(
            f"{name} died, restart {self._restarts[name]} of {supervision.max_restarts} "
            f"in {pause_s:g} s: {str(error).splitlines()[0]}"
        )

    def _restart_what_is_due(self) -> None:
        for name, (when, restart) in list(self._due.items()):
            if time.monotonic() >= when:
                del self._due[name]
                restart()

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

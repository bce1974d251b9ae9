"""Starts the processes of one run, watches them, and restarts a process that dies.

The root process starts Ray (engines, scorer, controller), then the trainer through torchrun, and
checks all of them twice a second.  Its loop never waits for a single process: it sends
calls to actors and handles their answers when they arrive (`RemoteCalls`).

- Engine: restarted; its unfinished requests continue on other engines, and the next publish updates
  it to the current version. An engine that keeps dying is excluded (`Restarts`). Engines join and
  leave on request (`Membership`).
- Trainer: restarted from its newest checkpoint, or before the first one from the first weights, as
  a new incarnation; engines and finished rollouts stay, the steps after it are trained again.
- Controller: restarted at its endpoint from its journal; trainer and engines stay, requests are
  repeated.
- Reference ranks: restarted; they have no state.
- Scorer: Ray restarts it and repeats its pending calls; it has no state.
- Timeouts: the log names the process, the pending call and its thread stacks, then the process is
  ended and so restarted: controller and engine hosts after `supervision.answer_timeout_s`, the
  trainer after two `trainer.step_timeout_s` without a step (its stacks are logged after one).
- Ray's own daemons hold the state of all actors: when one dies all processes end, and on one
  machine the command then resumes the run, once.
- A failure before the first step ends the run, because it is likely a configuration error; so do
  `supervision.max_restarts` restarts of one process without a new step in between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from moerl.config.clusters import takes_turns
from moerl.controller.controller import Controller
from moerl.core.errors import DaemonError, MoerlError
from moerl.core.types import PolicyVersion
from moerl.launch.nodes.lease import LeaseKeeper
from moerl.launch.nodes.ray_nodes import RayDaemons, start_ray
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.actors import RayActors
from moerl.launch.supervision.controller_supervisor import ControllerSupervisor, Polled
from moerl.launch.supervision.engine_supervisor import EngineSupervisor
from moerl.launch.supervision.live_report import LiveReport, start_nice
from moerl.launch.supervision.ray_proxy import CallTimeout
from moerl.launch.supervision.restarts import Restarts
from moerl.launch.supervision.supervisor_context import (
    POLL_S,
    HangReports,
    RemoteCalls,
    SupervisorContext,
)
from moerl.launch.supervision.trainer_supervisor import TrainerSupervisor
from moerl.observe.console import Console
from moerl.observe.metrics import newest_row, read_rows
from moerl.runtime.beside import LineWriter
from moerl.runtime.process_tree import Orphans, SignalWatch
from moerl.runtime.run_dir import write_pids
from moerl.runtime.run_lock import State
from moerl.runtime.trace import Tracer


class Supervisor:
    """Starts the processes of one run and raises the first failure."""

    def __init__(
        self,
        run_context: RunContext,
        console: Console,
        scratch: Path,
        signals: SignalWatch,
        actors: RayActors | None = None,
        clock: Callable[[], float] = time.monotonic,
        check: Callable[[], None] = lambda: None,
        note: Callable[[State], None] = lambda _: None,
    ) -> None:
        """Start nothing yet.

        actors: None = Ray's.  clock: monotonic seconds.  check: raises errors that must end the
        run.  note: publishes the state of the run.
        """
        self._scratch, self._signals, self._clock = scratch, signals, clock
        self._check, self._note = check, note
        self._context = _context(run_context, console, actors or RayActors(), clock)
        lease_s = run_context.config.supervision.lease_s
        self._lease = LeaseKeeper(run_context.run.endpoints.lease, lease_s, clock)
        self.controller = ControllerSupervisor(
            self._context, self._place_controller, lambda: self.engines.members.lost()
        )
        self.engines = EngineSupervisor(self._context, run_context, self.controller)
        self.trainer = TrainerSupervisor(self._context, run_context, self.controller)
        self._report = LiveReport(self._context, start_nice)
        self._daemons = RayDaemons()
        self._orphans = Orphans()
        self._scorer: Any = None
        self._next_scorer_pid = 0.0  # clock seconds; Ray may restart it at any time
        self._written_pids: dict[str, int] = {}

    @property
    def run_context(self) -> RunContext:
        """Of the newest trainer."""
        return self.trainer.run_context

    def run(self) -> dict[str, float]:
        """Train to the end.  Returns numbers measured outside the steps.

        Raises MoerlError with the first cause that ends the run.
        """
        self._start_ray()
        self._signals.install()
        self._place()
        self._start()
        self._note("training")
        self._loop(self.trainer.is_done, self._watch_run)
        self.trainer.show_last_rows()
        self._finish_metrics()
        return self._measure()

    def evaluate(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Evaluate the model folder: engines, scorer and controller, no trainer.

        Returns as `Controller.evaluate`.  Raises MoerlError with the first cause that ends it.
        """
        found: list[tuple[dict[str, float], list[dict[str, Any]]]] = []
        self._start_ray()
        self._signals.install()
        self._place()
        self._start(trains=False)
        self._context.console.wait("answers")
        self.controller.ask(found.append, _raise, Controller.evaluate)
        self._loop(lambda: bool(found), self._watch_evaluation)
        self._context.calls.drop()  # it has succeeded: a death is no failure now
        self._context.console.ready("answers")
        return found[0]

    # --- start ----------------------------------------------------------------------------------
    def _start_ray(self) -> None:
        self._context.console.wait("ray")
        if not self._context.is_local:
            self._lease.renew()
        start_ray(self._context.config, self._context.run, self._scratch)
        self._daemons.find()
        self._context.console.ready("ray")

    def _place(self) -> None:
        """Engine hosts and scorer, which the controller is given handles of."""
        self.engines.members.place_all()
        self._scorer = self._context.actors.scorer(self.run_context)

    def _start(self, *, trains: bool = True) -> None:
        """Controller, trainer and engines, until all engines are up."""
        self.controller.start()
        self._loop(lambda: self.controller.is_up, self._watch_processes)
        turns = takes_turns(self._context.config.cluster)
        if trains and not turns:
            self.trainer.start()
        self.engines.start_all()
        self._loop(lambda: self.engines.are_up, self._watch_processes)
        self.controller.tell(Controller.engines_started)
        if trains and turns:  # it needs memory in which the engines start
            self.trainer.start()
        self.trainer.restart_clock()

    def _place_controller(self) -> Any:
        members = self.engines.members
        engines = members.present
        sizes = {index: members.sizes[index] for index in engines}
        return self._context.actors.controller(
            self.run_context, engines, sizes, self._scorer, members.changed
        )

    # --- the loop -------------------------------------------------------------------------------
    def _loop(self, is_over: Callable[[], bool], watch: Callable[[], None]) -> None:
        """Handle answers and signals, then `watch`, until it is over."""
        while not is_over():
            self._context.calls.poll(POLL_S)
            self._signals.check()
            if not self._context.is_local:
                self._lease.renew()
            watch()

    def _watch_processes(self) -> None:
        """Watch the processes; during the start a failure ends the run."""
        if cause := self._daemons.death():
            raise DaemonError(cause)
        self._check()
        self.trainer.poll_ranks()
        self._ping_scorer()
        self.engines.ping_hosts()
        self._context.hangs.act()
        self._orphans.collect()
        self._write_pids()

    def _watch_run(self) -> None:
        self._watch_processes()
        self.engines.members.poll()
        self._context.restarts.run_due()
        self.controller.poll(self.trainer.hear)
        self.trainer.check_clock()
        self._report.poll(self._context.restarts.has_steps)

    def _watch_evaluation(self) -> None:
        def hear(polled: Polled) -> None:
            for notice in polled[-1]:
                self._context.console.event(notice)

        self._watch_processes()
        self.controller.poll(hear)

    def _ping_scorer(self) -> None:
        """For its pid, and whether it answers at all."""
        now = self._clock()
        if now >= self._next_scorer_pid:
            self._next_scorer_pid = now + self._context.ping_s
            self._context.ask_pid("scorer", self._scorer, self._end_hung_scorer)

    def _end_hung_scorer(self, error: MoerlError) -> None:
        """End a scorer that does not answer: Ray starts it again and repeats its calls."""
        if not isinstance(error, CallTimeout):
            return
        pid = self._context.pids.pop("scorer", None)  # unknown until it answers again
        if pid is not None:
            self._context.say("the scorer does not answer: it is restarted")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _write_pids(self) -> None:
        """Write pids.json when it changed, for users and for tests that end a process."""
        pids = self._context.pids | self.trainer.pids()
        if pids == self._written_pids:
            return
        self._written_pids = pids
        write_pids(self._context.run, pids)

    # --- the end --------------------------------------------------------------------------------
    def _finish_metrics(self) -> None:
        """Let the mirrors get the last rows; a controller that dies now leaves them behind."""
        self._context.calls.drop()  # the run has succeeded: a death is no failure now
        if not self.controller.is_up:
            return
        over: list[object] = []

        def told(notices: list[str]) -> None:
            over.append(notices)
            for notice in notices:
                self._context.note(notice)

        self.controller.finish(told, over.append)
        self._loop(lambda: bool(over), lambda: None)

    def _measure(self) -> dict[str, float]:
        """Engine tokens/s while training, from the metrics, and alone, measured after training."""
        rows = read_rows(self._context.run.metrics)
        rates = [r["perf/rollout_tokens_per_s"] for r in rows if "perf/rollout_tokens_per_s" in r]
        numbers = {}
        if rates:
            numbers["engine tokens/s while training"] = sum(rates) / len(rates)
        seconds = self._context.config.observe.engine_alone_s
        if seconds > 0 and self.controller.is_up:
            numbers |= self._measure_alone(seconds)
        return numbers

    def _measure_alone(self, seconds: float) -> dict[str, float]:
        self._context.console.wait("speed of the idle engine")
        rates: list[float] = []
        failures: list[MoerlError] = []
        self.controller.measure_engines(seconds, rates.append, failures.append)
        self._loop(lambda: bool(rates or failures), lambda: None)
        for error in failures:
            self._context.say(f"no measurement of engine tokens/s alone: {error}")
        self._context.console.ready("speed of the idle engine")
        return {"engine tokens/s alone": rates[0]} if rates else {}


def _raise(error: MoerlError) -> NoReturn:
    raise error


def _context(
    run_context: RunContext, console: Console, actors: RayActors, clock: Callable[[], float]
) -> SupervisorContext:
    tracer = Tracer(run_context.run.trace, "supervisor", tell=console.event)
    return SupervisorContext(
        config=run_context.config,
        run=run_context.run,
        console=console,
        actors=actors,
        clock=clock,
        calls=RemoteCalls(actors, clock),
        restarts=Restarts(
            run_context.config.supervision,
            console,
            tracer,
            clock,
            partial(_steps_made, run_context),
        ),
        hangs=HangReports(console, run_context.run.logs),
        pids={"root": os.getpid()},
        notices=LineWriter(run_context.run.notices, console.event),
    )


def _steps_made(run_context: RunContext) -> int:
    """Steps of the run whose rows this start has written; an older trainer's do not count."""
    row = newest_row(run_context.run.metrics)
    if row is None or PolicyVersion.parse(row["version"]).incarnation < run_context.incarnation:
        return 0
    return int(row["step"]) + 1

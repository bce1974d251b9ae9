"""Starts the processes of one run, watches them, and restarts what dies.

The root process starts Ray (engines, scorer, controller), then the trainer through torchrun, and
checks all of them twice a second.  Its loop never waits for one of them: calls to actors are sent,
and their answers handled when they arrive (`remote_calls`).

- Engine: restarted; its unfinished requests continue on other engines, and the next publish updates
  it to the current version. One that keeps dying is excluded (`restart_policy`). Engines join and
  leave on request (`membership`).
- Trainer: restarted from its newest checkpoint as a new incarnation; engines and finished rollouts
  stay, the steps after the checkpoint are trained again.
- Controller: restarted at its endpoint from its journal; trainer and engines stay, requests are
  repeated.
- Reference ranks: restarted; they have no state.
- Scorer: Ray restarts it and repeats its pending calls; it has no state.
- Timeouts: the log names the process, the pending call and its thread stacks, then the process is
  ended and so restarted: controller and engine hosts after `supervision.answer_timeout_s`, the
  trainer after two `trainer.step_timeout_s` without a step (its stacks are logged after one).
- Ray's own daemons hold the state of all actors: the run ends when one of them dies.
- A failure before the first step ends the run, because it is likely a configuration error; so do
  `supervision.max_restarts` restarts of one process without a new step in between.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from moerl.config.clusters import is_local
from moerl.errors import EngineError, MoerlError, TrainerError
from moerl.launch.nodes.lease import LeaseKeeper
from moerl.launch.nodes.process_tree import Orphans, end_descendants, serving
from moerl.launch.nodes.ray_nodes import RayDaemons, start_ray
from moerl.launch.run_context import TRAINER_JOB, RunContext
from moerl.launch.supervision.actors import RayActors
from moerl.launch.supervision.membership import Membership
from moerl.launch.supervision.ref_model_ranks import RefModelRanks
from moerl.launch.supervision.remote_calls import Actors, Late, RemoteCalls
from moerl.launch.supervision.restart_policy import RestartPolicy
from moerl.launch.supervision.signal_watch import SignalWatch
from moerl.launch.supervision.trainer_ranks import TrainerRanks
from moerl.observe.console import Console
from moerl.observe.metrics import read_rows
from moerl.run_dir import next_incarnation, write_pids
from moerl.stack_dump import stacks
from moerl.trace import Tracer
from moerl.trainer.checkpoints.checkpoint_files import newest_checkpoint
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)

_POLL_S = 0.5
_GRACE_S = 0.5  # for ranks of a trainer that died
_START_S = 300.0  # seconds an actor of this machine may take to start
_PINGS = 6  # questions to an engine host per supervision.answer_timeout_s
_CAUSE_S = 1.0  # after a trainer's death: the controller may know why


class Supervisor:
    """Starts the processes of one run and raises the first failure."""

    def __init__(
        self,
        plan: RunContext,
        console: Console,
        scratch: Path,
        signals: SignalWatch,
        actors: Actors | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """actors: None = Ray's; clock: monotonic seconds."""
        config = plan.config
        self.plan, self.console, self.scratch = plan, console, scratch
        self._actors: Actors = actors or RayActors()
        self._signals, self._clock = signals, clock
        self._calls = RemoteCalls(self._actors, clock)
        self._lease = LeaseKeeper(plan.run.endpoints.lease, config.supervision.lease_s, clock)
        self._policy = RestartPolicy(config.supervision, clock)
        self._answer_s = config.supervision.answer_timeout_s
        self._trainer = TrainerRanks(plan.run.logs, config.trainer.step_timeout_s)
        self._ref_models: RefModelRanks | None = None
        self._daemons = RayDaemons()
        self._orphans = Orphans()
        self._tracer = Tracer(plan.run.trace, "supervisor")
        self._stacks = StackDumps()
        self._endpoint = ""  # of the controller; known when it has opened
        self._controller_is_up = False
        self._untold: list[Callable[[Any], Any]] | None = None  # for a controller that is opening
        self._next_poll = 0.0  # clock seconds; inf while it is asked
        self._next_pings: dict[int, float] = {}  # the same per engine host
        self._next_scorer_pid = 0.0  # the same; Ray may restart it at any time
        self._starting: set[int] = set()  # engines
        self._engines_are_up = False  # all of the first start
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}  # (clock seconds, restart)
        self._steps = 0  # last step of this start
        self._shown = max((row["step"] for row in read_rows(plan.run.metrics)), default=-1)
        self._trainer_ended_at: float | None = None  # clock seconds; its death is not counted yet
        self._pids = {"root": os.getpid()}
        self._written_pids: dict[str, int] = {}
        self._down: dict[str, float] = {}  # unix time when a death was seen, per process
        self._restarted: dict[str, float] = {}  # unix time when its restart began

    def run(self) -> dict[str, float]:
        """Train to the end.  Returns numbers measured outside the steps.

        Raises MoerlError with the first cause that ends the run.
        """
        self._start_ray()
        self._signals.install()
        plan = self.plan
        self.members = Membership(plan, self, self._actors)
        self.scorer = self._actors.scorer(plan)
        self._start_controller()
        self._loop(lambda: self._controller_is_up, self._watch_processes)
        self._start_trainer()
        if plan.config.ref_models.placement == "separate" and is_local(plan.config.cluster):
            self._ref_models = RefModelRanks(plan, self._endpoint)
            self._start_ref_models()
        for index in self.members.actors:
            self.start_engine(index)
        self._loop(lambda: self._engines_are_up, self._watch_processes)
        self._loop(self._is_trained, self._watch_run)
        self._show_last_rows()
        return self._measure()

    # --- the loop -------------------------------------------------------------------------------
    def _loop(self, is_over: Callable[[], bool], watch: Callable[[], None]) -> None:
        """Handle answers and signals, then `watch`, until it is over."""
        while not is_over():
            self._calls.poll(_POLL_S)
            self._signals.check()
            if not is_local(self.plan.config.cluster):
                self._lease.renew()
            watch()

    def _watch_processes(self) -> None:
        """What is watched from the start on: a failure then ends the run."""
        if cause := self._daemons.death():
            raise EngineError(cause)
        self._look_at_trainer()
        self._ping_hosts()
        self._stacks.act()
        self._orphans.collect()
        self._write_pids()

    def _watch_run(self) -> None:
        self._watch_processes()
        self.members.poll()
        self._restart_what_is_due()
        self._poll_controller()
        self._look_at_the_clock()

    # --- start --------------------------------------------------------------------------------
    def _start_ray(self) -> None:
        self.console.wait("ray")
        if not is_local(self.plan.config.cluster):
            self._lease.renew()
        start_ray(self.plan.config, self.plan.run, self.scratch)
        self._daemons.find()
        self.console.ready("ray")

    def _start_trainer(self) -> None:
        self.console.wait("trainer")
        self._trainer.start(self.plan, self._endpoint)

    def _start_ref_models(self) -> None:
        assert self._ref_models is not None, "there are no reference ranks"
        self.console.wait("ref_models")
        self._ref_models.start()

    # --- engines --------------------------------------------------------------------------------
    def start_engine(self, index: int) -> None:
        name = f"engine {index}"
        self.console.wait(name)
        self._starting.add(index)
        self._calls.send(
            self.members.actors[index].ask.remote("start", PolicyVersion(0, 0)),
            name,
            lambda status: self._engine_up(index, status.pid),
            lambda error: self._start_failed(index, error),
        )

    def _engine_up(self, index: int, pid: int) -> None:
        name = f"engine {index}"
        self._starting.discard(index)
        self._pids[f"engine-{index}"] = pid
        watch = self.members.actors[index].ask.remote("watch")
        self._calls.send(
            watch,
            name,
            lambda _: self._engine_died(index, EngineError(f"{name} ended without a cause")),
            lambda error: self._engine_died(index, error),
        )
        if not self._engines_are_up:
            self.console.ready(name)
            self._are_all_up()
            return
        if not self.members.joined(index):
            engine = self.members.actors[index]
            self.tell(lambda controller: controller.engine_back.remote(index, engine))
        self._is_back(name)

    def _are_all_up(self) -> None:
        """At the first start: let the trainer begin when the last engine is up."""
        if not self._starting:
            self._engines_are_up = True
            self.tell(lambda controller: controller.engines_started.remote())
            self._trainer.restart_clock()

    def _start_failed(self, index: int, error: MoerlError) -> None:
        """A ConfigError too: an engine that joins may have a size that is not usable."""
        self._starting.discard(index)
        if not self.members.gave_up(index, error):
            self._engine_died(index, error)

    def _engine_died(self, index: int, error: MoerlError) -> None:
        name = f"engine {index}"
        self._pids.pop(f"engine-{index}", None)
        host_died = isinstance(error.__cause__, RayActorError)
        if self.members.may_restart(index):
            if why_not := self._died(name, error):
                self._exclude(index, why_not, error)
            else:
                self._schedule(name, error, lambda: self.start_engine(index))
        self.tell(lambda controller: controller.engine_lost.remote(index))
        if not host_died:
            return
        self._forget_host(index)
        if self.members.may_restart(index):
            self.members.replace(index)

    def _exclude(self, index: int, why: str, error: MoerlError) -> None:
        """Continue without an engine that keeps dying.  Raises EngineError when too few remain."""
        if not self._policy.restarts_at_all:
            raise error
        self.members.exclude(index)
        num_left, quorum = len(self.members.remaining), self.plan.config.sync.quorum
        what = f"engine {index} is excluded: {why}; {num_left} engine(s) are left"
        self.say(f"{what}: {str(error).splitlines()[0]}")
        if num_left < quorum:
            raise EngineError(f"{what}, sync.quorum = {quorum}: {error}") from error
        self.console.give_up(f"engine {index}")
        self.tell(lambda controller: controller.engine_excluded.remote(index))

    def forget_engine(self, index: int) -> None:
        """Stop watching and restarting a leaving engine."""
        name = f"engine {index}"
        self._calls.drop(name)
        self._starting.discard(index)
        self._due.pop(name, None)
        self._down.pop(name, None)
        self._policy.forget(name)
        self._pids.pop(f"engine-{index}", None)
        self._forget_host(index)
        self.console.give_up(name)

    def is_down(self, index: int) -> bool:
        return index in self._starting or f"engine {index}" in self._due

    # --- engine hosts ---------------------------------------------------------------------------
    def _ping_hosts(self) -> None:
        """Ask every host for its pid: one that does not answer in time hangs.  The scorer too, for
        its pid: waiting for a score has a deadline.

        A new host is given the time of a start on this machine; on a cluster it may wait for a node
        with room.
        """
        now = self._clock()
        if now >= self._next_scorer_pid:
            self._next_scorer_pid = now + self._answer_s / _PINGS
            self._ask_pid("scorer", self.scorer)
        for index, actor in self.members.actors.items():
            if now < self._next_pings.get(index, 0.0):
                continue
            self._next_pings[index] = float("inf")
            is_new = f"engine-{index}-host" not in self._pids
            first_s = _START_S if is_local(self.plan.config.cluster) else float("inf")
            self._calls.send(
                actor.pid.remote(),
                f"engine {index}",
                partial(self._host_answered, index),
                partial(self._host_failed, index, actor),
                first_s if is_new else self._answer_s,
            )

    def _host_answered(self, index: int, pid: int) -> None:
        self._pids[f"engine-{index}-host"] = pid
        self._next_pings[index] = self._clock() + self._answer_s / _PINGS

    def _host_failed(self, index: int, actor: Any, error: MoerlError) -> None:
        if not isinstance(error, Late):  # its watch or its start reports a death
            self._next_pings[index] = self._clock() + self._answer_s / _PINGS
            return
        name, log_file = f"engine-{index}-host", self.plan.run.logs / f"engine-{index}.host.log"
        pid = self._pids.get(name) if is_local(self.plan.config.cluster) else None
        self._stuck(
            f"the host of engine {index}",
            str(error),
            [(pid, log_file)] if pid else [],
            lambda: self._actors.kill(actor),
        )

    def _forget_host(self, index: int) -> None:
        """It died: the next one is asked as soon as it is there."""
        self._pids.pop(f"engine-{index}-host", None)
        self._next_pings.pop(index, None)

    # --- controller -----------------------------------------------------------------------------
    def _start_controller(self) -> None:
        """Start it, at its old endpoint and from the journal if there was one before."""
        is_new = not self._endpoint
        if not is_new:
            self.console.wait("controller")
        engines, lost = self.members.present, self.members.lost() if not is_new else []
        sizes = {index: self.members.sizes[index] for index in engines}
        self.controller = self._actors.controller(
            self.plan, engines, sizes, self.scorer, self.members.changed
        )
        self._untold = []
        asked = (self._endpoint, lost) if self._endpoint else ()
        self._calls.send(
            self.controller.open.remote(*asked),
            "controller",
            self._controller_up,
            self._open_failed,
            _START_S,
        )

    def _controller_up(self, endpoint: str) -> None:
        was_restarted, self._endpoint = bool(self._endpoint), endpoint
        self._controller_is_up, self._next_poll = True, 0.0
        untold, self._untold = self._untold or [], None
        self._calls.send(
            self.controller.watch.remote(),
            "controller",
            lambda _: self._controller_died(EngineError("controller ended without a cause")),
            self._controller_died,
        )
        self._ask_pid("controller", self.controller)
        for call in untold:
            self.tell(call)
        if was_restarted:
            self.tell(lambda controller: controller.engines_started.remote())
            self._is_back("controller")

    def _open_failed(self, error: MoerlError) -> None:
        self._actors.kill(self.controller)
        self._untold = None
        if not isinstance(error, EngineError):
            raise error
        self._restart("controller", error, self._start_controller)

    def _controller_died(self, error: MoerlError) -> None:
        if not isinstance(error.__cause__, RayActorError):
            raise error  # the first failure of the run
        self._controller_is_up = False
        self._pids.pop("controller", None)
        self._restart("controller", error, self._start_controller)

    def _ask_pid(self, name: str, actor: Any) -> None:
        def note(pid: int) -> None:
            self._pids[name] = pid

        self._calls.send(actor.pid.remote(), name, note, lambda _: None, self._answer_s)

    def ask(
        self,
        call: Callable[[Any], Any],
        then: Callable[[Any], None],
        failed: Callable[[MoerlError], None],
    ) -> bool:
        """Handle an answer of the controller, however long it takes; False while it is down."""
        if self._controller_is_up:
            self._calls.send(call(self.controller), "controller", then, failed)
        return self._controller_is_up

    def tell(self, call: Callable[[Any], Any]) -> None:
        """A call to the controller.  One that is down learns the state of engines at its start."""
        if self._untold is not None:
            self._untold.append(call)
        elif self._controller_is_up:
            self._ask_in_time(call, lambda _: None)

    def _ask_in_time(self, call: Callable[[Any], Any], then: Callable[[Any], None]) -> None:
        ref = call(self.controller)
        self._calls.send(ref, "controller", then, self._call_failed, self._answer_s)

    def _call_failed(self, error: MoerlError) -> None:
        if isinstance(error, Late):
            pid, logs, actor = self._pids.get("controller"), self.plan.run.logs, self.controller
            self._stuck(
                "controller",
                str(error),
                [(pid, logs / "controller.log")] if pid else [],
                lambda: self._actors.kill(actor),  # its watch restarts it
            )
        elif not isinstance(error.__cause__, RayActorError):
            raise error  # else its watch reports it

    def _poll_controller(self) -> None:
        if self._controller_is_up and self._clock() >= self._next_poll:
            self._next_poll = float("inf")
            self._ask_in_time(lambda controller: controller.poll.remote(), self._polled)

    def _polled(self, answer: tuple[dict[str, float], list[dict[str, Any]], str]) -> None:
        status, rows, failure = answer
        self._next_poll = self._clock() + _POLL_S
        self.console.status(status)
        if failure and not is_local(self.plan.config.cluster) and self._trainer.fell():
            self._fell(failure)
        if self._trainer.says_hello(int(status["trainer/incarnation"])):
            self._is_back("trainer")
        refs = self._ref_models  # a dead one has no pid; keep its last number
        if refs and refs.pid and status["ref_models/start"] == refs.starts - 1:
            self._is_back("ref_models")
        for row in rows:
            self._count(row)

    # --- steps and clocks -----------------------------------------------------------------------
    def _count(self, row: dict[str, Any]) -> None:
        """A step: the trainer is up; a new one forgives the deaths that led to it."""
        self.console.step(row)
        self._shown = row["step"]
        self._trainer.restart_clock()  # a step trained again is progress too
        if row["step"] >= self.plan.config.run.steps - 1:
            self._trainer.stop_clock()  # saving the model has no step limit
        if row["step"] >= self._steps:
            self._steps = row["step"] + 1
            self._policy.stepped()

    def _show_last_rows(self) -> None:
        """Rows since the last poll, which the trainer did not wait for."""
        for row in read_rows(self.plan.run.metrics):
            if row["step"] > self._shown:
                self._count(row)

    def _look_at_the_clock(self) -> None:
        """Log a trainer that makes no step, and end it after twice the limit."""
        if what := self._trainer.lateness():
            # on several nodes other pids belong to other machines
            is_here = is_local(self.plan.config.cluster)
            others = serving(self._pids, self.plan.run.logs) if is_here else []
            self._stuck("trainer", what, [*self._trainer.ranks(), *others])

    def _stuck(
        self,
        name: str,
        what: str,
        processes: list[tuple[int, Path]],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write the stacks of processes of this machine to the log, then act."""
        self.console.event(f"{name}: {what}; its stacks are in {self.plan.run.logs / 'root.log'}")
        self._stacks.write(f"{name}: {what}", processes, then)

    # --- trainer --------------------------------------------------------------------------------
    def _is_trained(self) -> bool:
        return self._is_success(self._trainer.exit_status())

    def _is_success(self, code: int | None) -> bool:
        """True also for a cluster's trainer that finished while it was being ended."""
        if not code or is_local(self.plan.config.cluster):
            return code == 0
        return self.plan.run.endpoints.is_done()

    def _look_at_trainer(self) -> None:
        """Restart ranks that died.  Raises TrainerError when that is not allowed."""
        if self._ref_models is not None and (error := self._ref_models.death()) is not None:
            self._restart("ref_models", error, self._start_ref_models)
        code = self._trainer.exit_status()
        if code is None or self._is_success(code):
            return
        if self._trainer_ended_at is None:
            self._trainer_ended_at = self._clock()
        if self._controller_is_up and self._clock() - self._trainer_ended_at < _CAUSE_S:
            return  # it may have sent its cause to the controller, whose watch raises it
        self._trainer_ended_at = None
        died_at = self._trainer.rank_died
        self._restart("trainer", self._trainer.bury(code), self._start_trainer_again, died_at)

    def _fell(self, cause: str) -> None:
        """Nodes restart their own ranks; this enforces max_restarts."""
        error = TrainerError(cause)
        if self._died("trainer", error):
            raise error
        self._restarted["trainer"] = time.time()
        self.console.event(f"trainer: the nodes start the trainer again: {cause.splitlines()[0]}")

    def _start_trainer_again(self) -> None:
        end_descendants(_GRACE_S, mark=(TRAINER_JOB, str(self.plan.incarnation)))
        try:
            newest = newest_checkpoint(self.plan.run)
            incarnation = next_incarnation(self.plan.run, resume=True)
        except OSError as error:  # a full disk: the trainer waits for room
            pause_s = max(1.0, self.plan.config.supervision.backoff_s)
            self._due["trainer"] = (self._clock() + pause_s, self._start_trainer_again)
            self.say(f"the trainer is not started yet, state.json cannot be written: {error}")
            return
        self.plan = replace(
            self.plan,
            incarnation=incarnation,
            checkpoint=newest,
            # a checkpoint of this start already has this layout's optimizer state
            reset_optimizer=self.plan.reset_optimizer and newest == self.plan.checkpoint,
        )
        self._start_trainer()
        if self._ref_models is not None and self._ref_models.is_through():
            self._start_ref_models()  # steps that are trained again need their scores

    # --- restarts -------------------------------------------------------------------------------
    def _restart(
        self, name: str, error: MoerlError, restart: Callable[[], None], died_at: float = 0.0
    ) -> None:
        """Restart `name` after a pause, or raise `error` when no restart is allowed.

        died_at: unix time; 0 = now.
        """
        if self._died(name, error, died_at):
            raise error
        self._schedule(name, error, restart)

    def _died(self, name: str, error: MoerlError, died_at: float = 0.0) -> str:
        """Count a death.  Returns why no restart is allowed, or ""."""
        why_not = self._policy.died(name)
        self._down.setdefault(name, died_at or time.time())
        log.error("%s died, restart %d: %s", name, self._policy.restarts[name], error)
        return why_not

    def _schedule(self, name: str, error: MoerlError, restart: Callable[[], None]) -> None:
        pause_s = self._policy.pause_s(name)
        self._due[name] = (self._clock() + pause_s, restart)
        self.console.event(
            f"{name} died, restart {self._policy.restarts[name]} of "
            f"{self.plan.config.supervision.max_restarts} in {pause_s:g} s: "
            f"{str(error).splitlines()[0]}"
        )

    def _restart_what_is_due(self) -> None:
        for name, (when, restart) in list(self._due.items()):
            if self._clock() >= when:
                del self._due[name]
                self._restarted[name] = time.time()
                restart()

    def _is_back(self, name: str) -> None:
        """Log how long a process was down, and how long its start took."""
        self.console.ready(name)
        if name not in self._down:
            return
        self._policy.is_back(name)
        died, now = self._down.pop(name), time.time()
        start_s = now - self._restarted[name]
        self._tracer.add(f"{name} down", died, now, starting_s=start_s)
        self.say(f"{name} is back after {now - died:.1f} s, its start took {start_s:.1f} s")

    def say(self, text: str) -> None:
        log.info("%s", text)
        self.console.event(text)

    def send(
        self,
        ref: Any,
        name: str,
        then: Callable[[Any], None],
        failed: Callable[[MoerlError], None],
        limit_s: float,
    ) -> None:
        self._calls.send(ref, name, then, failed, limit_s)

    # --- the end and the files ------------------------------------------------------------------
    def _measure(self) -> dict[str, float]:
        """Engine tokens/s while training, from the metrics, and alone, measured after training."""
        rows = read_rows(self.plan.run.metrics)
        rates = [r["perf/rollout_tokens_per_s"] for r in rows if "perf/rollout_tokens_per_s" in r]
        numbers = {}
        if rates:
            numbers["engine tokens/s while training"] = sum(rates) / len(rates)
        seconds = self.plan.config.observe.engine_alone_s
        if seconds > 0 and self._controller_is_up:
            numbers |= self._measure_alone(seconds)
        return numbers

    def _measure_alone(self, seconds: float) -> dict[str, float]:
        self._calls.drop()  # the run has succeeded: a death is no failure now
        self.console.wait("engine alone, measured")
        rates: list[float] = []
        failures: list[MoerlError] = []
        asked = self.controller.measure_engines.remote(seconds)
        limit_s = seconds + self._answer_s
        self._calls.send(asked, "controller", rates.append, failures.append, limit_s)
        self._loop(lambda: bool(rates or failures), lambda: None)
        for error in failures:
            self.say(f"no measurement of engine tokens/s alone: {error}")
        self.console.ready("engine alone, measured")
        return {"engine tokens/s alone": rates[0]} if rates else {}

    def _write_pids(self) -> None:
        """Write pids.json when it changed, for users and for tests that end a process."""
        jobs = {
            "trainer": self._trainer.pid,
            "ref_models": self._ref_models.pid if self._ref_models else None,
        }
        pids = self._pids | {name: pid for name, pid in jobs.items() if pid is not None}
        if pids == self._written_pids:
            return
        self._written_pids = pids
        write_pids(self.plan.run, pids)


class StackDumps:
    """Writes stacks to the log in a thread: processes take half a second each."""

    def __init__(self) -> None:
        self._written: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def write(self, what: str, processes: list[tuple[int, Path]], then: Callable[[], None]) -> None:
        """then: called by `act` when they are written."""

        def work() -> None:
            try:
                log.error("%s\n%s", what, stacks(processes))
            finally:
                self._written.put(then)

        threading.Thread(target=work, daemon=True, name="stacks").start()

    def act(self) -> None:
        while not self._written.empty():
            self._written.get()()

"""Starts the processes of one run, watches them, and restarts what dies.

The root process starts Ray (engines, scorer, controller), then the trainer through torchrun, and
checks all of them twice a second.

- Engine: restarted; its unfinished requests continue on other engines, and the next publish updates
  it to the current version. Engines join and leave on request (`membership`).
- Trainer: restarted from its newest checkpoint as a new incarnation; engines and finished rollouts
  stay, the steps after the checkpoint are trained again.
- Controller: restarted at its endpoint from its journal; trainer and engines stay, requests are
  repeated.
- Reference ranks: restarted; they have no state.
- Scorer: Ray restarts it and repeats its pending calls; it has no state.
- Timeouts: the log names the process, the pending call and its thread stacks, then the process is
  ended and so restarted: the controller after a minute, the trainer after two
  `trainer.step_timeout_s` without a step (its stacks are logged after one).
- A failure before the first step ends the run, because it is likely a configuration error; so do
  `supervision.max_restarts` restarts of one process without a new step in between.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from moerl.config.clusters import is_local
from moerl.errors import EngineError, MoerlError, TrainerError
from moerl.launch.nodes.process_tree import Orphans, end_descendants, serving
from moerl.launch.nodes.ray_nodes import start_ray
from moerl.launch.run_context import TRAINER_JOB, RunContext
from moerl.launch.supervision.actors import ControllerActor, ScorerActor, place
from moerl.launch.supervision.membership import Membership
from moerl.launch.supervision.ray_proxy import own_errors
from moerl.launch.supervision.ref_model_ranks import RefModelRanks
from moerl.launch.supervision.trainer_ranks import TrainerRanks
from moerl.observe.console import Console
from moerl.observe.metrics import read_rows
from moerl.run_dir import next_incarnation, write_pids
from moerl.stack_dump import stacks
from moerl.trace import Tracer
from moerl.trainer.checkpoints.checkpoint_files import newest_checkpoint
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)

INTERRUPT = "the run was interrupted"
_POLL_S = 0.5
_GRACE_S = 2.0
_ANSWER_S = 60.0  # seconds an actor may take to answer
_START_S = 300.0  # seconds an actor may take to start


class Interrupted(MoerlError):
    """Ctrl-C or SIGTERM."""


class Late(EngineError):
    """An actor did not answer in time."""


class Supervisor:
    """Starts the processes of one run and raises the first failure."""

    def __init__(self, plan: RunContext, console: Console, scratch: Path) -> None:
        self.plan, self.console, self.scratch = plan, console, scratch
        self._trainer = TrainerRanks(plan.run.logs, plan.config.trainer.step_timeout_s)
        self._ref_models: RefModelRanks | None = None
        self._watches: dict[Any, str] = {}  # calls that return only when their process ended
        self._starts: dict[Any, int] = {}  # engines that are being restarted
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}  # (monotonic s, restart)
        self._restarts: Counter[str] = Counter()  # since the last new step
        self._steps = 0  # last step of this start
        self._interrupted = False
        self._controller_is_up = True
        self._pids: dict[str, int] = {}
        self._orphans = Orphans()
        self._down: dict[str, float] = {}  # unix time when a death was seen, per process
        self._restarted: dict[str, float] = {}  # unix time when its restart began
        self._tracer = Tracer(plan.run.trace, "supervisor")

    def run(self) -> dict[str, float]:
        """Train to the end.  Returns numbers measured outside the steps.

        Raises MoerlError with the first cause that ends the run.
        """
        self._start_ray()
        self._catch_signals()
        plan = self.plan
        self.members = Membership(plan, self)
        restarts = -1 if plan.config.supervision.max_restarts else 0
        self.scorer = place(ScorerActor, plan, restarts=restarts)
        engines = self.members.present
        self.controller = place(ControllerActor, plan, engines, self.members.sizes, self.scorer)
        self._endpoint = self.get(self.controller.open.remote(), "controller", _START_S)
        self._watches[self.controller.watch.remote()] = "controller"
        self._start_trainer()
        if plan.config.ref_models.placement == "separate" and is_local(plan.config.cluster):
            self._ref_models = RefModelRanks(plan, self._endpoint)
            self._start_ref_models()
        self._start_engines()
        self.write_pids()
        self._watch_until_trained()
        return self._measure()

    # --- start --------------------------------------------------------------------------------
    def _start_ray(self) -> None:
        self.console.wait("ray")
        start_ray(self.plan.config, self.plan.run, self.scratch)
        self.console.ready("ray")

    def _start_trainer(self) -> None:
        self.console.wait("trainer")
        self._trainer.start(self.plan, self._endpoint)

    def _start_ref_models(self) -> None:
        assert self._ref_models is not None, "there are no reference ranks"
        self.console.wait("ref_models")
        self._ref_models.start()
        if self._ref_models.starts > 1:
            self.write_pids()

    def _start_engines(self) -> None:
        starts: dict[Any, str] = {}
        for index, engine in self.members.actors.items():
            self.console.wait(f"engine {index}")
            starts[engine.ask.remote("start", PolicyVersion(0, 0))] = f"engine {index}"
        while starts:
            ready, _ = ray.wait(list(starts), timeout=_POLL_S)
            for ref in ready:
                name = starts.pop(ref)
                self.get(ref, name)
                self.console.ready(name)
            self._look_at_watches(timeout_s=0)
            self._look_at_trainer()  # a failure before the first step ends the run
        for index, engine in self.members.actors.items():
            self._watches[engine.ask.remote("watch")] = f"engine {index}"
        self.get(self.controller.engines_started.remote(), "controller", timeout_s=_ANSWER_S)
        self._trainer.restart_clock()

    def write_pids(self) -> None:
        """Write pids.json, for users and for tests that end a process."""
        pids = {"root": os.getpid()}
        asked = {"scorer": self.scorer.pid.remote()}
        if self._controller_is_up:
            asked["controller"] = self.controller.pid.remote()
        servers = {}
        for index, engine in self.members.present.items():
            if not self.is_down(index):
                asked[f"engine-{index}-host"] = engine.pid.remote()
                servers[f"engine-{index}"] = engine.ask.remote("status")
        refs = asked | servers
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_S)
        for name, ref in refs.items():
            if ref not in ready:
                continue  # it hangs; do not wait for it twice
            with contextlib.suppress(EngineError):  # it just died
                found = self.get(ref, name, timeout_s=_ANSWER_S)
                pids[name] = found.pid if name in servers else found
        jobs = {
            "trainer": self._trainer.pid,
            "ref_models": self._ref_models and self._ref_models.pid,
        }
        pids |= {name: pid for name, pid in jobs.items() if pid is not None}
        self._pids = pids
        write_pids(self.plan.run, pids)

    # --- watch --------------------------------------------------------------------------------
    def _watch_until_trained(self) -> None:
        trained = False
        while not trained:
            self._look_at_watches(timeout_s=_POLL_S)
            self._look_at_starts()
            self.members.poll()
            trained = self._look_at_trainer()
            self._restart_what_is_due()
            self._poll_controller()
            self._look_at_the_clock()
            self._orphans.collect()

    def _poll_controller(self) -> None:
        polled = self.tell(lambda controller: controller.poll.remote())
        if polled is not None:
            status, rows, failure = polled
            self.console.status(status)
            if failure and not is_local(self.plan.config.cluster) and self._trainer.fell():
                self._fell(failure)
            if self._trainer.says_hello(int(status["trainer/incarnation"])):
                self._is_back("trainer")
            ref_models = self._ref_models  # a dead one has no pid; keep its last number
            if (
                ref_models
                and ref_models.pid
                and status["ref_models/start"] == ref_models.starts - 1
            ):
                self._is_back("ref_models")
            for row in rows:
                self._count(row)

    def ask(self, call: Callable[[ActorHandle[ControllerActor]], Any]) -> Any:
        """A pending call to the controller; None while it is down."""
        return call(self.controller) if self._controller_is_up else None

    def tell(self, call: Callable[[ActorHandle[ControllerActor]], Any]) -> Any:
        """Answer of the controller; None while it is down."""
        if not self._controller_is_up:
            return None
        try:
            return self.get(call(self.controller), "controller", timeout_s=_ANSWER_S)
        except Late as late:
            pid, logs = self._pids.get("controller"), self.plan.run.logs
            self._stuck("controller", str(late), [(pid, logs / "controller.log")] if pid else [])
            ray.kill(self.controller)  # its watch restarts it
        except EngineError as error:
            if not isinstance(error.__cause__, RayActorError):
                raise  # else its watch reports it
        return None

    def _fell(self, cause: str) -> None:
        """Nodes restart their own ranks; this enforces max_restarts."""
        self._count_restart("trainer", TrainerError(cause))
        self._restarted["trainer"] = time.time()
        self.console.event(f"trainer: the nodes start the trainer again: {cause.splitlines()[0]}")

    def _look_at_the_clock(self) -> None:
        """Log a trainer that makes no step, and end it after twice the limit."""
        if what := self._trainer.lateness():
            # on several nodes other pids belong to other machines
            others = (
                serving(self._pids, self.plan.run.logs)
                if is_local(self.plan.config.cluster)
                else []
            )
            self._stuck("trainer", what, [*self._trainer.ranks(), *others])

    def _stuck(self, name: str, what: str, processes: list[tuple[int, Path]]) -> None:
        log.error("%s: %s\n%s", name, what, stacks(processes))
        self.console.event(f"{name}: {what}; its stacks are in {self.plan.run.logs / 'root.log'}")

    def _count(self, row: dict[str, Any]) -> None:
        """A new step: the trainer is up, and restart counts are reset."""
        self.console.step(row)
        self._trainer.restart_clock()  # a step trained again is progress too
        if row["step"] >= self.plan.config.run.steps - 1:
            self._trainer.stop_clock()  # saving the model has no step limit
        if row["step"] >= self._steps:
            self._steps = row["step"] + 1
            self._restarts.clear()

    def _look_at_watches(self, timeout_s: float) -> None:
        """Raises the failure of the first ended process that may not be restarted."""
        if not self._watches:  # all watched processes are being restarted
            time.sleep(timeout_s)
            return
        ready, _ = ray.wait(list(self._watches), timeout=timeout_s)
        for ref in ready:
            name = self._watches.pop(ref)
            try:
                self.get(ref, name)
                raise EngineError(f"{name} ended without a cause")
            except EngineError as error:
                if name.startswith("engine "):
                    self._engine_died(int(name.removeprefix("engine ")), error)
                elif isinstance(error.__cause__, RayActorError):
                    self._controller_is_up = False
                    self._schedule("controller", error, self._start_controller_again)
                else:
                    raise

    def _look_at_starts(self) -> None:
        """Hand started engines to the controller; restart engines that failed to start."""
        ready, _ = ray.wait(list(self._starts), timeout=0) if self._starts else ([], [])
        for ref in ready:
            index = self._starts.pop(ref)
            try:
                self.get(ref, f"engine {index}")
            except MoerlError as error:  # a ConfigError too: a new engine may have any size
                if not self.members.gave_up(index, error):
                    self._engine_died(index, error)
                continue
            engine = self.members.actors[index]
            self._watches[engine.ask.remote("watch")] = f"engine {index}"
            if not self.members.joined(index):
                self.tell(lambda controller, i=index, e=engine: controller.engine_back.remote(i, e))
            self._is_back(f"engine {index}")
            self.write_pids()

    def _engine_died(self, index: int, error: MoerlError) -> None:
        if self.members.may_restart(index):
            self._schedule(f"engine {index}", error, lambda: self.start_engine(index))
        self.tell(lambda controller: controller.engine_lost.remote(index))
        if isinstance(error.__cause__, RayActorError) and self.members.may_restart(index):
            self.members.replace(index)  # the host itself died, not only its server

    def start_engine(self, index: int) -> None:
        self.console.wait(f"engine {index}")
        self._starts[self.members.actors[index].ask.remote("start", PolicyVersion(0, 0))] = index

    def forget_engine(self, index: int) -> None:
        """Stop watching and restarting a leaving engine."""
        name = f"engine {index}"
        self._watches = {ref: other for ref, other in self._watches.items() if other != name}
        self._starts = {ref: other for ref, other in self._starts.items() if other != index}
        self._due.pop(name, None)
        self._down.pop(name, None)
        self.console.give_up(name)

    def say(self, text: str) -> None:
        log.info("%s", text)
        self.console.event(text)

    def _start_controller_again(self) -> None:
        """Restart the controller at the same endpoint from the journal."""
        self.console.wait("controller")
        engines = self.members.present
        lost = [index for index in engines if self.is_down(index)]
        sizes = {index: self.members.sizes[index] for index in engines}
        arguments = self.plan, engines, sizes, self.scorer, self.members.changed
        self.controller = place(ControllerActor, *arguments)
        try:
            opened: Any = self.controller.open.remote(self._endpoint, lost)
            self.get(opened, "controller", timeout_s=_START_S)
        except EngineError as error:
            ray.kill(self.controller)
            self._schedule("controller", error, self._start_controller_again)
            return
        self._controller_is_up = True
        self._watches[self.controller.watch.remote()] = "controller"
        self.tell(lambda controller: controller.engines_started.remote())
        self._is_back("controller")
        self.write_pids()

    def is_down(self, index: int) -> bool:
        return index in self._starts.values() or f"engine {index}" in self._due

    def _look_at_trainer(self) -> bool:
        """True when the trainer exited 0; raises TrainerError when it may not be restarted.

        Every waiting loop calls this, so interrupts are noticed here too.
        """
        if self._interrupted:
            raise Interrupted(INTERRUPT)
        if self._ref_models is not None and (error := self._ref_models.death()) is not None:
            self._schedule("ref_models", error, self._start_ref_models)
        code = self._trainer.exit_status()
        if code is None or code == 0:
            return code == 0
        if not is_local(self.plan.config.cluster) and self.plan.run.endpoints.is_done():
            return True  # it finished while being ended
        for ref, name in self._watches.items():
            if name == "controller":  # the trainer may have sent its cause to the controller
                try:
                    self.get(ref, name, timeout_s=1.0)
                except Late:
                    pass
                except EngineError as error:
                    if not isinstance(error.__cause__, RayActorError):
                        raise  # else it died as well, and its watch reports it
        self._schedule("trainer", self._trainer.bury(code), self._start_trainer_again)
        return False

    def _start_trainer_again(self) -> None:
        end_descendants(_GRACE_S, mark=(TRAINER_JOB, str(self.plan.incarnation)))
        try:
            newest = newest_checkpoint(self.plan.run)
            incarnation = next_incarnation(self.plan.run, resume=True)
        except OSError as error:  # a full disk: the trainer waits for room
            pause_s = max(1.0, self.plan.config.supervision.backoff_s)
            self._due["trainer"] = (time.monotonic() + pause_s, self._start_trainer_again)
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
        self.write_pids()

    def _schedule(self, name: str, error: MoerlError, restart: Callable[[], None]) -> None:
        """Restart `name` after a pause, or raise `error` when no restart is allowed."""
        supervision = self.plan.config.supervision
        self._count_restart(name, error)
        pause_s = supervision.backoff_s * 2 ** (self._restarts[name] - 1)
        self._due[name] = (time.monotonic() + pause_s, restart)
        self.console.event(
            f"{name} died, restart {self._restarts[name]} of {supervision.max_restarts} "
            f"in {pause_s:g} s: {str(error).splitlines()[0]}"
        )

    def _count_restart(self, name: str, error: MoerlError) -> None:
        """Raises `error` when no further restart without a new step is allowed."""
        if self._steps == 0 or self._restarts[name] >= self.plan.config.supervision.max_restarts:
            raise error
        self._restarts[name] += 1
        self._down.setdefault(name, (name == "trainer" and self._trainer.rank_died) or time.time())
        log.error("%s died, restart %d: %s", name, self._restarts[name], error)

    def _restart_what_is_due(self) -> None:
        for name, (when, restart) in list(self._due.items()):
            if time.monotonic() >= when:
                del self._due[name]
                self._restarted[name] = time.time()
                restart()

    def _is_back(self, name: str) -> None:
        """Log how long a process was down, and how long its start took."""
        self.console.ready(name)
        if name not in self._down:
            return
        died, now = self._down.pop(name), time.time()
        start_s = now - self._restarted[name]
        self._tracer.add(f"{name} down", died, now, starting_s=start_s)
        log.info("%s is back after %.1f s, its start took %.1f s", name, now - died, start_s)
        self.console.event(
            f"{name} is back after {now - died:.1f} s, its start took {start_s:.1f} s"
        )

    def _measure(self) -> dict[str, float]:
        """Engine tokens/s while training, from the metrics, and alone, measured after training."""
        rows = read_rows(self.plan.run.metrics)
        rates = [r["perf/rollout_tokens_per_s"] for r in rows if "perf/rollout_tokens_per_s" in r]
        numbers = {}
        if rates:
            numbers["engine tokens/s while training"] = sum(rates) / len(rates)
        seconds = self.plan.config.observe.engine_alone_s
        if seconds > 0 and self._controller_is_up:
            self.console.wait("engine alone, measured")
            asked: Any = self.controller.measure_engines.remote(seconds)
            try:
                rate = self.get(asked, "controller", timeout_s=seconds + _ANSWER_S)
                numbers["engine tokens/s alone"] = rate
            except EngineError as error:  # the run itself has succeeded
                self.say(f"no measurement of engine tokens/s alone: {error}")
            self.console.ready("engine alone, measured")
        return numbers

    # --- plumbing -----------------------------------------------------------------------------
    def get(self, ref: Any, name: str, timeout_s: float | None = None) -> Any:
        """Result of a remote call; a failure becomes one of our own errors."""
        try:
            with own_errors(name):
                return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            raise EngineError(f"{name}: {type(error.cause).__name__}: {error.cause}") from error
        except GetTimeoutError as error:
            raise Late(f"{name} did not answer within {timeout_s:g} s") from error

    def _catch_signals(self) -> None:
        def stop(_signum: int, _frame: FrameType | None) -> None:
            self._interrupted = True  # an exception raised here would surface inside Ray

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)

"""The trainer under supervision: its ranks, the reference ranks, its steps and their timeout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moerl.core.errors import TrainerError
from moerl.launch.run_context import TRAINER_JOB, RunContext
from moerl.launch.supervision.controller_supervisor import ControllerSupervisor, Polled
from moerl.launch.supervision.ref_model_ranks import RefModelRanks
from moerl.launch.supervision.supervisor_context import SupervisorContext
from moerl.launch.supervision.trainer_ranks import TrainerRanks
from moerl.observe.metrics import read_rows
from moerl.runtime.process_tree import end_descendants, serving
from moerl.runtime.run_dir import next_incarnation
from moerl.trainer.checkpoints.checkpoint_files import newest_checkpoint

_GRACE_S = 0.5  # for ranks of a trainer that died
_CAUSE_S = 1.0  # after a trainer's death: the controller may know why


class TrainerSupervisor:
    """One trainer at a time, each a new incarnation."""

    def __init__(
        self, context: SupervisorContext, plan: RunContext, controller: ControllerSupervisor
    ) -> None:
        self.plan = plan  # of the newest incarnation
        self._context, self._controller = context, controller
        self._ranks = TrainerRanks(plan.run.logs, plan.config.trainer.step_timeout_s)
        self._ref_models: RefModelRanks | None = None
        self._shown = max((row["step"] for row in read_rows(plan.run.metrics)), default=-1)
        self._ended_at: float | None = None  # clock seconds; its death is not counted yet

    def start(self) -> None:
        self._start_ranks()
        if self.plan.config.ref_models.placement == "separate" and self._context.is_local:
            self._ref_models = RefModelRanks(self.plan, self._controller.endpoint)
            self._start_ref_models()

    def _start_ranks(self) -> None:
        self._context.console.wait("trainer")
        self._ranks.start(self.plan, self._controller.endpoint)

    def _start_ref_models(self) -> None:
        assert self._ref_models is not None, "there are no reference ranks"
        self._context.console.wait("ref_models")
        self._ref_models.start()

    def pids(self) -> dict[str, int]:
        """Of the torchruns that run."""
        jobs = {
            "trainer": self._ranks.pid,
            "ref_models": self._ref_models.pid if self._ref_models else None,
        }
        return {name: pid for name, pid in jobs.items() if pid is not None}

    # --- deaths ---------------------------------------------------------------------------------
    def is_done(self) -> bool:
        return self._is_success(self._ranks.exit_status())

    def _is_success(self, code: int | None) -> bool:
        """True also for a cluster's trainer that finished while it was being ended."""
        if not code or self._context.is_local:
            return code == 0
        return self._context.run.endpoints.is_done()

    def poll_ranks(self) -> None:
        """Restart ranks that died.  Raises TrainerError when that is not allowed."""
        restarts = self._context.restarts
        if self._ref_models is not None and (error := self._ref_models.death()) is not None:
            restarts.restart("ref_models", error, self._start_ref_models)
        code = self._ranks.exit_status()
        if code is None or self._is_success(code):
            return
        now = self._context.clock()
        if self._ended_at is None:
            self._ended_at = now
        if self._controller.is_up and now - self._ended_at < _CAUSE_S:
            return  # it may have sent its cause to the controller, whose watch raises it
        self._ended_at = None
        died_at = self._ranks.rank_died
        restarts.restart("trainer", self._ranks.bury(code), self._start_again, died_at)

    def _fell(self, cause: str) -> None:
        """Nodes restart their own ranks; this enforces max_restarts."""
        error = TrainerError(cause)
        if self._context.restarts.died("trainer", error):
            raise error
        self._context.restarts.began("trainer")
        self._context.console.event(
            f"trainer: the nodes start the trainer again: {cause.splitlines()[0]}"
        )

    def _start_again(self) -> None:
        end_descendants(_GRACE_S, mark=(TRAINER_JOB, str(self.plan.incarnation)))
        try:
            newest = newest_checkpoint(self.plan.run)
            incarnation = next_incarnation(self.plan.run, resume=True)
        except OSError as error:  # a full disk: the trainer waits for room
            pause_s = max(1.0, self.plan.config.supervision.backoff_s)
            self._context.restarts.postpone("trainer", pause_s, self._start_again)
            self._context.say(
                f"the trainer is not started yet, state.json cannot be written: {error}"
            )
            return
        self.plan = replace(
            self.plan,
            incarnation=incarnation,
            checkpoint=newest,
            # a checkpoint of this start already has this layout's optimizer state
            reset_optimizer=self.plan.reset_optimizer and newest == self.plan.checkpoint,
        )
        self._start_ranks()
        if self._ref_models is not None and self._ref_models.is_through():
            self._start_ref_models()  # steps that are trained again need their scores

    # --- steps and their timeout ----------------------------------------------------------------
    def hear(self, polled: Polled) -> None:
        """What the controller knows about the trainer."""
        status, rows, failure = polled
        self._context.console.status(status)
        if failure and not self._context.is_local and self._ranks.fell():
            self._fell(failure)
        if self._ranks.says_hello(int(status["trainer/incarnation"])):
            self._context.restarts.is_back("trainer")
        refs = self._ref_models  # a dead one has no pid; keep its last number
        if refs and refs.pid and status["ref_models/start"] == refs.starts - 1:
            self._context.restarts.is_back("ref_models")
        for row in rows:
            self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        """A step: the trainer is up."""
        self._context.console.step(row)
        self._shown = row["step"]
        self._ranks.restart_clock()  # a step trained again is progress too
        if row["step"] >= self.plan.config.run.steps - 1:
            self._ranks.stop_clock()  # saving the model has no step limit
        self._context.restarts.made(row["step"] + 1)

    def show_last_rows(self) -> None:
        """Rows since the last poll, which the trainer did not wait for."""
        for row in read_rows(self._context.run.metrics):
            if row["step"] > self._shown:
                self._count(row)

    def restart_clock(self) -> None:
        """The time for the first step begins."""
        self._ranks.restart_clock()

    def check_clock(self) -> None:
        """Log a trainer that makes no step, and end it after twice the limit."""
        if what := self._ranks.lateness():
            # on several nodes other pids belong to other machines
            is_here = self._context.is_local
            others = serving(self._context.pids, self._context.run.logs) if is_here else []
            self._context.hangs.write("trainer", what, [*self._ranks.ranks(), *others])

"""Supervises the trainer: its ranks, the reference ranks, its steps and their timeout."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from moerl.config.clusters import takes_turns
from moerl.controller.controller import Controller
from moerl.core.errors import MoerlError, TrainerError
from moerl.distributed.torchrun import TRAINER_JOB, TorchrunJob
from moerl.launch.run_context import (
    RunContext,
    ref_model_command,
    ref_model_environment,
    trainer_command,
    trainer_environment,
)
from moerl.launch.supervision.controller_supervisor import ControllerSupervisor, Polled
from moerl.launch.supervision.supervisor_context import SupervisorContext
from moerl.observe.metrics import newest_row, read_rows
from moerl.runtime.process_tree import end_descendants, ending_of, serving
from moerl.runtime.run_dir import next_incarnation
from moerl.trainer.checkpoints.checkpoint_files import damaged_in, newest_checkpoint

_GRACE_S = 0.5  # for ranks of a trainer that died
_CLOSED_S = 1.0  # until the next question to a controller that is down
_CAUSE_S = 1.0  # after a trainer's death: the controller may know why


class TrainerSupervisor:
    """One trainer at a time, each a new incarnation."""

    def __init__(
        self, context: SupervisorContext, run_context: RunContext, controller: ControllerSupervisor
    ) -> None:
        self.run_context = run_context  # of the newest incarnation
        self._context, self._controller = context, controller
        self._ranks = TrainerRanks(run_context.run.logs, run_context.config.trainer.step_timeout_s)
        self._ref_models: RefModelRanks | None = None
        self._shown = max((row["step"] for row in read_rows(run_context.run.metrics)), default=-1)
        self._ended_at: float | None = None  # clock seconds; its death is not counted yet
        self._set_aside = damaged_in(run_context.run)  # the user knows of these

    def start(self) -> None:
        self._start_ranks()
        if self.run_context.config.ref_models.placement == "separate" and self._context.is_local:
            self._ref_models = RefModelRanks(self.run_context, self._controller.endpoint)
            self._start_ref_models()

    def _start_ranks(self) -> None:
        self._context.console.wait("trainer")
        if takes_turns(self.run_context.config.cluster):
            self._start_when_closed()
        else:
            self._ranks.start(self.run_context, self._controller.endpoint)

    def _start_when_closed(self) -> None:
        """Start the ranks when the engines sleep."""

        def closed(_: object) -> None:
            self._ranks.start(self.run_context, self._controller.endpoint)

        def failed(_: MoerlError) -> None:
            self._context.restarts.postpone("trainer", _CLOSED_S, self._start_when_closed)

        if not self._controller.ask(closed, failed, Controller.close_turn):
            failed(TrainerError("the controller is down"))

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
        died_at, error = self._ranks.rank_died, self._ranks.bury(code)
        self._refuse_lost_checkpoint(error)
        restarts.restart("trainer", error, self._start_again, died_at)

    def _refuse_lost_checkpoint(self, error: TrainerError) -> None:
        """Raises TrainerError where the checkpoint that this trainer began from is gone.

        Before the first checkpoint a trainer begins again from the first weights, as from a
        checkpoint of step 0.
        """
        began, run = self.run_context.checkpoint, self.run_context.run
        if began is not None and newest_checkpoint(run) is None:
            raise TrainerError(
                f"{error}; the checkpoint {began.name} from which this trainer began is gone. To "
                f"train all steps again: moerl train --resume {run.root} --from-start"
            )

    def _fell(self, cause: str) -> None:
        """Nodes restart their own ranks; this enforces max_restarts."""
        error = TrainerError(cause)
        self._refuse_lost_checkpoint(error)
        if self._context.restarts.died("trainer", error):
            raise error
        self._context.restarts.began("trainer")
        self._context.console.event(
            f"trainer: the nodes start the trainer again: {cause.splitlines()[0]}"
        )

    def _start_again(self) -> None:
        end_descendants(_GRACE_S, mark=(TRAINER_JOB, str(self.run_context.incarnation)))
        try:
            newest = newest_checkpoint(self.run_context.run)
            incarnation = next_incarnation(self.run_context.run, resume=True)
        except OSError as error:  # a full disk: the trainer waits for room
            pause_s = max(1.0, self.run_context.config.supervision.backoff_s)
            self._context.restarts.postpone("trainer", pause_s, self._start_again)
            self._context.say(
                f"the trainer is not started yet, state.json cannot be written: {error}"
            )
            return
        self._say_begin(newest)
        self.run_context = replace(
            self.run_context,
            incarnation=incarnation,
            checkpoint=newest,
            # a checkpoint of this start already has this layout's optimizer state
            reset_optimizer=self.run_context.reset_optimizer
            and newest == self.run_context.checkpoint,
        )
        self._start_ranks()
        if self._ref_models is not None and self._ref_models.is_through():
            self._start_ref_models()  # steps that are trained again need their scores

    def _say_begin(self, newest: Path | None) -> None:
        """Say where the trainer begins, and how many finished steps it trains again."""
        run = self.run_context.run
        row, saved = newest_row(run.metrics), run.latest_checkpoint() if newest else None
        again = (row["step"] + 1 if row else 0) - (saved[0] if saved else 0)
        place = newest.name if newest else "the first weights, because no checkpoint was written"
        self._context.say(f"trainer: begins again from {place}, {max(0, again)} steps are repeated")

    # --- steps and their timeout ----------------------------------------------------------------
    def hear(self, polled: Polled) -> None:
        """Take status, new rows, the trainer's failure and notices from the controller."""
        status, rows, failure, notices = polled
        for notice in notices:
            self._context.note(notice)
        self._context.console.status(status)
        if failure and not self._context.is_local and self._ranks.fell():
            self._fell(failure)
        if self._ranks.says_hello(int(status["trainer/incarnation"])):
            self._context.restarts.is_back("trainer")
            self._say_set_aside()
        refs = self._ref_models  # a dead process has no pid; keep its last number
        if refs and refs.pid and status["ref_models/start"] == refs.starts - 1:
            self._context.restarts.is_back("ref_models")
        for row in rows:
            self._count(row)

    def _say_set_aside(self) -> None:
        """A line for each checkpoint that a rank found damaged: an earlier checkpoint is loaded."""
        found = damaged_in(self.run_context.run)
        for path in sorted(found - self._set_aside):
            self._context.say(f"a checkpoint is damaged, an earlier one is loaded: see {path}")
        self._set_aside = found

    def _count(self, row: dict[str, Any]) -> None:
        """A step: the trainer is up."""
        self._context.console.step(row)
        self._shown = row["step"]
        self._ranks.restart_clock()  # a step trained again is progress too
        if row["step"] >= self.run_context.config.run.steps - 1:
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


class TrainerRanks:
    """One trainer at a time: a process, its ranks, and a step timeout.

    The process is torchrun; on a cluster it is `trainer_watch`, which stands for the trainer nodes.
    On a cluster torchrun restarts all ranks when a rank ends; the controller reports it (`Failed`),
    and the step timeout starts again.  The caller polls `exit_status` and calls `start` again.
    """

    def __init__(self, logs: Path, limit_s: float) -> None:
        """Start no trainer yet.  limit_s: `trainer.step_timeout_s`, between two steps."""
        self.rank_died = 0.0  # unix time when a rank was first seen dead; 0 = none
        self._logs, self._limit_s = logs, limit_s
        self._job: TorchrunJob | None = None
        self._since = time.monotonic()  # monotonic time of the last step or start
        self._is_late = False  # the timeout was logged
        self._given_up = ""  # why the supervisor ended this trainer
        self._incarnation = -1  # of the last hello
        self._fell = False  # a rank failure was reported after the last hello
        self._most_ranks = 0  # most ranks of this trainer alive at once

    def start(self, run_context: RunContext, endpoint: str) -> None:
        self.restart_clock()
        self._given_up, self._fell, self.rank_died, self._most_ranks = "", False, 0.0, 0
        self._job = TorchrunJob(
            trainer_command(run_context, endpoint),
            trainer_environment(run_context),
            self._logs / "trainer.log",
        )

    @property
    def pid(self) -> int | None:
        """None while no trainer runs."""
        return None if self._job is None else self._job.pid

    def exit_status(self) -> int | None:
        """None while it runs or is absent; also notes a rank's death, before torchrun ends."""
        if self._job is None:
            return None
        code = self._job.poll()
        if code is None:
            alive = len(self.ranks())
            if alive < self._most_ranks and not self.rank_died:
                self.rank_died = time.time()
            self._most_ranks = max(alive, self._most_ranks)
        return code

    def bury(self, code: int) -> TrainerError:
        """Forget the ended trainer; returns the error with its cause."""
        assert self._job is not None, "it has ended"
        given_up = self._given_up and f"{ending_of(code)}: {self._given_up}"
        cause, self._job = given_up or self._job.ending(code), None
        return TrainerError(f"the trainer ended with {cause}")

    def ranks(self) -> list[tuple[int, Path]]:
        """(pid, log) of the living ranks on this machine."""
        if self._job is None:
            return []
        return [(pid, self._logs / f"trainer-{rank}.log") for pid, rank in self._job.ranks()]

    # --- clock ----------------------------------------------------------------------------------
    def restart_clock(self) -> None:
        """Call at each step and start."""
        self._since, self._is_late = time.monotonic(), False

    def stop_clock(self) -> None:
        """No further step is expected."""
        self._since = math.inf

    def says_hello(self, incarnation: int) -> bool:
        """Record a hello.  Returns True for a new incarnation; cluster nodes choose the number."""
        if self._job is None or incarnation <= self._incarnation:
            return False
        self._incarnation, self._fell = incarnation, False
        self.restart_clock()
        return True

    def fell(self) -> bool:
        """Record a rank failure.  Returns True for the first failure of this incarnation."""
        if self._fell or self._job is None:
            return False
        self._fell = True
        self.restart_clock()
        return True

    def lateness(self) -> str:
        """One message when no step came within the limit; ends it after twice the limit."""
        waited_s = time.monotonic() - self._since
        if self._job is None or waited_s < self._limit_s:
            return ""
        if not self._is_late:
            self._is_late = True
            return f"no step for {waited_s:.0f} s, trainer.step_timeout_s = {self._limit_s:g}"
        if waited_s > 2 * self._limit_s:
            self._given_up = f"it made no step for {waited_s:.0f} s"
            self._job.kill()
        return ""


class RefModelRanks:
    """The torchrun of the ranks that run reference and teacher models.

    They have no state, so they are simply restarted; unanswered scores are requested again.  The
    caller polls `death` and calls `start` again.
    """

    def __init__(self, run_context: RunContext, endpoint: str) -> None:
        self.starts = 0
        self._run_context, self._endpoint = run_context, endpoint
        self._job: TorchrunJob | None = None
        self._is_dead = False  # `death` has returned why

    def start(self) -> None:
        """Start torchrun, after ending remaining processes of an earlier one."""
        if self._job is not None:
            self._job.end(_GRACE_S)
        run_context, self._is_dead = self._run_context, False
        command = ref_model_command(run_context, self._endpoint, self.starts)
        log = run_context.run.logs / "ref_models.log"
        self._job = TorchrunJob(command, ref_model_environment(run_context), log)
        self.starts += 1

    @property
    def pid(self) -> int | None:
        """Pid of torchrun; None when it is not running."""
        return None if self._job is None or self._is_dead else self._job.pid

    def is_through(self) -> bool:
        """True if it ended with status 0: all scores are done."""
        return self._job is not None and self._job.poll() == 0

    def death(self) -> TrainerError | None:
        """Why it died, returned once; None while it runs and after status 0."""
        code = None if self._job is None or self._is_dead else self._job.poll()
        if self._job is None or not code:
            return None
        self._is_dead = True
        return TrainerError(f"the reference ranks ended with {self._job.ending(code)}")

"""The trainer as its supervisor sees it: one process, its ranks, and a step timeout.

The process is torchrun; on a cluster it is `trainer_watch`, which stands for the trainer nodes.
There torchrun restarts the ranks when one ends; the controller reports it (`Failed`), and the step
timeout starts again.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from moerl.core.errors import TrainerError
from moerl.launch.nodes.torchrun_job import TorchrunJob
from moerl.launch.run_context import RunContext, trainer_command, trainer_environment
from moerl.runtime.process_tree import ending_of


class TrainerRanks:
    """One trainer at a time; the caller polls `exit_status` and calls `start` again."""

    def __init__(self, logs: Path, limit_s: float) -> None:
        """limit_s: longest time between two steps, `trainer.step_timeout_s`."""
        self.rank_died = 0.0  # unix time when a rank was first seen dead; 0 = none
        self._logs, self._limit_s = logs, limit_s
        self._job: TorchrunJob | None = None
        self._since = time.monotonic()  # monotonic time of the last step or start
        self._is_late = False  # the timeout was logged
        self._given_up = ""  # why the supervisor ended this trainer
        self._incarnation = -1  # of the last hello
        self._fell = False  # a rank failure was reported after the last hello
        self._most_ranks = 0  # most ranks of this trainer alive at once

    def start(self, plan: RunContext, endpoint: str) -> None:
        self.restart_clock()
        self._given_up, self._fell, self.rank_died, self._most_ranks = "", False, 0.0, 0
        self._job = TorchrunJob(
            trainer_command(plan, endpoint), trainer_environment(plan), self._logs / "trainer.log"
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
        """A message, once, when no step came within the limit; after twice the limit ends the
        trainer.
        """
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

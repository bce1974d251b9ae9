"""The trainer as its supervisor sees it: one process, its ranks, and a clock.

The process is torchrun, or on a cluster what stands for the nodes that run it (`gang_watch`).
There the ranks start again by themselves when one of them ends; the controller hears of it
(`Failed`), and so does the clock, which gives every start as long as a step.
"""

from __future__ import annotations

import math
import subprocess
import time
from pathlib import Path
from typing import IO

from moerl.errors import TrainerError
from moerl.launch.nodes.process_tree import children_with, ending_of, last_error
from moerl.launch.run_context import RunContext, trainer_command, trainer_environment


class TrainerRanks:
    """One trainer at a time; the caller asks for its `end` and calls `start` again."""

    def __init__(self, logs: Path, limit_s: float) -> None:
        """limit_s: the longest time between two steps, `trainer.step_timeout_s`."""
        self.rank_died = 0.0  # unix time at which one of this trainer was seen dead; 0 = none
        self._logs, self._limit_s = logs, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._since = time.monotonic()  # the last step, or start
        self._is_late = False  # and its lateness was shown
        self._given_up = ""  # why this trainer was ended from here
        self._incarnation = -1  # that said hello last
        self._fell = False  # it said so itself, after its hello
        self._most_ranks = 0  # of this trainer that were alive at once

    def start(self, plan: RunContext, endpoint: str) -> None:
        self.close()
        self.restart_clock()
        self._given_up, self._fell, self.rank_died, self._most_ranks = "", False, 0.0, 0
        self._log = (self._logs / "trainer.log").open("ab")
        self._process = subprocess.Popen(
            trainer_command(plan, endpoint),
            env=trainer_environment(plan),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    @property
    def pid(self) -> int | None:
        """None while there is no trainer: its restart is due soon."""
        return None if self._process is None else self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs or is absent; a rank's death is noticed here, before torchrun's."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            alive = len(self.ranks())
            if alive < self._most_ranks and not self.rank_died:
                self.rank_died = time.time()
            self._most_ranks = max(alive, self._most_ranks)
        return code

    def bury(self, code: int) -> TrainerError:
        """Why it ended with this status; there is no trainer from here on."""
        self._process = None
        cause = self._given_up or last_error(self._logs / "trainer.log")
        return TrainerError(f"the trainer ended with {ending_of(code)}: {cause}")

    def ranks(self) -> list[tuple[int, Path]]:
        """(pid, log) of the living ranks on this machine."""
        if self._process is None:
            return []
        ranks = children_with(self._process.pid, "RANK")
        return [(pid, self._logs / f"trainer-{rank}.log") for pid, rank in ranks]

    # --- clock ----------------------------------------------------------------------------------
    def restart_clock(self) -> None:
        """A step was made, or a start begins."""
        self._since, self._is_late = time.monotonic(), False

    def stop_clock(self) -> None:
        """No step is to come."""
        self._since = math.inf

    def says_hello(self, incarnation: int) -> bool:
        """Whether this trainer has not been seen before.  Nodes of a cluster choose their
        number.
        """
        if self._process is None or incarnation <= self._incarnation:
            return False
        self._incarnation, self._fell = incarnation, False
        self.restart_clock()
        return True

    def fell(self) -> bool:
        """A rank said why it ends; whether it is the first of its trainer, which starts again."""
        if self._fell or self._process is None:
            return False
        self._fell = True
        self.restart_clock()
        return True

    def lateness(self) -> str:
        """What to show of a trainer that makes no step, once; after as long again it is ended."""
        waited_s = time.monotonic() - self._since
        if self._process is None or waited_s < self._limit_s:
            return ""
        if not self._is_late:
            self._is_late = True
            return f"no step for {waited_s:.0f} s, trainer.step_timeout_s = {self._limit_s:g}"
        if waited_s > 2 * self._limit_s:
            self._given_up = f"it made no step for {waited_s:.0f} s"
            self._process.kill()
        return ""

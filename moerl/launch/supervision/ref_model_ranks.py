"""The ranks that run reference and teacher models, as the supervisor sees them.

They have no state, so they are simply restarted; unanswered scores are requested again.
"""

from __future__ import annotations

import subprocess

from moerl.errors import TrainerError
from moerl.launch.nodes.process_tree import end_descendants, ending_of, last_error
from moerl.launch.run_context import (
    REF_MODELS,
    TRAINER_JOB,
    RunContext,
    ref_model_command,
    ref_model_environment,
)

_GRACE_S = 0.5


class RefModelRanks:
    """One torchrun at a time; the caller polls `death` and calls `start` again."""

    def __init__(self, plan: RunContext, endpoint: str) -> None:
        self.starts = 0
        self._plan, self._endpoint = plan, endpoint
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start torchrun, after ending remaining processes of an earlier one."""
        if self.starts:
            end_descendants(_GRACE_S, mark=(TRAINER_JOB, REF_MODELS))
        plan = self._plan
        with (plan.run.logs / "ref_models.log").open("ab") as log:
            self._process = subprocess.Popen(
                ref_model_command(plan, self._endpoint, self.starts),
                env=ref_model_environment(plan),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.starts += 1

    @property
    def pid(self) -> int | None:
        """Pid of torchrun; None when it is not running."""
        return None if self._process is None else self._process.pid

    def is_through(self) -> bool:
        """True if it ended with status 0: all scores are done."""
        return self._process is not None and self._process.poll() == 0

    def death(self) -> TrainerError | None:
        """Why it died, returned once; None while it runs and after status 0."""
        code = None if self._process is None else self._process.poll()
        if not code:
            return None
        self._process = None
        cause = last_error(self._plan.run.logs / "ref_models.log")
        return TrainerError(f"the reference ranks ended with {ending_of(code)}: {cause}")

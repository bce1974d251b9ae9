"""The ranks that run reference and teacher models, as the supervisor sees them.

They have no state, so they are simply restarted; unanswered scores are requested again.
"""

from __future__ import annotations

from moerl.core.errors import TrainerError
from moerl.launch.nodes.torchrun_job import TorchrunJob
from moerl.launch.run_context import RunContext, ref_model_command, ref_model_environment

_GRACE_S = 0.5


class RefModelRanks:
    """One torchrun at a time; the caller polls `death` and calls `start` again."""

    def __init__(self, plan: RunContext, endpoint: str) -> None:
        self.starts = 0
        self._plan, self._endpoint = plan, endpoint
        self._job: TorchrunJob | None = None
        self._is_dead = False  # `death` has returned why

    def start(self) -> None:
        """Start torchrun, after ending remaining processes of an earlier one."""
        if self._job is not None:
            self._job.end(_GRACE_S)
        plan, self._is_dead = self._plan, False
        command = ref_model_command(plan, self._endpoint, self.starts)
        log = plan.run.logs / "ref_models.log"
        self._job = TorchrunJob(command, ref_model_environment(plan), log)
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

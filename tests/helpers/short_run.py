"""One short real run for tests that look at a run from outside: its calls and its listeners."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.helpers import listeners, path_trace
from tests.helpers.path_trace import Passed
from tests.helpers.train_runs import Run, start

SHORT = [
    "run.steps=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.buffer_depth=0",
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
    "task.pass_environment=[MOERL_PATH_TRACE]",  # workers write what they pass there,
    "task.limits.user=same",  # in a folder of the test's user
]


@dataclass(frozen=True, slots=True)
class ShortRun:
    """A quickstart of two steps that has ended."""

    run: Run
    passed: list[Passed]  # functions that tokens, weights and control messages passed
    listeners: set[listeners.Seen]


def make(root: Path, recipe: str = "quickstart") -> ShortRun:
    with mock.patch.dict(os.environ, path_trace.install(root / "trace")):
        run = start(root, recipe, *SHORT, name="x")
    try:
        seen = listeners.watch(run)
    finally:
        code = run.finish()
    assert code == 0, run.text()
    return ShortRun(run, path_trace.passed(root / "trace"), seen)

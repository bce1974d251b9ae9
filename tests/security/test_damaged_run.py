"""A real run whose waiting blobs are damaged: it ends with all steps, and says what it cost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from moerl.config.schema import ClusterConfig
from moerl.launch.train import outside_folder
from tests.helpers.damage import empty, flip, shorten
from tests.helpers.patience import patience
from tests.helpers.train_runs import Run, check_history, last_step, start, survivors

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 24
SETTINGS = [
    f"run.steps={STEPS}",
    "checkpoint.every=4",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "supervision.backoff_s=0.1",
    "supervision.max_restarts=1",
    "observe.engine_alone_s=0",
]


def ranks_of(run: Run) -> list[psutil.Process]:
    children = psutil.Process(run.pids()["trainer"]).children()
    return [rank for rank in children if "moerl.trainer.main" in rank.cmdline()]


def group_of(path: Path) -> int:
    return int(path.name.split(".")[0])


def damage_one(run: Run, damage: Callable[[Path], None]) -> int:
    """Damage a blob of the newest group that waits, while nothing reads it; returns its group."""
    folder = outside_folder(ClusterConfig().blob_dir, run.dir)
    stopped = ranks_of(run)
    for rank in stopped:
        rank.suspend()
    names: set[str] = set()
    try:
        while True:  # until the buffer is full, and so no group is in generation
            before, names = names, {path.name for path in folder.glob("[!.]*")}
            if names and names == before:
                break
            time.sleep(patience(3.0))
        path = max(folder.glob("[!.]*"), key=group_of)
        damage(path)
        return group_of(path)
    finally:
        for rank in stopped:
            os.kill(rank.pid, signal.SIGCONT)


def test_a_run_whose_blobs_are_damaged(tmp_path: Path) -> None:
    """A flipped bit is found by the rank that reads it and ends the trainer once.  Cut and empty
    ones do so only where their group was planned before the damage; nothing else ends it.
    """
    run = start(tmp_path, "quickstart", *SETTINGS, name="x", copies=True)
    ever: set[psutil.Process] = set()
    doomed: list[int] = []
    try:
        for damage in (shorten, empty, flip):
            seen = last_step(run)
            run.wait_for(lambda seen=seen: last_step(run) >= seen + 3)
            ever |= set(run.members())
            doomed.append(damage_one(run, damage))
        run.wait_for(lambda: "trainer died" in run.text())
        ever |= set(run.members())
        assert run.finish() == 0, run.text()
        assert not survivors(list(ever), 10.0)
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    log = (run.dir.logs / "controller.log").read_text()  # rows of redone steps are cut
    lost = log.count("are lost, it is regenerated")
    damaged = log.count("are damaged, it is regenerated")
    assert (lost + damaged, damaged >= 1) == (3, True)
    assert rows[-1]["refused/damaged"] == damaged
    assert run.text().count("trainer died") == damaged, run.text()
    trained = run.trained.groups(rows)
    check_history(run, trained)
    assert set(doomed) <= {group.group_id for _, group in trained}, "generated again"

"""Trainer and engine are killed in the middle of a run, and the run goes on by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from moerl.protocols import decode_value
from moerl.types import EpisodeGroup
from tests.e2e.runs import Run, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 40
SETTINGS = [
    f"run.steps={STEPS}",
    "checkpoint.every=5",
    "rollout.keep_records=true",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.groups_per_request=4",
    "supervision.backoff_s=0.1",
    "observe.engine_alone_s=0",
]


@pytest.mark.parametrize(
    "victims",
    [
        ("trainer rank", "engine-0"),
        pytest.param(("engine-0-host", "trainer", "engine-0"), marks=pytest.mark.full),
    ],
    ids=["each", "again"],
)
def test_the_run_goes_on(victims: tuple[str, ...], tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *SETTINGS, name="x")
    try:
        for number, victim in enumerate(victims, 1):
            last = run.rows()[-1]["step"] if run.rows() else 0
            run.wait_for(lambda last=last: bool(run.rows()) and run.rows()[-1]["step"] >= last + 7)
            os.kill(pid_of(run, victim), signal.SIGKILL)
            run.wait_for(lambda number=number: run.text().count("died, restart 1 of 3") == number)
        members = run.members()
        assert run.finish() == 0, run.text()
        assert not survivors(members, 10.0)
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [row["version"] for row in (rows[0], rows[-1])] == ["0.1", f"1.{STEPS}"]
    engines = sum(victim.startswith("engine") for victim in victims)
    assert sum(row["async/engine_restarts"] for row in rows) == engines
    check_history(run)


def pid_of(run: Run, victim: str) -> int:
    if victim != "trainer rank":
        return run.pids()[victim]
    ranks = psutil.Process(run.pids()["trainer"]).children()
    return next(rank.pid for rank in ranks if "moerl.trainer.main" in rank.cmdline())


def check_history(run: Run) -> None:
    """Each prompt group at most once, none skipped, no token of weights that were given up."""
    rows = run.rows()
    begins = {int(row["version"].split(".")[0]): row["step"] for row in reversed(rows)}
    trained: list[int] = []
    for row in rows:
        path = next(run.dir.records.glob(f"*/step-{row['step']:06d}.msgpack"))
        for group in decode_value(path.read_bytes(), list[EpisodeGroup]):
            trained.append(group.group_id)
            for span in (span for r in group.rollouts() for span in r.versions):
                later = [s for i, s in begins.items() if i > span.version.incarnation]
                assert all(span.version.step <= step for step in later), (row["step"], span)
                assert 0 <= row["step"] - span.version.step <= 4
    assert len(trained) == len(set(trained)), "a group was trained twice"
    line = range(max(trained) + 1)
    assert set(line) - set(trained) <= set(line[-12:]), "a group was lost"

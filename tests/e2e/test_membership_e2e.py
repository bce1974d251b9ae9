"""Engines join and leave a real run: `moerl engines`, real SGLang and Megatron."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moerl.launch.nodes.control_api import request
from tests.helpers.patience import patience
from tests.helpers.train_runs import Run, check_deletion, check_history, start

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 24
SETTINGS = [
    f"run.steps={STEPS}",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "task.reward=tests.helpers.run_rewards:gated",
    "task.score_timeout_s=300",
    "task.pass_environment=[MOERL_TEST_GATE]",
    "task.limits.user=same",  # the reward sees the gate, which is in a folder of the test's user
    "checkpoint.every=0",
    "observe.engine_alone_s=0",
]


def engines(run: Run, *arguments: str) -> tuple[int, str]:
    """(exit status, what it printed) of `moerl engines`."""
    done = subprocess.run(
        [sys.executable, "-m", "moerl", "engines", *arguments],
        capture_output=True, text=True, timeout=patience(120), check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).strip()


def test_one_joins_and_the_first_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is made until the engines have changed, so the run is not over before they have."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("MOERL_TEST_GATE", str(gate))
    run = start(tmp_path, "quickstart", *SETTINGS, name="x", copies=True)
    folder = str(run.dir.root)
    try:
        run.wait_for(lambda: len(run.rows()) >= 2)
        gate.touch()
        old = psutil.Process(run.pids()["engine-0"])
        status, text = engines(run, "remove", folder, "0")
        assert (status, text.splitlines()) == (
            2,
            ["moerl: ENGINE = 0 is not usable: it is the last working engine: add another first"],
        )
        assert request(run.dir, 60.0, do="add", tp=0) == 1
        run.wait_for(lambda: "engine 1 has joined" in run.text())
        run.wait_for(lambda: {row["state"] for row in request(run.dir, 60.0, do="list")} == {"up"})
        assert "engine-1" in run.pids()
        assert request(run.dir, 60.0, do="remove", engine=0) == "leaving"
        run.wait_for(lambda: "engine 0 has left" in run.text())
        left = len(run.rows())
        assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
        assert "engine-0" not in run.pids()
        table = engines(run, "list", folder)[1].splitlines()
        assert [line.split()[0] for line in table] == ["engine", "1"]
        gate.unlink()
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert left < STEPS - 8, "the run ended too soon to show anything"
    check_deletion(run, in_flight=32)
    trained = run.trained.groups(run.rows())
    check_history(run, trained)  # each group once, none lost
    by = {
        name: {s for s, g in trained for r in g.rollouts() if r.engine == name} for name in (0, 1)
    }
    assert min(by[1]) > 1, "engine 1 was used before it was there"
    assert max(by[0]) <= left + 4, "engine 0 was used after it had left"
    assert set(range(left + 5, STEPS)) <= by[1]
    lags = [s - r.oldest.step for s, g in trained for r in g.rollouts() if r.engine == 1]
    assert max(lags) <= 4, "engine 1 worked before it had the run's weights"
    assert rows[-1]["async/engines"] == 1.0

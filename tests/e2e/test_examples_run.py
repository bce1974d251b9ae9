"""One short run with an own reward, environment and objective; then its model is audited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.train_runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "task.reward=examples.own_reward:reward",
    "task.environment=examples.turn_environment:reply",
    "algorithm.objective=examples.new_objective:soft_clip",
    "task.max_turns=2",
    "run.steps=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.groups_per_request=2",
    "checkpoint.every=0",
    "evaluation.every=0",
    "observe.engine_alone_s=0",
]


def test_a_run_of_own_functions_and_the_audit_of_its_model(tmp_path: Path) -> None:
    run = start(tmp_path, "digits-in-turns", *SETTINGS, name="x")
    assert run.finish() == 0, run.text()
    rows = run.rows()
    assert len(rows) == 2
    assert all(0 <= row["reward/mean"] <= 1 and row["loss/grad_norm"] > 0 for row in rows)
    done = subprocess.run(
        [sys.executable, "examples/audit_dump.py", run.dir.root / "hf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    gaps = {
        words[1]: float(words[-1])
        for line in done.stdout.splitlines()
        if (words := line.split())[:1] == ["replayed:"]
    }
    assert gaps["both"] < 1e-4, "the trainer scores what transformers sampled"

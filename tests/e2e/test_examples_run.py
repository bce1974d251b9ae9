"""One short run with an own reward, environment and objective; then its model is audited.

It is also the run of several turns over context parallel ranks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.train_runs import PACKED, TWO_STEPS, start, trained_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    *TWO_STEPS,
    "task.reward=examples.own_reward:reward",
    "task.environment=examples.turn_environment:reply",
    "algorithm.objective=examples.new_objective:soft_clip",
    "trainer.parallel={dp: 1, ep: 1, cp: 2}",
    PACKED,
]


def test_a_run_of_own_functions_and_the_audit_of_its_model(tmp_path: Path) -> None:
    run = start(tmp_path, "digits-in-turns", *SETTINGS, name="x")
    for row in trained_rows(run):
        assert 0 <= row["reward/mean"] <= 1
        assert row["loss/tokens"] > 8 * 8 * 4, "later turns are trained, too"
    done = subprocess.run(
        [sys.executable, "examples/audit_dump.py", run.dir.root / "hf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    assert done.returncode == 0, done.stderr
    gaps = {
        words[1]: float(words[-1])
        for line in done.stdout.splitlines()
        if (words := line.split())[:1] == ["replayed:"]
    }
    assert gaps["both"] < 1e-4, "the trainer scores what transformers sampled"

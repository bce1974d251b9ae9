"""A model that the engine keeps in another form than the plan knows ends with its sentence.

On a CPU SGLang pads experts whose width is no multiple of 32 x tp: here 48 with two engine ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.train_runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(600)]

PADDED = ("model.tiny.moe_ffn=48", "engine.tp=2")


def test_a_run_ends_before_its_first_step_with_the_engines_sentence(tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *PADDED, "run.steps=6", name="x")
    assert run.finish(240) == 1, run.text()
    assert not run.rows()
    assert "0 of 1 engines take version 0.0" in run.text()
    assert "w13_weight: the plan fills" in run.text()


def test_the_same_run_with_a_width_that_is_not_padded_trains(tmp_path: Path) -> None:
    settings = ("model.tiny.moe_ffn=64", "engine.tp=2", "run.steps=2", "observe.engine_alone_s=0")
    run = start(tmp_path, "quickstart", *settings, name="x")
    assert run.finish() == 0, run.text()
    assert len(run.rows()) == 2


def test_mismatch_says_it_before_it_samples(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moerl", "mismatch", "quickstart", *PADDED]
    command += ["--tokens", "100", "--page", str(tmp_path / "page.html")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True,
        text=True, check=False, timeout=patience(300),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "w13_weight: the plan fills" in done.stderr
    assert "generated" not in done.stderr

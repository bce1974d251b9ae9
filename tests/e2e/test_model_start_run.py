"""A run that was killed becomes a model folder, and the start of another run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.patience import patience
from tests.helpers.train_runs import SMALL, Run, start, survivors
from tests.helpers.trainer_support import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]


def _kill(run: Run) -> None:
    """All of its processes at once, as a lost machine does."""
    members = run.members()
    for member in members:
        os.kill(member.pid, signal.SIGKILL)
    assert survivors(members, 20.0) == []


def _converted(run: Run, to: Path, processes: int) -> Path:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "moerl.distributed.torchrun", f"--nproc-per-node={processes}"]
    tool = str(ROOT / "tools" / "megatron_to_hf.py")
    subprocess.run([*command, tool, str(run.dir.root), str(to)], timeout=patience(200), check=True)
    return to


def test_a_killed_run_converts_without_a_resume_and_starts_another(tmp_path: Path) -> None:
    """Two expert ranks wrote it; one process and two make a model folder, bitwise that of the run.

    The run that starts from it has an engine with the same weights: its first step, which is
    trained before anything is published, sees no difference.
    """
    keep = ["run.steps=50", "checkpoint.every=1", "checkpoint.keep_versions=true"]
    # decay moves weights also where all rewards are equal
    keep += ["checkpoint.hf=every", "trainer.optimizer.weight_decay=0.1"]
    killed = start(tmp_path, "quickstart", *SMALL, *keep, name="killed")
    killed.wait_for(lambda: len(killed.dir.finished_checkpoints()) > 1)
    _kill(killed)
    found = killed.dir.latest_checkpoint()
    assert found is not None
    step = found[0]
    saved = killed.dir.versions / f"0.{step}"
    for processes in (1, 2):
        out = _converted(killed, tmp_path / f"hf{processes}", processes)
        assert {path.name for path in out.iterdir()} == {path.name for path in saved.iterdir()}
        for path in saved.iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    want = load_file(saved / "model.safetensors")
    other = load_file(killed.dir.versions / f"0.{step - 1}" / "model.safetensors")
    assert any(not torch.equal(other[name], want[name]) for name in want), "control"
    assert (killed.dir.hf / "config.json").exists(), "written with every checkpoint"

    start_from = f"checkpoint.start={killed.dir.root}"
    off = ["checkpoint.hf=off", "trainer.parallel.pp=2", "trainer.parallel.dp=1"]
    off += ["trainer.parallel.ep=1"]
    run = start(tmp_path, "quickstart", *SMALL, *off, start_from, name="next")
    assert run.finish() == 0, run.text()
    begun = load_file(run.dir.root / "start" / "model.safetensors")
    assert all(torch.equal(begun[name], want[name]) for name in want)
    assert not run.dir.hf.exists()
    rows = run.rows()
    assert [row["version"] for row in rows] == ["0.1", "0.2", "0.3"]
    assert rows[0]["mismatch/abs_dlogp_max"] < 1e-4, "the engine has other weights"

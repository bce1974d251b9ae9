"""A copied and a moved run resume, verify, rerun and report in their own folder."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.train_runs import start

SETTINGS = [
    "run.steps=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "stream.keep_steps=-1",
    "checkpoint.every=1",
    "observe.engine_alone_s=0",
]


def _content(folder: Path) -> dict[str, str]:
    """Digest and time of each file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mtime_ns} "
        + hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _moerl(*words: str) -> str:
    command = [sys.executable, "-m", "moerl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_copied_and_a_moved_run_are_runs_of_their_own(tmp_path: Path) -> None:
    first = start(tmp_path, "quickstart-smoke", *SETTINGS, name="a")
    assert first.finish() == 0, first.text()
    old, before = first.dir.root, _content(first.dir.root)
    shutil.copytree(old, tmp_path / "copied")

    copied = start(tmp_path, "--resume", str(tmp_path / "copied"), "run.steps=3")
    assert copied.finish() == 0, copied.text()
    assert [row["step"] for row in copied.rows() if "async/buffer_depth" in row] == [0, 1, 2]
    for command in ("verify", "report"):
        _moerl(command, str(copied.dir.root))
    assert _content(old) == before, "the first run is as it was"
    assert _content(copied.dir.root) != before, "control: a command changes what it works on"

    moved = tmp_path / "elsewhere" / "m"
    moved.parent.mkdir()
    old.rename(moved)
    again = start(moved.parent, "--resume", str(moved), "run.steps=3")
    assert again.finish() == 0, again.text()
    assert again.rows()[-1]["step"] >= 2
    assert not old.exists()
    _moerl("verify", str(moved))
    text = _moerl("rerun", str(moved), "--run", "again")
    assert "3 of 3 steps ended with the recorded weights" in text
    assert (moved.parent / "again" / "rerun.html").is_file()

"""A full disk, a failing disk or a kill at any write costs that write, not the run.

The sweep (`tests.helpers.write_fault_runs`) finds the call sites that write in a run without
faults, then fails each at its first, a middle and its last use with ENOSPC, EIO and a kill.  After
each fault the run is resumed: each step has one row, each group is trained once, none is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moerl.runtime.run_dir import read_manifest
from tests.helpers.patience import Patience
from tests.helpers.train_runs import Run, start
from tests.helpers.trainer_support import ROOT

SAMPLE = 40  # every so many of the faults in the default selection


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: the runs flush files thousands of times."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def sweep(folder: Path, share: int, *before: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.helpers.write_fault_runs", str(folder), str(share)]
    done = subprocess.run(
        [*command, *before], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    counts = {name: len(v) if isinstance(v, list) else v for name, v in found.items()}
    print(counts)
    return found


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(SAMPLE, marks=pytest.mark.timeout(300)),
        pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
def test_a_fault_at_any_write_leaves_a_run_that_resumes(memory: Path, share: int) -> None:
    found = sweep(memory, share)
    assert found["sites"] >= 78, "the sweep no longer sees the writes"
    assert found["ran"] == -(-found["faults"] // share)
    assert found["not reached"] <= 0.1 * found["ran"] + 1
    assert found["wrong"] == []
    assert found["ended in training"] == [], "between the first and the last step the run waits"


@pytest.mark.parametrize(
    ("before", "sites", "share", "symptom"),
    [
        ("rows", "write at observe/metrics.py", 4, "want ascending steps"),
        pytest.param(
            "names", "checkpoint_store", 1, "a checkpoint was set aside", marks=pytest.mark.full
        ),
    ],
)
@pytest.mark.timeout(600)
def test_the_sweep_finds_earlier_faults(
    memory: Path, before: str, sites: str, share: int, symptom: str
) -> None:
    """Rows that wait in a buffer, and checkpoints that are written under their final name."""
    wrong = sweep(memory, share, before, sites)["wrong"]
    assert any(symptom in cause for *_, cause in wrong), wrong


# --- real runs on small disks --------------------------------------------------------------------
STEPS, GROUPS_PER_STEP = 10, 4
SETTINGS = [
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=2",
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
]


ROOM = "96m"


class SmallDisk:
    """A folder with little room, which can be filled."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder, self._filler = folder, folder / ".filler"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True
        )

    def fill(self, leave: int = 0) -> None:
        with self._filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            file.truncate(max(0, file.tell() - leave))

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)
        room = f"remount,size={ROOM}"
        subprocess.run(["mount", "-o", room, str(self.folder)], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


class Case(NamedTuple):
    disk: str  # the folder that fills, below the test's own
    says: str  # in a log while it is full
    rows: int = 3  # when it fills
    leave: int = 0  # bytes that are left
    size: str = ROOM


CASES = {
    "metrics row": Case("x", "the row of step"),
    # SQLite writes over the pages of its log after 800 KiB: the disk is smaller, so it must grow.
    "journal": Case("journal", "could not be written, the run waits for the disk", size="640k"),
    "state.json": Case("x", "state.json cannot be written"),
    "blob": Case("blobs", "No space left on device"),
    "checkpoint": Case("x/checkpoints", "was not written"),
    "hf": Case("x", "No space left on device", rows=STEPS - 1, leave=128 * 1024),
}


@pytest.fixture
def disks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """The disk of a case; logs and checkpoints of a run on a full disk have their own."""
    if os.geteuid():
        pytest.skip("to mount a small file system needs root")
    case = CASES[request.getfixturevalue("name")]
    full = SmallDisk(tmp_path / case.disk, case.size)
    roomy = [SmallDisk(tmp_path / "x" / name, ROOM) for name in ("logs", "checkpoints")]
    if case.disk == "x/checkpoints":
        roomy.pop().unmount()
    yield full
    for disk in (*roomy, full):
        disk.unmount()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_real_run_survives_a_full_disk(name: str, tmp_path: Path, disks: SmallDisk) -> None:
    case, starts = CASES[name], 1
    outside = [f"rollout.journal_dir={tmp_path}/journal", f"cluster.blob_dir={tmp_path}/blobs"]
    run = start(tmp_path, "quickstart", *SETTINGS, *outside, name="x")
    try:
        run.wait_for(
            lambda: len(run.rows()) >= case.rows and run.dir.latest_checkpoint() is not None
        )
        disks.fill(case.leave)
        if name == "state.json":
            os.kill(run.pids()["trainer"], signal.SIGKILL)
        _wait_for_words(run, case.says)
        disks.free()
        while run.finish() and starts < 3:
            starts += 1
            run = start(tmp_path, "--resume", str(run.dir.root))
        rows = run.rows()
        print(f"{name}: {starts} start(s), incarnations {sorted({r['version'] for r in rows})}")
        assert run.process.returncode == 0, run.text()
    finally:
        run.end()
    assert [row["step"] for row in rows] == list(range(STEPS))
    latest = run.dir.latest_checkpoint()
    assert latest is not None
    assert read_manifest(latest[1])["consumed_groups"] == STEPS * GROUPS_PER_STEP, "trained twice"
    assert run.dir.hf.is_dir()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_real_run_falls_back_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *SETTINGS, "run.steps=4", name="x")
    assert run.finish() == 0, run.text()
    newest = max(run.dir.checkpoint(4).glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    run = start(tmp_path, "--resume", str(run.dir.root), "run.steps=6")
    assert run.finish() == 0, run.text()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["version"] for row in rows[2:]] == ["1.3", "1.4", "1.5", "1.6"]
    assert (run.dir.checkpoints / ".step-000004.bad").is_dir()
    words = "checkpoint step-000004 is damaged and set aside as .step-000004.bad"
    assert words in (run.dir.logs / "trainer-0.log").read_text()


# --- everything at once ---------------------------------------------------------------------------
BAD = {7: "loss", 20: "gradient"}
STUBS = {
    "wandb.py": """
class Settings:
    def __init__(self, **given): pass
def init(**given): return Run()
class Run:
    name = "x"
    def log(self, values, step): raise RuntimeError(f"503 from api.example.invalid at {step}")
    def finish(self): raise RuntimeError("503 from api.example.invalid")
""",
    "my_objective.py": f"""
from pathlib import Path
import torch.distributed as dist
from tests.helpers import bad_objective
ROWS, BAD = Path(__file__).parents[1] / "x" / "metrics.jsonl", {BAD}
armed = set()
def objective(t, old, s):
    step = ROWS.read_bytes().count(b"\\n") if ROWS.exists() else 0
    if step not in armed:
        bad_objective.arm(BAD.get(step, "") if dist.get_rank() == 0 else "")
        armed.add(step)
    return bad_objective.objective(t, old, s)
""",
}


@pytest.fixture
def run_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if os.geteuid():
        pytest.skip("to mount a small file system needs root")
    disk = SmallDisk(tmp_path / "x", ROOM)
    yield disk
    disk.unmount()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_run_under_a_broken_mirror_bad_steps_and_a_full_disk(
    tmp_path: Path, run_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in STUBS.items():
        (tmp_path / "stubs").mkdir(exist_ok=True)
        (tmp_path / "stubs" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/stubs{os.pathsep}{ROOT}")
    settings = [*SETTINGS, "run.steps=40", "checkpoint.every=10", "trainer.skip_bad_steps=1"]
    settings += ["algorithm.objective=my_objective:objective", "observe.wandb_project=p"]
    settings += [f"rollout.journal_dir={tmp_path}/journal", f"cluster.blob_dir={tmp_path}/blobs"]
    run = start(tmp_path, "quickstart-smoke", *settings, name="x")
    try:
        run.wait_for(lambda: len(run.rows()) >= 12)
        run_disk.fill()
        time.sleep(30)
        waiting = len(run.rows())
        assert run.process.poll() is None, run.text()
        run_disk.free()
        assert run.finish() == 0, run.text()
        rows = run.rows()
        page, output = run.dir.report.read_text(), run.text()
        kept = sorted(path.name for path in run.dir.bad_steps.glob("*.step"))
        latest = run.dir.latest_checkpoint()
        assert latest is not None
        consumed = read_manifest(latest[1])["consumed_groups"]
    finally:
        run.end()
    assert waiting < 20, "control: the disk was full in between"
    assert [row["step"] for row in rows] == list(range(40))
    assert {row["version"].split(".")[0] for row in rows} == {"0"}, "no process began again"
    skipped = [row["step"] for row in rows if row["loss/skipped_steps"]]
    assert skipped == list(BAD), "the others were taken"
    assert consumed == 40 * GROUPS_PER_STEP, "groups of a step that was not taken are consumed once"
    assert kept == ["0.000007.1.step", "0.000020.1.step"]
    lines = [line for line in output.splitlines() if "503 from api.example.invalid" in line]
    assert len(lines) == 1, lines
    for words in (
        "wandb failed: RuntimeError: 503 from api.example.invalid",
        "step 7: the loss is nan in microbatch",
        "step 20: the gradient norm is",
        "waits for room on the disk",
        "without room",
        "wandb lacks the steps from 0",
    ):
        assert words in output, words
        assert words in page, words


def _wait_for_words(run: Run, words: str) -> None:
    limit = Patience(120)
    while not limit.over():
        logs = run.dir.logs.glob("*.log")
        if any(words in path.read_text(errors="replace") for path in logs):
            return
        time.sleep(0.2)
    raise AssertionError(f"no log says {words!r}")

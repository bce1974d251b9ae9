"""A run is trained again from its stream: each step ends with the recorded weights, bit for bit.

Its controls: settings that change the sum, and a change in a copy of the stream.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from moerl.audit.verify_run import verify
from tests.helpers.patience import patience
from tests.helpers.streams import change_group, with_rollout
from tests.helpers.train_runs import Run, last_step, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

STREAM = ["stream.keep_steps=-1", "observe.engine_alone_s=0"]


def _has_steps(run: Run, last: int) -> bool:
    return last_step(run) >= last


def rerun(source: Path, *options: str) -> tuple[int, str]:
    """(exit status, output) of `moerl rerun`."""
    command = [sys.executable, "-m", "moerl", "rerun", str(source), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(900))
    return done.returncode, done.stdout + done.stderr


def equal_steps(text: str) -> tuple[int, int]:
    found = re.search(r"(\d+) of (\d+) steps ended with the recorded weights", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """150 steps at the default lag; controller, trainer, engine and front are killed on the way."""
    root = tmp_path_factory.mktemp("runs")
    settings = [*STREAM, "run.steps=150", "checkpoint.every=5", "supervision.backoff_s=0.1"]
    run = start(root, "quickstart", *settings, name="x")
    draw = random.Random(7)
    try:
        run.wait_for(lambda: run.dir.latest_checkpoint() is not None)
        for victim in ("controller", "trainer", "engine-0", "front"):
            seen = last_step(run) + draw.randint(3, 25)
            run.wait_for(partial(_has_steps, run, seen))
            time.sleep(draw.uniform(0.0, 1.0))
            members = run.members()
            pid = run.process.pid if victim == "front" else run.pids()[victim]
            os.kill(pid, signal.SIGKILL)
        assert not survivors(members, 60.0)  # of the front: nobody is left
        run = start(root, "--resume", str(run.dir.root))
        assert run.finish(1200.0) == 0, run.text()
    finally:
        run.end()
    return run


def test_each_step_of_a_run_that_was_killed_is_bitwise_the_same(killed: Run) -> None:
    found = verify(killed.dir.root)
    assert not found.differences
    assert (found.steps, found.starts) == (150, 3)  # the trainer, and the front's resume
    code, text = rerun(killed.dir.root, "--run", "same")
    assert (code, equal_steps(text)) == (0, (150, 150)), text


@pytest.mark.parametrize("layout", ["tp=2 dp=1 ep=1", "tp=1 dp=1 ep=1"], ids=["tp2", "one-rank"])
def test_another_layout_agrees(layout: str, killed: Run) -> None:
    """The run itself has two expert parallel ranks."""
    settings = [part for item in layout.split() for part in ("--set", f"trainer.parallel.{item}")]
    code, text = rerun(killed.dir.root, *settings)
    assert code == 0, text
    assert equal_steps(text)[0] == 0  # control: its sums have another order


def test_a_changed_route_is_found_before_it_is_trained(killed: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(killed.dir.root, copy)
    path = next(path for path in sorted((copy / "stream/steps").glob("*.000012.step")))
    group_id = int(next(iter(_groups(copy, 12))))

    def other_token(group, blobs):  # type: ignore[no-untyped-def]
        tokens = group.episodes[0].turns[0].rollout.token_ids.copy()
        tokens[-1] = 5 + (tokens[-1] == 5)
        return with_rollout(group, token_ids=tokens), blobs

    change_group(path, group_id, other_token)
    assert any(f"step 12, group {group_id}: its tokens" in one for one in verify(copy).differences)
    code, text = rerun(copy, "--to", "20")
    assert code == 1
    assert "first difference: step 12: " in text


def _groups(root: Path, step: int) -> list[str]:
    from moerl.records.stream_files import StreamDir, read_lines, surviving

    kept, _ = surviving(line for line, _ in read_lines(StreamDir(root / "stream").log))
    return list(kept[step].groups)


def test_another_loss_on_the_same_rollouts(killed: Run) -> None:
    code, text = rerun(killed.dir.root, "--from", "147", "--set", "algorithm.objective=cispo")
    assert code == 0, text
    assert equal_steps(text)[0] == 0
    same = killed_objective(killed)
    code, text = rerun(killed.dir.root, "--from", "147", "--set", f"algorithm.objective={same}")
    equal, steps = equal_steps(text)
    assert (code, equal) == (0, steps), text


def killed_objective(run: Run) -> str:
    from moerl.config.load import load_saved

    return load_saved(run.dir.config).algorithm.objective


TWENTY = ["run.steps=20", "rollout.groups_per_step=4", "checkpoint.every=0", "evaluation.every=0"]


def test_adapters(tmp_path: Path) -> None:
    check_rerun(start(tmp_path, "quickstart-lora", *STREAM, *TWENTY, name="x"))


def test_turns_with_tools(tmp_path: Path) -> None:
    sft = ["-m", "moerl", "sft", "tool-use-start", f"run.root={tmp_path}", "--run", "warm"]
    few = ["run.steps=20", "rollout.groups_per_step=16"]
    subprocess.run([sys.executable, *sft, *few], timeout=patience(400), check=True)
    warm = f"model.path={tmp_path / 'warm' / 'hf'}"
    check_rerun(start(tmp_path, "tool-use", *STREAM, *TWENTY, warm, name="x"))


def check_rerun(run: Run) -> None:
    assert run.finish(900.0) == 0, run.text()
    assert not verify(run.dir.root).differences
    code, text = rerun(run.dir.root)
    assert (code, equal_steps(text)) == (0, (20, 20)), text

"""`moerl sft` trains a value head; a run takes rewards from it while its ranks are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from moerl.core.types import EpisodeGroup
from moerl.observe.metrics import read_rows
from moerl.runtime.trace import read_spans
from tests.helpers.patience import patience
from tests.helpers.train_runs import Run, start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]

STEPS = 10


def _sft(root: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moerl", "sft", "quickstart-smoke", f"run.root={root}"]
    return subprocess.run(
        [*command, *settings], capture_output=True, text=True, timeout=patience(600), check=False
    )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that says whether a digit follows the one in the prompt."""
    root, rng, rows = tmp_path_factory.mktemp("head"), random.Random(0), []
    for _ in range(400):
        asked, said = rng.randrange(10), rng.randrange(10)
        said = (asked + 1) % 10 if rng.random() < 0.5 else said
        label = float(said == (asked + 1) % 10)
        steps = [[f"{said} ", label], [" ", None]]
        rows.append({"prompt": f"{asked}=", "answer": str(asked + 1), "steps": steps})
    path = root / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    settings = ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match", "run.steps=40"]
    settings += ["rollout.groups_per_step=32", "sft.value_head=bce", "--run", "head"]
    done = _sft(root, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [row["loss/value"] for row in read_rows(root / "head" / "metrics.jsonl")]
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0], losses
    return root / "head" / "hf"


def _value(head: Path, ids: np.ndarray) -> float:
    model = AutoModelForTokenClassification.from_pretrained(head, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1, 0].sigmoid())


def test_labels_that_are_no_labels_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"prompt": "1=", "answer": "2", "steps": [["2 ", 3]]}\n')
    task = ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match", "run.steps=2"]
    done = _sft(tmp_path, *task, "sft.value_head=bce", "--run", "x")
    assert done.returncode == 2, done.stderr
    assert "a number in 0..1" in done.stderr


def test_ranks_that_are_killed_lose_no_rollout(tmp_path: Path, head: Path) -> None:
    term = f"{{name: steps, where: model, model: {head}, unit: step, separator: ' '}}"
    run = start(
        tmp_path,
        "quickstart-smoke",
        f"run.steps={STEPS}",
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "rollout.slice_tokens=2",
        "sampling.max_new_tokens=6",
        "observe.engine_alone_s=0",
        "checkpoint.every=0",
        "evaluation.every=5",
        "evaluation.prompts=8",
        'task.reward=""',
        f"task.rewards=[{term}, {{name: right, function: exact_match}}]",
        "ref_models.placement=separate",
        "trainer.parallel={dp: 1, ep: 1}",
        "supervision.backoff_s=0.5",
        name="x",
        copies=True,
    )
    try:
        run.wait_for(lambda: len(run.rows()) >= 2)
        first = run.pids()["ref_models"]
        os.kill(first, signal.SIGKILL)
        run.wait_for(lambda: run.pids().get("ref_models", first) != first)
        assert run.finish(600) == 0, run.text()
    finally:
        run.end()
    _check(run, head)


def _check(run: Run, head: Path) -> None:
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert "ref_models died, restart 1" in run.text()
    assert sum(row["scorer/failed"] for row in rows) == 0, "no group was given up"
    trained: list[EpisodeGroup] = [group for _, group in run.trained.groups(run.rows())]
    assert sorted(group.group_id for group in trained) == list(range(4 * STEPS)), "each group once"
    assert any("eval/reward_mean" in row and row["eval/step"] == STEPS for row in run.rows())
    checked = 0
    for group in trained[:: 4 * STEPS // 6]:
        episode = group.episodes[0]
        ids, steps = episode.turns[0].rollout.token_ids, dict(episode.score.steps)
        begin = len(group.prompt.token_ids)
        assert max(steps) == len(ids) - begin - 1, "the last step ends with the answer"
        place = min(steps)
        if place < max(steps):  # the last token has the other term, too
            assert abs(steps[place] - _value(head, ids[: begin + place + 1])) < 1e-4
            checked += 1
    print(f"{checked} values compared")
    spans = read_spans(run.dir.trace)
    assert [s for s in spans if s["process"] == "ref_models-0" and s["name"] == "values"]

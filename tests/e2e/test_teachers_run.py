"""Teachers that follow the policy in real runs: each score is that of the version that it names.

The oracle is transformers over the weights that the trainer keeps of every version
(`checkpoint.keep_versions`), a folder that no teacher reads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moerl.audit.verify_run import MemoryBlobs, verify
from moerl.config.load import load_saved
from moerl.core.types import BatchPlan, PolicyVersion, Rollout
from moerl.data.teacher_versions import teachers_at
from moerl.records.blob_ranges import read_mask
from moerl.records.stream_files import (
    StartLine,
    StepFile,
    StepLine,
    StreamDir,
    read_lines,
    surviving,
    whole_plan,
)
from tests.helpers.patience import patience
from tests.helpers.train_runs import ENOUGH, Run, last_step, start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

GATE = 1e-5  # fp32, transformers
OWN = [
    "ref_models.placement=separate",
    "trainer.parallel={dp: 1, ep: 1}",
    "supervision.backoff_s=0.1",
    "stream.keep_steps=-1",
    "observe.engine_alone_s=0",
    "algorithm.distill_coef=0.05",
    "checkpoint.every=6",
    "checkpoint.keep_versions=true",
]
SLOW = "{name: slow, follows: policy, lag: 1}"
MEAN = "{name: mean, follows: policy, every: 3, ema: 0.5, weight: 0.5}"
SWAPS, STEPS = 20, 24


class Kept:
    """The weights of every version that the trainer kept, as models of transformers."""

    def __init__(self, run: Run) -> None:
        from moerl.engine import torchvision_fix

        torchvision_fix.arm()  # transformers imports torchvision
        from transformers import AutoModelForCausalLM

        self.run = run
        self.model = AutoModelForCausalLM.from_pretrained(
            load_saved(run.dir.config).model.path,
            dtype=torch.float32,
            experts_implementation="eager",
        ).eval()

    def weights(self, version: object) -> dict[str, torch.Tensor]:
        return load_file(self.run.dir.versions / str(version) / "model.safetensors")

    def mean(self, versions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Of MEAN, from the versions at multiples of 3."""
        found = self.weights(versions[0])
        for version in versions[1:]:
            found = {n: 0.5 * found[n] + 0.5 * w for n, w in self.weights(version).items()}
        return found

    @torch.no_grad()
    def scores(
        self, weights: dict[str, torch.Tensor], plan: BatchPlan, blobs: MemoryBlobs
    ) -> list[np.ndarray]:
        """[S] by row: log-probabilities over the recorded masks, at the student's temperature."""
        self._load(weights)
        rollouts = plan.rollouts()
        longest = max(rollout.num_tokens for rollout in rollouts)
        ids = torch.zeros(len(rollouts), longest, dtype=torch.long)
        for row, rollout in zip(ids, rollouts, strict=True):
            row[: rollout.num_tokens] = torch.from_numpy(rollout.token_ids.astype(np.int64))
        logits = self.model(ids).logits  # causal: padding behind a row changes nothing in it
        return [_of_row(one, rollout, blobs) for one, rollout in zip(logits, rollouts, strict=True)]

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        folder = self.run.dir.root / "oracle"
        folder.mkdir(exist_ok=True)
        source = Path(load_saved(self.run.dir.config).model.path)
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        from safetensors.torch import save_file

        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        self.model = (
            type(self.model)
            .from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
            .eval()
        )


def _of_row(logits: torch.Tensor, rollout: Rollout, blobs: MemoryBlobs) -> np.ndarray:
    places = np.flatnonzero(rollout.loss_mask)
    rows = logits[torch.from_numpy(places - 1)] / rollout.sampling.temperature
    offsets, kept = read_mask(blobs, rollout.sampling_mask)
    found = []
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        entries = torch.from_numpy(kept[offsets[number] : offsets[number + 1]].astype(np.int64))
        token = int(rollout.token_ids[place])
        found.append(float(row[token] - row[entries].logsumexp(0)))
    return np.array(found)


def _steps(run: Run) -> Iterator[tuple[StartLine, BatchPlan, MemoryBlobs]]:
    """Steps of the surviving history, each with the start of the trainer that trained it."""
    stream = StreamDir(run.dir.stream)
    lines = [line for line, _ in read_lines(stream.log)]
    kept: list[StepLine] = surviving(lines)[0]
    starts = {line.version.incarnation: line for line in lines if isinstance(line, StartLine)}
    for line in kept:
        plan, blobs = whole_plan(StepFile(stream, line))
        yield starts[line.version.incarnation], plan, MemoryBlobs(blobs)


def _gap(plan: BatchPlan, name: str, want: Sequence[np.ndarray]) -> float:
    pairs = zip(plan.ref_models, want, strict=True)
    return max(float(np.abs(scores.logprobs[name] - values).max()) for scores, values in pairs)


def _compare(run: Run) -> dict[str, Any]:
    """Worst gaps of scores to the version that they name and, the control, to the one before."""
    config, kept = load_saved(run.dir.config), Kept(run)
    found: dict[str, Any] = {"gap": 0.0, "control": 0.0, "versions": set(), "scores": 0}
    for begin, plan, blobs in _steps(run):
        want = teachers_at(config.algorithm, begin.begins, plan.step)
        assert plan.teachers == want, plan.step
        for scores in plan.ref_models:
            assert scores.teachers == want, "one version in a batch"
        slow = want["slow"]
        found["versions"].add(str(slow))
        found["gap"] = max(
            found["gap"], _gap(plan, "slow", kept.scores(kept.weights(slow), plan, blobs))
        )
        found["scores"] += sum(rollout.num_sampled for rollout in plan.rollouts())
        if slow.step > 2:
            names = {path.name for path in run.dir.versions.iterdir()}
            (before,) = sorted(n for n in names if n.endswith(f".{slow.step - 2}"))[-1:]
            other = kept.scores(kept.weights(before), plan, blobs)
            found["control"] = max(found["control"], _gap(plan, "slow", other))
        if "mean" in want:
            line = [_lineage(begin.begins, s) for s in range(0, want["mean"].step + 1, 3)]
            values = kept.scores(kept.mean(line), plan, blobs)
            found["gap"] = max(found["gap"], _gap(plan, "mean", values))
    return found


def _lineage(begins: Sequence[PolicyVersion], step: int) -> str:
    """The name of the version after `step` steps: by the last trainer that began before it."""
    before = [begin for begin in begins if begin.step < step]
    return str(PolicyVersion(before[-1].incarnation if before else begins[0].incarnation, step))


def _has(run: Run, step: int) -> bool:
    return last_step(run) >= step


def test_twenty_swaps_with_deaths_of_reference_ranks_and_trainer(tmp_path: Path) -> None:
    teachers = f"algorithm.teachers=[{SLOW},{MEAN}]"
    run = start(tmp_path, "quickstart", *ENOUGH, *OWN, teachers, f"run.steps={STEPS}", name="x")
    try:
        run.wait_for(partial(_has, run, 4))
        os.kill(run.pids()["ref_models"], signal.SIGKILL)
        run.wait_for(partial(_has, run, 14))
        os.kill(run.pids()["trainer"], signal.SIGKILL)
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    found = _compare(run)
    print({name: value for name, value in found.items() if name != "versions"})
    print(sorted(found["versions"]))
    assert len(found["versions"]) > SWAPS
    assert {name.split(".")[0] for name in found["versions"]} == {"0", "1"}, "both trainers' names"
    assert found["gap"] <= GATE
    assert found["control"] > 1000 * GATE, "control: an older version misses"
    assert verify(run.dir.root).differences == []
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[-1]["teacher/slow/swaps"] >= SWAPS
    assert all(row["teacher/slow/lag"] == (row["step"] > 0) for row in rows)


def test_with_adapters_a_teacher_is_its_factors(tmp_path: Path) -> None:
    adapters = ["lora.rank=4", "trainer.optimizer.lr=0.01", "trainer.optimizer.warmup_steps=0"]
    teachers = f"algorithm.teachers=[{SLOW}]"
    settings = [*ENOUGH, *OWN, *adapters, teachers, "run.steps=8"]
    run = start(tmp_path, "quickstart", *settings, name="x")
    try:
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    names = {path.name for path in next((run.dir.teachers / "slow").iterdir()).iterdir()}
    assert "adapter_model.safetensors" in names, "factors alone"
    assert "model.safetensors" not in names
    found = _compare(run)
    print({name: value for name, value in found.items() if name != "versions"})
    assert found["gap"] <= GATE
    assert found["control"] > 100 * GATE, "control: an older version misses"


def _rerun(source: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "moerl", "rerun", str(source), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300))
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_a_rerun_makes_the_teachers_of_the_trainers_ranks_again(tmp_path: Path) -> None:
    own = [item for item in OWN if not item.startswith(("ref_models", "checkpoint.every"))]
    teachers = f"algorithm.teachers=[{SLOW},{MEAN}]"
    settings = [*ENOUGH, *own, teachers, "run.steps=6", "checkpoint.every=3"]
    run = start(tmp_path, "quickstart", *settings, name="x")
    try:
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    rows = run.rows()
    assert [row["teacher/slow/version"] for row in rows] == [0, 0, 1, 2, 3, 4]
    assert [row["teacher/mean/version"] for row in rows] == [0, 0, 0, 3, 3, 3]
    assert any(row["loss/kl_teacher"] for row in rows)
    code, text = _rerun(run.dir.root)
    assert code == 0, text
    assert "6 of 6 steps ended with the recorded weights" in text
    code, text = _rerun(run.dir.root, "--from", "4")
    assert code != 0
    assert "versions before step 3 are not in the stream: rerun from step 0" in text, text

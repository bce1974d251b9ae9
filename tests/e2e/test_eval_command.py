"""`moerl eval` on real engines, beside transformers and beside the evaluations of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.patience import Patience, patience
from tests.helpers.train_runs import Run, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
EIGHT = ["evaluation.prompts=8", "evaluation.samples=2"]
RUN = [
    *EIGHT,
    "run.steps=24",
    "evaluation.every=12",
    "evaluation.hold_s=120",
    "checkpoint.every=12",
    "rollout.groups_per_step=16",
    "observe.engine_alone_s=0",
    "trainer.optimizer={lr: 4.0e-3, min_lr: 4.0e-3, warmup_steps: 0}",
]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files; Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        yield Path(folder)


def command(scratch: Path, page: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "moerl", "eval", *words, "--page", str(page)],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(scratch)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def evaluated(scratch: Path, *words: str) -> dict[str, Any]:
    """The JSON object of an evaluation, which leaves no temporary file."""
    page = scratch.with_name(f"{scratch.name}.html")
    try:
        process = command(scratch, page, *words, "--json")
        out, said = process.communicate(timeout=patience(240))
        assert out.startswith("{"), said
        assert page.is_file()
    finally:
        page.unlink(missing_ok=True)
    assert not list(scratch.glob("moerl-*"))
    found: dict[str, Any] = json.loads(out)
    return found


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """The figures of answers: no time, and no count of the run's own."""
    others = ("eval/seconds", "eval/step", "eval/given_up")
    return {k: v for k, v in metrics.items() if k.startswith("eval/") and k not in others}


def greedy(folder: Path, prompts: list[str], tokens: int) -> list[str]:
    """Answers of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, top_k=None, top_p=None)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def shares(prompts: list[str], answers: list[str]) -> list[float]:
    """Share of right positions of sorted digits."""
    wanted = ["".join(sorted(prompt.rstrip("="))) for prompt in prompts]
    return [
        sum(map(str.__eq__, right, said)) / len(right)
        for right, said in zip(wanted, answers, strict=True)
    ]


def test_answers_of_the_first_weights_are_those_of_transformers(
    scratch: Path, tmp_path: Path
) -> None:
    found = evaluated(scratch, "quickstart", *EIGHT, "--keep", str(tmp_path / "kept"))
    rows = found["models"]["model"]["prompts"]
    prompts = [row["prompt"] for row in rows]
    answers = greedy(tmp_path / "kept" / "model" / "model", prompts, 4)
    assert len(set(prompts)) == 8
    assert [row["answers"] for row in rows] == [[said, said] for said in answers]
    rewards = shares(prompts, answers)
    assert [row["rewards"] for row in rows] == [[reward, reward] for reward in rewards]
    metrics = found["models"]["model"]["metrics"]
    assert metrics["eval/reward_mean"] == pytest.approx(sum(rewards) / 8)
    assert not list((tmp_path / "kept" / "model" / "checkpoints").iterdir()), "nothing is trained"


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = start(tmp_path_factory.mktemp("runs"), "quickstart", *RUN, name="mine")
    assert run.finish() == 0, run.text()
    return run


def by_step(run: Run) -> dict[float, dict[str, float]]:
    return {row["eval/step"]: figures(row) for row in run.rows() if "eval/step" in row}


@pytest.mark.full
def test_a_run_beside_its_base_has_the_figures_of_its_rows(mine: Run, scratch: Path) -> None:
    """Greedy, so they are equal bit for bit."""
    wanted = by_step(mine)
    assert wanted.keys() == {0.0, 12.0, 24.0}
    models = (found := evaluated(scratch, str(mine.dir.root), "--against", "base"))["models"]
    assert figures(models["model"]["metrics"]) == wanted[24.0]
    assert figures(models["against"]["metrics"]) == wanted[0.0]
    gain = wanted[24.0]["eval/reward_mean"] - wanted[0.0]["eval/reward_mean"]
    assert found["difference"][""]["mean"] == pytest.approx(gain)
    prompts = models["model"]["prompts"]
    said = greedy(mine.dir.hf, [row["prompt"] for row in prompts], 4)
    assert [row["answers"][0] for row in prompts] == said


@pytest.mark.full
def test_a_checkpoint_has_the_figures_of_its_own_row(mine: Run, scratch: Path) -> None:
    wanted, early = by_step(mine), str(mine.dir.checkpoint(12))
    found = evaluated(scratch, "quickstart", *EIGHT, "--checkpoint", early)
    assert figures(found["models"]["model"]["metrics"]) == wanted[12.0]
    assert wanted[24.0] != wanted[12.0] != wanted[0.0], "control: each version has others"


@pytest.mark.full
def test_an_adapter_is_the_merged_model_of_its_run(
    mine: Run, scratch: Path, tmp_path: Path
) -> None:
    model = f"model.path={mine.dir.hf}"
    short = ["run.steps=2", "evaluation.every=2", "rollout.groups_per_step=8"]
    run = start(tmp_path, "quickstart-lora", *RUN, *short, model, name="adapted")
    assert run.finish() == 0, run.text()
    words = [model, *EIGHT, "--checkpoint", str(run.dir.adapter)]
    found = evaluated(scratch, "quickstart-lora", *words)["models"]["model"]
    assert figures(found["metrics"]) == by_step(run)[2.0]
    assert by_step(run)[2.0] != by_step(run)[0.0], "control: without it they are others"


@pytest.mark.full
def test_agents_are_played(scratch: Path, tmp_path: Path) -> None:
    program = f"task.agent.command=[python, {ROOT}/examples/tool_agent.py]"
    short = ["run.steps=2", "evaluation.every=2", "rollout.groups_per_step=4"]
    run = start(
        tmp_path, "digits-by-agent", *RUN, *short, program, "checkpoint.every=0", name="agents"
    )
    assert run.finish() == 0, run.text()
    found = evaluated(scratch, str(run.dir.root))["models"]["model"]
    assert figures(found["metrics"]) == by_step(run)[2.0]
    assert all(len(row["answers"]) == 2 for row in found["prompts"])


@pytest.mark.full
@pytest.mark.parametrize("said", ["waiting for engine 0", "waiting for answers"])
def test_ctrl_c_ends_it(said: str, scratch: Path, tmp_path: Path) -> None:
    endless = ["evaluation.prompts=64", "evaluation.max_requests=1", "evaluation.samples=64"]
    process = command(scratch, tmp_path / "eval.html", "quickstart", *endless)
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == said:
            break
    time.sleep(1.0)
    front = psutil.Process(process.pid)
    members = [front, *front.children(recursive=True)]
    process.send_signal(signal.SIGINT)
    limit = Patience(30.0)
    while process.poll() is None and not limit.over():
        time.sleep(0.1)
    assert process.returncode == 130
    assert len(members) > 5
    assert not survivors(members, 10.0)
    assert not list(scratch.glob("moerl-*"))
    assert not (tmp_path / "eval.html").exists()
    assert "interrupted" in process.stderr.read()

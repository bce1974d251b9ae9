"""`moerl sft` on a JSONL file, and reinforcement learning from what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moerl.config.lora_settings import LoraConfig
from moerl.observe.metrics import read_rows
from moerl.trainer.hf_io.adapter_files import load_adapter
from moerl.trainer.hf_io.hf_folder import HfFolder
from tests.helpers.patience import patience
from tests.helpers.train_runs import SMALL, start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]


def _sft(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moerl", "sft", "quickstart", f"run.root={root}"]
    return subprocess.run(
        [*command, *args], capture_output=True, text=True, timeout=patience(600), check=False
    )


def test_a_warm_start_and_a_run_from_it(tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    rows = [{"prompt": f"{i % 10}=", "answer": str((i + 1) % 10)} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match"]
    done = _sft(tmp_path, *task, "--run", "warm", "run.steps=30")
    assert done.returncode == 0, done.stdout + done.stderr
    nll = [row["loss/nll"] for row in read_rows(tmp_path / "warm" / "metrics.jsonl")]
    assert len(nll) == 30
    assert nll[-1] < 0.5 * nll[0], nll
    warm = f"model.path={tmp_path / 'warm' / 'hf'}"
    run = start(tmp_path, "quickstart", *SMALL, *task, warm, "sampling.max_new_tokens=2", name="x")
    assert run.finish() == 0, run.text()
    assert run.rows()[0]["reward/mean"] > 0.2, "a random model answers one in hundreds"


def test_a_warm_start_by_adapters_alone(tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    rows = [{"prompt": f"{i % 10}=", "answer": str((i + 1) % 10)} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match"]
    lora = ["lora.rank=8", "trainer.optimizer.lr=1e-2", "trainer.optimizer.min_lr=1e-2"]
    done = _sft(tmp_path, *task, *lora, "--run", "warm", "run.steps=12")
    assert done.returncode == 0, done.stdout + done.stderr
    nll = [row["loss/nll"] for row in read_rows(tmp_path / "warm" / "metrics.jsonl")]
    assert nll[-1] < 0.7 * nll[0], nll
    merged = HfFolder(tmp_path / "warm" / "hf")
    factors = load_adapter(tmp_path / "warm" / "adapter" / "peft", merged.spec, LoraConfig(rank=8))
    first = HfFolder(tmp_path / "warm" / "model")
    module = "model.layers.1.mlp.experts.3.down_proj"
    delta = factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]
    assert delta.any()
    want = first.read(f"{module}.weight") + delta
    torch.testing.assert_close(merged.read(f"{module}.weight"), want)


def test_a_missing_answer_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text('{"prompt": "1=", "answer": 2}\n')
    task = ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match"]
    done = _sft(tmp_path, *task, "--run", "warm", "run.steps=2")
    assert done.returncode == 2  # refused before anything starts
    assert "sft needs a text to learn" in done.stderr

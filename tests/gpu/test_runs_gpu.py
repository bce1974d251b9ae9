"""Whole runs on the GPUs of one node: transports, two engines, resume, ablation.

The model is the tiny one of a recipe, so a figure of seconds is a start and a round trip, not a
bandwidth.  MOERL_GPU_CHECK_MODEL names a folder for the ablation, such as OLMoE-1B-7B.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moerl.runtime.trace import read_spans
from tests.helpers.device_figures import Figure
from tests.helpers.tiny_families import RECIPE
from tests.helpers.train_runs import Run, start
from tests.helpers.turn_figures import turn_figures

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is None, reason="SGLang's CUDA kernels are not installed"
)
ON_CUDA = ("cluster=gpu1", "run.steps=4")
# NCCL has no two ranks on one GPU
OTHER_GPU = {"nccl": ("cluster.colocated=none", "cluster.nodes.all.devices=2")}


def finished(root: Path, *settings: str, name: str = "x") -> Run:
    run = start(root, RECIPE, *ON_CUDA, *settings, name=name)
    assert run.finish(1500) == 0, run.text()[-6000:]
    assert len([row for row in run.rows() if "loss/total" in row]) >= 4
    return run


@pytest.mark.parametrize("transport", ["shm", "gloo", "disk", "cuda_ipc", "nccl", "mooncake"])
def test_publishes_over(transport: str, tmp_path: Path, figure: Figure) -> None:
    if transport in OTHER_GPU and torch.cuda.device_count() < 2:
        pytest.skip(f"{transport} needs two GPUs")
    if transport == "mooncake" and importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake's library is not installed")
    settings = (f"sync.transport={transport}", f"sync.folder={tmp_path}")
    run = finished(tmp_path, *settings, *OTHER_GPU.get(transport, ()))
    rows = [row for row in run.rows() if "async/sync_commit_s" in row]
    assert all(row["async/sync_engines_behind"] == 0 for row in rows)
    for phase in ("prepare", "verify", "commit", "pause"):
        worst = max(row[f"async/sync_{phase}_s"] for row in rows)
        figure(f"{transport}, {phase}, largest of {len(rows)}", worst, "s")


def test_turns_with_one_gpu(tmp_path: Path, figure: Figure) -> None:
    """The real loop: the plan's parts, and all that may move; every version arrives."""
    turns = ("cluster.colocated=turns", "rollout.in_flight_mode=retract", "run.steps=8")
    folder = os.environ.get("MOERL_GPU_CHECK_MODEL", "")
    recipe, own = (RECIPE, ON_CUDA)
    if folder:
        recipe, own = "olmoe-1gpu", (f"model.path={folder}", "task.chat_template=false")
    parts = ["gradients", "kv_cache", "optimizer", "trainer_weights"]
    every = [*parts, *([] if folder else ["engine_weights"])]  # adapters keep the base
    for name, moves in (("plan", ()), ("all", (f"turn.moves=[{','.join(every)}]",))):
        run = start(tmp_path, recipe, *own, *turns, *moves, name=name)
        assert run.finish(1700) == 0, run.text()[-6000:]
        rows = [row for row in run.rows() if "loss/total" in row]
        assert [row["step"] for row in rows] == list(range(8))
        assert all(row.get("async/sync_engines_behind", 0) == 0 for row in rows)
        spans = [s for s in read_spans(run.dir.trace) if s["process"] == "trainer-0"]
        for told, (value, unit) in turn_figures(rows, spans).items():
            figure(f"{name}: {told}", value, unit)


def test_two_engines_on_one_node(tmp_path: Path, figure: Figure) -> None:
    """Both take every version; where there are three GPUs each process has its own."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip("two engines need two GPUs")
    settings = ["engine.count=2", f"cluster.nodes.all.devices={gpus}"]
    run = finished(tmp_path, *settings, *(["cluster.colocated=none"] if gpus >= 3 else []))
    rows = [row for row in run.rows() if "async/engines" in row]
    assert {row["async/engines"] for row in rows} == {2}
    assert all(row["async/sync_engines_behind"] == 0 for row in rows)
    figure("steps", float(len(rows)), "steps")


def test_a_run_resumes(tmp_path: Path, figure: Figure) -> None:
    first = finished(tmp_path, "checkpoint.every=2")
    again = start(tmp_path, "--resume", str(first.dir.root), "run.steps=6")
    assert again.finish(1500) == 0, again.text()[-6000:]
    steps = [int(row["step"]) for row in again.rows() if "loss/total" in row]
    assert steps == list(range(6))
    figure("steps of both parts", float(len(steps)), "steps")


def test_ablation(tmp_path: Path, figure: Figure) -> None:
    """A trained MoE in bf16 on both sides: rounding with both replays, more without each."""
    folder = os.environ.get("MOERL_GPU_CHECK_MODEL", "")
    if not folder:
        folder = str(finished(tmp_path).dir.hf)
    command = [sys.executable, "-m", "moerl", "mismatch", RECIPE, f"model.path={folder}"]
    command += [*ON_CUDA, "--json", "--page", str(tmp_path / "page.html")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)["results"]["bf16"]
    for name in ("none", "routing", "mask", "both"):
        figure(f"{name}, k3", found[name]["k3"], "nats")
        figure(f"{name}, 99 % of abs(d)", found[name]["abs_dlogp_p99"], "nats")
    assert found["both"]["k3"] < min(found[name]["k3"] for name in ("none", "routing", "mask"))

"""`model.fp32_lm_head` with bf16 weights: engines and trainer, each with and without it.

The head alone: the engine returns the hidden states that its head read, and the trainer's head
scores them.  On a CPU both use one kernel for bf16, so two bf16 heads agree there, too; what the
setting saves shows only where one side has it.  The whole model: a bf16 trainer replays records.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moerl.algorithms.head_logprob import Head, full_logprobs
from tests.helpers.patience import patience
from tests.helpers.rank_server import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
SERVED = {"fp32": True, "fp32-tp2": True, "fp32-tied": True, "bf16": False}  # fp32 head, by case
EXACT = 5e-6  # nats
Scores = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of every case, and what trainers with either head say of them."""
    folder = tmp_path_factory.mktemp("heads")
    helper = "tests.helpers.fp32_head_servers"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", helper, str(folder), *SERVED],
        cwd=ROOT,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=patience(1200),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    failed = [path.read_text() for path in folder.glob("*/failed.txt")]
    assert not failed, failed
    jobs = sorted(map(str, folder.glob("*/job-*.json")))
    assert len(jobs) == 2 * len(SERVED)
    run_ranks(1, ["-m", "moerl.audit.score_ranks", "--job", *jobs], timeout_s=600.0)
    return folder


def head_gap(folder: Path, *, fp32: bool) -> float:
    """Largest difference between the trainer's head and the engine's, of the same states."""
    found, weights = np.load(folder / "head.npz"), load_file(folder / "model/model.safetensors")
    config = json.loads((folder / "model/config.json").read_text())
    name = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    weight = weights[f"{name}.weight"].bfloat16()
    hidden = torch.from_numpy(found["hidden"]).float()
    assert torch.equal(hidden.bfloat16().float(), hidden), "the engine's states are bf16"
    tokens = torch.from_numpy(found["token"])
    got = full_logprobs(
        hidden.bfloat16(),
        Head(weight, len(weight), fp32=fp32),
        tokens,
        temperature_S=torch.ones(len(tokens)),
    ).logprob
    return float((got - torch.from_numpy(found["logprob"])).abs().max())


@pytest.mark.parametrize("case", SERVED)
def test_both_sides_agree_and_one_alone_does_not(served: Path, case: str) -> None:
    gaps = {fp32: head_gap(served / case, fp32=fp32) for fp32 in (False, True)}
    print(case, gaps)
    assert gaps[not SERVED[case]] > 100 * EXACT, "control: one side alone"
    if SERVED[case]:
        assert gaps[True] <= EXACT


@pytest.mark.parametrize("case", SERVED)
def test_the_setting_reaches_a_trainer_that_replays_the_records(served: Path, case: str) -> None:
    """Layers in bf16 round on both sides, by more than the heads of so small a model differ."""
    scores: dict[str, Scores] = {
        trainer: np.load(served / case / f"scores-{trainer}.npz") for trainer in ("fp32", "bf16")
    }
    fp32, bf16 = (scores[trainer]["bf16/both"] for trainer in ("fp32", "bf16"))
    engine = scores["fp32"]["engine"]
    assert len(engine) >= 200
    print(case, *(float(np.abs(one - engine).mean()) for one in (fp32, bf16)))
    assert float(np.abs(fp32 - engine).mean()) < 0.02
    assert float(np.abs(fp32 - bf16).max()) > 100 * EXACT, "control: the trainer's head is another"

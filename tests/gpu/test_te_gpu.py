"""Steps with Transformer Engine: the CPU's with local layers; with adapters, transformers'."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.double.train_once import NUMBERS, numbers, prepare
from tests.helpers.device_figures import Figure
from tests.helpers.lora_oracle import FAMILIES, LORA, SHARED, Trained

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed",
)
# fp32 with products in TF32: 1e-3 of a number is its rounding.  A step with routes of other tokens
# moves the loss by more (tests/double/on_trainer.py).
NEAR = 5e-3
COMPARED = ("loss/total", "loss/entropy", "loss/grad_norm", "loss/grad_norm_router")


def test_step_with_transformer_engine(tmp_path: Path, figure: Figure) -> None:
    """Loss, entropy and the gradient's norm; parameters have other names and shapes there."""
    command = [sys.executable, "-m", "tests.double.train_once", str(tmp_path)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(command, cwd=ROOT, env=hidden, check=True)
    want = torch.load(tmp_path / NUMBERS)["metrics"]
    got = numbers(prepare("cuda", tmp_path, layers="te"))["metrics"]
    assert got["routing/replay_cover_frac"] == got["keep/cover_frac"] == 1.0
    for name in COMPARED:
        if name in want:
            figure(f"{name}, from the CPU's", abs(got[name] / want[name] - 1), "of it")
            assert got[name] == pytest.approx(want[name], rel=NEAR), name


@pytest.mark.parametrize("form", ["each", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_transformer_engine(
    family: str, form: str, tmp_path: Path, figure: Figure
) -> None:
    """Loss, norm and gradients of factors; control: each expert's factors meet other rows."""
    case = Trained(tmp_path, family, {"each": LORA, "shared": SHARED}[form])
    found = case.run("one", on="gpu")
    assert found["te_layers"] > 10
    gaps = case.gaps(found)
    figure(f"{family}, {form}: gradients, from transformers'", max(gaps.values()), "of the largest")
    assert max(gaps.values()) <= NEAR, max(gaps, key=gaps.__getitem__)
    assert max(case.gaps(case.run("one", on="gpu", broken="next_rows")).values()) > 10 * NEAR

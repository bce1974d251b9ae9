"""The dithered cast in Megatron's optimizers: the same bits under every layout, and they move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.lora_oracle import write_model
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT

STEPS, RATE = 20, 1e-6
LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "dp2": ({"dp": 2, "ep": 2}, True),  # the distributed optimizer
    "tp2": ({"tp": 2, "etp": 2}, False),
    "pp2": ({"pp": 2}, True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


def _trained(model: Path, sizes: dict[str, int], distributed: bool, rounding: str) -> Any:
    out, script = model.parent / "found.pt", str(ROOT / "tests/helpers/dithered_cast_ranks.py")
    settings = {"parallel": sizes, "distributed": distributed, "rounding": rounding}
    settings |= {"steps": STEPS, "lr": RATE}
    arguments = ["--model", str(model), "--out", str(out), "--settings", json.dumps(settings)]
    run_ranks(sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1), [script, *arguments])
    return torch.load(out, weights_only=True)


def _moved(found: dict[str, Tensor], model: Path) -> float:
    """Mean change of all weights, of which half a step of bf16 is far above what they move."""
    first = load_file(model / "model.safetensors")
    moves = [(found[name] - first[name].bfloat16().float()).double().flatten() for name in first]
    large = [first[name].bfloat16().float().abs().flatten() > 0.02 for name in first]
    return float(torch.cat(moves)[torch.cat(large)].mean())


@pytest.mark.full
def test_weights_move_as_their_masters_with_the_same_bits_everywhere(model: Path) -> None:
    one = _trained(model, {}, False, "dither")
    moved, wanted = _moved(one, model), STEPS * RATE
    print(f"masters moved by {wanted:.2e}, weights by {moved:.2e}")
    assert abs(moved - wanted) < 0.1 * wanted
    assert _moved(_trained(model, {}, False, "nearest"), model) == 0.0
    for sizes, distributed in LAYOUTS.values():
        found = _trained(model, sizes, distributed, "dither")
        assert all(torch.equal(found[name], one[name]) for name in one), sizes

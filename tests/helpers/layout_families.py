"""Model families whose layouts are compared with transformers, and programs run as their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from moerl.layout import model_spec
from tests.helpers.patience import patience
from tests.helpers.rank_server import end_of_ranks

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = json.loads((ROOT / "tests/data/layout_families.json").read_text())
NUM_TOKENS = 24
MESHES = {"tp1": {}, "tp2-etp2": {"tp": 2, "etp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}}
SPECS = {family: model_spec(config) for family, config in FAMILIES.items()}


def refusal(family: str, axes: dict[str, int]) -> str:
    """Why live modules of a family cannot be built on a mesh; empty: they can."""
    spec = SPECS[family.removesuffix("+mtp")]
    if spec.qk_norm_all_heads and axes.get("tp", 1) > 1:
        return "cannot be cut; use trainer.parallel.tp = 1"
    if spec.experts and spec.o_bias and axes.get("etp", 1) > 1:
        return "Bias in Moe is only supported when ETP==1"
    if not spec.experts and axes.get("ep", 1) > 1:
        return "must be non None to use expert-parallel"
    return ""


def tokens(vocab: int) -> Any:
    import torch

    return torch.randint(vocab, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


def write(*args: str, program: str) -> None:
    """`python PROGRAM write ARGS`: transformers, beside a torch that nothing has patched."""
    done = subprocess.run(
        [sys.executable, program, "write", *args],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def run(*args: str, program: str, world: int = 1) -> str:
    """Run a program as `world` ranks; the last line that rank 0 printed."""
    codes, outputs = end_of_ranks(world, [program, *args], timeout_s=100.0)
    assert not any(codes), "".join(outputs)[-3000:]
    lines = outputs[0].splitlines()
    return lines[-1] if lines else ""

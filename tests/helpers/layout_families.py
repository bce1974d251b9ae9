"""Model families whose layouts are compared with transformers, and programs run as their ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_store import store_variable
from moerl.layout import model_spec
from tests.helpers.patience import patience

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


def run(*args: str, program: str, world: int = 1) -> str:
    """Run a program as `world` processes; the last line that rank 0 printed."""
    store = StoreServer("127.0.0.1")
    shared = os.environ | store_variable(store.server_address, 0)
    shared |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(world),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, program, *args],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [worker.communicate(timeout=patience(100)) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
        store.close()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    lines = outputs[0][0].splitlines()
    return lines[-1] if lines else ""

"""Both replays on CUDA: with this project's torch modules alone, and through Megatron-core with
Transformer Engine where both are installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.helpers import device_checks as checks
from tests.helpers.device_figures import Figure


def test_a_bf16_engine_and_an_fp32_trainer(figure: Figure) -> None:
    for name, (largest, k3) in checks.replay_closes_the_gap("cuda").items():
        figure(f"{name}, largest abs(d)", largest, "nats")
        figure(f"{name}, k3", k3, "nats")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_chosen_experts_learn(dtype: torch.dtype) -> None:
    checks.gradient_reaches_chosen_experts_only("cuda", dtype)


NEEDED = (
    "megatron",
    "transformer_engine",
    "transformers",
    "numpy",
    "msgspec",
    "xxhash",
    "omegaconf",
)


def test_megatron_replays_a_record(tmp_path: Path) -> None:
    """A tiny Qwen3-MoE in fp32 and bf16 on one GPU: executed experts are the recorded ones."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; runs in the whole environment")
    from tests.helpers.megatron_checks import scores_of_a_record

    for line in scores_of_a_record(tmp_path, "cuda"):
        print(line)

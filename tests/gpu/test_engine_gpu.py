"""SGLang's defaults on CUDA against the trainer's scores of what they recorded.

An engine in bf16 and a trainer in fp32 with the very same weights: with both replays they differ by
rounding, with rows of other tokens by much more.  The bound is that of the same comparison on a CPU
(tests/e2e/test_replay_engine.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moerl.engine.feature_table import FEATURES
from tests.helpers.device_engine import (
    experts_that_agree,
    judged,
    keep,
    needs_kernels,
    recorded,
    shifted,
)
from tests.helpers.device_figures import Figure
from tests.helpers.routes_by_rank import compared, noted

pytestmark = needs_kernels


def test_graphs_record_what_eager_passes_record(tmp_path: Path, figure: Figure) -> None:
    """Decoding and prefill in graphs, as by default, and none."""
    for name, off in (("graphs", False), ("eager", True)):
        world = recorded(tmp_path / name, disable_cuda_graph=off)
        captured = "Capture" in world.log.read_text()
        assert captured is not off, f"{name}: graphs were {'' if captured else 'not '}captured"
        judged(world, figure, name)


@pytest.mark.parametrize("ep", [1, 2])
def test_all_ranks_choose_the_recorded_experts(ep: int, tmp_path: Path, figure: Figure) -> None:
    """The record is that of rank 0; each rank routes after its own all-reduce."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    with noted(tmp_path / "routes"):
        world = recorded(tmp_path / "world", tp=2, ep_size=ep)
    judged(world, figure, f"ep {ep}")
    requests, differ = compared(tmp_path / "routes", ranks=2)
    figure(f"requests with other experts on rank 1, ep {ep}", differ, f"of {requests}")
    assert requests >= 24
    assert differ == 0


@pytest.mark.parametrize(
    "backend",
    next(row for row in FEATURES if row.name == "attention backends").args["attention_backend"],
)
def test_attention_backends_agree(backend: str | None, tmp_path: Path, figure: Figure) -> None:
    """Each value that the support table lets through; none = SGLang's choice."""
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for GPUs of capability 9")
    args = {} if backend is None else {"attention_backend": backend}
    judged(recorded(tmp_path / "one", **args), figure, backend or "SGLang's choice")


def test_routes_are_those_of_transformers(tmp_path: Path, figure: Figure) -> None:
    """In fp32, where rounding moves next to no choice: the fused kernels' ids are transformers'.

    Triton's products round to TF32, so near ties may differ; rows of other tokens agree in less
    than a half.
    """
    root = tmp_path / "one"
    keep(recorded(root, "float32", attention_backend="triton"))
    equal = experts_that_agree(root, torch.float32)
    figure("rows with transformers' experts", 100 * equal, "%")
    assert equal >= 0.99
    assert experts_that_agree(root, torch.float32, shifted) < 0.5

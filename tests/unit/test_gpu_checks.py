"""The checks of tests/gpu on the CPU: what a machine without a GPU can show of them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from moerl.algorithms import masked_logprob
from moerl.kernels.build import TARGETS, source_folder
from tests.helpers import device_checks as checks
from tests.helpers.kernel_implementations import implementations

LANES = Path(__file__).parents[1] / "data" / "warp_lanes.cpp"

each = pytest.mark.parametrize("implementation", implementations())


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_kernels(implementation: str, dtype: torch.dtype) -> None:
    case = checks.make_case("cpu", dtype, torch.int32, 9, 700, 30)
    checks.kernel_equals_fp64(case, implementation)
    if implementation == "built":
        checks.shards_join(case, 3)


@each
def test_gradcheck_and_refusals(implementation: str) -> None:
    checks.gradcheck_and_its_controls("cpu", implementation)
    checks.broken_records_are_refused("cpu", implementation)


def test_full_entropy() -> None:
    checks.full_entropy_is_that_of_all_logits("cpu")


def test_replay() -> None:
    checks.replay_closes_the_gap("cpu")
    for dtype in (torch.bfloat16, torch.float32):
        checks.gradient_reaches_chosen_experts_only("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_warp_of_32_lanes(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the CUDA build does inside one row, with threads for lanes."""
    compiler = TARGETS["cpu"].compiler()
    if compiler is None:
        return
    built = tmp_path_factory.getbasetemp() / "warp_lanes.so"
    if not built.exists():
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{source_folder()}"]
        subprocess.run([compiler, *flags, str(LANES), "-o", str(built)], check=True)
    lib = ctypes.CDLL(str(built))
    monkeypatch.setattr(masked_logprob, "library", lambda target: lib)
    case = checks.make_case("cpu", dtype, torch.int64, 5, 90, 40)
    checks.kernel_equals_fp64(case, "built")
    if dtype == torch.float64:
        checks.broken_records_are_refused("cpu", "built")

"""The checks of tests/gpu on the CPU: what a machine without a GPU can show of them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import checks
from tests.implementations import implementations

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

"""The checks of tests/gpu on the CPU: what a machine without a GPU can show of them."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import device_checks as checks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_head(dtype: torch.dtype) -> None:
    checks.head_equals_fp64(checks.make_case("cpu", dtype, torch.int32, 9, 700, 30))


def test_gradcheck_and_refusals() -> None:
    checks.gradcheck_and_its_controls("cpu")
    checks.broken_records_are_refused("cpu")


def test_full_entropy() -> None:
    checks.full_entropy_is_that_of_all_logits("cpu")


def test_replay() -> None:
    checks.replay_closes_the_gap("cpu")
    for dtype in (torch.bfloat16, torch.float32):
        checks.gradient_reaches_chosen_experts_only("cpu", dtype)

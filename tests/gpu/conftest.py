"""Everything here needs CUDA: elsewhere it is skipped, and the reason is printed.

On the device double (`pytest -p tests.double.plugin`) the same tests run with small sizes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.bare_imports import hide_other_packages
from tests.helpers.device_figures import Figure, machine, on_double

HERE = Path(__file__).parent
PARTS = "MOERL_GPU_CHECK_PARTS"  # environment variable: import only what `--parts` brings


if os.environ.get(PARTS):
    hide_other_packages()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where torch sees no GPU."""
    reason = f"torch {torch.__version__} sees no CUDA device; runs where it sees one"
    absent = pytest.mark.skip(reason=reason)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(absent)


@pytest.fixture(scope="session", autouse=True)
def where(record_testsuite_property: Callable[[str, object], None]) -> None:
    """Say once where the numbers come from; plain fp32 products, no TF32."""
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False
        record_testsuite_property("machine", json.dumps(machine()))
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Keeps a measured number, with its unit, for the table of tools/gpu-check."""

    def keep(name: str, value: float, unit: str) -> None:
        record_property("figure", json.dumps([name, value, unit]))
        print(f"{name}: {value:.4g} {unit}")

    return keep


@pytest.fixture
def tiny() -> bool:
    """Whether sizes must be small: on the double the CPU computes."""
    return on_double()

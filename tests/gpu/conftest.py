"""Everything here needs CUDA: elsewhere it is skipped, and the reason is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


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
def machine() -> None:
    """Say once where the numbers come from; plain fp32 products, no TF32."""
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")

"""A router's bias as one row [1, E] (ERNIE-4.5): SGLang's torch path takes [E] only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flat_bias(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """AROUND fused_topk_native, whose `correction_bias` comes by name."""
    if (bias := options.get("correction_bias")) is not None:
        options["correction_bias"] = bias.reshape(-1)
    return original(*args, **options)

"""The second entry of SGLang's plug-in point: registers this package's hooks."""

from __future__ import annotations

import os
from pathlib import Path

from moerl.engine.plugin import entry_points
from moerl.engine.protocol import DP_ATTENTION, MODEL_FOLDER, model_type_of


def register_hooks() -> None:
    """Entry point of `sglang.srt.plugins`: the hooks of the served model, without CUDA."""
    import torch

    from moerl_cpu_sglang import registry

    if torch.cuda.is_available():
        return
    folder = os.environ.get(MODEL_FOLDER)
    of_model = registry.hooks_of(model_type_of(Path(folder))) if folder else ()
    of_dp = registry.DP_HOOKS if DP_ATTENTION in os.environ else ()
    entry_points.register((*registry.FP8_HOOKS, *of_dp, *of_model))

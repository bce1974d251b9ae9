"""moerl's additions to SGLang, through SGLang's own plug-in entry points (see pyproject.toml).

`activate` offers the plain-CPU platform, `register_hooks` adapts functions; SGLang runs both
in each of its processes.  With CUDA they add only the check of loaded weights and the receiving end
of weight updates.
"""

from __future__ import annotations


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform class, or None for "not here"."""
    import torch

    return None if torch.cuda.is_available() else "moerl.engine.cpu_platform.PlainCpu"


def register_hooks() -> None:
    """Entry point of `sglang.srt.plugins`: registers the rows of `HOOKS` that apply here."""
    import os

    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moerl.engine.hooks import DP_ATTENTION, HOOKS

    cuda, dp_attention = torch.cuda.is_available(), DP_ATTENTION in os.environ
    for hook in HOOKS:
        if hook.when.applies(cuda=cuda, dp_attention=dp_attention):
            HookRegistry.register(hook.symbol, hook.ours, HookType(hook.kind))

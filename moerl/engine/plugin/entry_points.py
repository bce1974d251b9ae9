"""moerl's additions to SGLang, through SGLang's own plug-in entry points (see pyproject.toml).

`activate` offers the plain-CPU platform, `register_hooks` adapts functions; SGLang runs both
in each of its processes.  With CUDA they add only the check of loaded weights and the receiving end
of weight updates.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moerl.core.errors import EngineError
from moerl.engine import node_span
from moerl.engine.protocol import DP_ATTENTION

if TYPE_CHECKING:
    from moerl.engine.plugin.hooks import Hook

_before: dict[str, object] = {}  # symbol of a hook -> its object when the hook was registered


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform class, or None for "not here"."""
    import torch

    return None if torch.cuda.is_available() else "moerl.engine.plugin.cpu_platform.PlainCpu"


def register_hooks() -> None:
    """Entry point of `sglang.srt.plugins`: registers the rows of `HOOKS` that apply here."""
    import torch

    from moerl.engine.plugin.hooks import HOOKS

    node_span.register()
    cuda, dp_attention = torch.cuda.is_available(), DP_ATTENTION in os.environ
    register(h for h in HOOKS if h.when.applies(cuda=cuda, dp_attention=dp_attention))


def register(hooks: Iterable[Hook]) -> None:
    """Register hooks with SGLang, also of a further plug-in: `check_installed` covers them all."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        _before[hook.symbol] = None  # stays where the symbol is gone
        _before[hook.symbol] = _read(hook.symbol)
        HookRegistry.register(hook.symbol, hook.ours, HookType(hook.kind))


def check_installed() -> None:
    """Raises EngineError unless every hook replaced its symbol; SGLang only logs the failure.

    Call it after SGLang's load_plugins.
    """
    for symbol, before in _before.items():
        if before is None or _read(symbol) is before:
            raise EngineError(
                f"engine: the hook of {symbol} was not installed; patches/sglang/README.md names "
                "the version of SGLang that has it"
            )
    if not _before:
        raise EngineError("engine: SGLang did not load the plug-in moerl_hooks; see SGLANG_PLUGINS")


def _read(symbol: str) -> object:
    owner, _, name = symbol.rpartition(".")
    return inspect.getattr_static(pkgutil.resolve_name(owner), name)

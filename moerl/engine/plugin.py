"""What moerl adds to SGLang, through SGLang's own plug-in entry points (see pyproject.toml).

`activate` offers the plain-CPU platform, `register_hooks` repairs one function; SGLang runs both in
each of its processes.  With CUDA both do nothing, so a GPU server is stock SGLang.
"""

from __future__ import annotations


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform class, or None for "not here"."""
    import torch

    return None if torch.cuda.is_available() else "moerl.engine.cpu_platform.PlainCpu"


def register_hooks() -> None:
    """Entry point of `sglang.srt.plugins`.

    The host buffer of the routed experts asks CUDA to pin its memory; without CUDA that raises, and
    nothing needs the pin.  Target: SGLang 0.5.23 `srt/mem_cache/pool_host/common.py`.
    """
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(target, _leave_unpinned, HookType.REPLACE)


def _leave_unpinned(*_args: object, **_kwargs: object) -> None:
    return None

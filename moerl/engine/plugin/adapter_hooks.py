"""SGLang's adapter slots inside its processes: filling them, refusing requests without adapter.

An adapter's id is its version and its name says so: a request names the version under which it
shall run, SGLang's prefix cache adds the id to every key, so versions never share a prefix, and the
tokens of a request belong to that version whatever is committed while it runs.

SGLang 0.5.23 would answer a request that names no adapter from the base weights, and load any
tensors with success: a wrong shape ends the scheduler at the first request.  `check_named` refuses
this request, `fill` copies an adapter into its slot at once, between two forward passes.
Read at 0.5.23: srt/lora/lora_manager.py, mem_pool.py, lora_registry.py, backend/torch_backend.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moerl.core.errors import EngineError, LayoutError
from moerl.weight_sync.receiver_names import adapter_name

_MADE = "moerl"  # in place of a folder; SGLang wants a text


# --- scheduler ------------------------------------------------------------------------------------
def fill(runner: Any, version: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> int:
    """Load an adapter and copy it into a slot; returns its number.  Raises EngineError."""
    manager = _manager(runner)
    remove(runner, version)  # of an update that another rank refused
    loaded = manager.load_lora_adapter_from_tensors(reference(version), tensors, config)
    try:
        if not loaded.success:
            raise ValueError(loaded.error_message)
        manager.fetch_new_loras({version})
    except (ValueError, AssertionError, KeyError) as error:
        remove(runner, version)
        raise EngineError(f"SGLang refuses the adapter of {version}: {error}") from error
    return int(manager.memory_pool.get_buffer_id(version))


def remove(runner: Any, version: str) -> None:
    """Unload an adapter; an unknown name is ignored."""
    manager = _manager(runner)
    if version in manager.configs:
        manager.unload_lora_adapter(reference(version))


def slots(runner: Any, module: str) -> tuple[Tensor, Tensor]:
    """A [slots, parts * rank, in] and B [slots, out, rank] of a module, such as
    model.layers.0.self_attn.qkv_proj.  Raises LayoutError for a module without slots.
    """
    pool, (_, _, layer, *_, leaf) = _manager(runner).memory_pool, module.split(".")
    if leaf not in pool.A_buffer:
        raise LayoutError(f"{module}: SGLang keeps no adapter slots for it")
    return pool.A_buffer[leaf][int(layer)], pool.B_buffer[leaf][int(layer)]


def reference(version: str) -> Any:
    """SGLang's record of an adapter."""
    from sglang.srt.lora.lora_registry import LoRARef

    name = adapter_name(version)
    return LoRARef(lora_id=version, lora_name=name, lora_path=_MADE, pinned=False)


def _manager(runner: Any) -> Any:
    if runner.lora_manager is None:
        raise LayoutError("the server was started without adapter slots; set lora.delivery")
    return runner.lora_manager


# --- the server's own process ---------------------------------------------------------------------
async def check_named(original: Callable[..., Any], manager: Any, request: Any) -> None:
    """AROUND TokenizerManager._validate_and_resolve_lora: one adapter, which is loaded."""
    if manager.enable_lora:
        named = request.lora_path
        known = manager.lora_registry.get_all_adapters()
        for name in named if isinstance(named, list) else [named]:
            if name not in known:
                raise ValueError(
                    f"a request names the adapter {name!r}, the engine has "
                    f"{', '.join(known) or 'none'}; the base alone is not served"
                )
    await original(manager, request)


async def register(manager: Any, version: str) -> None:
    """Requests may name an adapter that all ranks have."""
    if adapter_name(version) not in manager.lora_registry.get_all_adapters():
        await manager.lora_registry.register(reference(version))


# --- without CUDA ---------------------------------------------------------------------------------
class NoPinnedMemory(TorchFunctionMode):
    """Within it memory is not page-locked, which only a GPU has."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **options)


def unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND functions of the LoRA manager that ask for page-locked memory."""
    with NoPinnedMemory():
        return original(*args, **kwargs)

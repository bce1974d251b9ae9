"""Which adapters an engine holds, and how many requests run under each (lora.delivery = adapter).

Every version is an adapter of its own in SGLang's slots.  New requests name the newest version,
running requests end under the adapter that they began with.  A slot becomes free when a newer
version is served and the last request of its own version has ended; an update waits for a free
slot.
This file imports no SGLang and no torch: it is the host's side of
`moerl.engine.plugin.adapter_hooks`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moerl.config.lora_settings import SLOT_TARGETS, LoraConfig
from moerl.core.errors import EngineError
from moerl.core.types import PolicyVersion
from moerl.weight_sync.receiver_names import UNCHANGED, adapter_name

if TYPE_CHECKING:
    from moerl.engine.host.sglang_client import EngineClient  # a dry run has no aiohttp


def slot_arguments(lora: LoraConfig, args: Mapping[str, Any]) -> dict[str, Any]:
    """Server arguments for adapter slots, none where weights are merged.

    args: the server's others.  One slot more than versions is for batches without an adapter.
    """
    if not lora.serves_adapters:
        return {}
    slots: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": max(lora.rank, *lora.ranks.values()) if lora.ranks else lora.rank,
        "max_loras_per_batch": lora.slots + 1,
        "lora_target_modules": _modules(lora),
        "lora_strict_loading": True,
    }
    return slots | ({"lora_backend": "torch_native"} if args.get("device") == "cpu" else {})


def _modules(lora: LoraConfig) -> list[str]:
    """SGLang has one slot for q, k and v."""
    leaves = {name for name in SLOT_TARGETS if any(t.endswith(name) for t in lora.targets)}
    return sorted(leaves | set(SLOT_TARGETS[:3]) if leaves - {"o_proj"} else leaves)


class AdapterSlots:
    """The slots of one server.  Used from one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._running: dict[PolicyVersion, int] = {}  # by version, oldest first
        self._left = asyncio.Event()  # a request has ended

    @property
    def loaded(self) -> tuple[PolicyVersion, ...]:
        return tuple(self._running)

    def clear(self) -> None:
        """A new server has no adapter."""
        self._running.clear()

    def add(self, version: PolicyVersion) -> None:
        """The server has this version; requests may name it."""
        self._running.setdefault(version, 0)

    def enter(self, version: PolicyVersion, count: int) -> str:
        """Requests will run under a version; its adapter's name.

        Raises EngineError where the server has it not: it would serve the base.
        """
        if version not in self._running:
            raise EngineError(f"the engine has no adapter of {version} yet; a publish brings it")
        self._running[version] += count
        return adapter_name(str(version))

    def leave(self, version: PolicyVersion, count: int) -> None:
        if version in self._running:  # else of a server that was replaced
            self._running[version] -= count
        self._left.set()

    async def make_room(self, client: EngineClient, timeout_s: float) -> None:
        """Unload versions without requests, except the newest; wait for one if no slot is free.

        Raises EngineError when none becomes free in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._unload_idle(client)
                while len(self._running) >= self._size:
                    self._left.clear()
                    await self._left.wait()
                    await self._unload_idle(client)
        if len(self._running) >= self._size:
            raise EngineError(
                f"{UNCHANGED}: requests still run under all {self._size} adapters "
                f"({', '.join(map(str, self._running))}); raise lora.slots, or shorten rollouts"
            )

    async def _unload_idle(self, client: EngineClient) -> None:
        newest = max(self._running, default=None)
        for version in [v for v, count in self._running.items() if not count and v != newest]:
            del self._running[version]  # first: an answer that is late leaves a spare slot
            await client.unload_adapter(adapter_name(str(version)))

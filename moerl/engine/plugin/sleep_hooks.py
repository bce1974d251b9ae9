"""Sleep and wake of an engine, inside SGLang.

An /update_weights_from_tensor request with load_format "moerl_memory.sleep.PARTS" or
"moerl_memory.wake.PARTS" reaches all ranks in the same iteration of their schedulers.  They first
retract every request and compare their states; if one cannot change, none does.  Then SGLang's own
release or resume runs, which asserts the same conditions: a scheduler that fails them ends.

A sleeping scheduler stays paused, so that requests wait.  SGLang's routes for release and resume
are refused: the host has to know the state.

Read at sglang 0.5.23: srt/managers/scheduler_components/weight_updater.py,
srt/managers/scheduler.py (pause_generation, event loops), tokenizer_control_mixin.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from moerl.core.errors import EngineError
from moerl.distributed.object_collectives import all_gather_values
from moerl.engine.plugin import in_flight
from moerl.engine.protocol import MEMORY_PARTS, SLEEP
from moerl.weight_sync.receiver_names import UNCHANGED, MemoryMoved

_WEIGHTS = "weights"
_released: dict[str, int] = {}  # bytes by part; a scheduler process serves one rank


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of SGLang's release and resume."""

    tags: list[str]


def is_asleep(manager: Any, part: str = "") -> bool:
    """Whether a part, or any, is released."""
    return part in manager.offload_tags if part else bool(manager.offload_tags)


def change(manager: Any, what: str, parts: list[str]) -> tuple[bool, str]:
    """Release or resume parts on all ranks.  Returns success, and the record or the cause."""
    begin, recomputed = time.perf_counter(), 0
    was_asleep = is_asleep(manager)
    if what == SLEEP and not was_asleep:
        recomputed = in_flight.retract(manager.scheduler)
    torch.cuda.empty_cache()  # the saver's memory is not in torch's cache and would be added to it
    mine = (_cause(manager, what, parts), sorted(manager.offload_tags))
    every = all_gather_values(mine, tuple[str, list[str]], manager.tp_cpu_group)
    causes = [cause for cause, _ in every if cause]
    if any(asleep != every[0][1] for _, asleep in every):
        causes.append(f"parts that sleep differ: {[asleep for _, asleep in every]}")
    if causes:
        if not was_asleep:
            in_flight.go_on(manager.scheduler)
        return False, f"{UNCHANGED}: {'; '.join(causes)}"
    moved = 0
    if what == SLEEP:
        _released.update((part, _release(manager, part)) for part in MEMORY_PARTS if part in parts)
        moved = sum(_released[part] for part in parts)
    else:
        manager.resume_memory_occupation(_Asked(parts))
    if not is_asleep(manager):
        in_flight.go_on(manager.scheduler)
    record = MemoryMoved(time.perf_counter() - begin, moved, recomputed)
    return True, msgspec.json.encode(record).decode() + "\n"


def _release(manager: Any, part: str) -> int:
    """Returns the bytes that the device, or the system, has back."""
    saver, before = manager.memory_saver_adapter, _free()
    touched = saver.resident(part) if hasattr(saver, "resident") else 0
    manager.release_memory_occupation(_Asked([part]))
    return touched or _free() - before


def _free() -> int:
    """Bytes of the device that no process has; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _cause(manager: Any, what: str, parts: list[str]) -> str:
    if unknown := set(parts) - set(MEMORY_PARTS):
        return f"no part of an engine's memory is called {', '.join(sorted(unknown))}"
    wrong = [part for part in parts if is_asleep(manager, part) == (what == SLEEP)]
    if wrong or not parts:
        return f"{', '.join(wrong) or 'nothing'} can be changed by {what}"
    if what != SLEEP:
        need = sum(_released.get(part, 0) for part in parts)
        if torch.cuda.is_available() and need > _free():  # the saver would end the process
            return f"{need} bytes are to come back, {_free()} are free: a trainer rank keeps them"
        return ""
    if not manager.memory_saver_adapter.enabled:
        return "the server was started without a memory saver (cluster.colocated: turns)"
    if not manager.scheduler.is_fully_idle(ignore_waiting=True):
        return "a request cannot be retracted now"
    if _WEIGHTS in parts and (lost := _kept_nowhere(manager.tp_worker.model_runner.model)):
        return f"no update and no copy of buffers brings back {lost}"
    return ""


def _kept_nowhere(model: nn.Module) -> str:
    """A tensor of a module that neither an update nor SGLang's copy of buffers brings back."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_skip_weight_check", False):  # a scale of the cache
            return name
    own = [*model.parameters(), *model.buffers()]
    kept, devices = {t.untyped_storage()._cdata for t in own}, {t.device.type for t in own}
    for name, module in model.named_modules():
        for field, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or value.device.type not in devices:
                continue
            if value.untyped_storage()._cdata not in kept:
                return f"{name}.{field}"
    return ""


async def refuse(_original: Callable[..., Any], *_args: object, **_fields: object) -> None:
    """AROUND TokenizerControlMixin.release_memory_occupation and resume_memory_occupation."""
    raise EngineError("the engine's host alone puts it to sleep and wakes it")


def wait_while_paused(_result: None, scheduler: Any) -> None:
    """AFTER Scheduler._record_scheduler_state_for_paused_engine: its loop keeps a core busy."""
    if is_asleep(scheduler.weight_updater):
        scheduler.maybe_sleep_on_idle()

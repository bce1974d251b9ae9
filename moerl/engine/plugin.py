"""What moerl adds to SGLang, through SGLang's own plug-in entry points (see pyproject.toml).

`activate` offers the plain-CPU platform, `register_hooks` adapts functions; SGLang runs both
in each of its processes.  With CUDA they add the check of loaded weights and the receiving end of
weight updates, nothing else.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform class, or None for "not here"."""
    import torch

    return None if torch.cuda.is_available() else "moerl.engine.cpu_platform.PlainCpu"


def register_hooks() -> None:
    """Entry point of `sglang.srt.plugins`; the targets are those of SGLang 0.5.23.

    Always: a rank that keeps its weights in another layout than the known one ends the start,
    each rank opens the receiving end of publish sessions (`live`), and requests that weights change
    under keep their rows, spans and prefixes apart (`in_flight`).
    Without CUDA:

    1. The host buffer of the routed experts asks CUDA to pin its memory; without CUDA that raises,
       and nothing needs the pin.
    2. SGLang spawns its processes because a CUDA context does not survive a fork.  Without CUDA a
       fork is safe there (nothing but imports has happened yet) and saves each process the import
       of everything: a start takes 12 s instead of 33 s on two cores, and shares the memory.
    3. Decode attention runs once per layer for the whole batch instead of once per request.
    4. Layers of fp8 blocks have kernels for GPUs and AMX only.
    5. The torch path for experts knows no expert parallelism.
    """
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moerl.engine import in_flight, layout, live

    target = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(target, layout.check_loaded, HookType.AFTER)
    updater = "sglang.srt.managers.scheduler_components.weight_updater"
    updater += ".SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{updater}.__post_init__", live.after_start, HookType.AFTER)
    target = f"{updater}.update_weights_from_tensor"
    HookRegistry.register(target, live.around_update, HookType.AROUND)
    managers = "sglang.srt.managers"
    target = f"{managers}.tokenizer_control_mixin.TokenizerControlMixin.update_weights_from_tensor"
    HookRegistry.register(target, live.around_request, HookType.AROUND)
    target = f"{managers}.scheduler.Scheduler._add_request_to_queue"
    HookRegistry.register(target, in_flight.name_prefix, HookType.BEFORE)
    target = f"{managers}.schedule_batch.release_req"
    HookRegistry.register(target, in_flight.keep_rows, HookType.BEFORE)
    target = f"{managers}.scheduler_components.batch_result_processor"
    target += ".SchedulerBatchResultProcessor._maybe_collect_routed_experts"
    HookRegistry.register(target, in_flight.return_rows, HookType.AFTER)
    if torch.cuda.is_available():
        return
    from moerl.engine import cpu_attention, cpu_experts, cpu_fp8

    target = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(target, _leave_unpinned, HookType.REPLACE)
    target = "sglang.srt.entrypoints.engine._set_envs_and_config"
    HookRegistry.register(target, _then_fork, HookType.AROUND)
    target = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    target += "._run_sdpa_forward_decode"
    HookRegistry.register(target, cpu_attention.decode, HookType.AROUND)
    fp8 = "sglang.srt.layers.quantization.fp8"
    HookRegistry.register(f"{fp8}.Fp8LinearMethod.apply", cpu_fp8.linear, HookType.AROUND)
    HookRegistry.register(f"{fp8}.Fp8MoEMethod.apply", cpu_fp8.experts, HookType.AROUND)
    target = f"{fp8}.Fp8Config.get_supported_act_dtypes"
    HookRegistry.register(target, cpu_fp8.dtypes, HookType.AFTER)
    target = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(target, cpu_experts.forward, HookType.AROUND)


def _leave_unpinned(*_args: object, **_kwargs: object) -> None:
    return None


def _then_fork(original: Callable[..., None], *args: object, **kwargs: object) -> None:
    original(*args, **kwargs)
    multiprocessing.set_start_method("fork", force=True)

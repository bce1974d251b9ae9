"""The functions of SGLang that moerl changes: one table, which `entry_points` registers.

patches/sglang/README.md has an entry per row: why, which test covers it, when it can be removed.
tests/unit/test_patches.py compares that page with this table and with the installed SGLang.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from moerl.engine.plugin import (
    adapter_hooks,
    cpu_attention,
    cpu_experts,
    grammars,
    host_memory,
    in_flight,
    kv_slots_per_request,
    loaded_weights,
    record_output,
    server_access,
    sleep_hooks,
    top_k_first,
    update_hooks,
)


class When(StrEnum):
    """On which machines, and for which engines, a hook is registered."""

    ALWAYS = "always"
    CPU = "without CUDA"
    DP = "with data-parallel attention"

    def applies(self, *, cuda: bool, dp_attention: bool) -> bool:
        return {When.CPU: not cuda, When.DP: dp_attention}.get(self, True)


@dataclass(frozen=True, slots=True)
class Hook:
    symbol: str  # dotted path of the function of SGLang
    kind: str  # SGLang's HookType: before, after, around, replace
    ours: Callable[..., object]
    when: When
    version: str = "0.5.23"  # version of SGLang in which `symbol` was last read


def _leave_unpinned(*_args: object, **_kwargs: object) -> None:
    return None


def _then_fork(original: Callable[..., None], *args: object, **kwargs: object) -> None:
    original(*args, **kwargs)
    multiprocessing.set_start_method("fork", force=True)


_MANAGERS = "sglang.srt.managers"
_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin"
_RESULTS = f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_STREAMER = f"{_MANAGERS}.scheduler_components.output_streamer"
_TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_LORA = "sglang.srt.lora.lora_manager.LoRAManager"

HOOKS = (
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        "after",
        loaded_weights.check_loaded,
        When.ALWAYS,
    ),
    Hook(f"{_UPDATER}.__post_init__", "after", update_hooks.after_start, When.ALWAYS),
    Hook(
        f"{_UPDATER}.update_weights_from_tensor", "around", update_hooks.around_update, When.ALWAYS
    ),
    Hook(
        f"{_TOKENIZER}.update_weights_from_tensor",
        "around",
        update_hooks.around_request,
        When.ALWAYS,
    ),
    Hook(f"{_TOKENIZER}.release_memory_occupation", "around", sleep_hooks.refuse, When.ALWAYS),
    Hook(f"{_TOKENIZER}.resume_memory_occupation", "around", sleep_hooks.refuse, When.ALWAYS),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        "after",
        sleep_hooks.wait_while_paused,
        When.ALWAYS,
    ),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler._add_request_to_queue",
        "before",
        in_flight.name_versions,
        When.ALWAYS,
    ),
    Hook(
        f"{_MANAGERS}.schedule_batch.release_req",
        "before",
        in_flight.keep_rows,
        When.ALWAYS,
    ),
    Hook(
        f"{_RESULTS}._maybe_collect_routed_experts",
        "after",
        in_flight.return_rows,
        When.ALWAYS,
    ),
    Hook(
        f"{_RESULTS}._maybe_collect_indexer_topk",
        "after",
        in_flight.drop_positions,
        When.ALWAYS,
    ),
    Hook(
        "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar",
        "around",
        grammars.admit,
        When.ALWAYS,
    ),
    Hook(
        f"{_STREAMER}._GenerationStreamAccumulator.to_payload",
        "after",
        record_output.to_files,
        When.ALWAYS,
    ),
    Hook(
        f"{_STREAMER}.SchedulerOutputStreamer.__post_init__",
        "after",
        record_output.send_recorded,
        When.ALWAYS,
    ),
    Hook(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "around",
        top_k_first.sample,
        When.ALWAYS,
    ),
    Hook(
        "sglang.srt.mem_cache.common.checkpoint_kv_cache",
        "around",
        kv_slots_per_request.publish,
        When.ALWAYS,
    ),
    Hook(
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._validate_and_resolve_lora",
        "around",
        adapter_hooks.check_named,
        When.ALWAYS,
    ),
    Hook("sglang.srt.utils.auth.decide_request_auth", "around", server_access.decide, When.ALWAYS),
    Hook(
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create",
        "around",
        host_memory.create,
        When.CPU,
    ),
    Hook(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        "replace",
        _leave_unpinned,
        When.CPU,
    ),
    Hook(f"{_LORA}.__init__", "around", adapter_hooks.unpinned, When.CPU),
    Hook(f"{_LORA}.prepare_lora_batch", "around", adapter_hooks.unpinned, When.CPU),
    Hook(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        "around",
        _then_fork,
        When.CPU,
    ),
    Hook(f"{_TORCH_NATIVE}._run_sdpa_forward_decode", "around", cpu_attention.decode, When.CPU),
    Hook(f"{_TORCH_NATIVE}._run_sdpa_forward_extend", "around", cpu_attention.extend, When.CPU),
    Hook(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        "around",
        cpu_experts.forward,
        When.CPU,
    ),
    Hook("sglang.srt.server_args.PortArgs.init_new", "around", server_access.use_files, When.DP),
    Hook(
        "sglang.srt.utils.network.get_zmq_socket_on_host",
        "around",
        server_access.bind_file,
        When.DP,
    ),
)

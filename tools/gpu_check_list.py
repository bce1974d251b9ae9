"""The checks of tools/gpu-check, by name: which tests of tests/gpu each one runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Size = Literal["parts", "full", "loop"]
_FOLDER = "tests/gpu/"


@dataclass(frozen=True, slots=True)
class Check:
    """Some tests, in a process of their own: a fault of one leaves no other without a device."""

    name: str
    about: str
    file: str
    tests: tuple[str, ...]  # functions, or one case of a function
    size: Size = "parts"  # torch, megatron-core and a compiler are enough; full: all but `loop`
    on_double: tuple[str, ...] | None = None  # other cases on the double; () = it cannot
    absent: str = "it cannot"  # why it is not on the double
    limit_s: int = 600
    least_s: int = 20  # with less time left it is not begun

    def nodes(self, *, double: bool = False) -> list[str]:
        """For pytest."""
        chosen = self.tests if not double or self.on_double is None else self.on_double
        return [f"{_FOLDER}{self.file}::{name}" for name in chosen]


CHECKS = (
    Check("speed", "a bf16 product, copies: what other figures are compared with",
          "test_trainer_gpu.py", ("test_speed_of_the_device",)),
    Check("head", "log-probabilities by blocks of logits, their gradients, against fp64; refusals",
          "test_head_gpu.py",
          ("test_values_and_gradients", "test_gradcheck_and_refusals", "test_full_entropy",
           "test_another_stream"),
          on_double=("test_values_and_gradients[130-1000-torch.int32-torch.float32]",
                     "test_gradcheck_and_refusals", "test_full_entropy")),
    Check("head-speed", "the head at Qwen3's vocabulary beside all logits: time, memory",
          "test_head_gpu.py", ("test_speed_beside_all_logits",)),
    Check("replay", "hooks on a bf16 engine and an fp32 trainer: none, routes, masks, both",
          "test_replay_gpu.py",
          ("test_a_bf16_engine_and_an_fp32_trainer", "test_only_chosen_experts_learn")),
    Check("cpu-step", "a step with megatron-core's local layers and both replays against the CPU's",
          "test_trainer_gpu.py", ("test_a_step_is_that_of_the_cpu",)),
    Check("sampler", "k largest first against the sort of 151,936 tokens: kept sets, ties, time",
          "test_samplers_gpu.py",
          ("test_short_way_keeps_what_the_whole_sort_keeps",
           "test_equal_probabilities_are_in_the_order_of_the_whole_sort",
           "test_speed_of_a_decode_step")),
    Check("fp8", "fp8 blocks against the CPU's, their speed, Hopper's product of them",
          "test_fp8_gpu.py",
          ("test_blocks_are_those_of_the_cpu", "test_product_of_blocks", "test_speed_of_blocks")),
    Check("streams", "a snapshot is of its version while training writes; two commit buckets",
          "test_snapshot_gpu.py",
          ("test_a_snapshot_is_of_its_version_while_training_continues",
           "test_a_commit_streams_host_staging_through_two_buckets")),
    Check("cuda-ipc", "staging in GPU memory between two processes", "test_cuda_ipc_gpu.py",
          ("test_bytes_cast_on_the_way_arrive",
           "test_a_dead_receiver_is_an_error_and_a_stopped_one_is_not_needed",
           "test_memory_is_given_back_after_the_last_mapping"), on_double=()),
    Check("step", "a MoE of 1.8e9 parameters, local layers: tokens/s, speed, memory",
          "test_trainer_gpu.py", ("test_step[none]",)),
    Check("step-replay", "the same with routes and sampling masks replayed",
          "test_trainer_gpu.py", ("test_step[both]",)),
    Check("step-control", "routes of other tokens change the step; grouped experts are the loop",
          "test_trainer_gpu.py",
          ("test_routes_of_other_tokens_change_the_step", "test_grouped_experts_are_the_loop")),
    Check("fusions", "each fusion against none; two of the four need Transformer Engine",
          "test_fusions_gpu.py", ("test_fusion_agrees",),
          on_double=("test_fusion_agrees[bias_activation_fusion]",
                     "test_fusion_agrees[bias_dropout_fusion]")),
    Check("snapshot", "weight snapshot on a side stream beside a step, then packed and sent",
          "test_publish_gpu.py", ("test_snapshot_and_packing_beside_a_step",)),
    Check("commit", "verify, and the pause in which served weights change",
          "test_publish_gpu.py", ("test_commit",)),
    Check("delta", "the next version as a delta of one step", "test_publish_gpu.py",
          ("test_delta",)),
    Check("te-step", "a step with Transformer Engine against the CPU's",
          "test_te_gpu.py", ("test_step_with_transformer_engine",), size="full", on_double=()),
    Check("te-lora", "adapters on Transformer Engine's layers against transformers",
          "test_te_gpu.py", ("test_adapters_on_transformer_engine",), size="full", on_double=()),
    Check("te-replay", "a record through Megatron-core: executed experts, ablation, controls",
          "test_replay_gpu.py", ("test_megatron_replays_a_record",), size="full", on_double=()),
    Check("samplers", "kept sets of the samplers pytorch and flashinfer, ties included",
          "test_samplers_gpu.py", ("test_kept_sets_are_equal", "test_draws_are_kept"), size="full",
          on_double=()),
    Check("engine", "start with CUDA graphs and capture; routes against transformers; backends",
          "test_engine_gpu.py",
          ("test_graphs_record_what_eager_passes_record", "test_routes_are_those_of_transformers",
           "test_attention_backends_agree"), size="full", on_double=(), limit_s=1800),
    Check("engine-ranks", "two ranks, with and without expert parallelism: the same experts",
          "test_engine_gpu.py", ("test_all_ranks_choose_the_recorded_experts",), size="full",
          on_double=(), limit_s=1800),
    Check("transports", "a whole run over each transport of one node: seconds, pause",
          "test_runs_gpu.py", ("test_publishes_over",), size="full", on_double=(), limit_s=3600),
    Check("colocated", "engine and trainer in turns on one GPU: tokens/s, share of switches",
          "test_runs_gpu.py", ("test_turns_with_one_gpu",), size="full", on_double=(),
          limit_s=3600),
    Check("two-engines", "two engines on GPUs of their own, one trainer: both are published to",
          "test_runs_gpu.py", ("test_two_engines_on_one_node",), size="full", on_double=(),
          limit_s=1800),
    Check("resume", "a run that continues from its checkpoint", "test_runs_gpu.py",
          ("test_a_run_resumes",), size="full", on_double=(), limit_s=1800),
    Check("ablation", "moerl mismatch in bf16: none, routes, masks, both", "test_runs_gpu.py",
          ("test_ablation",), size="full", on_double=(), limit_s=1800),
)  # fmt: skip

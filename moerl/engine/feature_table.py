"""Which deployment features of SGLang work with replay: one table for the check and for the docs.

A feature is proven (a test compares its records with another implementation), refused while
routing is recorded, or refused always because it samples other tokens than the record says.
A feature whose records were not compared is refused.  SGLang's defaults on CUDA cannot be compared
without a GPU: each such row names the allowed values and their comparison in tests/gpu, and every
other value is refused with replay.

`check` reads the table when a server's arguments are made; docs/replay-support.md has it before the
table of model families.  The table has the arguments that change
routing rows, sampling masks or log-probabilities.  Rejected: a list of allowed arguments (SGLang
has 546).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moerl.core.errors import ConfigError


class Verdict(StrEnum):
    PROVEN = "proven"
    NOT_RUN = "allowed on CUDA, comparison not run"
    WITHOUT_REPLAY = "refused with replay"
    NEVER = "refused"


@dataclass(frozen=True, slots=True)
class Feature:
    """One row.  `args`: server argument -> allowed values, SGLang's default first."""

    name: str
    verdict: Verdict
    why: str  # after "NAME: ", one clause
    args: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    proof: str = ""  # file::test of a proven feature, or of one whose comparison has not run


_RECORDS = "tests/e2e/test_engine_e2e.py::test_records_equal_transformers"
_REPLAY = "tests/e2e/test_replay_engine.py::"
_DSA = "tests/e2e/test_model_dsa.py::"
_MODES = "tests/e2e/test_modes.py::"
_DP_ATTENTION = "tests/e2e/test_model_dp_attention.py::"
_ON_CUDA = "tests/gpu/test_engine_gpu.py::"
_ATTENTION = (None, "fa3", "flashinfer", "triton", "torch_native")
_OFF: tuple[Any, ...] = (False,)
_NONE: tuple[Any, ...] = (None,)
_ONE: tuple[Any, ...] = (1,)

FEATURES = (
    Feature(
        "prompt rows",
        Verdict.PROVEN,
        "every fed-in token has its row, the prompt included",
        proof=_RECORDS,
    ),
    Feature(
        "prefix cache",
        Verdict.PROVEN,
        "a cached token keeps the row of the forward pass that wrote its slot",
        proof=_REPLAY + "test_cache_hits_chunks_and_overlap_took_part",
    ),
    Feature(
        "one prefix computed by several requests at once",
        Verdict.PROVEN,
        "a request keeps its own slots, and so its own rows, where another one's differ",
        proof=_DSA + "test_a_prefix_that_others_compute_too",
    ),
    Feature(
        "positions of sparse attention",
        Verdict.PROVEN,
        "DeepSeek-V3.2 where attention is not cut: rows as those of routes; a retracted request "
        "that chose otherwise is refused",
        proof=_DSA + "test_recorded_positions_make_both_sides_equal",
    ),
    Feature(
        "chunked prefill",
        Verdict.PROVEN,
        "rows of all chunks are joined",
        proof=_REPLAY + "test_cache_hits_chunks_and_overlap_took_part",
    ),
    Feature(
        "overlap scheduling",
        Verdict.PROVEN,
        "on by default",
        proof=_REPLAY + "test_cache_hits_chunks_and_overlap_took_part",
    ),
    Feature(
        "tensor parallelism",
        Verdict.PROVEN,
        "every rank routes every token, the first rank reports",
        proof=_REPLAY + "test_every_segment_matches_the_weights_that_sampled_it",
    ),
    Feature(
        "expert parallelism",
        Verdict.PROVEN,
        "`ep_size`: routing is done before tokens are sent to ranks, with ids of the whole model",
        proof=_REPLAY + "test_expert_parallelism",
    ),
    Feature(
        "data-parallel attention",
        Verdict.PROVEN,
        "`attn_dp_size`: each rank reports its own requests, with ids of the whole model; with "
        "latent attention and expert parallelism too",
        proof=_DP_ATTENTION + "test_records_of_all_ranks_match_the_weights",
    ),
    Feature(
        "weights in fp8 blocks",
        Verdict.PROVEN,
        "of a checkpoint that has them: the rounded weights choose, and the trainer, with its own "
        "precision, replays what they chose",
        proof=_REPLAY + "test_fp8_blocks_on_expert_parallel_ranks",
    ),
    Feature(
        "abort and resume, with a weight update in between",
        Verdict.PROVEN,
        "segments tile the rows and each matches its own weights",
        proof=_REPLAY + "test_seams_are_complete",
    ),
    Feature(
        "several turns",
        Verdict.PROVEN,
        "a turn asks for rows that the turns before it have not delivered: one row of all turns",
        proof=_REPLAY + "test_two_turns_are_one_row",
    ),
    Feature(
        "siblings of one prompt",
        Verdict.PROVEN,
        "prompt rows that are bitwise equal are stored once",
        proof=_REPLAY + "test_siblings_store_their_prompt_rows_once",
    ),
    Feature(
        "retraction under memory pressure",
        Verdict.PROVEN,
        "rows are computed again under the same weights",
        proof=_REPLAY + "test_other_schedules",
    ),
    Feature(
        "mixed chunks, pages of 16, no radix cache, no overlap",
        Verdict.PROVEN,
        "`enable_mixed_chunk`, `page_size`, `disable_radix_cache`, `disable_overlap_schedule`",
        proof=_REPLAY + "test_other_schedules",
    ),
    Feature(
        "weights exchanged in place under a running request",
        Verdict.PROVEN,
        "with `rollout.in_flight_mode=in_place`: rows as executed, spans exact; tokens after the "
        "update are marked as sampled on an older KV cache",
        proof=_MODES + "test_spans_of_an_update_in_place_are_exact",
    ),
    Feature(
        "retraction for a weight update",
        Verdict.PROVEN,
        "with `rollout.in_flight_mode=retract`: the plug-in keeps the rows that SGLang overwrites",
        proof=_MODES + "test_segments_match_their_own_weights",
    ),
    Feature(
        "an adapter per version of the trainer",
        Verdict.PROVEN,
        "with `lora.delivery=adapter`: a request runs under one adapter to its end, and its rows "
        "are those of that adapter",
        proof="tests/e2e/test_lora_adapter_engine.py::"
        "test_two_versions_at_once_and_requests_end_under_theirs",
    ),
    Feature(
        "CUDA graphs",
        Verdict.NOT_RUN,
        "SGLang's defaults: a captured router writes into a fixed buffer, which is read after each "
        "replay; other forms of graphs were not looked at",
        {
            "cuda_graph_backend_decode": (None, "full", "disabled"),
            "cuda_graph_backend_prefill": (None, "breakable", "disabled"),
            "cuda_graph_config": _NONE,
            "debug_cuda_graph": _OFF,
        },
        proof=_ON_CUDA + "test_graphs_record_what_eager_passes_record",
    ),
    Feature(
        "CUDA graphs of prefill with data-parallel attention",
        Verdict.WITHOUT_REPLAY,
        "SGLang would read a rank's rows at an offset that is computed from decoding's batch "
        "(`get_dp_local_slice_cpu`); these graphs are switched off there",
        proof="tests/unit/test_engine_args.py::test_data_parallel_attention_has_no_prefill_graphs",
    ),
    Feature(
        "attention backends",
        Verdict.NOT_RUN,
        "other backends were not looked at; none leaves the choice to SGLang",
        {
            "attention_backend": _ATTENTION,
            "prefill_attention_backend": _ATTENTION,
            "decode_attention_backend": _ATTENTION,
        },
        proof=_ON_CUDA + "test_attention_backends_agree",
    ),
    Feature(
        "fused top-k kernels",
        Verdict.NOT_RUN,
        "SGLang's kernels of scores, bias and top-k: rows are the ids that the experts get; those "
        "that route inside of experts keep other weights and are refused always",
        proof=_ON_CUDA + "test_routes_are_those_of_transformers",
    ),
    Feature(
        "sampling backends",
        Verdict.NEVER,
        "`pytorch` is passed on every platform: its sampling mask is the array that was sampled "
        "from; flashinfer draws in one kernel and rebuilds the set with others, whose comparison "
        "(`tests/gpu/test_samplers_gpu.py`) has not run",
        {"sampling_backend": ("pytorch",)},
    ),
    Feature(
        "torch.compile",
        Verdict.WITHOUT_REPLAY,
        "a compiled router may break ties otherwise; its records were not compared",
        {"enable_torch_compile": _OFF},
    ),
    Feature(
        "fp32 head",
        Verdict.PROVEN,
        "`enable_fp32_lm_head`, by `model.fp32_lm_head`, which sets the trainer's, too; a server "
        "whose head differs from the trainer's is refused",
        proof="tests/e2e/test_fp32_head_engine.py::test_both_sides_agree_and_one_alone_does_not",
    ),
    Feature(
        "weights exchanged under a request in another mode",
        Verdict.NEVER,
        "a reply of two versions is refused as `version`",
        proof=_REPLAY + "test_weights_exchanged_under_a_request_are_refused",
    ),
    Feature(
        "grammars of requests",
        Verdict.PROVEN,
        "a client of an agent's gateway may give one: the recorded sampling mask is what grammar "
        "and truncation left, also behind an update, where the matcher has accepted the tokens so "
        "far",
        proof="tests/e2e/test_grammars.py::"
        "test_the_trainer_agrees_with_the_kept_sets_and_not_without_them",
    ),
    Feature(
        "other grammars of the server",
        Verdict.NEVER,
        "matchers of other backends, and tokens that the server forbids, were not compared",
        {"grammar_backend": ("xgrammar",), "enable_strict_thinking": _OFF},
    ),
    Feature(
        "beam search, penalties, logit bias, custom logit processors of a request",
        Verdict.NEVER,
        "no recipe can ask for them: the host sends each sampling parameter, all neutral but those "
        "whose sampling mask is recorded",
        proof="tests/unit/test_feature_table.py::test_requests_carry_nothing_that_is_not_recorded",
    ),
    Feature(
        "greedy sampling for training",
        Verdict.NEVER,
        "the one kept token has probability 1 and no gradient; an evaluation may be greedy",
        proof="tests/unit/test_refusals.py::test_settings_are_refused_with_their_sentence",
    ),
    Feature(
        "custom logit processors",
        Verdict.NEVER,
        "they change the distribution behind the recorded sampling mask",
        {"enable_custom_logit_processor": _OFF},
    ),
    Feature(
        "sampling parameters of the server",
        Verdict.NEVER,
        "they would join a request unseen; set sampling.* of the recipe",
        {"preferred_sampling_params": _NONE},
    ),
    Feature(
        "watermark",
        Verdict.NEVER,
        "it changes the distribution that is sampled",
        {
            "enable_watermark": _OFF,
            "watermark_default_enabled": _OFF,
            "watermark_enforce_all": _OFF,
        },
    ),
    Feature(
        "truncated prompts",
        Verdict.NEVER,
        "rows and tokens of a prompt that the engine cuts no longer belong together",
        {"allow_auto_truncate": _OFF},
    ),
    Feature(
        "another model configuration",
        Verdict.NEVER,
        "engine and trainer would run two models; change the model folder's config.json",
        {"json_model_override_args": ("{}",)},
    ),
    Feature(
        "largest sampling mask",
        Verdict.NEVER,
        "a smaller limit aborts requests that the recipe allows",
        {"sampling_mask_max_tokens": (4096,)},
    ),
    Feature(
        "hierarchical cache",
        Verdict.WITHOUT_REPLAY,
        "nothing moves the rows along with the pages, so a reloaded page returns stale ones; it "
        "writes pages back with kernels for GPUs, so only a GPU can show more",
        {
            "enable_hierarchical_cache": _OFF,
            "hicache_storage_backend": _NONE,
            "enable_lmcache": _OFF,
            "enable_flexkv": _OFF,
            "enable_unified_cache_external_linker": _OFF,
            "disaggregation_decode_enable_offload_kvcache": _OFF,
        },
    ),
    Feature(
        "speculative decoding",
        Verdict.WITHOUT_REPLAY,
        "a draft's routers are left out of the record, but its buffer is not sized for the tokens "
        "that a step verifies, and sampling masks are refused with all algorithms but DFlash; its "
        "kernels need a GPU",
        {"speculative_algorithm": _NONE, "decoupled_spec_role": ("null", None)},
    ),
    Feature(
        "replicas in one server",
        Verdict.NEVER,
        "every replica is an engine of the run (`engine.count`); for data-parallel attention set "
        "`attn_dp_size`",
        {"enable_dp_attention": _OFF, "dp_size": _ONE},
    ),
    Feature(
        "experts over data-parallel ranks, all-to-all between experts",
        Verdict.WITHOUT_REPLAY,
        "tokens are scattered over ranks before they are routed; SGLang gathers the rows of DeepEP "
        "again, of other backends not; their packages need a GPU, so nothing was compared",
        {
            "moe_dp_size": _ONE,
            "moe_a2a_backend": ("none", None),
            "dwdp_size": _ONE,
        },
    ),
    Feature(
        "expert load balancing",
        Verdict.WITHOUT_REPLAY,
        "a physical expert is not the logical expert of the trainer, and moves",
        {
            "enable_eplb": _OFF,
            "ep_num_redundant_experts": (0,),
            "init_expert_location": ("trivial",),
            "elastic_ep_backend": _NONE,
            "enable_elastic_expert_backup": _OFF,
        },
    ),
    Feature(
        "prefill/decode disaggregation",
        Verdict.WITHOUT_REPLAY,
        "rows of the prompt are collected on the prefill server and nothing moves them to the "
        "decode server; its transports need a GPU",
        {"disaggregation_mode": ("null",), "enable_pdmux": _OFF, "enable_pd_role_switch": _OFF},
    ),
    Feature(
        "pipeline-parallel engines",
        Verdict.WITHOUT_REPLAY,
        "each stage captures the layers it holds and nothing joins them",
        {"pp_size": _ONE},
    ),
    Feature(
        "context parallelism",
        Verdict.WITHOUT_REPLAY,
        "rows of one token are spread over ranks and nothing joins them",
        {"attn_cp_size": _ONE, "dcp_size": _ONE, "enable_prefill_cp": _OFF},
    ),
    Feature(
        "overlapped batches",
        Verdict.WITHOUT_REPLAY,
        "two batches fill the capture buffer at once",
        {"enable_two_batch_overlap": _OFF, "enable_single_batch_overlap": _OFF},
    ),
    Feature(
        "LoRA adapters from folders",
        Verdict.WITHOUT_REPLAY,
        "requests would run under adapters that are not trained",
        {"lora_paths": _NONE},
    ),
    Feature(
        "other quantised weights, or a quantised cache",
        Verdict.WITHOUT_REPLAY,
        "their records were not compared; weights in fp8 blocks are proven",
        {
            "quantization": (None, "fp8"),
            "quantize_and_serve": _OFF,
            "kv_cache_dtype": ("auto",),
            "rl_quant_profile": _NONE,
        },
    ),
    Feature(
        "experts on the host",
        Verdict.WITHOUT_REPLAY,
        "routing is done by code that does not report its rows",
        {"enable_paged_experts": _OFF, "kt_method": (None, "AMXINT4"), "kt_weight_path": _NONE},
    ),
    Feature(
        "fused whole-layer kernels",
        Verdict.WITHOUT_REPLAY,
        "they route inside the kernel and report no rows",
        {"enable_nvidia_megakernel": _OFF, "enable_amd_monokernel": _OFF},
    ),
    Feature(
        "model code of transformers",
        Verdict.WITHOUT_REPLAY,
        "it does not pass SGLang's router, where rows are captured",
        {"model_impl": ("auto", "sglang")},
    ),
    Feature(
        "rounded logits",
        Verdict.WITHOUT_REPLAY,
        "it rounds logits to bf16 before the log-softmax, which the trainer does not",
        {"rl_on_policy_target": _NONE},
    ),
    Feature(
        "diffusion decoding",
        Verdict.WITHOUT_REPLAY,
        "a token is fed more than once and has no single row",
        {"dllm_algorithm": _NONE},
    ),
)

# Variables that would change what the server reports; the server inherits its environment.
ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "it reports log-probabilities at temperature 1",
    "SGLANG_SIMULATE_ACC_LEN": "it accepts draft tokens that the model did not sample",
}

PROVEN = tuple(feature.name for feature in FEATURES if feature.verdict is Verdict.PROVEN)


def check(name: str, value: Any, *, replay: bool) -> None:
    """Raises ConfigError when the table refuses the argument.  replay: routing is recorded."""
    for feature in FEATURES:
        allowed = feature.args.get(name)
        if allowed is None or value in allowed or feature.verdict is Verdict.PROVEN:
            continue
        if replay or feature.verdict is Verdict.NEVER:
            refused = Verdict.NEVER if feature.verdict is Verdict.NEVER else Verdict.WITHOUT_REPLAY
            raise ConfigError(
                f"engine.args.{name}",
                value,
                f"{feature.name} is {refused}: {feature.why}; allowed: "
                + ", ".join(repr(one) for one in allowed),
            )


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse variables that change the engine's reports.  Raises ConfigError."""
    for name, why in ENVIRONMENT.items():
        if environment.get(name, "0") not in ("", "0", "false", "False"):
            raise ConfigError(f"environment.{name}", environment[name], f"unset it: {why}")


def markdown() -> str:
    """The first part of docs/replay-support.md."""
    lines = [
        "# Deployment features and replay",
        "",
        "Made from `moerl/engine/feature_table.py` by `python -m tests.helpers.family_table`;",
        "a test keeps them equal. *Proven* means that a test compares the records with another",
        "implementation. *Allowed on CUDA, comparison not run* means that SGLang does it by",
        "default on GPUs, that the test in the row compares it, and that no GPU has run that test.",
        "Everything else is refused with one sentence before the engine starts.",
        "",
        "| feature | verdict | why | server arguments | test |",
        "|---|---|---|---|---|",
    ]
    for feature in FEATURES:
        args = ", ".join(f"`{name}`" for name in feature.args)
        proof = f"`{feature.proof}`" if feature.proof else ""
        lines.append(f"| {feature.name} | {feature.verdict} | {feature.why} | {args} | {proof} |")
    lines += ["", "Environment variables that are refused:", ""]
    lines += [f"- `{name}`: {why}" for name, why in ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"

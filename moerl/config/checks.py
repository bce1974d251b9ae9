"""Cross-field checks: every rule about several fields, each with one sentence.

`check` needs no model and no heavy package, so a dry run on a login node can use it;
`check_model` adds the rules that depend on the model's config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moerl.config.algorithms import check_algorithm, ref_models_of
from moerl.config.clusters import check_cluster, is_local
from moerl.config.episode_checks import check_episodes
from moerl.config.functions import functions
from moerl.config.lora_checks import check_lora, check_quantised_base
from moerl.config.mesh import TRAINER, check_divides, check_mesh
from moerl.config.optimizer_settings import check_optimizer_settings
from moerl.config.reward_checks import check_reward
from moerl.config.schema import (
    Config,
    ParallelConfig,
    RefModelsConfig,
    RolloutConfig,
    SamplingConfig,
)
from moerl.config.task_kinds import SOURCE
from moerl.config.task_mixture import HELD_OUT, TaskEntry, entries_of, naming, reward_models_of
from moerl.config.task_tables import EXTRACTS, REWARD_NAMES, REWARDS, SOURCES, check_isolation
from moerl.config.template_names import template_problems
from moerl.config.transport_rules import check_transport
from moerl.config.validate import either, validate
from moerl.core.errors import ConfigError, ModelError
from moerl.core.json_files import read_model_config

_RUN_NAME = re.compile(r"\w[\w.-]*")  # it becomes a folder, and part of other names
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_EXPERTS = (  # by family
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)
_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "num_hidden_layers",
)
_ENGINE_MASK_CAP = 4096  # SGLang's default --sampling-mask-max-tokens
_GRAPHS = "a captured router is replayed without asking for the rows of its microbatch"
NOT_WITH_REPLAY = {  # fields of trainer.megatron; others are refused where megatron-core is loaded
    "moe_router_fusion": "the fused router returns before replay is consulted",
    "cuda_graph_impl": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
}
_SMOLLM2 = "tools/get_smollm2 makes this folder, in the checkout"
MODEL_MAKERS = {  # of model folders that recipes name
    "models/smollm2": _SMOLLM2,
    "models/smollm2-moe": _SMOLLM2,
    "runs/tool-use-start/hf": "moerl sft tool-use-start --run tool-use-start makes this folder",
}
_FILES = {name: source.files for name, source in SOURCES.items() if source.files}
_LEAST_CACHE = 64  # tokens of an engine's KV cache


def check(config: Config, *, starts: bool = True) -> None:
    """Check everything that needs neither the model nor a heavy package.  Raises ConfigError.

    starts: require also the other models that the algorithm reads.
    """
    validate(config)
    if config.run.name and not _RUN_NAME.fullmatch(config.run.name):
        raise ConfigError(
            "run.name", config.run.name, "use letters, digits, _, . and -, not . or - first"
        )
    _check_parallel(TRAINER, config.trainer.parallel)
    _check_ref_models(config)
    _check_replay(config)
    _check_head(config)
    _check_shared_prompts(config)
    _check_minibatches(config)
    check_optimizer_settings(config.trainer)
    check_lora(config)
    _check_tasks(config)
    check_episodes(config)
    _check_sync(config)
    _check_sizes(config)
    _check_evaluation(config)
    _check_rollout(config.rollout)
    _check_late_siblings(config)
    _check_stale_siblings(config)
    _check_start(config)
    check_cluster(config)
    check_transport(config)
    check_algorithm(config, folders=starts)


def _check_start(config: Config) -> None:
    start, made = config.checkpoint.start, Path(config.run.root) / config.run.name / "start"
    if start and not Path(start).is_dir() and not made.is_dir():  # a resume needs it no longer
        raise ConfigError(
            "checkpoint.start",
            start,
            "no such folder; name a run, one of its checkpoints/step-N, or a torch_dist checkpoint "
            "of Megatron-LM",
        )


def missing_folder(path: str) -> str:
    """A sentence about a model folder that does not exist; how to fetch or make it."""
    folder = Path(path)
    sentence = "a Hugging Face model folder of this machine is needed; nothing is downloaded"
    if _HUB_NAME.fullmatch(path) and not folder.parent.is_dir():
        sentence += (
            f", and a name of the hub is fetched by: hf download {path} --local-dir {folder.name}"
        )
    return MODEL_MAKERS.get(folder.as_posix(), sentence)


def check_model(config: Config) -> dict[str, Any]:
    """Check the model folder and the settings that depend on it; returns its config.json.

    Raises ConfigError naming `model.path` or the setting that does not divide.
    """
    folder = Path(config.model.path)
    if not config.model.path or not folder.is_dir():
        raise ConfigError("model.path", config.model.path, missing_folder(config.model.path))
    try:
        hf = read_model_config(folder)
    except ModelError as error:
        raise ConfigError("model.path", config.model.path, str(error)) from error
    if not (config.checkpoint.start or any(folder.glob("*.safetensors"))):
        raise ConfigError("model.path", config.model.path, "it holds no *.safetensors file")
    for tp in {config.engine.tp, *config.engine.tp_each}:
        check_model_sizes(config.trainer.parallel, tp, hf)
    if hf.get("index_topk"):
        _check_sparse(config)
    check_quantised_base(config, hf)
    if config.ref_models.placement == "separate":
        for path in (*ref_models_of(config).values(), *reward_models_of(config)):
            try:
                other = read_model_config(Path(path))
            except ModelError as error:
                raise ConfigError("ref_models", path, str(error)) from error
            check_model_sizes(config.ref_models.parallel, 1, other, field="ref_models.parallel")
    return hf


def _check_sparse(config: Config) -> None:
    """A model with sparse attention: its positions are recorded and replayed with the routes."""
    engine = config.engine
    is_cut = engine.tp > 1 and not engine.args.get("enable_dp_attention")
    wrong = (
        (
            "replay.routing",
            config.replay.routing,
            config.replay.routing == "R2",
            "positions are replayed from the engine's record; use R3 or off",
        ),
        (
            "rollout.in_flight_mode",
            config.rollout.in_flight_mode,
            config.rollout.in_flight_mode != "abort_resume",
            "a reply of several versions has positions of one; use abort_resume",
        ),
        (
            "engine.tp",
            engine.tp,
            config.replay.routing == "R3" and is_cut,
            "SGLang records positions where attention is not cut; use tp 1 or "
            "engine.args.enable_dp_attention",
        ),
    )
    for field, value, holds, reason in wrong:
        if holds:
            raise ConfigError(field, value, f"{reason} (sparse attention)")


def check_model_sizes(
    parallel: ParallelConfig, engine_tp: int, hf: Mapping[str, Any], *, field: str = TRAINER
) -> None:
    """Heads, experts and layers of a config.json must divide by the ranks that cut them."""
    hf = hf.get("text_config") or hf  # of the language model
    ends = [n for n in (parallel.first_stage_layers, parallel.last_stage_layers) if n]
    layers = int(hf.get("num_hidden_layers") or 0)
    if ends and (parallel.pp <= len(ends) or (layers and layers <= sum(ends))):
        raise ConfigError(
            f"{field}.first_stage_layers",
            ends,
            "stages between need layers too: lower it, or use pp > 2",
        )
    sizes = {name: int(hf.get(name) or 0) for name in _SIZES}
    sizes["num_experts"] = next((int(hf[name]) for name in _EXPERTS if hf.get(name)), 0)
    check_divides(parallel, sizes, field)
    if parallel.cp > 1 and hf.get("model_type") == "gpt_oss":
        raise ConfigError(
            f"{field}.cp",
            parallel.cp,
            "no attention has sinks and sliding windows over context-parallel ranks: Transformer "
            "Engine refuses its kernels, megatron-core's own has neither; set it to 1",
        )
    if (heads := sizes["num_attention_heads"]) % engine_tp:
        raise ConfigError(
            "engine.tp", engine_tp, f"it must divide the model's num_attention_heads = {heads}"
        )


def _check_sync(config: Config) -> None:
    sync = config.sync
    if sync.transport == "disk" and not Path(sync.folder).is_dir():
        raise ConfigError("sync.folder", sync.folder, "transport disk needs an existing folder")
    if sync.delta and sync.direct:
        raise ConfigError(
            "sync.direct", sync.direct, "engines do not relay deltas: use 0, or sync.delta=false"
        )
    if sync.quorum > config.engine.count:
        raise ConfigError(
            "sync.quorum", sync.quorum, f"use at most engine.count = {config.engine.count}"
        )


def _check_sizes(config: Config) -> None:
    """Ranks of attention, and engines of different sizes."""
    engine, each = config.engine, config.engine.tp_each
    if not each and (engine.attention_dp < 1 or engine.tp % engine.attention_dp):
        raise ConfigError(
            "engine.args.attn_dp_size",
            engine.args["attn_dp_size"],
            f"it must divide engine.tp = {engine.tp}",
        )
    if 0 < engine.max_total_tokens < _LEAST_CACHE:
        raise ConfigError(
            "engine.max_total_tokens",
            engine.max_total_tokens,
            f"use at least {_LEAST_CACHE}, or 0: as many as engine.mem_fraction_static leaves",
        )
    _check_nodes(config)
    if not each:
        return
    if len(each) != engine.count:
        raise ConfigError(
            "engine.tp_each", each, f"name one size for each of engine.count = {engine.count}"
        )
    cut = math.lcm(engine.ep, engine.attention_dp)
    if any(tp < 1 or tp % cut for tp in each):
        raise ConfigError("engine.tp_each", each, f"every size must be a multiple of {cut}")
    if config.sync.direct and len(set(each)) > 1:
        raise ConfigError(
            "sync.direct", config.sync.direct, "engines of other sizes cannot copy a version: use 0"
        )


def _check_nodes(config: Config) -> None:
    """Engines that span several nodes."""
    engine, nodes = config.engine, config.engine.nodes
    if nodes == 1:
        return
    if is_local(config.cluster):
        raise ConfigError("engine.nodes", nodes, "cluster.launcher = local is one machine: use 1")
    uneven = [tp for tp in engine.sizes.values() if tp % nodes]
    if uneven:
        raise ConfigError("engine.nodes", nodes, f"it must divide the size of each engine {uneven}")
    if engine.attention_dp > 1:
        raise ConfigError(
            "engine.args.attn_dp_size",
            engine.attention_dp,
            "between nodes SGLang would send requests to data-parallel ranks through ports that "
            "everybody can use: use 1, or engine.nodes=1",
        )


def _check_sampling(sampling: SamplingConfig, *, kept: bool) -> None:
    """Check one task's sampling settings.  kept: sampling masks are recorded."""
    if sampling.top_k == 1:
        raise ConfigError(
            "sampling.top_k", 1, "greedy sampling has no gradient; use -1 or at least 2"
        )
    for name in ("top_k", "mask_top_k"):
        value = getattr(sampling, name)
        unlimited = value == -1 and name == "top_k"
        if not unlimited and not 2 <= value <= _ENGINE_MASK_CAP:
            raise ConfigError(
                f"sampling.{name}", value, f"use 2..{_ENGINE_MASK_CAP}, the engine's largest mask"
            )
    if sampling.min_p > 0 and kept:
        raise ConfigError(
            "sampling.min_p",
            sampling.min_p,
            "min-p is not proven with Keep Sampling Mask (sampling backends differ); use 0",
        )


def _check_best(config: Config) -> None:
    """Every checkpoint that is ranked by an evaluation must have one."""
    best, every = config.checkpoint.best, config.evaluation.every
    if best.startswith("eval/") and (not every or config.checkpoint.every % every):
        raise ConfigError(
            "checkpoint.best",
            best,
            f"evaluation.every must divide checkpoint.every = {config.checkpoint.every}, "
            f"not be {every}: only evaluated weights can be compared",
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    _check_best(config)
    if not evaluation.every:
        return
    limit = evaluation.top_k
    if limit != -1 and not 2 <= limit <= _ENGINE_MASK_CAP:
        raise ConfigError(
            "evaluation.top_k", limit, f"use -1, or 2..{_ENGINE_MASK_CAP}; temperature=0 is greedy"
        )
    if evaluation.top_p < 1.0 and limit == -1:
        raise ConfigError("evaluation.top_k", -1, f"with top_p < 1 use 2..{_ENGINE_MASK_CAP}")
    for entry in entries_of(config):
        _check_held_out(entry)


def _check_held_out(entry: TaskEntry) -> None:
    if entry.name not in _FILES:
        return
    field = f"tasks.{entry.label}.evaluation_path" if entry.label else "evaluation.path"
    path = entry.evaluation_path or (entry.path if entry.evaluation_split else "")
    _check_file(field, entry.name, path)
    is_same = Path(path).resolve() == Path(entry.path).resolve()
    if is_same and entry.evaluation_split == entry.split:
        raise ConfigError(field, path, "use another file than task.path, or another split of it")


def _check_rollout(rollout: RolloutConfig) -> None:
    if rollout.cancel_lag > rollout.max_lag:
        raise ConfigError(
            "rollout.cancel_lag", rollout.cancel_lag, f"use at most max_lag = {rollout.max_lag}"
        )
    if rollout.admission == "unbounded" and (
        rollout.fixed_lag >= 0 or rollout.selection == "strict"
    ):
        raise ConfigError(
            "rollout.admission",
            "unbounded",
            "later groups may fill the buffer while a fixed lag and selection=strict wait for the "
            "next ones; use bounded",
        )
    quorum = rollout.group_quorum
    if not quorum:
        return
    if not 2 <= quorum <= rollout.group_size or rollout.oversample > 1:
        raise ConfigError(
            "rollout.group_quorum",
            quorum,
            f"use 0, or 2..group_size = {rollout.group_size} with rollout.oversample=1",
        )


def _check_late_siblings(config: Config) -> None:
    rollout = config.rollout
    if rollout.late_siblings == "drop":
        return
    reasons = {
        "there are none without rollout.group_quorum": not rollout.group_quorum,
        "selection=strict would wait for them": rollout.selection == "strict",
        "their lag is not fixed: rollout.fixed_lag=-1 is needed": rollout.fixed_lag >= 0,
        **_reasons_against_peers(config),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError("rollout.late_siblings", "carry", f"{reason}; use drop")


def _check_stale_siblings(config: Config) -> None:
    rollout = config.rollout
    if rollout.stale_siblings == "group":
        return
    reasons = {
        "selection=strict trains whole groups in the order of the prompts": (
            rollout.selection == "strict"
        ),
        "with a fixed lag no sibling is older than another: rollout.fixed_lag=-1 is needed": (
            rollout.fixed_lag >= 0
        ),
        **_reasons_against_peers(config),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError("rollout.stale_siblings", "drop", f"{reason}; use group")


def _reasons_against_peers(config: Config) -> dict[str, bool]:
    """Reasons why siblings that are not in the batch (`EpisodeGroup.peers`) are not enough."""
    advantage = config.algorithm.advantage
    return {
        "algorithm.advantage=online_dpo pairs siblings of one batch": advantage == "online_dpo",
        "peers bring their rewards, not those of their steps that process_mean and process_std "
        "compare": advantage in ("process_mean", "process_std"),
    }


def _check_ref_models(config: Config) -> None:
    ref_models, default = config.ref_models, RefModelsConfig()
    if ref_models.placement == "trainer":
        if ref_models != default:
            raise ConfigError(
                "ref_models.parallel",
                ref_models.parallel,
                "only ref_models.placement = separate has one",
            )
        return
    if not (ref_models_of(config) or reward_models_of(config)):
        raise ConfigError(
            "ref_models.placement",
            "separate",
            "the algorithm reads neither a reference nor a teacher, and no reward has where=model",
        )
    _check_parallel("ref_models.parallel", ref_models.parallel)


def _check_shared_prompts(config: Config) -> None:
    if not config.trainer.share_prompts:
        return
    if not config.trainer.packing:
        raise ConfigError(
            "trainer.share_prompts", True, "rows share slots: trainer.packing=true is needed"
        )
    sizes = {TRAINER: config.trainer.parallel, "ref_models.parallel": config.ref_models.parallel}
    for field, parallel in sizes.items():
        if parallel.cp > 1:
            reason = "trainer.share_prompts=true takes whole rows: use 1"
            raise ConfigError(f"{field}.cp", parallel.cp, reason)


def _check_parallel(field: str, p: ParallelConfig) -> None:
    check_mesh(p, field)
    if p.etp not in (1, p.tp):
        raise ConfigError(f"{field}.etp", p.etp, f"use 1 or tp = {p.tp}")


def _check_replay(config: Config) -> None:
    megatron = config.trainer.megatron
    for name, why in NOT_WITH_REPLAY.items():
        value = megatron.get(name)
        if config.replay.routing != "off" and value not in (None, False, "none"):
            raise ConfigError(
                f"trainer.megatron.{name}", value, f"{why}; leave it out, or replay.routing=off"
            )
    if config.rollout.turn_rows == "split" and not config.replay.audit:
        raise ConfigError(
            "rollout.turn_rows",
            "split",
            "a row under new weights needs its prefix of them; set replay.audit, or use join",
        )
    if config.rollout.buffer_depth > 0 and config.rollout.max_lag == 0:
        raise ConfigError(
            "rollout.max_lag",
            0,
            "a buffer holds rollouts of older weights; use at least 1, or rollout.buffer_depth=0",
        )


def _check_head(config: Config) -> None:
    both = config.model.fp32_lm_head
    if config.engine.args.get("enable_fp32_lm_head", both) != both:
        raise ConfigError(
            "engine.args.enable_fp32_lm_head",
            config.engine.args["enable_fp32_lm_head"],
            f"it must be model.fp32_lm_head = {both}, which sets it for trainer and engines",
        )


def _check_minibatches(config: Config) -> None:
    count, groups = config.trainer.minibatches, config.rollout.groups_per_step
    if groups % count:
        raise ConfigError(
            "trainer.minibatches", count, f"it must divide rollout.groups_per_step = {groups}"
        )


def _check_tasks(config: Config) -> None:
    entries = entries_of(config)
    kept = config.replay.sampling_mask
    for entry in entries:
        with naming(entry):
            _check_task(entry)
            for sampling in entry.samplings.values():
                _check_sampling(sampling, kept=kept)
    for name in HELD_OUT if config.tasks else ():
        if value := getattr(config.evaluation, name):
            way = f"with several tasks it belongs to one of them: use tasks.LABEL.evaluation_{name}"
            raise ConfigError(f"evaluation.{name}", value, way)
    truncates = {entry.sampling.truncates: entry for entry in entries}
    if kept and len(truncates) > 1:
        plain = truncates[False]
        raise ConfigError(
            f"tasks.{plain.label}.sampling.top_p",
            plain.sampling.top_p,
            f"tasks.{truncates[True].label} truncates, and a microbatch has sampling masks for all "
            "of its rows or for none: set top_p below 1, or top_k, for every task or for none",
        )


def _check_task(task: TaskEntry) -> None:
    if task.name not in SOURCES:
        raise ConfigError("task.name", task.name, f"use {either(tuple(SOURCES))}")
    for name in ("columns", "split") if task.name not in _FILES else ():
        if value := getattr(task, name):
            raise ConfigError(f"task.{name}", value, f"only {either(tuple(_FILES))} reads it")
    if task.name in _FILES:
        _check_file("task.path", task.name, task.path)
        if task.reward in ("", SOURCE) and not (task.brings_reward or task.rewards):
            raise ConfigError("task.reward", task.reward, f"use {functions(REWARDS)}")
    if task.reward and task.reward not in REWARD_NAMES:
        check_reward("task.reward", task.reward, REWARD_NAMES)
    if task.name == "reasoning_gym" and not task.dataset:
        raise ConfigError("task.dataset", "", "name a reasoning-gym dataset")
    _check_extract(task.extract)
    has_messages = task.chat_template or task.name in _FILES or task.kind.speaks_messages
    for name in ("system", "template_arguments"):
        if (value := getattr(task, name)) and not has_messages:
            raise ConfigError(f"task.{name}", value, "it needs task.chat_template=true")
    for problem in template_problems("task", task.chat_template, task.template_arguments):
        raise ConfigError(*problem)
    if any("\ud800" <= letter <= "\udfff" for letter in task.system):
        raise ConfigError("task.system", task.system, "it has half a character, a lone surrogate")
    check_isolation(task)


def _check_extract(rule: str) -> None:
    with suppress(re.error):
        if rule in EXTRACTS or re.compile(rule).groups == 1:
            return
    allowed = f"{', '.join(filter(None, EXTRACTS))}, or a regular expression with one group"
    raise ConfigError("task.extract", rule, f"use {allowed}")


def _check_file(field: str, source: str, path: str) -> None:
    found = Path(path)
    if path and (found.exists() or any(found.parent.glob(found.name))):
        return
    is_hub = re.fullmatch(r"[\w-]+/[\w.-]+", path) and not found.parent.exists()
    fetch = f"; a data set of the hub: hf download {path} --repo-type dataset --local-dir DIR"
    raise ConfigError(field, path, f"{_FILES[source]} is needed{fetch if is_hub else ''}")

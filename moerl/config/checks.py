"""Cross-field checks: every rule about several fields, each with one sentence.

`check` needs no model and no heavy package, so a dry run on a login node can use it;
`check_model` adds the rules that depend on the model's config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
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
from moerl.config.rules import Reasons, Rows, refuse
from moerl.config.schema import Config, ParallelConfig, RefModelsConfig, SamplingConfig
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
    refuse(config, chain(_ranks(config), _replay(config), _batch(config)))
    check_optimizer_settings(config.trainer)
    check_lora(config)
    _check_tasks(config)
    check_episodes(config)
    refuse(config, chain(_engines(config), _evaluation(config), _rollout(config), _start(config)))
    check_cluster(config)
    check_transport(config)
    check_algorithm(config, folders=starts)


def _start(config: Config) -> Rows:
    start, made = config.checkpoint.start, Path(config.run.root) / config.run.name / "start"
    if start and not Path(start).is_dir() and not made.is_dir():  # a resume needs it no longer
        yield (
            "checkpoint.start",
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
    hf = _model_config("model.path", config.model.path)
    if not (config.checkpoint.start or any(folder.glob("*.safetensors"))):
        raise ConfigError("model.path", config.model.path, "it holds no *.safetensors file")
    for tp in {config.engine.tp, *config.engine.tp_each}:
        check_model_sizes(config.trainer.parallel, tp, hf)
    if hf.get("index_topk"):
        refuse(config, sparse_attention(config))
    check_quantised_base(config, hf)
    if config.ref_models.placement == "separate":
        for path in (*ref_models_of(config).values(), *reward_models_of(config)):
            other = _model_config("ref_models", path)
            check_model_sizes(config.ref_models.parallel, 1, other, field="ref_models.parallel")
    return hf


def _model_config(field: str, path: str) -> dict[str, Any]:
    try:
        return read_model_config(Path(path))
    except ModelError as error:
        raise ConfigError(field, path, str(error)) from error


def sparse_attention(config: Config) -> Rows:
    """A model with sparse attention: its positions are recorded and replayed with the routes."""
    routing, engine, end = config.replay.routing, config.engine, " (sparse attention)"
    if routing == "R2":
        allowed = "positions are replayed from the engine's record; use R3 or off"
        yield "replay.routing", allowed + end
    if config.rollout.in_flight_mode != "abort_resume":
        allowed = "a reply of several versions has positions of one; use abort_resume"
        yield "rollout.in_flight_mode", allowed + end
    if routing == "R3" and engine.tp > 1 and not engine.args.get("enable_dp_attention"):
        yield (
            "engine.tp",
            "SGLang records positions where attention is not cut; use tp 1 or "
            f"engine.args.enable_dp_attention{end}",
        )


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


def _engines(config: Config) -> Rows:
    """Versions that engines get, ranks of attention, and engines of different sizes."""
    sync, engine, each = config.sync, config.engine, config.engine.tp_each
    if sync.transport == "disk" and not Path(sync.folder).is_dir():
        yield "sync.folder", "transport disk needs an existing folder"
    if sync.delta and sync.direct:
        yield "sync.direct", "engines do not relay deltas: use 0, or sync.delta=false"
    if sync.quorum > engine.count:
        yield "sync.quorum", f"use at most engine.count = {engine.count}"
    if not each and (engine.attention_dp < 1 or engine.tp % engine.attention_dp):
        yield "engine.args.attn_dp_size", f"it must divide engine.tp = {engine.tp}"
    if 0 < engine.max_total_tokens < _LEAST_CACHE:
        allowed = f"use at least {_LEAST_CACHE}, or 0: as many as engine.mem_fraction_static leaves"
        yield "engine.max_total_tokens", allowed
    if engine.nodes > 1:
        yield from _nodes(config)
    if not each:
        return
    if len(each) != engine.count:
        yield "engine.tp_each", f"name one size for each of engine.count = {engine.count}"
    cut = math.lcm(engine.ep, engine.attention_dp)
    if any(tp < 1 or tp % cut for tp in each):
        yield "engine.tp_each", f"every size must be a multiple of {cut}"
    if sync.direct and len(set(each)) > 1:
        yield "sync.direct", "engines of other sizes cannot copy a version: use 0"


def _nodes(config: Config) -> Rows:
    """Engines that span several nodes."""
    engine = config.engine
    if is_local(config.cluster):
        yield "engine.nodes", "cluster.launcher = local is one machine: use 1"
    if uneven := [tp for tp in engine.sizes.values() if tp % engine.nodes]:
        yield "engine.nodes", f"it must divide the size of each engine {uneven}"
    if engine.attention_dp > 1:
        yield (
            "engine.args.attn_dp_size",
            engine.attention_dp,
            "between nodes SGLang would send requests to data-parallel ranks through ports that "
            "everybody can use: use 1, or engine.nodes=1",
        )


def _sampling(sampling: SamplingConfig, *, kept: bool) -> Rows:
    """Of a task or a role.  kept: sampling masks are recorded."""
    if sampling.top_k == 1:
        yield "sampling.top_k", 1, "greedy sampling has no gradient; use -1 or at least 2"
    for name, value in (("top_k", sampling.top_k), ("mask_top_k", sampling.mask_top_k)):
        unlimited = value == -1 and name == "top_k"
        if not unlimited and not 2 <= value <= _ENGINE_MASK_CAP:
            yield f"sampling.{name}", value, f"use 2..{_ENGINE_MASK_CAP}, the engine's largest mask"
    if sampling.min_p > 0 and kept:
        allowed = "min-p is not proven with Keep Sampling Mask (sampling backends differ); use 0"
        yield "sampling.min_p", sampling.min_p, allowed


def _evaluation(config: Config) -> Rows:
    evaluation, best = config.evaluation, config.checkpoint.best
    every, limit, largest = evaluation.every, evaluation.top_k, f"2..{_ENGINE_MASK_CAP}"
    if best.startswith("eval/") and (not every or config.checkpoint.every % every):
        yield (
            "checkpoint.best",
            f"evaluation.every must divide checkpoint.every = {config.checkpoint.every}, "
            f"not be {every}: only evaluated weights can be compared",
        )
    if not every:
        return
    if limit != -1 and not 2 <= limit <= _ENGINE_MASK_CAP:
        yield "evaluation.top_k", f"use -1, or {largest}; temperature=0 is greedy"
    if evaluation.top_p < 1.0 and limit == -1:
        yield "evaluation.top_k", f"with top_p < 1 use {largest}"
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


def _rollout(config: Config) -> Rows:
    rollout, quorum = config.rollout, config.rollout.group_quorum
    if rollout.cancel_lag > rollout.max_lag:
        yield "rollout.cancel_lag", f"use at most max_lag = {rollout.max_lag}"
    in_order = rollout.fixed_lag >= 0 or rollout.selection == "strict"
    if rollout.admission == "unbounded" and in_order:
        yield (
            "rollout.admission",
            "later groups may fill the buffer while a fixed lag and selection=strict wait for the "
            "next ones; use bounded",
        )
    if quorum and (not 2 <= quorum <= rollout.group_size or rollout.oversample > 1):
        allowed = f"use 0, or 2..group_size = {rollout.group_size} with rollout.oversample=1"
        yield "rollout.group_quorum", allowed
    if rollout.late_siblings == "carry":
        for reason in _against_late_siblings(config):
            yield "rollout.late_siblings", f"{reason}; use drop"
    if rollout.stale_siblings == "drop":
        for reason in _against_stale_siblings(config):
            yield "rollout.stale_siblings", f"{reason}; use group"


def _against_late_siblings(config: Config) -> Reasons:
    rollout = config.rollout
    if not rollout.group_quorum:
        yield "there are none without rollout.group_quorum"
    if rollout.selection == "strict":
        yield "selection=strict would wait for them"
    if rollout.fixed_lag >= 0:
        yield "their lag is not fixed: rollout.fixed_lag=-1 is needed"
    yield from _against_peers(config)


def _against_stale_siblings(config: Config) -> Reasons:
    if config.rollout.selection == "strict":
        yield "selection=strict trains whole groups in the order of the prompts"
    if config.rollout.fixed_lag >= 0:
        yield "with a fixed lag no sibling is older than another: rollout.fixed_lag=-1 is needed"
    yield from _against_peers(config)


def _against_peers(config: Config) -> Reasons:
    """Reasons why siblings that are not in the batch (`EpisodeGroup.peers`) are not enough."""
    if config.algorithm.advantage == "online_dpo":
        yield "algorithm.advantage=online_dpo pairs siblings of one batch"
    if config.algorithm.advantage in ("process_mean", "process_std"):
        yield (
            "peers bring their rewards, not those of their steps that process_mean and process_std "
            "compare"
        )


def _ranks(config: Config) -> Rows:
    """The run's name; trainer and reference ranks."""
    if config.run.name and not _RUN_NAME.fullmatch(config.run.name):
        yield "run.name", "use letters, digits, _, . and -, not . or - first"
    yield from _parallel(TRAINER, config.trainer.parallel)
    if config.ref_models.placement == "separate":
        if not (ref_models_of(config) or reward_models_of(config)):
            yield (
                "ref_models.placement",
                "the algorithm reads neither a reference nor a teacher, and no reward has "
                "where=model",
            )
        yield from _parallel("ref_models.parallel", config.ref_models.parallel)
    elif config.ref_models != RefModelsConfig():
        yield "ref_models.parallel", "only ref_models.placement = separate has one"


def _parallel(field: str, p: ParallelConfig) -> Rows:
    check_mesh(p, field)
    if p.etp not in (1, p.tp):
        yield f"{field}.etp", f"use 1 or tp = {p.tp}"


def _replay(config: Config) -> Rows:
    rollout = config.rollout
    for name, why in NOT_WITH_REPLAY.items() if config.replay.routing != "off" else ():
        if config.trainer.megatron.get(name) not in (None, False, "none"):
            yield f"trainer.megatron.{name}", f"{why}; leave it out, or replay.routing=off"
    if rollout.turn_rows == "split" and not config.replay.audit:
        allowed = "a row under new weights needs its prefix of them; set replay.audit, or use join"
        yield "rollout.turn_rows", allowed
    if rollout.buffer_depth > 0 and rollout.max_lag == 0:
        yield (
            "rollout.max_lag",
            "a buffer holds rollouts of older weights; use at least 1, or rollout.buffer_depth=0",
        )


def _batch(config: Config) -> Rows:
    trainer, both = config.trainer, config.model.fp32_lm_head
    if config.engine.args.get("enable_fp32_lm_head", both) != both:
        allowed = f"it must be model.fp32_lm_head = {both}, which sets it for trainer and engines"
        yield "engine.args.enable_fp32_lm_head", allowed
    if trainer.share_prompts:
        if not trainer.packing:
            yield "trainer.share_prompts", "rows share slots: trainer.packing=true is needed"
        for field, parallel in (
            (TRAINER, trainer.parallel),
            ("ref_models.parallel", config.ref_models.parallel),
        ):
            if parallel.cp > 1:
                yield f"{field}.cp", "trainer.share_prompts=true takes whole rows: use 1"
    if (groups := config.rollout.groups_per_step) % trainer.minibatches:
        yield "trainer.minibatches", f"it must divide rollout.groups_per_step = {groups}"


def _check_tasks(config: Config) -> None:
    entries, kept = entries_of(config), config.replay.sampling_mask
    for entry in entries:
        with naming(entry):
            refuse({"task": entry}, _task(entry))
            for sampling in entry.samplings.values():
                refuse({}, _sampling(sampling, kept=kept))
    refuse(config, _mixture(config, entries))


def _mixture(config: Config, entries: tuple[TaskEntry, ...]) -> Rows:
    """Several tasks beside each other."""
    for name in HELD_OUT if config.tasks else ():
        if getattr(config.evaluation, name):
            way = f"with several tasks it belongs to one of them: use tasks.LABEL.evaluation_{name}"
            yield f"evaluation.{name}", way
    truncates = {entry.sampling.truncates: entry for entry in entries}
    if config.replay.sampling_mask and len(truncates) > 1:
        plain = truncates[False]
        yield (
            f"tasks.{plain.label}.sampling.top_p",
            plain.sampling.top_p,
            f"tasks.{truncates[True].label} truncates, and a microbatch has sampling masks for all "
            "of its rows or for none: set top_p below 1, or top_k, for every task or for none",
        )


def _task(task: TaskEntry) -> Rows:
    if task.name not in SOURCES:
        yield "task.name", f"use {either(tuple(SOURCES))}"
    for name in ("columns", "split") if task.name not in _FILES else ():
        if getattr(task, name):
            yield f"task.{name}", f"only {either(tuple(_FILES))} reads it"
    if task.name in _FILES:
        _check_file("task.path", task.name, task.path)
        if task.reward in ("", SOURCE) and not (task.brings_reward or task.rewards):
            yield "task.reward", f"use {functions(REWARDS)}"
    if task.reward and task.reward not in REWARD_NAMES:
        check_reward("task.reward", task.reward, REWARD_NAMES)
    if task.name == "reasoning_gym" and not task.dataset:
        yield "task.dataset", "name a reasoning-gym dataset"
    if not _is_extract(task.extract):
        names = ", ".join(filter(None, EXTRACTS))
        yield "task.extract", f"use {names}, or a regular expression with one group"
    has_messages = task.chat_template or task.name in _FILES or task.kind.uses_chat
    for name in ("system", "template_arguments") if not has_messages else ():
        if getattr(task, name):
            yield f"task.{name}", "it needs task.chat_template=true"
    yield from template_problems("task", task.chat_template, task.template_arguments)
    if any("\ud800" <= letter <= "\udfff" for letter in task.system):
        yield "task.system", "it has half a character, a lone surrogate"
    check_isolation(task)


def _is_extract(rule: str) -> bool:
    with suppress(re.error):
        return rule in EXTRACTS or re.compile(rule).groups == 1
    return False


def _check_file(field: str, source: str, path: str) -> None:
    found = Path(path)
    if path and (found.exists() or any(found.parent.glob(found.name))):
        return
    is_hub = re.fullmatch(r"[\w-]+/[\w.-]+", path) and not found.parent.exists()
    fetch = f"; a data set of the hub: hf download {path} --repo-type dataset --local-dir DIR"
    raise ConfigError(field, path, f"{_FILES[source]} is needed{fetch if is_hub else ''}")

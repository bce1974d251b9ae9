"""What each setting may be by itself: choices, least values, shares.

What fits together is `moerl.config.checks`.  Tables, so that a new setting is one line more.
"""

from __future__ import annotations

import math
from typing import Any

from moerl.config.schema import Config
from moerl.errors import ConfigError

CHOICES: dict[str, tuple[Any, ...]] = {
    "run.console": ("auto", "panel", "lines", "quiet"),
    "task.name": ("sort_digits", "reasoning_gym", "jsonl"),
    "task.on_score_error": ("stop", "drop"),
    "rollout.in_flight_mode": ("abort_resume", "drain", "in_place", "retract"),
    "rollout.selection": ("oldest", "freshest", "strict"),
    "rollout.late_siblings": ("drop", "carry"),
    "rollout.durability": ("node", "shared"),
    "replay.routing": ("R3", "R2", "off"),
    "replay.rows": ("sampled",),
    "engine.platform": ("auto", "cpu", "cuda"),
    "engine.dtype": ("float32", "bfloat16"),
    "trainer.platform": ("auto", "cpu", "cuda"),
    "trainer.dtype": ("fp32", "bf16"),
    "trainer.dispatcher": ("alltoall", "allgather"),
    "frozen.ranks": ("trainer", "own"),
    "trainer.optimizer.decay_style": ("constant", "linear", "cosine"),
    "sync.transport": ("auto", "shm", "cuda_ipc", "gloo", "nccl", "mooncake", "disk"),
    "sync.every": (1,),
    "checkpoint.best_is": ("highest", "lowest"),
}
AT_LEAST: dict[str, float] = {
    "run.steps": 1,
    "run.seed": 0,
    **{
        f"model.tiny.{size}": 1
        for size in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    },
    **{f"model.tiny.{size}": 1 for size in ("num_experts", "experts_per_token", "moe_ffn")},
    "task.digits": 1,
    "task.max_prompt_tokens": 1,
    "task.scorer_workers": 1,
    "task.max_turns": 1,
    "sampling.max_new_tokens": 1,
    "rollout.groups_per_step": 1,
    "rollout.group_size": 1,
    "rollout.oversample": 1,
    "rollout.max_lag": 0,
    "rollout.buffer_depth": 0,
    "rollout.fixed_lag": -1,
    "rollout.max_drop_batches": 0,
    "rollout.slice_tokens": 0,
    "rollout.group_quorum": 0,
    "rollout.groups_per_request": 1,
    "rollout.max_groups_in_flight": 1,
    "rollout.prefix_slack": -1,
    "engine.count": 1,
    "engine.tp": 1,
    "engine.max_running_requests": 1,
    "engine.max_total_tokens": 64,
    "engine.cpu_threads": 1,
    "trainer.max_tokens_per_microbatch": 1,
    "trainer.cpu_threads": 1,
    "trainer.minibatches": 1,
    "trainer.optimizer.lr": 0,
    "trainer.optimizer.min_lr": 0,
    "trainer.optimizer.warmup_steps": 0,
    "trainer.optimizer.decay_steps": 0,
    "trainer.optimizer.weight_decay": 0,
    "trainer.optimizer.clip_grad": 0,
    "algorithm.entropy_coef": 0,
    "algorithm.critic_lr": 0,
    "algorithm.kl_coef": 0,
    "algorithm.reward_kl_coef": 0,
    "algorithm.distill_coef": 0,
    "algorithm.clip_low": 0,
    "algorithm.clip_high": 0,
    "algorithm.sapo_tau_pos": 0,
    "algorithm.sapo_tau_neg": 0,
    "algorithm.kimi_tau": 0,
    "algorithm.dppo_cap": 0,
    "algorithm.tis_cap": 0,
    "algorithm.off_policy_delta": 0,
    "algorithm.lag_cap": 0,
    "algorithm.constant_tokens": 0,
    "algorithm.overlong_buffer": 0,
    "sync.bucket_bytes": 1024,
    "sync.quorum": 1,
    "sync.direct": 0,
    "supervision.max_restarts": 0,
    "supervision.backoff_s": 0,
    "evaluation.every": 0,
    "evaluation.prompts": 1,
    "evaluation.samples": 1,
    "evaluation.temperature": 0,
    "evaluation.max_requests": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "replay.probe": 0,
    "observe.sample_rollouts": 0,
    "observe.full_entropy": 0,
    "observe.engine_alone_s": 0,
}
for _gang in ("trainer", "frozen"):
    for _axis in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp"):
        AT_LEAST[f"{_gang}.parallel.{_axis}"] = 1
    for _end in ("first_stage_layers", "last_stage_layers"):
        AT_LEAST[f"{_gang}.parallel.{_end}"] = 0
POSITIVE = (
    "task.score_timeout_s",
    "rollout.request_timeout_s",
    "engine.start_timeout_s",
    "trainer.step_timeout_s",
    "sync.timeout_s",
    "supervision.stop_timeout_s",
    "evaluation.hold_s",
    "sampling.temperature",
    "model.tiny.initializer_range",
    "trainer.optimizer.eps",
)
SHARES: dict[str, tuple[bool, bool]] = {  # name: whether 0 and whether 1 is allowed
    "engine.mem_fraction_static": (False, True),
    "sampling.top_p": (False, True),
    "sampling.min_p": (True, False),
    "evaluation.top_p": (False, True),
    "algorithm.gae_gamma": (True, True),
    "algorithm.gae_lambda": (True, True),
    "trainer.optimizer.beta1": (True, False),
    "trainer.optimizer.beta2": (True, False),
}


def check_ranges(config: Config) -> None:
    """Raises ConfigError for the first setting that is out of its range."""
    for name, allowed in CHOICES.items():
        if get(config, name) not in allowed:
            raise ConfigError(name, get(config, name), f"use {either(allowed)}")
    for name, lowest in AT_LEAST.items():
        value = get(config, name)
        if not (math.isfinite(value) and value >= lowest):
            raise ConfigError(name, value, f"a number of at least {lowest:g} is needed")
    for name in POSITIVE:
        if not (math.isfinite(get(config, name)) and get(config, name) > 0):
            raise ConfigError(name, get(config, name), "a finite number above 0 is needed")
    for name, (zero, one) in SHARES.items():
        value = get(config, name)
        if not (0.0 < value < 1.0 or (zero and value == 0.0) or (one and value == 1.0)):
            bounds = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
            raise ConfigError(name, value, f"a number in {bounds} is needed")


def get(config: Config, name: str) -> Any:
    """The value of a dotted field name."""
    node: Any = config
    for part in name.split("."):
        node = getattr(node, part)
    return node


def either(allowed: tuple[Any, ...]) -> str:
    """`a, b or c`."""
    texts = [str(a) for a in allowed]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]

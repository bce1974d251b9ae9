"""The metrics that a step adds up and those that the report draws, each declared once.

A row says how a metric is added and where the report draws it.  docs/metrics.md defines each name.
A part in braces stands for any word: `refused/{reason}`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple


class Adds(Enum):
    """The row of a step has what was added since the row before."""

    SUM = auto()  # 0 in a row without an addition
    SEEN = auto()  # absent from a row without an addition
    TOTAL = auto()  # what was added since the start of the process; absent before the first
    OWN = auto()  # its owner computes the value


class Ratio(NamedTuple):
    """A sum over another sum, of all tokens or requests; absent where nothing was added to `per`.

    The two are names of sums that no row has.
    """

    of: str
    per: str


class Metric(NamedTuple):
    """One metric of a row.

    chart: the title of a chart of `moerl.observe.report_sections`.
    """

    adds: Adds | Ratio
    chart: str = ""
    label: str = ""  # of the line
    band: str = ""  # metric with the half width of a band around the line


LAGS = {  # bins of the version lag: first and last
    "lag_0": (0, 0),
    "lag_1": (1, 1),
    "lag_2_3": (2, 3),
    "lag_4_7": (4, 7),
    "lag_8": (8, sys.maxsize),
}

_SUM, _SEEN, _TOTAL, _OWN = Adds
_SIGNAL = "Groups without signal, answers cut off"
_DLOGP = "Absolute log-probability difference"
_UPDATE = "Weight update and checkpoint"
_ORIGIN = "Turns by their request"

# fmt: off
METRICS = {
    "reward/mean": Metric(_OWN, "Reward", "mean \u00b1 standard deviation", "reward/std"),
    "reward/zero_var_frac": Metric(_OWN, _SIGNAL, "all rewards equal"),
    "sample/truncated_frac": Metric(_OWN, _SIGNAL, "hit the length limit"),
    "sample/length_mean": Metric(_OWN, "Response length", "mean"),
    "sample/context_ends": Metric(_SUM),
    "sample/shared_frac": Metric(
        _OWN, "Tokens saved by rows of several turns", "of a row per turn"),
    "eval/reward_mean": Metric(
        _OWN, "Held-out prompts", "mean \u00b1 standard error", "eval/reward_se"),
    "eval/given_up": Metric(_SEEN),
    "loss/grad_norm": Metric(_OWN, "Gradient norm", "norm"),
    "loss/entropy": Metric(Ratio("entropy", "sampled")),
    "loss/entropy_full": Metric(Ratio("entropy_full", "sampled_full")),

    "mismatch/k3": Metric(_OWN, "k3 divergence", "k3"),
    "mismatch/abs_dlogp_max": Metric(_OWN, _DLOGP, "max"),
    "mismatch/abs_dlogp_mean": Metric(_OWN, _DLOGP, "mean"),
    "mismatch/ratio_mean": Metric(
        _OWN, "Mean importance ratio", "mean \u00b1 4 standard errors", "mismatch/ratio_se"),

    "routing/replay_cover_frac": Metric(
        Ratio("replayed_rows", "fed_rows"), "Replay coverage", "routing"),
    "keep/cover_frac": Metric(
        Ratio("masked", "sampled_truncated"), "Replay coverage", "sampling mask"),
    "keep/size_mean": Metric(Ratio("kept", "masked")),
    "keep/singleton_frac": Metric(Ratio("kept_singleton", "masked")),
    "keep/bytes_per_token": Metric(Ratio("mask_bytes", "masked")),
    "keep/logprob_bytes_per_token": Metric(Ratio("support_bytes", "supported")),
    "indexer/replay_cover_frac": Metric(Ratio("indexer_rows", "fed_index_rows")),
    "routing/load_entropy_frac_mean": Metric(_OWN, "Entropy of the load", "mean of the layers"),
    "routing/load_entropy_frac_min": Metric(_OWN, "Entropy of the load", "least even layer"),
    "routing/load_max_over_mean": Metric(_OWN, "Busiest expert", "in the worst layer"),
    "routing/dead_experts": Metric(_OWN, "Experts without a token", "all layers"),
    "probe/live_agree_frac": Metric(_OWN, "Live router and record agree", "all layers"),
    "refused/{reason}": Metric(_TOTAL),

    "async/lag_max": Metric(_OWN, "Version lag", "max"),
    "async/lag_mean": Metric(_OWN, "Version lag", "mean"),
    "async/lag_frac/lag_0": Metric(_OWN, "Tokens by lag", "0"),
    "async/lag_frac/lag_1": Metric(_OWN, "Tokens by lag", "1"),
    "async/lag_frac/lag_2_3": Metric(_OWN, "Tokens by lag", "2-3"),
    "async/lag_frac/lag_4_7": Metric(_OWN, "Tokens by lag", "4-7"),
    "async/lag_frac/lag_8": Metric(_OWN, "Tokens by lag", "8+"),
    "perf/rollout_tokens_per_s": Metric(_OWN, "Throughput", "engine, generated"),
    "perf/train_tokens_per_s": Metric(_OWN, "Throughput", "trainer"),
    "async/engine_idle_frac": Metric(_OWN, "Idle", "engine"),
    "async/trainer_wait_frac": Metric(_OWN, "Idle", "trainer, waiting for a batch"),
    "async/trainer_wait_s": Metric(_SUM),
    "ref_models/wait_s": Metric(_SEEN),
    "teacher/{name}/seconds": Metric(_SEEN),  # exchanges on reference ranks
    "async/buffer_depth": Metric(_OWN, "Buffer depth", "groups"),
    "async/buffer_age_max_s": Metric(_OWN, "Buffer age", "oldest group taken"),
    "async/buffer_age_mean_s": Metric(_OWN, "Buffer age", "mean"),
    "async/interrupts": Metric(_SUM, "Requests aborted and resumed", "requests"),
    "async/recomputed_tokens": Metric(_SUM, "Prefilled again after an update", "tokens"),
    "async/partial_frac": Metric(_OWN, "Rollouts of several versions", "share"),
    "async/sync_transfer_s": Metric(_OWN, _UPDATE, "transfer"),
    "async/sync_pause_s": Metric(_SEEN, _UPDATE, "engine pause"),
    "checkpoint/pause_s": Metric(_OWN, _UPDATE, "checkpoint pause"),
    "async/routed_groups": Metric(_SUM),
    "async/cached_frac": Metric(Ratio("cached_tokens", "prompt_tokens")),
    "async/engine_restarts": Metric(_SUM),
    "async/engines_excluded": Metric(_SUM),
    "async/engines_suspended": Metric(_SUM),
    "async/stalled_requests": Metric(_SUM),
    "async/dropped_stale_groups": Metric(_SUM),
    "async/dropped_branch_groups": Metric(_SUM),
    "async/dropped_lost_groups": Metric(_SUM),
    "async/dropped_zero_variance_groups": Metric(_SUM),
    "async/dropped_siblings": Metric(_SUM),
    "async/dropped_stale_siblings": Metric(_SUM),
    "async/carried_siblings": Metric(_SUM),
    "async/cancelled_groups": Metric(_SUM),
    "async/cancelled_tokens": Metric(_SUM),
    "async/copied_groups": Metric(_SUM),
    "async/bad_prompts": Metric(_SUM),
    "scorer/failed": Metric(_SUM),
    "journal/adopted_groups": Metric(_SUM),
    "journal/lost_groups": Metric(_SUM),
    "journal/failed_writes": Metric(_SUM),

    "agent/engine_s": Metric(_SEEN, "Time of episodes", "with the engines"),
    "agent/program_s": Metric(_SEEN, "Time of episodes", "waiting for the program"),
    "agent/origin/continued": Metric(_SEEN, _ORIGIN, "continued"),
    "agent/origin/branched": Metric(_SEEN, _ORIGIN, "branched"),
    "agent/origin/repeated": Metric(_SEEN, _ORIGIN, "repeated"),
    "agent/origin/rewritten": Metric(_SEEN, _ORIGIN, "rewritten"),
    "agent/origin/tools_changed": Metric(_SEEN, _ORIGIN, "other tools"),
    "agent/origin/arguments_changed": Metric(_SEEN, _ORIGIN, "other arguments"),
    "agent/origin/new": Metric(_SEEN, _ORIGIN, "another conversation"),
    "agent/{count}": Metric(_SEEN),
    "fork/continuations": Metric(_SEEN),
    "fork/given_up": Metric(_SEEN),
    "fork/cached_frac": Metric(Ratio("fork_cached", "fork_fed")),
}
# fmt: on

_RATIOS = {name: one.adds for name, one in METRICS.items() if isinstance(one.adds, Ratio)}
_ADDED = {
    name.partition("{")[0]: one.adds
    for name, one in METRICS.items()
    if isinstance(one.adds, Adds) and one.adds is not Adds.OWN
} | {name: Adds.SEEN for ratio in _RATIOS.values() for name in ratio}


def adds_of(name: str) -> Adds:
    """The rule of a metric, or of a sum that a ratio reads.  Raises KeyError for any other name."""
    return _ADDED.get(name) or _ADDED[name.partition("/")[0] + "/"]


def row_of(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a row, from sums of this table by name."""
    zeros = {name: 0.0 for name, adds in _ADDED.items() if adds is Adds.SUM}
    return zeros | {name: sums[name] for name in sums if "/" in name} | ratios(sums)


def ratios(sums: Mapping[str, float]) -> dict[str, float]:
    """The ratios whose divisor is there."""
    found = {name: one for name, one in _RATIOS.items() if one.per in sums}
    return {name: sums.get(of, 0.0) / max(1.0, sums[per]) for name, (of, per) in found.items()}

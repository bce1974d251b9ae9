"""The charts of a run's report: a table of charts over optimizer steps, and heatmaps by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from moerl.observe.charts import COLORS, Chart, Heatmap, has_values
from moerl.observe.metrics import Row
from moerl.observe.page import Column, Figure, PageSection, Table, figure

_LEARNING, _ROUTERS, _AGENTS = "Learning", "Routers", "Agents"
_AGREEMENT = "probe/live_agree_frac/layer_"

_VERSIONS: dict[str, Any] = {"x": "eval/step", "x_label": "version"}  # of evaluations

# fmt: off
_SECTIONS: dict[str, tuple[str, list[Chart]]] = {  # title -> text, charts
    _LEARNING: (
        "Raw reward of the rollouts that each step trained on: thin line per step, thick line a "
        "moving mean. Held-out prompts are never trained on; one version answers all of them. A "
        "group is the answers to one prompt: equal rewards in a group carry no signal.", [
        Chart("Reward", "reward", {"reward/mean": "mean \u00b1 standard deviation"},
              bands={"reward/mean": "reward/std"}, smooth=True),
        Chart("Held-out prompts", "reward", {"eval/reward_mean": "mean \u00b1 standard error"},
              bands={"eval/reward_mean": "eval/reward_se"}, **_VERSIONS),
        Chart("Response length", "tokens", {"sample/length_mean": "mean"}, "zero"),
        Chart("Groups without signal, answers cut off", "share",
              {"reward/zero_var_frac": "all rewards equal",
               "sample/truncated_frac": "hit the length limit"}, "share"),
        Chart("Gradient norm", "L2, before clipping", {"loss/grad_norm": "norm"}),
    ]),
    "Mismatch between trainer and engine": (
        "Trainer log-probability against the one that the engine recorded when it sampled the "
        "token, over all tokens of the step, including those of older weights. At lag 0 with both "
        "replays only rounding remains, except in rollouts that an update interrupted. k3 "
        "estimates the KL divergence. The ratio is trainer over engine probability; its mean is 1 "
        "when the records are complete.", [
        Chart("k3 divergence", "nats", {"mismatch/k3": "k3"}, "log"),
        Chart("Absolute log-probability difference", "nats",
              {"mismatch/abs_dlogp_max": "max", "mismatch/abs_dlogp_mean": "mean"}, "log"),
        Chart("Mean importance ratio", "ratio",
              {"mismatch/ratio_mean": "mean \u00b1 4 standard errors"},
              bands={"mismatch/ratio_mean": "mismatch/ratio_se"}, band_scale=4.0, level=1.0),
        Chart("Replay coverage", "share of tokens",
              {"routing/replay_cover_frac": "routing", "keep/cover_frac": "sampling mask"},
              "share"),
    ]),
    _ROUTERS: (
        "How evenly the tokens of a step use the experts, as recorded: entropy of their shares in "
        "each layer, 1 when all get as many; the busiest expert over the mean, 1 when even; "
        "experts without a token. The shades below show each layer: the share of pairs in which "
        "the trainer's own router picks the recorded experts, by step (probed steps), and the "
        "load of each expert in the last of them.", [
        Chart("Entropy of the load", "share of log(experts)",
              {"routing/load_entropy_frac_mean": "mean of the layers",
               "routing/load_entropy_frac_min": "least even layer"}, "share"),
        Chart("Busiest expert", "times the mean load",
              {"routing/load_max_over_mean": "in the worst layer"}, "zero"),
        Chart("Experts without a token", "experts", {"routing/dead_experts": "all layers"}, "zero"),
        Chart("Live router and record agree", "share of pairs",
              {"probe/live_agree_frac": "all layers"}, "share"),
    ]),
    "Asynchrony": (
        "Engines generate while the trainer works. The lag of a token is the number of versions "
        "between the weights that sampled it and the weights that train on it. A weight update "
        "aborts running requests; they are sent again, with their tokens so far prefilled.", [
        Chart("Version lag", "versions",
              {"async/lag_max": "max", "async/lag_mean": "mean"}, "zero"),
        Chart("Throughput", "tokens/s",
              {"perf/rollout_tokens_per_s": "engine, generated",
               "perf/train_tokens_per_s": "trainer"}, "zero"),
        Chart("Idle", "share of time",
              {"async/engine_idle_frac": "engine",
               "async/trainer_wait_frac": "trainer, waiting for a batch"}, "share"),
        Chart("Tokens by lag", "share of tokens",
              {"async/lag_frac/lag_0": "0", "async/lag_frac/lag_1": "1",
               "async/lag_frac/lag_2_3": "2-3", "async/lag_frac/lag_4_7": "4-7",
               "async/lag_frac/lag_8": "8+"}, "share"),
        Chart("Buffer depth", "groups", {"async/buffer_depth": "groups"}, "zero"),
        Chart("Buffer age", "seconds",
              {"async/buffer_age_max_s": "oldest group taken",
               "async/buffer_age_mean_s": "mean"}, "zero"),
        Chart("Requests aborted and resumed", "requests", {"async/interrupts": "requests"}, "zero"),
        Chart("Prefilled again after an update", "tokens",
              {"async/recomputed_tokens": "tokens"}, "zero"),
        Chart("Rollouts of several versions", "share of rollouts",
              {"async/partial_frac": "share"}, "share"),
        Chart("Weight update and checkpoint", "seconds",
              {"async/sync_transfer_s": "transfer", "async/sync_pause_s": "engine pause",
               "checkpoint/pause_s": "checkpoint pause"}, "zero"),
    ]),
    _AGENTS: (  # of a run with an agent program or a stateful environment
        "All episodes that ended since the step before, trained or not. A request that continues "
        "no earlier turn, or one that was continued before, begins a branch: a row of its own.", [
        Chart("Time of episodes", "seconds, summed",
              {"agent/engine_s": "with the engines",
               "agent/program_s": "waiting for the program"}, "zero"),
        Chart("Turns by their request", "turns",
              {"agent/origin/continued": "continued", "agent/origin/branched": "branched",
               "agent/origin/repeated": "repeated", "agent/origin/rewritten": "rewritten",
               "agent/origin/tools_changed": "other tools",
               "agent/origin/arguments_changed": "other arguments",
               "agent/origin/new": "another conversation"}, "zero"),
        Chart("Tokens saved by rows of several turns", "share",
              {"sample/shared_frac": "of a row per turn"}, "share"),
    ]),
}
BY_TASK = (  # title, unit, metric
    ("Reward by task", "reward", "reward/mean"),
    ("Held-out prompts by task", "reward", "eval/reward_mean"),
    ("Response length by task", "tokens", "sample/length_mean"),
)
BY_ROLE = (("Reward by role", "reward", "reward"), ("Held-out by role", "reward", "eval/role"))
# fmt: on


def chart_sections(
    rows: Sequence[Row],
    loads: Sequence[Row],
    labels: Sequence[str],
    roles: Sequence[str] = (),
    *,
    has_agent: bool,
) -> list[PageSection]:
    """The charts of one run, with those of its tasks and roles and the heatmaps of its routers.

    loads: the lines of `RunDir.expert_load`.  labels: of the tasks of a mixture.
    """
    more: dict[str, Sequence[Chart | Heatmap]] = {
        _LEARNING: [*charts_by(labels, BY_TASK), *charts_by(roles, BY_ROLE)],
        _ROUTERS: router_heatmaps(rows, loads),
    }
    rows = [row | {"step": row["step"] + 1} for row in rows]  # pages count from 1
    sections = [
        PageSection(title, text, figures=_figures([*charts, *more.get(title, ())], rows))
        for title, (text, charts) in _SECTIONS.items()
        if has_agent or title != _AGENTS
    ]
    return [section for section in sections if section.figures]


def _figures(charts: Sequence[Chart | Heatmap], rows: Sequence[Row]) -> list[Figure]:
    """Of the charts that have a value."""
    drawn = [one for one in charts if isinstance(one, Heatmap) or has_values(one, rows)]
    return [figure(chart, rows) for chart in drawn]


def charts_by(words: Sequence[str], kinds: Sequence[tuple[str, str, str]]) -> list[Chart]:
    """Charts with a line per task or role, each with at most one line per colour."""
    parts = [words[at : at + len(COLORS)] for at in range(0, len(words), len(COLORS))]
    return [
        Chart(
            title,
            unit,
            {f"{name}/{word}": word for word in part},
            **(_VERSIONS if "eval/" in name else {}),
        )
        for part in parts
        for title, unit, name in kinds
    ]


def scorer_section(rows: Sequence[Row]) -> list[PageSection]:
    """A table of the scorers of a run; [] without requests."""
    asked = {name for row in rows for name in row if name.startswith("scorer/asked/")}
    scorers = sorted(name.removeprefix("scorer/asked/") for name in asked)
    if not scorers:
        return []
    text = (
        "Requests to each scorer: sent again because no answer came, given up or refused, the most "
        "that waited at once, the mean seconds of a request until it was sent and of a message "
        "until its answer, and the cost that the answers named."
    )
    titles = ("Requests", "Repeated", "Unscored", "Most waiting", "Wait s", "Answer s", "Cost")
    columns = [Column("Scorer"), *(Column(title, "number") for title in titles)]
    return [PageSection("Scorers", text, Table(columns, [_scorer(rows, one) for one in scorers]))]


def _scorer(rows: Sequence[Row], name: str) -> list[str]:
    def values(count: str) -> list[float]:
        return [row.get(f"scorer/{count}/{name}", 0.0) for row in rows]

    asked = values("asked")
    sums = [sum(values(count)) for count in ("asked", "repeated", "unscored")]
    means = [
        sum(a * b for a, b in zip(asked, values(count), strict=True)) / max(1.0, sums[0])
        for count in ("wait_s", "answer_s")
    ]
    numbers = [*(f"{one:,.0f}" for one in (*sums, max(values("waiting_max"))))]
    return [name, *numbers, *(f"{mean:.3f}" for mean in means), f"{sum(values('cost')):g}"]


def notice_section(notices: Sequence[Row]) -> list[PageSection]:
    """The sentences of `RunDir.notices`; [] without one."""
    text = (
        "What failed beside the training, waited for a disk, or was not taken: sentences of the "
        "console, with the number of finished steps."
    )
    lines = [[str(one["step"]), _hour(one["time_s"]), one["text"]] for one in notices]
    columns = [Column("Steps", "number"), Column("Time (UTC)"), Column("Event", "long")]
    return [PageSection("What happened", text, Table(columns, lines))] if lines else []


def _hour(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def router_heatmaps(rows: Sequence[Row], loads: Sequence[Row]) -> list[Heatmap]:
    """Agreement by layer over steps, and the newest load by layer and expert; [] without data.

    loads: the lines of `RunDir.expert_load`.
    """
    found = [_agreement(rows), _load(loads[-1]) if loads else None]
    return [heatmap for heatmap in found if heatmap]


def _agreement(rows: Sequence[Row]) -> Heatmap | None:
    probed = [row for row in rows if any(name.startswith(_AGREEMENT) for name in row)]
    names = {name for row in probed for name in row if name.startswith(_AGREEMENT)}
    layers = sorted(int(name.removeprefix(_AGREEMENT)) for name in names)
    if not layers:
        return None
    values = [[row.get(f"{_AGREEMENT}{layer}", 0.0) for row in probed] for layer in layers]
    low = min(map(min, values))
    title = f"Live router and record agree, by layer: from {low:.3f} (light) to 1 (dark)"
    steps = [row["step"] + 1 for row in probed]
    return Heatmap(title, "step", "layer", steps, layers, values, low - 0.1 * (1 - low), 1.0)


def _load(newest: Row) -> Heatmap:
    counts: list[list[int]] = newest["counts"]
    values = [[n / max(sum(row) / len(row), 1e-9) for n in row] for row in counts]
    title = f"Load of each expert in step {newest['step'] + 1}: from 0 (light) to twice the mean"
    experts = range(len(counts[0]))
    return Heatmap(title, "expert", "layer", experts, newest["layers"], values, 0.0, 2.0)

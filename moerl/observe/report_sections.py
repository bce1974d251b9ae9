"""The charts of a run's report: a table of charts over optimizer steps, and heatmaps by layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from moerl.core.metric_table import METRICS
from moerl.observe.charts import COLORS, Chart, Heatmap, Scale, has_values
from moerl.observe.metrics import Row
from moerl.observe.page import Column, Figure, PageSection, Table, figure

_LEARNING, _ROUTERS, _AGENTS = "Learning", "Routers", "Agents"
_AGREEMENT = "probe/live_agree_frac/layer_"


def _chart(title: str, unit: str, scale: Scale = "auto", **more: Any) -> Chart:
    """A chart with the lines that the table of metrics has for it."""
    mine = {name: metric for name, metric in METRICS.items() if metric.chart == title}
    bands = {name: metric.band for name, metric in mine.items() if metric.band}
    lines = {name: metric.label for name, metric in mine.items()}
    return _line_chart(title, unit, lines, scale=scale, bands=bands, **more)


def _line_chart(title: str, unit: str, lines: dict[str, str], **more: Any) -> Chart:
    """Evaluations are drawn at their versions."""
    if all(name.startswith("eval/") for name in lines):
        more |= {"x": "eval/step", "x_label": "version"}
    return Chart(title, unit, lines, **more)


SECTIONS: dict[str, tuple[str, list[Chart]]] = {  # title -> text, charts
    _LEARNING: (
        "Raw reward of the rollouts that each step trained on: thin line per step, thick line a "
        "moving mean. Held-out prompts are never trained on; one version answers all of them. A "
        "group is the answers to one prompt: equal rewards in a group carry no signal.",
        [
            _chart("Reward", "reward", smooth=True),
            _chart("Held-out prompts", "reward"),
            _chart("Response length", "tokens", "zero"),
            _chart("Groups without signal, answers cut off", "share", "share"),
            _chart("Gradient norm", "L2, before clipping"),
        ],
    ),
    "Mismatch between trainer and engine": (
        "Trainer log-probability against the one that the engine recorded when it sampled the "
        "token, over all tokens of the step, including those of older weights. At lag 0 with both "
        "replays only rounding remains, except in rollouts that an update interrupted. k3 "
        "estimates the KL divergence. The ratio is trainer over engine probability; its mean is 1 "
        "when the records are complete.",
        [
            _chart("k3 divergence", "nats", "log"),
            _chart("Absolute log-probability difference", "nats", "log"),
            _chart("Mean importance ratio", "ratio", band_scale=4.0, level=1.0),
            _chart("Replay coverage", "share of tokens", "share"),
        ],
    ),
    _ROUTERS: (
        "How evenly the tokens of a step use the experts, as recorded: entropy of their shares in "
        "each layer, 1 when all get as many; the busiest expert over the mean, 1 when even; "
        "experts without a token. The shades below show each layer: the share of pairs in which "
        "the trainer's own router picks the recorded experts, by step (probed steps), and the "
        "load of each expert in the last of them.",
        [
            _chart("Entropy of the load", "share of log(experts)", "share"),
            _chart("Busiest expert", "times the mean load", "zero"),
            _chart("Experts without a token", "experts", "zero"),
            _chart("Live router and record agree", "share of pairs", "share"),
        ],
    ),
    "Asynchrony": (
        "Engines generate while the trainer works. The lag of a token is the number of versions "
        "between the weights that sampled it and the weights that train on it. A weight update "
        "aborts running requests; they are sent again, with their tokens so far prefilled.",
        [
            _chart("Version lag", "versions", "zero"),
            _chart("Throughput", "tokens/s", "zero"),
            _chart("Idle", "share of time", "share"),
            _chart("Tokens by lag", "share of tokens", "share"),
            _chart("Buffer depth", "groups", "zero"),
            _chart("Buffer age", "seconds", "zero"),
            _chart("Requests aborted and resumed", "requests", "zero"),
            _chart("Prefilled again after an update", "tokens", "zero"),
            _chart("Rollouts of several versions", "share of rollouts", "share"),
            _chart("Weight update and checkpoint", "seconds", "zero"),
        ],
    ),
    _AGENTS: (  # of a run with an agent program or a stateful environment
        "All episodes that ended since the step before, trained or not. A request that continues "
        "no earlier turn, or one that was continued before, begins a branch: a row of its own.",
        [
            _chart("Time of episodes", "seconds, summed", "zero"),
            _chart("Turns by their request", "turns", "zero"),
            _chart("Tokens saved by rows of several turns", "share", "share"),
        ],
    ),
}
BY_TASK = (  # title, unit, metric
    ("Reward by task", "reward", "reward/mean"),
    ("Held-out prompts by task", "reward", "eval/reward_mean"),
    ("Response length by task", "tokens", "sample/length_mean"),
)
BY_ROLE = (("Reward by role", "reward", "reward"), ("Held-out by role", "reward", "eval/role"))


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
        for title, (text, charts) in SECTIONS.items()
        if has_agent or title != _AGENTS
    ]
    return [section for section in sections if section.figures]


def _figures(charts: Sequence[Chart | Heatmap], rows: Sequence[Row]) -> list[Figure]:
    """Of the charts that have a value."""
    drawn = [one for one in charts if isinstance(one, Heatmap) or has_values(one, rows)]
    return [figure(chart, rows) for chart in drawn]


def charts_by(words: Sequence[str], kinds: Sequence[tuple[str, str, str]]) -> list[Chart]:
    """Charts with a line per task or role, each with at most one line per colour."""
    return [
        _line_chart(title, unit, {f"{name}/{word}": word for word in words[at : at + len(COLORS)]})
        for at in range(0, len(words), len(COLORS))
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

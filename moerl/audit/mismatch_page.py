"""mismatch.html: one self-contained page about log-probability differences.

Its only input is the findings of `moerl mismatch`.

Splits the gap between engine and trainer into routing, mask and numerics, by position and lag.

Four scores of the same tokens are compared: no replay, mask only, routes only, both.  The gap with
both is numerics (kernels, precision, reduction order) and, at lag > 0, staleness.  The reduction by
routing replay, with the mask replayed, is routing's share, and vice versa; the rest of the gap is
the interaction of the two.

Legend: S sampled tokens, d = trainer minus engine log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moerl.core.types import Array
from moerl.observe.charts import Chart, draw_bars
from moerl.observe.page import Column, Figure, Page, PageSection, Table, figure, write_html

VARIANTS = ("none", "routing", "mask", "both")
CAUSES = ("routing", "mask", "numerics")
NUM_POSITION_BINS = 16


def attribute(gaps: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """Shares of the gap by two measures: {measure: {cause or total: value}}.

    gaps: d [S] for each name of VARIANTS. Measures: `k3` (mean of exp(d) - 1 - d) and
    `abs_dlogp_mean`, both in nats.  A share is negative when replay widened the gap.
    """
    measures = {
        "k3": {name: float((np.expm1(d) - d).mean()) for name, d in gaps.items()},
        "abs_dlogp_mean": {name: float(np.abs(d).mean()) for name, d in gaps.items()},
    }
    result = {}
    for measure, value in measures.items():
        shares = {
            "total": value["none"],
            "routing": value["mask"] - value["both"],
            "mask": value["routing"] - value["both"],
            "numerics": value["both"],
        }
        shares["interaction"] = shares["total"] - sum(shares[cause] for cause in CAUSES)
        result[measure] = shares
    return result


def cause_of_tokens(gaps: Mapping[str, Array]) -> Array:
    """Index into CAUSES of the largest effect on each token, [S] i64."""
    both = gaps["both"]
    effects = np.stack([np.abs(gaps["mask"] - both), np.abs(gaps["routing"] - both), np.abs(both)])
    worst: Array = effects.argmax(0)
    return worst


def by_position(position: Array, gaps: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Mean and largest |d| along the response: one row per position, or per run of positions.

    position: [S] index of the token in its response.  Rows: {"step": mean position, "tokens",
    "NAME" mean, "NAME_max"}.
    """
    values = np.unique(position)
    rows = []
    for run in np.array_split(values, min(NUM_POSITION_BINS, len(values))):
        part = (position >= run[0]) & (position <= run[-1])
        row: dict[str, Any] = {"step": float(position[part].mean()), "tokens": int(part.sum())}
        for name, d in gaps.items():
            row[name] = float(np.abs(d[part]).mean())
            row[f"{name}_max"] = float(np.abs(d[part]).max())
        rows.append(row)
    return rows


def by_lag(lag: Array, gaps: Mapping[str, Array]) -> list[dict[str, Any]]:
    """k3 and mean |d| per version lag: {"lag", "tokens", "NAME": mean, "NAME_k3"}."""
    rows = []
    for value in np.unique(lag):
        part = lag == value
        row: dict[str, Any] = {"lag": int(value), "tokens": int(part.sum())}
        for name, d in gaps.items():
            row[name] = float(np.abs(d[part]).mean())
            row[f"{name}_k3"] = float((np.expm1(d[part]) - d[part]).mean())
        rows.append(row)
    return rows


QUANTILES = ("5 %", "50 %", "95 %")  # of the margin of the k-th expert
_SHARES = {"k3": "k3", "abs_dlogp_mean": "mean |d|"}  # bars: where each of them comes from
_METRICS = (  # title, name, format
    ("k3", "k3", ".2e"),
    ("mean |d|", "abs_dlogp_mean", ".2e"),
    ("p99 |d|", "abs_dlogp_p99", ".2e"),
    ("max |d|", "abs_dlogp_max", ".2e"),
    ("E[ratio]", "ratio_mean", ".5f"),
    ("F(2)", "extreme_frac_2", ".1e"),
)
_INTRO = (
    "d is the trainer's log-probability of a sampled token less the recorded one, in nats. The "
    "same tokens are scored four times: without replay, with recorded routes (routing), with "
    "recorded sampling masks (mask), with both. The remaining gap with both is numerics (and age, "
    "for tokens of older weights). Each replay removes its own share, and interaction is what "
    "both together remove beyond that.",
    "k3 estimates KL(engine, trainer) in nats. E[ratio] is the mean of trainer over engine "
    "probability, 1 when both score the same distribution. F(2) is the share of tokens with a "
    "ratio beyond 2 either way.",
)
_WORST = (
    "The largest |d| without replay and with both. Cause: the largest effect. Moved: the "
    "live router differs from the record at this token or before it."
)
_BARS = "Bars add up to the gap without replay; a negative one: this replay widens it."
_BY_VARIANT = {name: name for name in VARIANTS}
_LARGEST = {name + "_max": name for name in VARIANTS}
_POSITION = "position in the response"
_STEP = "A seam, a cut prompt or a shifted row shows as a step."
_chart = partial(Chart, marks=True)
# fmt: off
_CHARTS = (  # (rows of the findings, chart)
    ("layers", _chart(
        "Live router against the record, by layer", "share of tokens",
        {"agree_frac": "same experts", "same_input_frac": "on equal inputs"}, "below_one",
        x="layer", x_label="layer", text="A difference changes what later layers and tokens read; "
        "on equal inputs only the first of a chain counts.")),
    ("layers", _chart(
        "Margin of the k-th expert, by layer", "router score", {name: name for name in QUANTILES},
        "log", x="layer", x_label="layer",
        text="Quantiles of score k less score k + 1: near ties are where routes flip.")),
    ("position", _chart(
        "Mean |d| along the response", "nats", _BY_VARIANT, "log", x_label=_POSITION, text=_STEP)),
    ("position", _chart(
        "Largest |d| along the response", "nats", _LARGEST, "log", x_label=_POSITION, text=_STEP)),
    ("lag", _chart(
        "Mean |d| by age of the weights", "nats", _BY_VARIANT, "log", x="lag", x_label="versions",
        text="Version lag against the newest weights in the records.")),
)
# fmt: on


def write_page(path: Path, found: Mapping[str, Any]) -> Path:
    """Write the page of the result of `moerl.audit.mismatch_command.measure`."""
    subtitle = (
        f"{found['tokens']:,} sampled tokens of {found['source']}, "
        f"recorded by an engine in {found['engine_dtype']}"
    )
    sections = []
    for dtype, results in found["results"].items():
        where = found["where"][dtype]
        sections += [
            PageSection(f"Trainer in {dtype}", table=_variants(results), figures=_figures(where)),
            PageSection(f"Worst tokens, {dtype}", _WORST, table=_worst(where["worst"])),
        ]
    page = Page("moerl mismatch", found["model"], paragraphs=[subtitle, *_INTRO], sections=sections)
    return write_html(path, page)


def _variants(results: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per variant of replay."""
    columns = [Column("Replayed"), *(Column(title, "number") for title, _, _ in _METRICS)]
    rows = [
        [name, *(format(metrics[key], form) for _, key, form in _METRICS)]
        for name, metrics in results.items()
    ]
    return Table(columns, rows)


def _figures(where: Mapping[str, Any]) -> list[Figure]:
    layers = [row | dict(zip(QUANTILES, row["margin"], strict=True)) for row in where["layers"]]
    rows = {**where, "layers": layers}
    bars = [_shares(label, where["attribution"][name]) for name, label in _SHARES.items()]
    return bars + [_figure(kind, chart, rows[kind]) for kind, chart in _CHARTS]


def _shares(label: str, shares: Mapping[str, float]) -> Figure:
    """Each cause's share of one measure as a bar."""
    causes = {name: shares[name] for name in (*CAUSES, "interaction")}
    return Figure(f"Where {label} comes from", draw_bars(label, f"{label}, nats", causes), _BARS)


def _figure(kind: str, chart: Chart, rows: list[dict[str, Any]]) -> Figure:
    if kind == "lag" and len(rows) == 1:
        return Figure(chart.title, None, f"Not drawn: all tokens have lag {rows[0]['lag']}.")
    return figure(chart, rows)


def _worst(tokens: list[dict[str, Any]]) -> Table:
    numbers = ("Position", "Token", "Lag", "Kept", "Recorded", *(f"d, {v}" for v in VARIANTS))
    columns = [Column(title, "number") for title in numbers]
    rows = [
        [
            str(token["rollout"]),
            *(str(token[name]) for name in ("position", "token", "lag", "kept")),
            f"{token['engine']:.3f}",
            *(f"{token['gaps'][name]:+.2e}" for name in VARIANTS),
            "yes" if token["moved"] else "no",
            token["cause"],
        ]
        for token in tokens
    ]
    return Table([Column("Rollout"), *columns, Column("Moved"), Column("Cause")], rows)

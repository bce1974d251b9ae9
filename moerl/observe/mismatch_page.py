"""mismatch.html: one self-contained page that says where the gap of engine and trainer comes from.

Made from the findings of `moerl mismatch` alone.  Look and rules are those of the run's report:
one file, no script, nothing fetched, foreign text escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from moerl.atomic import atomic_write
from moerl.observe.charts import Curve, draw_bars, draw_curves
from moerl.observe.template import STYLE

VARIANTS = ("none", "routing", "mask", "both")
MEASURES = {"k3": "k3, nats", "abs_dlogp_mean": "mean |d|, nats"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>mismatch of {{ name }}</title>
{{ style }}
</head>
<body>
<main>
<header>
  <div class="eyebrow">moerl mismatch</div>
  <h1>{{ name }}</h1>
  <p>{{ subtitle }}</p>
</header>
<p>d is the trainer's log-probability of a sampled token less the one that was recorded, in nats.
Four scores of the same tokens: nothing replayed, routes, kept sets (mask), both. What both leave is
numerics (and age, for tokens of older weights); what each takes away is its own share, and
interaction is what they take away together beyond that.</p>
<p>k3 estimates KL(engine, trainer) in nats. E[ratio] is the mean of trainer over engine
probability, 1 when both score the same distribution. F(2) is the share of tokens with a ratio
beyond 2 either way.</p>
{% for part in parts %}
<h2>Trainer in {{ part.dtype }}</h2>
<div class="card"><div class="scroll"><table>
<thead><tr><th>Replayed</th><th class="number">k3</th><th class="number">mean |d|</th>
<th class="number">p99 |d|</th><th class="number">max |d|</th><th class="number">E[ratio]</th>
<th class="number">F(2)</th></tr></thead><tbody>
{% for row in part.rows %}
<tr><td data-label="Replayed">{{ row.name }}</td>
{% for value in row.cells %}<td class="number">{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div></div>
<p></p>
<div class="charts">
{% for chart in part.charts %}
  {% if chart.svg %}<figure class="card" style="margin:0" role="img" aria-label="{{ chart.title }}">
    <h3>{{ chart.title }}</h3>{{ chart.svg }}<p>{{ chart.text }}</p></figure>
  {% else %}<div class="card missing"><h3>{{ chart.title }}</h3><p>{{ chart.missing }}</p></div>
  {% endif %}
{% endfor %}
</div>
<h2>Worst tokens, {{ part.dtype }}</h2>
<p>Largest |d| without replay and with both. Cause: what moves the token most. Moved: the live
router differs from the record at this token or before it.</p>
<div class="card"><div class="scroll"><table>
<thead><tr><th>Rollout</th><th class="number">Position</th><th class="number">Token</th>
<th class="number">Lag</th><th class="number">Kept</th><th class="number">Recorded</th>
{% for name in variants %}<th class="number">d, {{ name }}</th>{% endfor %}
<th>Moved</th><th>Cause</th></tr></thead><tbody>
{% for row in part.worst %}
<tr><td data-label="Rollout">{{ row.rollout }}</td>
<td class="number" data-label="Position">{{ row.position }}</td>
<td class="number" data-label="Token">{{ row.token }}</td>
<td class="number" data-label="Lag">{{ row.lag }}</td>
<td class="number" data-label="Kept">{{ row.kept }}</td>
<td class="number" data-label="Recorded">{{ row.engine }}</td>
{% for value in row.gaps %}<td class="number">{{ value }}</td>{% endfor %}
<td data-label="Moved">{{ row.moved }}</td><td data-label="Cause">{{ row.cause }}</td></tr>
{% endfor %}
</tbody></table></div></div>
{% endfor %}
<footer>k3, F(2) and E[ratio] are defined in docs/metrics.md. This page stands alone: it loads
nothing.</footer>
</main>
</body>
</html>
"""


def write_page(path: Path, found: Mapping[str, Any]) -> Path:
    """Write the page of what `moerl.launch.mismatch.measure` returned."""
    parts = [_part(dtype, found) for dtype in found["results"]]
    subtitle = (
        f"{found['tokens']:,} sampled tokens of {found['source']}, "
        f"recorded by an engine in {found['engine_dtype']}"
    )
    page = (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(_PAGE)
        .render(
            name=found["model"],
            subtitle=subtitle,
            style=Markup(STYLE),
            variants=VARIANTS,
            parts=parts,
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, page.encode("utf-8", "replace"))
    return path


def _part(dtype: str, found: Mapping[str, Any]) -> dict[str, Any]:
    results, where = found["results"][dtype], found["where"][dtype]
    rows = [
        {
            "name": name,
            "cells": [
                f"{m['k3']:.2e}",
                f"{m['abs_dlogp_mean']:.2e}",
                f"{m['abs_dlogp_p99']:.2e}",
                f"{m['abs_dlogp_max']:.2e}",
                f"{m['ratio_mean']:.5f}",
                f"{m['extreme_frac_2']:.1e}",
            ],
        }
        for name, m in results.items()
    ]
    return {
        "dtype": dtype,
        "rows": rows,
        "charts": _charts(where),
        "worst": [_worst(row) for row in where["worst"]],
    }


def _charts(where: Mapping[str, Any]) -> list[dict[str, Any]]:
    charts = [
        _chart(
            f"Where {unit.split(',')[0]} comes from",
            draw_bars(measure, unit, _shares(where["attribution"][measure])),
            "Bars add up to the gap without replay; a negative one: this replay widens it.",
        )
        for measure, unit in MEASURES.items()
    ]
    layers, position, lag = where["layers"], where["position"], where["lag"]
    numbers = [row["layer"] for row in layers]
    charts.append(
        _chart(
            "Live router against the record, by layer",
            draw_curves(
                "agreement by layer",
                "layer",
                "share of tokens",
                [
                    Curve("same experts", numbers, [row["agree_frac"] for row in layers]),
                    Curve("on equal inputs", numbers, [row["same_input_frac"] for row in layers]),
                ],
                share=True,
            ),
            "A difference changes what later layers and tokens read; on equal inputs only the "
            "first of a chain counts.",
        )
    )
    charts.append(
        _chart(
            "Margin of the k-th expert, by layer",
            draw_curves(
                "margin by layer",
                "layer",
                "router score",
                [
                    Curve(f"{share} %", numbers, [row["margin"][index] for row in layers])
                    for index, share in enumerate((5, 50, 95))
                ],
                log=True,
            ),
            "Quantiles of score k less score k + 1: near ties are where routes flip.",
        )
    )
    for name, title in (("", "Mean |d|"), ("_max", "Largest |d|")):
        charts.append(
            _chart(
                f"{title} along the response",
                draw_curves(
                    title,
                    "position in the response",
                    "nats",
                    [
                        Curve(v, [r["step"] for r in position], [r[v + name] for r in position])
                        for v in VARIANTS
                    ],
                    log=True,
                ),
                "A seam, a cut prompt or a shifted row shows as a step.",
            )
        )
    charts.append(
        _chart(
            "Mean |d| by age of the weights",
            draw_curves(
                "by lag",
                "versions",
                "nats",
                [Curve(v, [r["lag"] for r in lag], [r[v] for r in lag]) for v in VARIANTS],
                log=True,
            )
            if len(lag) > 1
            else None,
            "Version lag against the newest weights in the records.",
            f"Not drawn: all tokens have lag {lag[0]['lag']}.",
        )
    )
    return charts


def _chart(title: str, svg: str | None, text: str, missing: str = "No value.") -> dict[str, Any]:
    drawn = Markup(svg) if svg else None
    return {"title": title, "svg": drawn, "text": text, "missing": missing}


def _shares(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: shares[name] for name in ("routing", "mask", "numerics", "interaction")}


def _worst(row: Mapping[str, Any]) -> dict[str, Any]:
    return dict(row) | {
        "engine": f"{row['engine']:.3f}",
        "gaps": [f"{row['gaps'][name]:+.2e}" for name in VARIANTS],
        "moved": "yes" if row["moved"] else "no",
    }

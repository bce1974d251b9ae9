"""rerun.html: the curves of a rerun beside those of the run that it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moerl.observe.charts import Chart
from moerl.observe.page import Page, PageSection, figure, write_html

_CHARTS = (  # title, unit, metric
    ("Policy loss", "nats", "loss/pg"),
    ("Gradient norm", "norm", "loss/grad_norm"),
    ("Entropy", "nats", "loss/entropy"),
    ("k3 of trainer and engine", "nats", "mismatch/k3"),
    ("Mean ratio of trainer and engine", "ratio", "mismatch/ratio_mean"),
    ("Effective sample size", "share", "mismatch/ess_token_frac"),
)
_INTRO = (
    "Both curves were trained on the same recorded rollouts. Rewards do not change: no policy was "
    "sampled again."
)


def write_rerun_page(
    path: Path, name: str, settings: Sequence[str], rows: Sequence[Mapping[str, float]]
) -> Path:
    """Write the page and return its path.  rows: by step, metrics named `was/` and `now/`."""
    charts = [
        Chart(title, unit, {f"was/{metric}": "recorded", f"now/{metric}": "rerun"})
        for title, unit, metric in _CHARTS
        if any(f"was/{metric}" in row or f"now/{metric}" in row for row in rows)
    ]
    changed = f"Changed settings: {', '.join(settings)}." if settings else "No setting was changed."
    page = Page(
        kind="moerl rerun",
        name=name,
        paragraphs=[_INTRO, changed],
        sections=[PageSection("Curves", figures=[figure(chart, rows) for chart in charts])],
    )
    return write_html(path, page)

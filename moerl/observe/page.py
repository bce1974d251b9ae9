"""The page of a report: one self-contained HTML file with stat cards, charts and tables.

The page has no script and loads nothing, so it opens without a network; of a running run, it reads
its own file again after a while.  Text is escaped and its control characters are shown; only the
SVG of `Figure` is inserted as markup, and only `moerl.observe.charts` draws it.  The page is light
or dark as the browser asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment

from moerl.core.atomic import atomic_write
from moerl.observe.charts import COLORS, Chart, Heatmap, draw_chart, draw_heatmap, only_value

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class StatCard:
    """One headline number."""

    label: str
    value: str
    note: str = ""
    wide: bool = False
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn chart, or a note in its place."""

    title: str
    svg: str | None
    text: str = ""  # below the chart, or why there is none
    wide: bool = False  # over the whole width of the page


@dataclass(frozen=True, slots=True)
class Column:
    """A title and how to show the cells.

    text: as it is.  number: aligned right.  badge: a coloured number.  long: several lines with a
    scroll bar.
    """

    title: str
    kind: Literal["text", "number", "badge", "long"] = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """A cell is text; in a badge column (text, strength of the colour from 0 to 1)."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | tuple[str, float]]]


@dataclass(frozen=True, slots=True)
class Passage:
    """A labelled piece of text; colour: of its edge, from 1 to 6, 0 = none."""

    label: str
    text: str
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation, folded below its title."""

    title: str
    note: str
    passages: Sequence[Passage]


@dataclass(frozen=True, slots=True)
class PageSection:
    """A heading with text, a table, transcripts, charts and folded text, each optional."""

    title: str
    text: str = ""
    table: Table | None = None
    figures: Sequence[Figure] = ()
    transcripts: Sequence[Transcript] = ()
    folded: tuple[str, str] | None = None  # (summary, text)


@dataclass(frozen=True, slots=True)
class Page:
    """Example: Page("moerl run report", "r1", "Complete: 20 of 20 steps", sections=[...])."""

    kind: str  # above the name
    name: str
    state: str = ""
    good: bool = True  # colour of the state
    paragraphs: Sequence[str] = ()
    cards: Sequence[StatCard] = ()
    sections: Sequence[PageSection] = ()
    reload_s: int = 0  # the browser reads the file again after so many seconds; 0 = never


def write_html(path: Path, page: Page) -> Path:
    """Write the page as one HTML file and return its path."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )
    html = environment.from_string(_SKELETON).render(page=page, colors=COLORS)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = html.encode("utf-8", "replace")  # model output may hold lone surrogates
    atomic_write(path, data, mode=0o600)  # prompts and answers
    return path


def _visible(value: object) -> object:
    """A text with control characters replaced by their picture symbols."""
    return value.translate(_PICTURES) if type(value) is str else value  # drawn SVG is Markup


def figure(chart: Chart | Heatmap, rows: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """The chart over these rows, or a note that they have no value for it."""
    if isinstance(chart, Heatmap):
        return Figure(chart.title, draw_heatmap(chart), wide=True)
    if number := only_value(chart, rows):
        return Figure(chart.title, None, number)
    svg, names = draw_chart(chart, rows), ", ".join(chart.lines)
    text = chart.text if svg else f"Not drawn: there is no value of {names} to draw."
    return Figure(chart.title, svg, text)


_SKELETON = """\
{% macro cell(column, value) %}
{% if column.kind == "badge" %}
<td class="number" data-label="{{ column.title }}">
<span class="badge" style="--share: {{ value[1] }}">{{ value[0] }}</span></td>
{% elif column.kind == "long" %}
<td class="text-cell" data-label="{{ column.title }}"><div class="text">{{ value }}</div></td>
{% else %}
<td{% if column.kind == "number" %} class="number"{% endif %} data-label="{{ column.title }}">
{{ value }}</td>
{% endif %}
{% endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{% if page.reload_s %}
<meta http-equiv="refresh" content="{{ page.reload_s }}">
{% endif %}
<title>{{ page.name }} - {{ page.kind }}</title>
<style>
:root { color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  --page: light-dark(#f6f7f9, #0f1216); --card: light-dark(#ffffff, #171b21);
  --line: light-dark(#e1e4e9, #2a3039); --ink: light-dark(#454c57, #a9b2bf);
  --strong: light-dark(#14171c, #f0f3f7); --good: light-dark(#1a7f4b, #4cc38a);
  --bad: light-dark(#c0362c, #ff7b6e);
{% for color in colors %}
  --c{{ loop.index }}: {{ color }};
{% endfor %}
}
* { box-sizing: border-box; }
body, figure { margin: 0; }
body { background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 28px 16px 56px; }
h1, h2, h3, th, summary, .value, .sampled .text, td .text, .badge { color: var(--strong); }
h1 { margin: 0; font-size: 26px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 36px 0 4px; font-size: 18px; }
h3 { margin: 0 0 6px; font-size: 14px; }
h3, th, summary { font-weight: 600; }
p { margin: 4px 0 12px; max-width: 76ch; }
.eyebrow { font-size: 12px; letter-spacing: .08em; text-transform: uppercase; }
.label, .note, footer, td::before { font-size: 12.5px; }
.state { display: inline-block; margin-top: 8px; padding: 2px 10px; border-radius: 99px;
  border: 1px solid currentColor; font-size: 13px; font-weight: 600; }
.good { color: var(--good); } .bad, .bad .value { color: var(--bad); }
.cards, .charts { display: grid; gap: 12px; margin-top: 12px; }
.cards { grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.charts .wide { grid-column: 1 / -1; }
.stat, .card { padding: 14px; min-width: 0; background: var(--card); break-inside: avoid;
  border: 1px solid var(--line); border-radius: 10px; }
.stat.wide { grid-column: span 2; }
.value { font-size: 23px; line-height: 1.3; font-weight: 650; }
.value, .number { font-variant-numeric: tabular-nums; }
.card p { margin: 6px 0 0; font-size: 13px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink) !important; font-family: var(--font) !important; }
.missing { align-content: center; border-style: dashed; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 720px; }
table { width: 100%; min-width: 640px; border-collapse: collapse; font-size: 13.5px; }
th, td { padding: 7px 14px 7px 0; text-align: left; vertical-align: top; }
tbody tr { border-top: 1px solid var(--line); }
td.number, th.number { text-align: right; white-space: nowrap; }
.text-cell { min-width: 8em; }
.transcript { margin-top: 12px; }
.passage { margin-top: 10px; padding-left: 10px; border-left: 4px solid var(--edge, var(--line)); }
.text { max-height: 24em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
td .text { max-height: 9.5em; }
.text, pre { font: var(--mono); }
.badge { display: inline-block; min-width: 3.6em; border-radius: 6px; text-align: center;
  background: color-mix(in srgb, var(--c3) calc(var(--share) * 55%), var(--page)); }
@media (max-width: 640px) {
  table { min-width: 0; } thead { display: none; }
  tr { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 10px 0; }
  td { padding: 0; }
  td::before { content: attr(data-label) " "; }
  .text-cell { flex-basis: 100%; }
}
summary { cursor: pointer; }
pre { margin: 10px 0 0; overflow-x: auto; }
footer { margin-top: 36px; }
@media print { :root { color-scheme: light; } }
</style>
</head>
<body>
<main>
<header>
  <div class="eyebrow">{{ page.kind }}</div>
  <h1>{{ page.name }}</h1>
  {% if page.state %}
  <div class="state {{ 'good' if page.good else 'bad' }}">{{ page.state }}</div>
  {% endif %}
</header>
{% for text in page.paragraphs %}
<p>{{ text }}</p>
{% endfor %}
{% if page.cards %}
<section class="cards">
{% for card in page.cards %}
  <div class="stat{{ ' wide' if card.wide }}{{ ' bad' if card.bad }}">
    <div class="label">{{ card.label }}</div>
    <div class="value">{{ card.value }}</div>
    <div class="note">{{ card.note }}</div>
  </div>
{% endfor %}
</section>
{% endif %}
{% for section in page.sections %}
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.table %}
<div class="card scroll"><table>
<thead><tr>
{% for column in section.table.columns %}
<th{% if column.kind in ("number", "badge") %} class="number"{% endif %}>{{ column.title }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in section.table.rows %}
<tr>
{% for value in row %}
{{ cell(section.table.columns[loop.index0], value) }}
{%- endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% for episode in section.transcripts %}
<div class="card transcript"><details{{ ' open' if loop.first }}>
<summary>{{ episode.title }}</summary><p>{{ episode.note }}</p>
{% for passage in episode.passages %}
<div class="passage{{ ' sampled' if passage.colour }}"
{%- if passage.colour %} style="--edge: var(--c{{ passage.colour }})"{% endif %}>
<div class="label">{{ passage.label }}</div>
<div class="text">{{ passage.text }}</div></div>
{% endfor %}
</details></div>
{% endfor %}
{% if section.figures %}
<div class="charts">
{% for figure in section.figures %}
  <figure class="card{{ ' wide' if figure.wide }}{{ ' missing' if not figure.svg }}"
{%- if figure.svg %} role="img" aria-label="{{ figure.title }}"{% endif %}>
    <h3>{{ figure.title }}</h3>
    {% if figure.svg %}
    <div{% if figure.wide %} class="scroll"{% endif %}>{{ figure.svg | safe }}</div>
    {% endif %}
    {% if figure.text %}<p>{{ figure.text }}</p>{% endif %}
  </figure>
{% endfor %}
</div>
{% endif %}
{% if section.folded %}
<div class="card"><details><summary>{{ section.folded[0] }}</summary>
<pre>{{ section.folded[1] }}</pre></details></div>
{% endif %}
{% endfor %}
<footer>Metrics are defined in docs/metrics.md. This page is self-contained: it loads nothing.
</footer>
</main>
</body>
</html>
"""

"""The report page as a Jinja template: one file, no script, nothing fetched.

Autoescape is on where it is rendered (moerl.observe.report); only the SVG drawn by this program
is inserted as markup.  Colours are variables with a light and a dark set, and the charts use them.
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ name }} - moerl report</title>
<style>
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --page: #f6f7f9; --card: #ffffff; --line: #e1e4e9; --ink: #454c57; --strong: #14171c;
  --grid: #e4e7ec; --good: #1a7f4b; --bad: #c0362c;
  --c1: #2463c9; --c2: #d9660a; --c3: #16895a; --c4: #8b4fc4; --c5: #b3841a; --c6: #c43d78;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #171b21; --line: #2a3039; --ink: #a9b2bf; --strong: #f0f3f7;
    --grid: #2a3039; --good: #4cc38a; --bad: #ff7b6e;
    --c1: #6ea8ff; --c2: #ff9d4d; --c3: #4cc38a; --c4: #c59bf5; --c5: #e3bd5b; --c6: #f285b0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1120px; margin: 0 auto; padding: 28px 16px 56px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; color: var(--strong);
  overflow-wrap: anywhere; }
h2 { margin: 36px 0 4px; font-size: 18px; color: var(--strong); }
h3 { margin: 0 0 6px; font-size: 14px; font-weight: 600; color: var(--strong); }
p { margin: 4px 0 12px; max-width: 76ch; }
.eyebrow { font-size: 12px; letter-spacing: .08em; text-transform: uppercase; }
.state { display: inline-block; margin: 8px 0 0; padding: 2px 10px; border-radius: 99px;
  border: 1px solid currentColor; font-size: 13px; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.tiles, .charts { display: grid; gap: 12px; }
.tiles { grid-template-columns: repeat(auto-fill, minmax(158px, 1fr)); margin-top: 20px; }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile.wide { grid-column: span 2; }
.tile .label { font-size: 12.5px; }
.tile .value { font-size: 23px; line-height: 1.3; font-weight: 650; color: var(--strong);
  font-variant-numeric: tabular-nums; }
.tile.bad .value { color: var(--bad); }
.tile .note { font-size: 12.5px; }
.card { padding: 14px; min-width: 0; }
.card svg { display: block; width: 100%; height: auto; }
.card p { margin: 6px 0 0; font-size: 13px; }
.missing { display: flex; flex-direction: column; justify-content: center; border-style: dashed; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 720px; }
table { width: 100%; min-width: 640px; border-collapse: collapse; font-size: 13.5px; }
th { text-align: left; font-weight: 600; color: var(--strong); }
th, td { padding: 7px 10px 7px 0; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td .text { max-height: 9.5em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  color: var(--strong); }
.badge { display: inline-block; min-width: 3.6em; padding: 0 7px; border-radius: 6px;
  text-align: center; color: var(--strong);
  background: color-mix(in srgb, var(--c3) calc(var(--share) * 55%), var(--page)); }
@media (max-width: 640px) {
  table { min-width: 0; } thead { display: none; }
  tr { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 10px 0;
    border-bottom: 1px solid var(--line); }
  tr:last-child { border-bottom: 0; }
  td, tr:last-child td { padding: 0; border: 0; }
  td::before { content: attr(data-label) " "; font-size: 12px; }
  td.text-cell { flex-basis: 100%; min-width: 0; }
}
details summary { cursor: pointer; font-weight: 600; color: var(--strong); }
pre { margin: 10px 0 0; overflow-x: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo,
  Consolas, monospace; }
footer { margin-top: 36px; font-size: 12.5px; }
@media print { body { background: #fff; } .tile, .card { break-inside: avoid; } }
</style>
</head>
<body>
<main>
<header>
  <div class="eyebrow">moerl run report</div>
  <h1>{{ name }}</h1>
  <div class="state {{ 'good' if good else 'bad' }}">{{ state }}</div>
  {% if subtitle %}<p>{{ subtitle }}</p>{% endif %}
</header>

<section class="tiles">
{% for tile in tiles %}
  <div class="tile{{ ' wide' if tile.wide }}{{ ' bad' if tile.bad }}">
    <div class="label">{{ tile.label }}</div>
    <div class="value">{{ tile.value }}</div>
    {% if tile.note %}<div class="note">{{ tile.note }}</div>{% endif %}
  </div>
{% endfor %}
</section>

{% for section in sections %}
<h2>{{ section.title }}</h2>
<p>{{ section.text }}</p>
<div class="charts">
{% for chart in section.charts %}
  {% if chart.svg %}
  <figure class="card" style="margin:0" role="img" aria-label="{{ chart.title }} over steps">
    <h3>{{ chart.title }}</h3>{{ chart.svg }}
  </figure>
  {% else %}
  <div class="card missing"><h3>{{ chart.title }}</h3>
    <p>Not drawn: this run has no value of {{ chart.names }} to draw.</p></div>
  {% endif %}
{% endfor %}
</div>
{% endfor %}

<h2>Timeline</h2>
<p>{{ timeline.text }}</p>
{% if timeline.svg %}<div class="card"><div class="scroll">{{ timeline.svg }}</div></div>
{% else %}<div class="card missing"><h3>Engine and trainer work</h3>
  <p>Not drawn: this run recorded no engine or trainer spans.</p></div>{% endif %}

<h2>Sample rollouts</h2>
{% if samples %}
<p>Reward and text as they were scored, and the mean reward of the group that the
rollout belongs to. Lag is the number of weight updates between the weights that wrote the text and
the weights that learned from it. Version names the weights that wrote it: restarts of the trainer,
a dot, batches trained.</p>
<div class="card"><div class="scroll"><table>
<thead><tr><th class="number">Step</th><th class="number">Reward</th>
<th class="number">Group mean</th><th class="number">Lag</th>
<th>Version</th><th>Prompt</th><th>Response</th></tr></thead>
<tbody>
{% for sample in samples %}
<tr><td class="number" data-label="Step">{{ sample.step }}</td>
<td class="number" data-label="Reward">
<span class="badge" style="--share: {{ sample.share }}">{{ sample.reward }}</span></td>
<td class="number" data-label="Group mean">{{ sample.group_mean }}</td>
<td class="number" data-label="Lag">{{ sample.lag }}</td>
<td data-label="Version">{{ sample.version }}</td>
<td class="text-cell" data-label="Prompt"><div class="text">{{ sample.prompt }}</div></td>
<td class="text-cell" data-label="Response"><div class="text">{{ sample.response }}</div></td></tr>
{% endfor %}
</tbody></table></div></div>
{% else %}<div class="card missing"><h3>No text kept</h3>
  <p>This run recorded no sample rollouts (observe.sample_rollouts sets how many).</p></div>
{% endif %}

<h2>Configuration</h2>
<div class="card"><details><summary>Resolved configuration</summary>
<pre>{{ config }}</pre></details></div>
<footer>Every name is defined in docs/metrics.md. This page stands alone: it loads nothing.</footer>
</main>
</body>
</html>
"""
STYLE = PAGE[PAGE.index("<style>") : PAGE.index("</style>") + len("</style>")]

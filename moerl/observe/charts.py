"""Charts of a page as inline SVG: lines over the rows of a table, bars, a heatmap, a timeline.

The colours stand out on a light and on a dark page; the page's style sheet colours the text. Text
stays text: searchable and small.  pyplot is not used: it is global state and picks a window backend
where one is installed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from moerl.observe.overlap import Interval

COLORS = ("#3f83e8", "#dd7320", "#259f6c", "#9c66d6", "#b58a22", "#d65088")  # series, in order
_LEVEL, _GRID = "#848c98", "#848c9838"
MAX_POINTS = 400  # per line; longer runs are averaged in blocks
MAX_CELLS = 64  # of one row of a heatmap
CHART_INCHES = (5.2, 2.5)
TIMELINE_INCHES = (10.4, 0.9)  # height without tracks
LEGEND_CHARACTERS = 13  # per inch, in the legend's font
_SPARSE = 0.5  # share of rows with a value; below it each value is marked
_STYLE: dict[Any, Any] = {  # matplotlib types the keys as one long list of literals
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.parse_math": False,  # names come from trace files, and $ is not mathematics there
    "axes.formatter.useoffset": False,  # "+1" above the axis would lie under the legend
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.bottom": False,  # labels without tick marks
    "ytick.left": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.borderaxespad": 0.1,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.4,
}

Scale = Literal["auto", "zero", "share", "below_one", "log"]  # of the vertical axis, see _scale
_Line = tuple[str, str, np.ndarray]  # column, colour, points of (x, value, half width of the band)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one column of the rows, by default over optimizer steps.

    Example: Chart("Idle", "share of time", {"async/engine_idle_frac": "engine"}, "share").

    bands: column of a line -> column of its half width; drawn as value +- band_scale * half width.
    smooth: draw a moving mean over a twentieth of the rows, and the raw values thin behind it.
    """

    title: str
    unit: str  # of the vertical axis
    lines: Mapping[str, str]  # column -> label
    scale: Scale = "auto"
    bands: Mapping[str, str] = field(default_factory=dict)
    band_scale: float = 1.0
    smooth: bool = False
    level: float | None = None  # draws a horizontal line there
    x: str = "step"  # column
    x_label: str = "optimizer step"
    marks: bool = False  # mark every value
    text: str = ""  # below the chart


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Cells in shades of one colour: `values[y][x]`, the darkest at `top` and above."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[int]  # numbers of the columns
    y: Sequence[int]  # numbers of the rows
    values: Sequence[Sequence[float]]
    bottom: float
    top: float


def only_value(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str:
    """In words, the values of a chart of which no line has two; empty with a line to draw."""
    points = {label: _points(chart, name, rows) for name, label in chart.lines.items()}
    if max(map(len, points.values())) != 1:
        return ""
    found = {label: at[0] for label, at in points.items() if at}
    words = ", ".join(f"{label}: {value:.4g}" for label, (_, value, _) in found.items())
    places = {x for x, _, _ in found.values()}
    return words + (f" ({chart.x_label} {places.pop():g})" if len(places) == 1 else "")


def has_values(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(_points(chart, name, rows) for name in chart.lines)


def draw_chart(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The chart as SVG; None without a value to draw (log scale: no positive value)."""
    lines = [
        (name, color, np.array(points, float))
        for name, color in zip(chart.lines, COLORS, strict=False)
        if (points := _points(chart, name, rows))
    ]
    if not lines:
        return None
    return _svg(chart.title, CHART_INCHES, partial(_draw_lines, chart, lines, len(rows)))


def draw_bars(title: str, y_label: str, bars: Mapping[str, float]) -> str:
    """One bar per name as SVG; negative values go below the axis."""

    def draw(axes: Axes) -> None:
        axes.bar(list(bars), list(bars.values()), color=COLORS, width=0.6)
        axes.axhline(0.0, color=_LEVEL, linewidth=0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.set_ylabel(y_label)
        axes.grid(False, axis="x")

    return _svg(title, CHART_INCHES, draw)


def draw_heatmap(chart: Heatmap) -> str | None:
    """The cells as SVG paths, wide rows averaged in blocks; None without a cell."""
    if not chart.values or not chart.x:
        return None
    bottom = min(chart.bottom, chart.top - 1e-6)  # equal values are all at the top: dark
    cells = np.array([_blocks(np.array(row, float), np.mean, MAX_CELLS) for row in chart.values])
    colors = LinearSegmentedColormap.from_list("", [COLORS[0] + "00", COLORS[0]])

    def draw(axes: Axes) -> None:
        axes.pcolormesh(cells, cmap=colors, vmin=bottom, vmax=chart.top)
        axes.invert_yaxis()
        for ticks, numbers, length in zip(
            (axes.set_yticks, axes.set_xticks), (chart.y, chart.x), cells.shape, strict=True
        ):
            # At most ten labels; a cell may stand for several numbers.
            places = sorted({round(at) for at in np.linspace(0, length - 1, min(length, 10))})
            labels = [str(numbers[place * len(numbers) // length]) for place in places]
            ticks([place + 0.5 for place in places], labels)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        axes.grid(False)

    return _svg(chart.title, (TIMELINE_INCHES[0], 1.2 + 0.16 * min(len(cells), 24)), draw)


def draw_timeline(
    bars: Mapping[tuple[str, str], Sequence[Interval]], window_s: float
) -> str | None:
    """Work over time as SVG; None without any.

    bars: (track, kind of work) -> intervals in seconds from the start of the window.
    """
    tracks = sorted({track for track, _ in bars}, key=_track_order)
    if not tracks:
        return None
    kinds = sorted({kind for _, kind in bars})
    colors = {kind: COLORS[index % len(COLORS)] for index, kind in enumerate(kinds)}

    def draw(axes: Axes) -> None:
        for (track, kind), intervals in bars.items():
            spans = [(start, end - start) for start, end in intervals]
            height = (tracks.index(track) - 0.36, 0.72)
            axes.broken_barh(spans, height, facecolors=colors[kind], linewidth=0)
        for kind, color in colors.items():
            axes.barh(0, 0, color=color, label=kind)
        axes.set_yticks(range(len(tracks)), tracks)
        axes.set(ylim=(len(tracks) - 0.4, -0.6), xlim=(0.0, window_s))
        axes.set_xlabel("seconds from the start of this window")
        axes.grid(False, axis="y")
        _legend(axes)

    width, base = TIMELINE_INCHES
    return _svg("timeline", (width, base + 0.42 * len(tracks)), draw)


def _points(
    chart: Chart, name: str, rows: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float, float]]:
    return [
        (row[chart.x], row[name], row.get(chart.bands.get(name, ""), 0.0))
        for row in rows
        if name in row and chart.x in row and (chart.scale != "log" or row[name] > 0)
    ]


def _draw_lines(chart: Chart, lines: Sequence[_Line], num_rows: int, axes: Axes) -> None:
    for name, color, points in lines:
        pick = np.max if name.endswith("_max") else np.mean
        x, values, half = (_blocks(column, pick) for column in points.T)
        if chart.smooth and len(values) >= 20:
            axes.plot(x, values, color=color, linewidth=0.8, alpha=0.35)
            values = _moving_mean(values, max(3, len(values) // 20))
        if half.any():
            half = half * chart.band_scale
            # on decades as far below as above: value - deviation may be 0 or less
            low = values**2 / (values + half) if chart.scale == "log" else values - half
            axes.fill_between(x, low, values + half, color=color, alpha=0.16, linewidth=0)
        marks = chart.marks or len(points) < _SPARSE * num_rows or len(x) == 1
        axes.plot(x, values, "o-" if marks else "-", color=color, label=chart.lines[name])
    if chart.level is not None:
        axes.axhline(chart.level, color=_LEVEL, linewidth=0.8, linestyle=(0, (2, 2)))
    _scale(axes, chart.scale)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set(xlabel=chart.x_label, ylabel=chart.unit)
    if len(lines) > 1 or lines[0][0] in chart.bands:
        _legend(axes)


def _scale(axes: Axes, scale: Scale) -> None:
    """Set the vertical axis: from 0, 0 to 1, up to 1, or logarithmic."""
    if scale == "zero":
        axes.set_ylim(bottom=0.0)
    elif scale == "share":
        axes.set_ylim(-0.03, 1.03)
    elif scale == "below_one":
        axes.set_ylim(top=1.0 + 0.03 * (1.0 - axes.get_ylim()[0]))
    elif scale == "log":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        # ticks at powers of ten, or at 1-2-5 where fewer than two powers are in view
        steps = (1.0,) if high / low > 100.0 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=8))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _tick(value: float, position: int | None = None) -> str:
    """0.01, but 1e-5; plain text, because mathematics is off."""
    return f"{value:g}".replace("e-0", "e-")


def _blocks(
    values: np.ndarray, pick: Callable[[np.ndarray], Any], limit: int = MAX_POINTS
) -> np.ndarray:
    """At most `limit` values, one per block of neighbours."""
    if len(values) <= limit:
        return values
    return np.array([pick(block) for block in np.array_split(values, limit)])


def _moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` values, over fewer at both ends."""
    sums, counts = (np.convolve(v, np.ones(width), "same") for v in (values, np.ones(len(values))))
    return sums / counts


def _track_order(track: str) -> tuple[bool, bool, bool, str]:
    """Sort key: engines, trainers, reference models, then others; engine2 before engine10."""
    engine, trainer, ref_models = map(track.startswith, ("engine", "trainer", "ref_models"))
    padded = re.sub(r"\d+", lambda digits: digits[0].zfill(9), track)
    return not engine, not trainer, not ref_models, padded


def _legend(axes: Axes) -> None:
    """Put the legend above the axes, in as many columns as the longest label allows."""
    widest = max(len(label) for label in axes.get_legend_handles_labels()[1])
    inches = float(axes.figure.get_figwidth())  # type: ignore[union-attr]
    columns = max(1, int(inches * LEGEND_CHARACTERS / (widest + 5)))  # 5: handle and gap
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns)


def _svg(title: str, inches: tuple[float, float], draw: Callable[[Axes], None]) -> str:
    """The SVG element of a drawing; the title keeps the ids of clip paths of two charts apart."""
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure.add_subplot())
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    svg = out.getvalue()
    return svg[svg.index("<svg") :]

"""Charts of a page as inline SVG in the page's light or dark colours.

matplotlib draws with placeholder colours, and each placeholder is replaced by a CSS variable of the
page.  Text stays text: searchable and small.  pyplot is not used: it is global state and picks a
window backend where one is installed.  It has no JavaScript, so it opens without a network.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from moerl.observe.overlap import Interval

INK, GRID = "#0a0001", "#0a0002"
COLORS = ("#0a0011", "#0a0012", "#0a0013", "#0a0014", "#0a0015", "#0a0016")  # series, in order
_CSS = {INK: "var(--ink)", GRID: "var(--grid)"} | {
    color: f"var(--c{index})" for index, color in enumerate(COLORS, start=1)
}
MAX_POINTS = 400  # per line; longer runs are averaged in blocks
MAX_CELLS = 64  # of one row of a heatmap
CHART_INCHES = (5.2, 2.5)
TIMELINE_INCHES = (10.4, 0.9)  # height without tracks
_SPARSE = 0.5  # share of rows with a value; below it each value is marked
LEGEND_CHARACTERS = 13  # per inch, in the legend's font


Scale = Literal["auto", "zero", "share", "below_one", "log"]  # of the vertical axis, see _scale


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one column of the rows, by default over optimizer steps.

    Example: Chart("Idle", "share of time", {"async/engine_idle_frac": "engine"}, scale="share").

    bands: column of a line -> column of its half width; drawn as value +- band_scale * half width.
    smooth: draw a moving mean over a twentieth of the rows, and the raw values thin behind it.
    """

    title: str
    unit: str  # of the vertical axis
    lines: Mapping[str, str]  # column -> label
    bands: Mapping[str, str] = field(default_factory=dict)
    band_scale: float = 1.0
    smooth: bool = False
    scale: Scale = "auto"
    level: float | None = None  # draws a horizontal line there
    x: str = "step"  # column
    x_label: str = "optimizer step"
    marks: bool = False  # mark every value
    text: str = ""  # below the chart


def draw_chart(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The chart as SVG; None without a value to draw (log scale: no positive value)."""
    with _figure(CHART_INCHES) as (figure, axes):
        drawn = [
            name
            for name, color in zip(chart.lines, COLORS, strict=False)
            if _draw_line(axes, chart, name, color, rows)
        ]
        if not drawn:
            return None
        if chart.level is not None:
            axes.axhline(chart.level, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.6)
        _scale(axes, chart.scale)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.unit)
        if len(drawn) > 1 or drawn[0] in chart.bands:
            _legend(axes)
        return _svg(figure, chart.title)


def draw_bars(title: str, y_label: str, bars: Mapping[str, float]) -> str | None:
    """One bar per name as SVG; negative values go below the axis; None without a bar."""
    if not bars:
        return None
    with _figure(CHART_INCHES) as (figure, axes):
        colors = [COLORS[index % len(COLORS)] for index in range(len(bars))]
        axes.bar(list(bars), list(bars.values()), color=colors, width=0.6)
        axes.axhline(0.0, color=INK, linewidth=0.8)
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.set_ylabel(y_label)
        axes.grid(False, axis="x")
        return _svg(figure, title)


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


def draw_heatmap(chart: Heatmap) -> str | None:
    """The cells as SVG, wide rows averaged in blocks; None without a cell.

    Vector cells: the page loads no images, not even its own.
    """
    if not chart.values or not chart.x:
        return None
    cells = np.array([_blocks(np.array(row, float), np.mean, MAX_CELLS) for row in chart.values])
    shades = np.clip((cells - chart.bottom) / (chart.top - chart.bottom or 1.0), 0.0, 1.0)
    width, height = TIMELINE_INCHES[0], 1.2 + 0.16 * min(len(cells), 24)
    with _figure((width, height)) as (figure, axes):
        for at, row in enumerate(shades):
            for place, shade in enumerate(row):
                box = (place - 0.5, at - 0.5)
                axes.add_patch(Rectangle(box, 1, 1, color=COLORS[0], alpha=shade, linewidth=0))
        axes.set_xlim(-0.5, len(shades[0]) - 0.5)
        axes.set_ylim(len(shades) - 0.5, -0.5)
        _number(axes.set_xticks, chart.x, len(shades[0]))
        _number(axes.set_yticks, chart.y, len(shades))
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.grid(False)
        return _svg(figure, chart.title)


def _number(ticks: Callable[..., object], numbers: Sequence[int], cells: int) -> None:
    """Label at most ten cells; a cell may stand for several numbers."""
    places = sorted({round(at) for at in np.linspace(0, cells - 1, min(cells, 10))})
    ticks(places, [str(numbers[place * len(numbers) // cells]) for place in places])


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
    width, base = TIMELINE_INCHES
    with _figure((width, base + 0.42 * len(tracks))) as (figure, axes):
        for (track, kind), intervals in bars.items():
            spans = [(start, end - start) for start, end in intervals]
            height = (tracks.index(track) - 0.36, 0.72)
            axes.broken_barh(spans, height, facecolors=colors[kind], linewidth=0)
        for kind, color in colors.items():
            axes.barh(0, 0, color=color, label=kind)
        axes.set_yticks(range(len(tracks)), tracks)
        axes.set_ylim(len(tracks) - 0.4, -0.6)
        axes.set_xlim(0.0, window_s)
        axes.set_xlabel("seconds from the start of this window")
        axes.grid(False, axis="y")
        _legend(axes)
        return _svg(figure, "timeline")


def _draw_line(
    axes: Axes, chart: Chart, name: str, color: str, rows: Sequence[Mapping[str, Any]]
) -> bool:
    """Draw one line; False without a value."""
    log, band = chart.scale == "log", chart.bands.get(name, "")
    points = [
        (row[chart.x], row[name], row.get(band, 0.0))
        for row in rows
        if name in row and (not log or row[name] > 0)
    ]
    if not points:
        return False
    pick = np.max if name.endswith("_max") else np.mean
    x, values, bands = (_blocks(column, pick) for column in np.array(points, float).T)
    shown = values
    if chart.smooth and len(values) >= 20:
        axes.plot(x, values, color=color, linewidth=0.8, alpha=0.35)
        shown = _moving_mean(values, max(3, len(values) // 20))
    if band and any(band in row for row in rows):
        half = bands * chart.band_scale
        # on decades as far below as above: value - deviation may be 0 or less
        low = shown**2 / (shown + half) if log else shown - half
        axes.fill_between(x, low, shown + half, color=color, alpha=0.16, linewidth=0)
    marks = chart.marks or len(points) < _SPARSE * len(rows) or len(x) == 1
    marker, label = "o" if marks else "", chart.lines[name]
    axes.plot(x, shown, color=color, linewidth=1.7, label=label, marker=marker, ms=4)
    return True


def _scale(axes: Axes, scale: Scale) -> None:
    """Set the vertical axis: from 0, 0 to 1, up to 1, or logarithmic."""
    if scale == "zero":
        axes.set_ylim(bottom=0.0)
    elif scale == "share":
        axes.set_ylim(-0.03, 1.03)
    elif scale == "below_one":
        axes.set_ylim(top=1.0 + 0.03 * (1.0 - axes.get_ylim()[0]))
    elif scale == "log":
        _log_axis(axes)


def _log_axis(axes: Axes) -> None:
    """Ticks at powers of ten, or at 1-2-5 where fewer than two powers are in view."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
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
    window = np.ones(width)
    counts = np.convolve(np.ones(len(values)), window, mode="same")
    return np.convolve(values, window, mode="same") / counts


def _track_order(track: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort key: engines, trainers, reference models, then others; engine2 before engine10."""
    first = ("engine", "trainer", "ref_models")
    group = next((i for i, head in enumerate(first) if track.startswith(head)), len(first))
    parts = re.findall(r"\d+|\D+", track)
    return group, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _legend(axes: Axes) -> None:
    """Put the legend above the axes, in as many columns as the longest label allows."""
    widest = max(len(label) for label in axes.get_legend_handles_labels()[1])
    inches = float(axes.figure.get_figwidth())  # type: ignore[union-attr]
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=max(1, int(inches * LEGEND_CHARACTERS / (widest + 5))),  # 5: handle and gap
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.2,
        columnspacing=1.4,
        fontsize=8.5,
    )


@contextmanager
def _figure(inches: tuple[float, float]) -> Iterator[tuple[Figure, Axes]]:
    style: Any = {  # matplotlib types the keys as one long list of literals
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9.0,
        "axes.formatter.useoffset": False,  # "+1" above the axis would lie under the legend
        "text.parse_math": False,  # names come from trace files, and $ is not mathematics there
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0.0,
        "ytick.major.size": 0.0,
        "xtick.minor.size": 0.0,
        "ytick.minor.size": 0.0,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def _svg(figure: Figure, title: str) -> str:
    """SVG element without a fixed size, in the colours of the page."""
    buffer = io.StringIO()
    # The salt keeps the ids of clip paths of two charts apart.
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for color, variable in _CSS.items():
        svg = svg.replace(color, variable)
    return re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", svg)

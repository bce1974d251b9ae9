"""Progress of a run on the terminal: a live panel, one line per step, or nothing.

Only this file writes to standard output; process logs go to files.  On a terminal `rich` redraws
one panel.  Elsewhere (a pipe, a log) each step is one line, so `grep` works.

Panel and lines show the newest value of each metric (docs/metrics.md).  Text from outside (events,
waits) is shown without control characters and without markup.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moerl.core.errors import ConfigError
from moerl.runtime.beside import Beside

MODES = ("auto", "panel", "lines", "quiet")
STILL_WAITING_S = 5.0  # seconds between two "still waiting" lines
PANEL_MAX_WIDTH = 100  # columns; wider only moves the numbers apart
LABEL_WIDTH = 10
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # sparkline, low to high

# Metrics in braces with their format; a metric without a value is shown as a dash.
STEP_LINE = (
    "reward {reward/mean:.3f}",
    "k3 {mismatch/k3:.1e}",
    "max|dlogp| {mismatch/abs_dlogp_max:.1e}",
    "lag {async/lag_mean:.1f}/{async/lag_max:.0f}",
    "tok/s engine {perf/rollout_tokens_per_s:,.0f} trainer {perf/train_tokens_per_s:,.0f}",
    "buffer {async/buffer_depth:.0f}",
    "idle engine {async/engine_idle_frac:.0%} trainer {async/trainer_wait_frac:.0%}",
    "cover {routing/replay_cover_frac:.4g}/{keep/cover_frac:.4g}",
)
HELD_OUT = "{eval/reward_mean:.3f} at version {eval/step:.0f}"
LAST_LINE = f"held out {HELD_OUT}"
PANEL_ROWS = {
    "tokens/s": "engine {perf/rollout_tokens_per_s:,.0f}   trainer {perf/train_tokens_per_s:,.0f}",
    "idle": "engine {async/engine_idle_frac:.0%}   trainer {async/trainer_wait_frac:.0%}",
    "policy": "version {version}   lag mean {async/lag_mean:.1f} max {async/lag_max:.0f}",
    "buffer": (
        "{async/buffer_depth:.0f} groups ready   {async/in_flight:.0f} rollouts in flight   "
        "oldest taken {async/buffer_age_max_s:.1f} s"
    ),
    "mismatch": "k3 {mismatch/k3:.1e}   max|dlogp| {mismatch/abs_dlogp_max:.1e} nats",
}
COVERAGE = {"routing": "routing/replay_cover_frac", "mask": "keep/cover_frac"}


class Console:
    """The only writer of standard output during a run.  Methods may be called from any thread.

    Example: wait("engine 0"), ready("engine 0"), then status(...) about once a second, step(row)
    after every optimizer step, event(text) when something happens, close(summary) once.
    """

    def __init__(self, mode: str, total_steps: int, out: IO[str] | None = None) -> None:
        """Show a run of `total_steps` steps.

        mode: auto (panel on a terminal, else lines), panel, lines or quiet.  Raises ConfigError for
        any other mode.
        """
        if mode not in MODES:
            raise ConfigError("run.console", mode, f"allowed are {', '.join(MODES)}")
        self._out = out if out is not None else sys.stdout
        if isinstance(self._out, io.TextIOWrapper):
            self._out.reconfigure(errors="replace")  # a C locale must not end the run
        terminal = RichConsole(file=self._out, force_terminal=True if mode == "panel" else None)
        if mode == "auto":
            mode = "panel" if terminal.is_terminal and not terminal.is_dumb_terminal else "lines"
        self._mode = mode
        self._beside = Beside("standard output")  # a pipe that closed, a full disk
        self._status = _Status(total_steps)
        self._lock = threading.RLock()
        self._last_line_s = time.monotonic()
        self._live: Live | None = None
        if mode == "panel":
            self._live = Live(
                get_renderable=lambda: self._panel(terminal),
                console=terminal,
                refresh_per_second=4,
                vertical_overflow="crop",
            )
            self._live.start()

    def wait(self, name: str) -> None:
        """Show that the run waits for `name`, with the seconds, until `ready(name)`."""
        with self._lock:
            self._status.waits[_plain(name)] = time.monotonic()
            self._line(f"waiting for {_plain(name)}")

    def ready(self, name: str) -> None:
        with self._lock:
            start = self._status.waits.pop(_plain(name), None)
            if start is not None:
                self.event(f"{name} ready after {time.monotonic() - start:.1f} s")

    def give_up(self, name: str) -> None:
        """Stop waiting for `name` without an event."""
        with self._lock:
            self._status.waits.pop(_plain(name), None)

    def event(self, text: str) -> None:
        """Show a publish, a checkpoint, a refusal or a restart."""
        with self._lock:
            self._status.event = _plain(text)
            self._line(self._status.event)

    def status(self, values: Mapping[str, Any]) -> None:
        """Update metrics (docs/metrics.md) between two steps, about once a second."""
        with self._lock:
            self._status.latest.update(values)
            if self._status.waits and time.monotonic() - self._last_line_s >= STILL_WAITING_S:
                self._line(f"still waiting for {self._status.waiting()}")

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one complete row of metrics.jsonl."""
        with self._lock:
            self._status.add_step(row)
            is_step = row["step"] < self._status.total_steps  # the last evaluation has a row
            self._line(step_line(self._status) if is_step else self._status.fill(LAST_LINE))
            if raised := alerts(row):
                at = self._status.num_done
                self.event(f"ALERT at step {at}: {', '.join(raised)}; see docs/metrics.md")

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the steps before a resume and add them to the sparkline; print nothing."""
        with self._lock:
            for row in rows:
                self._status.add_step(row)

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        """Show the final state, then one `name  value` line per entry; nothing in quiet mode."""
        with self._lock:
            self._status.waits.clear()
        if self._live is not None:
            self._live.stop()  # outside the lock: it joins the drawing thread, which takes the lock
        if self._mode != "quiet":
            for line in _summary_lines(summary or {}):
                self._print(line)

    def _panel(self, terminal: RichConsole) -> Panel:
        """The panel at the terminal's current width; called by rich's drawing thread."""
        with self._lock:
            return panel(self._status, terminal)

    def _line(self, text: str) -> None:
        if self._mode == "lines":
            self._print(text)

    def _print(self, line: str) -> None:
        self._beside.call(lambda: print(line, file=self._out, flush=True))
        self._last_line_s = time.monotonic()


def alerts(row: Mapping[str, Any]) -> list[str]:
    """Names of the alerts that a row raises."""
    return sorted(name for name, value in row.items() if name.startswith("alert/") and value)


# --- state ---------------------------------------------------------------------------------------
class _Dash:
    """A missing value: a dash in every format."""

    def __format__(self, spec: str) -> str:
        return "-"


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> _Dash:
        return _Dash()


@dataclass
class _Status:
    """State that panel and lines show."""

    total_steps: int
    latest: _Values = field(default_factory=_Values)  # metric name -> newest value
    rewards: list[float] = field(default_factory=list)  # one per step that has a reward
    waits: dict[str, float] = field(default_factory=dict)  # name -> monotonic start
    event: str = ""
    num_done: int = 0  # complete steps, including those before a resume
    start: float = field(default_factory=time.monotonic)
    step_ends: deque[float] = field(default_factory=lambda: deque(maxlen=21))  # unix time

    def add_step(self, row: Mapping[str, Any]) -> None:
        self.latest.update(row)
        self.num_done = min(int(row["step"]) + 1, self.total_steps)
        self.step_ends.append(float(row.get("time_s", time.time())))
        if "reward/mean" in row:
            self.rewards.append(float(row["reward/mean"]))

    def fill(self, text: str) -> str:
        """`text` with the newest value of every metric in braces."""
        return text.format_map(self.latest)

    @property
    def eta(self) -> str:
        """min:s, or empty before the second step.

        From the median of the last 20 steps, so the pause before a resume does not count.
        """
        if len(self.step_ends) < 2:
            return ""
        per_step = median(end - start for start, end in pairwise(self.step_ends))
        return clock(per_step * max(0, self.total_steps - self.num_done))

    @property
    def refused(self) -> dict[str, float]:
        """Refused records by reason, without zeros; the metrics count since the start."""
        head = "refused/"
        named = {name.removeprefix(head): v for name, v in self.latest.items() if head in name}
        return {reason: float(num) for reason, num in sorted(named.items()) if num}

    def waiting(self) -> str:
        now = time.monotonic()
        return ", ".join(f"{name} ({now - at:.0f} s)" for name, at in self.waits.items())

    def refusals(self) -> str:
        parts = ", ".join(f"{reason} {num:.0f}" for reason, num in self.refused.items())
        return f"{sum(self.refused.values()):.0f}" + (f" ({parts})" if parts else "")


# --- text ----------------------------------------------------------------------------------------
def step_line(status: _Status) -> str:
    """The newest step in one line."""
    parts = [f"step {status.num_done}/{status.total_steps}", *map(status.fill, STEP_LINE)]
    if status.refused:
        parts.append(f"refused {status.refusals()}")
    if status.eta:
        parts.append(f"eta {status.eta}")
    return "  ".join(parts)


def panel(status: _Status, terminal: RichConsole) -> Panel:
    """The panel as one table of (label, value) rows.

    Where the terminal cannot show Unicode, rich draws frame and bar in ASCII, and the sparkline is
    omitted.
    """
    width = min(terminal.width, PANEL_MAX_WIDTH)
    room = max(8, width - LABEL_WIDTH - 6)  # columns for the values; 6: frame and padding
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("progress", _progress(status, room))
    table.add_row("reward", _reward(status, 0 if terminal.options.ascii_only else room))
    if "eval/reward_mean" in status.latest:
        table.add_row("held out", Text(status.fill(HELD_OUT)))
    for label, text in PANEL_ROWS.items():
        table.add_row(label, Text(status.fill(text)))
    table.add_row("replay", _coverage(status))
    table.add_row("refused", Text(status.refusals(), "red" if status.refused else ""))
    if status.waits:
        table.add_row("waiting", Text(status.waiting(), "yellow"))
    table.add_row("last", Text(status.event[: 2 * room] or "-"))
    return Panel(table, title=Text(_title(status), "bold"), title_align="left", width=width)


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as at most `width` characters; surplus values are averaged with neighbours."""
    if not values or width < 1:
        return ""
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((v - low) / span * top) if span > 0 else 0] for v in means)


def clock(seconds: float) -> str:
    """1:05 or 2:03:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _title(status: _Status) -> str:
    elapsed = clock(time.monotonic() - status.start)
    state = f"step {status.num_done}/{status.total_steps}" if status.num_done else "starting"
    return f"moerl | {state} | {elapsed}"


def _progress(status: _Status, room: int) -> Table:
    share = min(1.0, status.num_done / status.total_steps) if status.total_steps else 0.0
    text = f"{share:4.0%}" + (f"  eta {status.eta}" if status.eta else "")
    width = max(1, min(40, room - len(text) - 1))
    bar = ProgressBar(total=1.0, completed=share, width=width, complete_style="green")
    row = Table.grid(padding=(0, 1))
    row.add_row(bar, Text(text))
    return row


def _reward(status: _Status, room: int) -> Text:
    if not status.rewards:
        return Text("-")
    head = f"{status.rewards[-1]:.3f}  "
    line = sparkline(status.rewards, min(60, room - len(head)))
    return Text.assemble((head, "bold"), (line, "green"))


def _coverage(status: _Status) -> Text:
    """Shares of replayed tokens as percentages; red unless 100."""
    text = Text()
    for label, name in COVERAGE.items():
        share = status.latest.get(name)
        percent = "-" if share is None else f"{share * 100:.6g}"
        text.append(f"{label} {percent}%   ", "" if share in (None, 1.0) else "bold red")
    return text


def _summary_lines(summary: Mapping[str, object]) -> list[str]:
    width = max((len(_plain(str(name))) for name in summary), default=0)
    return [f"{_plain(str(k)):<{width}}  {_plain(str(v))}" for k, v in summary.items()]


def _plain(text: str) -> str:
    """One line without control characters, which could move the cursor."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

"""What a person sees while a run goes on: a live panel, or one line per step, or nothing.

Standard output belongs to this file alone; process logs go to files.  On a terminal `rich` redraws
one panel; elsewhere (a pipe, a log) a step is one line, so `grep` works on it.  A progress bar
library was rejected: most of what matters in asynchronous RL are two sides and the gap between
them, which needs a small table.

Both views draw the same `_Board`, which holds the latest value of each name of docs/metrics.md.
Text from outside (events, waits) is shown without control characters and without markup.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import IO, Any, Protocol

from rich import box
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moerl.errors import ConfigError

MODES = ("auto", "panel", "lines", "quiet")
STILL_WAITING_S = 5.0  # lines mode repeats what a start-up waits for this often
PANEL_MAX_WIDTH = 100  # columns; wider only moves the numbers apart
LABEL_WIDTH = 10
BLOCKS, ASCII_BLOCKS = (
    "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588",
    "_.-=+*%#",
)  # sparkline, low to high
BAR, ASCII_BAR = ("\u2501", "\u2500"), ("#", "-")


class Console:
    """The only writer of standard output during a run.  Methods may be called from any thread.

    Example: wait("engine 0"), ready("engine 0"), then status(...) about once a second, step(row)
    after every optimizer step, event(text) when something happens, close(summary) once.
    """

    def __init__(self, mode: str, total_steps: int, out: IO[str] | None = None) -> None:
        """mode: auto (panel on a terminal, else lines), panel, lines or quiet.

        Raises ConfigError for any other mode.
        """
        if mode not in MODES:
            raise ConfigError("run.console", mode, f"allowed are {', '.join(MODES)}")
        out = out if out is not None else sys.stdout
        terminal = RichConsole(file=out, force_terminal=True if mode == "panel" else None)
        if mode == "auto":
            mode = "panel" if terminal.is_terminal and not terminal.is_dumb_terminal else "lines"
        self._board = _Board(total_steps)
        self._lock = threading.RLock()
        self._view: _View = _QuietView()
        if mode == "panel":
            self._view = _PanelView(terminal, self._board, self._lock)
        elif mode == "lines":
            self._view = _LinesView(out, self._board)

    def wait(self, what: str) -> None:
        """From now on the run waits for `what`; its seconds are shown until `ready(what)`."""
        with self._lock:
            self._board.waits[_plain(what)] = time.monotonic()
            self._view.waiting(_plain(what))

    def ready(self, what: str) -> None:
        with self._lock:
            start = self._board.waits.pop(_plain(what), None)
            if start is not None:
                self.event(f"{what} ready after {time.monotonic() - start:.1f} s")

    def give_up(self, what: str) -> None:
        """It is not waited for any more."""
        with self._lock:
            self._board.waits.pop(_plain(what), None)

    def event(self, text: str) -> None:
        """Something worth a line: a publish, a checkpoint, a refusal, a restart."""
        with self._lock:
            self._board.event = _plain(text)
            self._view.event(self._board.event)

    def status(self, values: Mapping[str, Any]) -> None:
        """Newer values between steps, under the names of docs/metrics.md; about once a second."""
        with self._lock:
            self._board.latest.update(values)
            self._view.tick()

    def step(self, row: Mapping[str, Any]) -> None:
        """One complete row of metrics.jsonl."""
        with self._lock:
            self._board.add_step(row)
            self._view.step()
            if raised := alerts(row):
                self.event(f"ALERT at step {row['step']}: {', '.join(raised)}; see docs/metrics.md")

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of the steps before a resume: they count and are drawn, but are not said again."""
        with self._lock:
            for row in rows:
                self._board.add_step(row)

    def close(self, summary: Mapping[str, object] | None = None) -> None:
        """Show the final state, then one `name  value` line per entry; nothing in quiet mode."""
        with self._lock:
            self._board.waits.clear()
        # Outside the lock: stopping the panel joins its drawing thread, which takes the lock.
        self._view.close(_summary_lines(summary or {}))


def alerts(row: Mapping[str, Any]) -> list[str]:
    """Names of the alerts that a row raises."""
    return sorted(name for name, value in row.items() if name.startswith("alert/") and value)


# --- what is known -------------------------------------------------------------------------------
@dataclass
class _Board:
    total_steps: int
    latest: dict[str, Any] = field(default_factory=dict)  # metric name -> newest value
    rewards: list[float] = field(default_factory=list)  # one per step that has a reward
    waits: dict[str, float] = field(default_factory=dict)  # what -> monotonic start
    event: str = ""
    num_done: int = 0  # steps complete, those before a resume included
    start: float = field(default_factory=time.monotonic)
    step_ends: deque[float] = field(default_factory=lambda: deque(maxlen=21))  # unix time

    def add_step(self, row: Mapping[str, Any]) -> None:
        self.latest.update(row)
        self.num_done = min(int(row["step"]) + 1, self.total_steps)
        self.step_ends.append(float(row.get("time_s", time.time())))
        if "reward/mean" in row:
            self.rewards.append(float(row["reward/mean"]))

    @property
    def eta_s(self) -> float | None:
        """From the median of the last 20 steps, so a resume's gap does not count; None before."""
        if len(self.step_ends) < 2:
            return None
        per_step = median(end - start for start, end in pairwise(self.step_ends))
        return per_step * max(0, self.total_steps - self.num_done)

    @property
    def refused(self) -> dict[str, float]:
        """Records refused so far by reason, without zeros; the rows count since the start."""
        head = "refused/"
        named = {name.removeprefix(head): v for name, v in self.latest.items() if head in name}
        return {reason: float(num) for reason, num in sorted(named.items()) if num}

    def show(self, name: str, form: str, scale: float = 1.0) -> str:
        """Newest value of `name`, or a dash when it was never given."""
        value = self.latest.get(name)
        return "-" if value is None else format(float(value) * scale, form)

    def waiting(self) -> str:
        now = time.monotonic()
        return ", ".join(f"{what} ({now - at:.0f} s)" for what, at in self.waits.items())

    def refusals(self) -> str:
        parts = ", ".join(f"{reason} {num:.0f}" for reason, num in self.refused.items())
        return f"{sum(self.refused.values()):.0f}" + (f" ({parts})" if parts else "")


# --- views ---------------------------------------------------------------------------------------
class _View(Protocol):
    def waiting(self, what: str) -> None: ...

    def event(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def step(self) -> None: ...

    def close(self, lines: Sequence[str]) -> None: ...


class _QuietView:
    def waiting(self, what: str) -> None: ...

    def event(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def step(self) -> None: ...

    def close(self, lines: Sequence[str]) -> None: ...


class _LinesView:
    """One line per step, event and wait; never redraws."""

    def __init__(self, out: IO[str], board: _Board) -> None:
        self._out, self._board, self._last_line = out, board, time.monotonic()

    def waiting(self, what: str) -> None:
        self._print(f"waiting for {what}")

    def event(self, text: str) -> None:
        self._print(text)

    def tick(self) -> None:
        if self._board.waits and time.monotonic() - self._last_line >= STILL_WAITING_S:
            self._print(f"still waiting for {self._board.waiting()}")

    def step(self) -> None:
        self._print(step_line(self._board))

    def close(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._print(line)

    def _print(self, line: str) -> None:
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._out.write(_encodable(line, encoding) + "\n")
        self._out.flush()
        self._last_line = time.monotonic()


class _PanelView:
    """A panel that is redrawn in place four times a second by rich's own thread."""

    def __init__(self, terminal: RichConsole, board: _Board, lock: threading.RLock) -> None:
        self._terminal = terminal
        self._live = Live(
            _BoardPanel(board, lock),
            console=terminal,
            refresh_per_second=4,
            vertical_overflow="crop",
        )
        self._live.start()

    def waiting(self, what: str) -> None: ...

    def event(self, text: str) -> None: ...

    def tick(self) -> None: ...

    def step(self) -> None: ...

    def close(self, lines: Sequence[str]) -> None:
        self._live.stop()
        for line in lines:
            self._terminal.out(_encodable(line, self._terminal.encoding), highlight=False)


@dataclass
class _BoardPanel:
    """Draws the board at the terminal's present width."""

    board: _Board
    lock: threading.RLock

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, PANEL_MAX_WIDTH)
        ascii_only = options.ascii_only
        with self.lock:
            rows = panel_rows(self.board, max(8, width - LABEL_WIDTH - 6), ascii_only)
            title = _title(self.board)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in rows:
            if ascii_only:
                text.plain = _encodable(text.plain, "ascii")
            grid.add_row(label, text)
        yield Panel(
            grid,
            title=Text(title, style="bold"),
            title_align="left",
            width=width,
            box=box.ASCII if ascii_only else box.ROUNDED,
        )


# --- text ----------------------------------------------------------------------------------------
def step_line(board: _Board) -> str:
    """The newest step in one line."""
    show = board.show
    parts = [
        f"step {board.num_done}/{board.total_steps}",
        f"reward {show('reward/mean', '.3f')}",
        f"k3 {show('mismatch/k3', '.1e')}",
        f"max|dlogp| {show('mismatch/abs_dlogp_max', '.1e')}",
        f"lag {show('async/lag_mean', '.1f')}/{show('async/lag_max', '.0f')}",
        f"tok/s engine {show('perf/rollout_tokens_per_s', ',.0f')}"
        f" trainer {show('perf/train_tokens_per_s', ',.0f')}",
        f"buffer {show('async/buffer_depth', '.0f')}",
        f"idle engine {show('async/engine_idle_frac', '.0f', 100)}%"
        f" trainer {show('async/trainer_wait_frac', '.0f', 100)}%",
        f"cover {show('routing/replay_cover_frac', '.4g')}/{show('keep/cover_frac', '.4g')}",
    ]
    if board.refused:
        parts.append(f"refused {board.refusals()}")
    if board.eta_s is not None:
        parts.append(f"eta {clock(board.eta_s)}")
    return "  ".join(parts)


def panel_rows(board: _Board, width: int, ascii_only: bool) -> list[tuple[str, Text]]:
    """(label, text) of each line of the panel; `width` columns are free for the text."""
    show = board.show
    rows = [
        ("progress", Text(_progress(board, width, ascii_only))),
        ("reward", _reward(board, width, ascii_only)),
        *_held_out(board),
        (
            "tokens/s",
            Text(
                f"engine {show('perf/rollout_tokens_per_s', ',.0f')}   "
                f"trainer {show('perf/train_tokens_per_s', ',.0f')}"
            ),
        ),
        (
            "idle",
            Text(
                f"engine {show('async/engine_idle_frac', '.0f', 100)}%   "
                f"trainer {show('async/trainer_wait_frac', '.0f', 100)}%"
            ),
        ),
        (
            "policy",
            Text(
                f"version {board.latest.get('version', '-')}   "
                f"lag mean {show('async/lag_mean', '.1f')} max {show('async/lag_max', '.0f')}"
            ),
        ),
        (
            "buffer",
            Text(
                f"{show('async/buffer_depth', '.0f')} groups ready   "
                f"{show('async/in_flight', '.0f')} rollouts in flight   "
                f"oldest taken {show('async/buffer_age_max_s', '.1f')} s"
            ),
        ),
        (
            "mismatch",
            Text(
                f"k3 {show('mismatch/k3', '.1e')}   "
                f"max|dlogp| {show('mismatch/abs_dlogp_max', '.1e')} nats"
            ),
        ),
        ("replay", _coverage(board)),
        ("refused", Text(board.refusals(), "red" if board.refused else "")),
    ]
    if board.waits:
        rows.append(("waiting", Text(board.waiting(), "yellow")))
    rows.append(("last", Text(board.event[: 2 * width] or "-")))
    return rows


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """`values` as at most `width` characters; neighbours are averaged when there are more."""
    if not values or width < 1:
        return ""
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(blocks) - 1
    return "".join(blocks[round((v - low) / span * top) if span > 0 else 0] for v in means)


def clock(seconds: float) -> str:
    """1:05 or 2:03:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _title(board: _Board) -> str:
    elapsed = clock(time.monotonic() - board.start)
    state = f"step {board.num_done}/{board.total_steps}" if board.num_done else "starting"
    return f"moerl | {state} | {elapsed}"


def _progress(board: _Board, width: int, ascii_only: bool) -> str:
    share = min(1.0, board.num_done / board.total_steps) if board.total_steps else 0.0
    tail = f" {share:4.0%}" + (f"  eta {clock(board.eta_s)}" if board.eta_s is not None else "")
    full, empty = ASCII_BAR if ascii_only else BAR
    room = min(40, width - len(tail))
    done = round(share * room)
    return full * done + empty * max(0, room - done) + tail


def _reward(board: _Board, width: int, ascii_only: bool) -> Text:
    if not board.rewards:
        return Text("-")
    head = f"{board.rewards[-1]:.3f}  "
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    line = sparkline(board.rewards, min(60, width - len(head)), blocks)
    return Text.assemble((head, "bold"), (line, "green"))


def _held_out(board: _Board) -> list[tuple[str, Text]]:
    """The newest evaluation, if there was one."""
    if "eval/reward_mean" not in board.latest:
        return []
    show = board.show
    text = f"{show('eval/reward_mean', '.3f')} at version {show('eval/step', '.0f')}"
    return [("held out", Text(text))]


def _coverage(board: _Board) -> Text:
    names = {"routing": "routing/replay_cover_frac", "mask": "keep/cover_frac"}
    text = Text()
    for label, name in names.items():
        broken = board.latest.get(name, 1.0) != 1.0
        text.append(f"{label} {board.show(name, '.6g', 100)}%   ", "bold red" if broken else "")
    return text


def _summary_lines(summary: Mapping[str, object]) -> list[str]:
    width = max((len(_plain(str(name))) for name in summary), default=0)
    return [f"{_plain(str(k)):<{width}}  {_plain(str(v))}" for k, v in summary.items()]


def _plain(text: str) -> str:
    """One line without control characters: foreign text must not move the cursor."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _encodable(text: str, encoding: str) -> str:
    """The same text with a question mark for what the encoding cannot write."""
    return text.encode(encoding, "replace").decode(encoding)

"""report.html: one self-contained page on the course of a run.

It reads only the files of the run (metrics.jsonl, samples.jsonl, trace/), so it can be written
again later, and for a run that died: a note replaces each chart without data.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moerl.config.load import printed
from moerl.config.schema import Config
from moerl.config.task_mixture import entries_of
from moerl.observe.charts import draw_heatmap, draw_timeline
from moerl.observe.console import alerts, clock
from moerl.observe.episode_section import episode_section
from moerl.observe.metrics import Row, read_lines, read_rows
from moerl.observe.overlap import (
    GENERATE,
    STEP,
    Interval,
    Span,
    decode_overlap,
    intersect,
    intervals,
    length,
    merge,
    subtract,
    trainer_work,
)
from moerl.observe.page import (
    Column,
    Figure,
    Page,
    PageSection,
    StatCard,
    Table,
    figure,
    visible,
    write_html,
)
from moerl.observe.report_sections import (
    AGENTS,
    LEARNING,
    ROUTERS,
    SECTIONS,
    Section,
    router_heatmaps,
    task_charts,
)
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_spans

ENGINE_ALONE = "engine tokens/s alone"  # names in the summary of a run
ENGINE_TRAINING = "engine tokens/s while training"
MAX_SAMPLES = 40  # rows of the table, spread over the run
WINDOW_STEPS = 6  # trainer steps in the timeline window
# Spans of other threads of the trainer and the names of their tracks.  The parts of a publish
# ("publish commit", ...) lie inside it and are not drawn.
_THREADS = {"publish": "publish", "rehearsal": "publish", "checkpoint write": "checkpoint"}
_PART = "publish "
_WORKERS = ("engine", "trainer", "ref_models")  # processes whose kinds of work get colours first
WINDOW_S = 20.0  # length of the window without a trainer step
MAX_PROCESSES, MAX_KINDS = 12, 6  # processes and kinds of work drawn in the timeline
_Work = dict[tuple[str, str], list[Interval]]  # (process or track, kind of work) -> when
_TASK_COLUMN = Column("Task")
_SAMPLE_COLUMNS = (
    Column("Step", "number"),
    Column("Reward", "badge"),
    Column("Group mean", "number"),
    Column("Lag", "number"),
    Column("Version"),
    Column("Prompt", "long"),
    Column("Response", "long"),
)


def write_report(
    run: RunDir,
    config: Config,
    summary: Mapping[str, float] | None = None,
    *,
    is_running: bool = False,
) -> Path:
    """Write report.html of a run in any state and return its path.

    summary: numbers measured outside the steps, named ENGINE_ALONE and ENGINE_TRAINING. is_running:
    the run is still training.  Raises RecordError when metrics.jsonl or samples.jsonl is damaged
    beyond a torn last line.
    """
    rows, spans = read_rows(run.metrics), read_spans(run.trace)
    samples = read_lines(run.samples)
    num_steps = config.run.steps
    entries = entries_of(config)
    parts = (*SECTIONS, AGENTS) if any(entry.agent.plays for entry in entries) else SECTIONS
    labels = [entry.label for entry in entries] if config.tasks else []
    trained = [row for row in rows if row["step"] < num_steps]
    num_done = trained[-1]["step"] + 1 if trained else 0  # a last evaluation has its own row
    page = Page(
        kind="moerl run report",
        name=run.root.name,
        state=_state(num_done, num_steps, is_running),
        good=is_running or num_done >= num_steps,
        paragraphs=[_subtitle(config, rows)],
        cards=_cards(rows, spans, summary or {}, num_done, config.rollout.max_lag),
        sections=[
            *(_charts(part, rows, run, labels) for part in parts),
            _timeline(spans),
            *episode_section(samples),
            _samples(samples, by_task=bool(labels)),
            PageSection("Configuration", folded=("Resolved configuration", printed(config))),
        ],
    )
    return write_html(run.report, page)


def _charts(part: Section, rows: Sequence[Row], run: RunDir, labels: Sequence[str]) -> PageSection:
    """Charts of one section.  labels: of the tasks of a mixture."""
    figures = [figure(chart, rows) for chart in part.charts]
    if part.title == LEARNING:
        figures += [figure(chart, rows) for chart in task_charts(labels)]
    if part.title == ROUTERS:
        cells = router_heatmaps(rows, read_lines(run.expert_load))
        figures += [Figure(chart.title, draw_heatmap(chart), wide=True) for chart in cells]
    return PageSection(part.title, part.text, figures=figures)


# --- headline ------------------------------------------------------------------------------------
def reward_gain(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Mean reward of the first and of the last tenth of the steps; None without a reward."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if not rewards:
        return None
    tenth = max(1, len(rewards) // 10)
    return fmean(rewards[:tenth]), fmean(rewards[-tenth:])


def held_out_words(rows: Sequence[Row]) -> tuple[str, str] | None:
    """The first and the last evaluation in words; None in a run that made none."""
    done = [row for row in rows if "eval/reward_low" in row]
    if not done:
        return None
    return _evaluation_words(done[0]), _evaluation_words(done[-1])


def _evaluation_words(row: Row) -> str:
    low, high = row["eval/reward_low"], row["eval/reward_high"]
    return f"{row['eval/reward_mean']:.3f} [{low:.3f}, {high:.3f}]"


def wall_time_s(rows: Sequence[Row]) -> float:
    """Seconds from the start of the first step to the end of the last, pauses included."""
    if not rows:
        return 0.0
    return float(rows[-1]["time_s"] - rows[0]["time_s"] + rows[0].get("perf/step_s", 0.0))


def _cards(
    rows: Sequence[Row],
    spans: Sequence[Span],
    summary: Mapping[str, float],
    num_done: int,
    max_lag: int,
) -> list[StatCard]:
    lag, overlap = _extreme(rows, "async/lag_max"), _number(decode_overlap(spans), ".0%")
    raised = [alerts(row) for row in rows]
    names = sorted({name.removeprefix("alert/") for row in raised for name in row})
    steps = f"in {sum(map(bool, raised))} of {len(rows)} steps; names in docs/metrics.md"
    refused = _num_refused(rows)
    is_late = lag is not None and lag > max_lag
    return [
        *_reward_cards(rows),
        StatCard("Wall time", clock(wall_time_s(rows)), f"min:s, for {num_done:,} steps"),
        *_throughput_cards(rows, summary),
        StatCard("Overlap", overlap, "engine decoding while the trainer works"),
        _mismatch_card(rows),
        _coverage_card("Routing replayed", rows, "routing/replay_cover_frac"),
        _coverage_card("Sampling masks kept", rows, "keep/cover_frac"),
        StatCard("Largest lag", _number(lag, ".0f"), f"versions, limit {max_lag}", bad=is_late),
        StatCard("Alerts", ", ".join(names) or "none", steps, bad=bool(names)),
        StatCard("Records refused", f"{refused:,.0f}", "never trained on", bad=refused > 0),
    ]


def _num_refused(rows: Sequence[Row]) -> float:
    """Sum over restarts: the metrics count since the controller's process started."""
    total = 0.0
    before: Mapping[str, Any] = {}
    for row in rows:
        now = {name: value for name, value in row.items() if name.startswith("refused/")}
        for name, value in now.items():
            grown = value - before.get(name, 0.0)
            total += grown if grown >= 0 else value  # a restarted controller counts from 0
        before = now
    return total


def _reward_cards(rows: Sequence[Row]) -> list[StatCard]:
    if (gain := reward_gain(rows)) is None:
        cards = [StatCard("Reward", "-", "no step has a reward", wide=True)]
    else:
        first, last = gain
        note = f"{last - first:+.3f}, mean of the first tenth of steps to mean of the last"
        cards = [StatCard("Reward", f"{first:.3f} \u2192 {last:.3f}", note, wide=True)]
    if words := held_out_words(rows):
        note = "held-out prompts with 95 % intervals, first evaluation to last"
        cards.append(StatCard("Held-out reward", " \u2192 ".join(words), note, wide=True))
    return cards


def _throughput_cards(rows: Sequence[Row], summary: Mapping[str, float]) -> list[StatCard]:
    alone = summary.get(ENGINE_ALONE)
    training = summary.get(ENGINE_TRAINING, _rate(rows, "perf/rollout_tokens_per_s"))
    note = "generated, while training" + (f"; alone {alone:,.0f}" if alone else "")
    return [
        StatCard("Engine tokens/s", _number(training, ",.0f"), note, wide=alone is not None),
        StatCard("Trainer tokens/s", _number(_rate(rows, "perf/train_tokens_per_s"), ",.0f")),
    ]


def _mismatch_card(rows: Sequence[Row]) -> StatCard:
    """Of lag-0 tokens where the probe measures them: tokens of older weights must differ."""
    of_all = _number(_extreme(rows, "mismatch/abs_dlogp_max"), ".2g")
    worst, note = _extreme(rows, "probe/exact_abs_dlogp_max"), "max |dlogp| in nats"
    if worst is None:
        return StatCard("Largest mismatch", of_all, note)
    return StatCard("Largest mismatch", f"{worst:.2g}", f"{note}, lag 0; all lags: {of_all}")


def _coverage_card(label: str, rows: Sequence[Row], name: str) -> StatCard:
    worst = min((row[name] for row in rows if name in row), default=None)
    text = "100%" if worst == 1.0 else _number(worst, ".4%")
    return StatCard(label, text, "of tokens, worst step", bad=worst is not None and worst != 1.0)


def _extreme(rows: Sequence[Row], name: str) -> float | None:
    return max((row[name] for row in rows if name in row), default=None)


def _rate(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a rate over the run, each step weighted by its seconds."""
    pairs = [(row[name], row.get("perf/step_s", 1.0)) for row in rows if name in row]
    total = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / total if total > 0 else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _state(num_done: int, num_steps: int, is_running: bool) -> str:
    if is_running:
        return f"Running: {num_done} of {num_steps} steps"
    if not num_done:
        return "Stopped before the first step"
    return f"{'Complete' if num_done >= num_steps else 'Stopped'}: {num_done} of {num_steps} steps"


def _subtitle(config: Config, rows: Sequence[Row]) -> str:
    parts = [
        _task_words(config),
        f"engines {config.engine.count}",
        f"engine {config.engine.dtype}",
        f"trainer {config.trainer.dtype}",
        f"expert parallel {config.trainer.parallel.ep}",
        f"top-p {_either(entry.sampling.top_p for entry in entries_of(config))}",
        f"routing replay {config.replay.routing}",
        f"sampling mask {'kept' if config.replay.sampling_mask else 'off'}",
    ]
    if rows:
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(rows[-1]["time_s"]))
        parts.append(f"last step {ended}")
    return ", ".join(parts)


def _task_words(config: Config) -> str:
    if not config.tasks:
        return f"task {config.task.name}"
    entries = entries_of(config)
    return f"tasks {', '.join(f'{entry.label} ({entry.weight:g})' for entry in entries)}"


def _either(values: Iterable[float]) -> str:
    """The values without repetition: 0.95 or 1.0."""
    return " or ".join(str(value) for value in dict.fromkeys(values))


# --- body ----------------------------------------------------------------------------------------
def _timeline(spans: Sequence[Span]) -> PageSection:
    """Work per process in a window around the middle of the run, and the overlap of all of it."""
    text = (
        "What each process did in a window around the middle of the run. generate: an engine "
        "answers requests; update: it takes new weights. step: forward, backward and optimizer; "
        "wait: for a batch; publish: new weights on their way to the engines. "
    )
    share = decode_overlap(spans)
    if share is not None:
        text += (
            f"Over the whole run an engine was decoding during {share:.1%} of the time in which "
            "the trainer worked (its steps, less waiting for a batch)."
        )
    return PageSection("Timeline", text, figures=[_timeline_figure(spans)])


def _timeline_figure(spans: Sequence[Span]) -> Figure:
    svg, num_hidden = None, 0
    if window := _window(spans):
        bars, num_hidden = _bars(spans, window)
        svg = draw_timeline(bars, window[1] - window[0])
    note = f"{num_hidden} more processes are not drawn." if num_hidden else ""
    if svg is None:
        note = "Not drawn: this run recorded no engine or trainer spans."
    return Figure("Engine and trainer work", svg, note, wide=True)


def _window(spans: Sequence[Span]) -> Interval | None:
    """From the start of one trainer step to the end of a later one, around the middle."""
    work = trainer_work(spans)
    if work:
        middle = (work[0][0] + work[-1][1]) / 2
        usual = median(end - start for start, end in intervals(spans, "trainer", STEP))
        half = WINDOW_STEPS / 2 * usual
        return max(work[0][0], middle - half), min(work[-1][1], middle + half)
    decoding = merge(intervals(spans, "engine", GENERATE))
    if not decoding:
        return None
    middle = (decoding[0][0] + decoding[-1][1]) / 2
    return middle - WINDOW_S / 2, middle + WINDOW_S / 2


def _bars(spans: Sequence[Span], window: Interval) -> tuple[_Work, int]:
    """Work by (track, kind) in seconds from the start of the window; number of hidden processes.

    A step span contains its phases: only the rest of it is drawn as "step".
    """
    found = _inside(spans, window)
    processes = sorted({process for process, _ in found})
    workers = [name for name in processes if name.startswith(_WORKERS)]
    others = [name for name in processes if name not in workers]
    drawn, main = (workers + others)[:MAX_PROCESSES], _main_kinds(found)
    bars: _Work = {}
    for (process, kind), parts in sorted(found.items()):
        if process not in drawn:
            continue
        if kind == STEP:
            parts = subtract(parts, _phases(found, process))
        track = f"{process} {_THREADS[kind]}" if kind in _THREADS else process
        shifted = [(a - window[0], b - window[0]) for a, b in intersect(parts, [window])]
        bars.setdefault((track, kind if kind in main else "other"), []).extend(shifted)
    return bars, len(processes) - len(drawn)


def _inside(spans: Sequence[Span], window: Interval) -> _Work:
    """Spans that touch the window by (process, name)."""
    found: _Work = {}
    for span in spans:
        inside = span["start_s"] < window[1] and span["end_s"] > window[0]
        if inside and not str(span["name"]).startswith(_PART):
            key = (str(span["process"]), str(span["name"]))
            found.setdefault(key, []).append((span["start_s"], span["end_s"]))
    return found


def _phases(found: _Work, process: str) -> list[Interval]:
    """Spans of the process inside its steps."""
    return [
        part
        for (owner, kind), parts in found.items()
        if owner == process and kind != STEP and kind not in _THREADS
        for part in parts
    ]


def _main_kinds(found: _Work) -> set[str]:
    """The kinds of work with most seconds, engines and trainer first; the rest is "other"."""
    seconds: dict[str, float] = {}
    for (_, kind), parts in found.items():
        seconds[kind] = seconds.get(kind, 0.0) + length(parts)
    of_workers = {kind for process, kind in found if process.startswith(_WORKERS)}
    order = sorted(seconds, key=lambda kind: (kind not in of_workers, -seconds[kind]))
    return set(order if len(order) <= MAX_KINDS else order[: MAX_KINDS - 1])


def _samples(samples: Sequence[Any], *, by_task: bool) -> PageSection:
    """A table of at most MAX_SAMPLES rollouts, spread evenly over the run."""
    columns = (_TASK_COLUMN, *_SAMPLE_COLUMNS) if by_task else _SAMPLE_COLUMNS
    kept = [sample for sample in samples if isinstance(sample, dict)]
    if not kept:
        note = "This run recorded no sample rollouts (observe.sample_rollouts sets how many)."
        return PageSection("Sample rollouts", figures=[Figure("No text kept", None, note, True)])
    if len(kept) > MAX_SAMPLES:
        last = len(kept) - 1
        kept = [kept[round(i * last / (MAX_SAMPLES - 1))] for i in range(MAX_SAMPLES)]
    rewards = [s["reward"] for s in kept if isinstance(s.get("reward"), int | float)]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return PageSection(
        "Sample rollouts",
        "Reward and text as they were scored, and the mean reward of the rollout's group. Lag is "
        "the number of weight updates between the weights that generated the text and the weights "
        "that trained on it. Version names the weights that generated it: restarts of the "
        "trainer, a dot, batches trained.",
        Table(columns, [_sample(sample, low, high, by_task=by_task) for sample in kept]),
    )


def _sample(
    sample: Mapping[str, Any], low: float, high: float, *, by_task: bool
) -> list[str | tuple[str, float]]:
    """One row of the table; the badge's share is the reward between the lowest and the highest."""
    reward = sample.get("reward")
    score = float(reward) if isinstance(reward, int | float) else None
    share = (score - low) / (high - low) if score is not None and high > low else 0.0
    return [
        *([str(sample.get("task", "-"))] if by_task else []),
        str(sample.get("step", "-")),
        (_number(score, ".3f"), round(share, 3)),
        _number(sample.get("group_mean"), ".3f"),
        str(sample.get("lag", "-")),
        str(sample.get("version", "-")),
        visible(str(sample.get("prompt", ""))),
        visible(_response(sample)),
    ]


def _response(sample: Mapping[str, Any]) -> str:
    """The response; of an episode of several turns, each turn behind its context."""
    turns = sample.get("turns")
    if not isinstance(turns, list) or len(turns) < 2:
        return str(sample.get("response", ""))
    return "\n".join(
        f"-- turn {number}: context\n{turn.get('context')}\n-- turn {number}: answer\n"
        f"{turn.get('answer')}"
        for number, turn in enumerate(turns, 1)
        if isinstance(turn, dict)
    )

"""report.html: one self-contained page on the course of a run.

It reads only the files of the run (metrics.jsonl, samples.jsonl, trace/), so it can be written
again later, and for a run that died: a note replaces each chart without data.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moerl.config.load import printed
from moerl.config.schema import Config
from moerl.config.task_mixture import entries_of
from moerl.config.template_names import template_words
from moerl.observe.charts import draw_timeline
from moerl.observe.console import alerts, clock
from moerl.observe.episode_section import counted, episode_section, reward_of, spread
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
    write_html,
)
from moerl.observe.report_sections import chart_sections, notice_section, scorer_section
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_spans

ENGINE_ALONE = "engine tokens/s alone"  # names in the summary of a run
ENGINE_TRAINING = "engine tokens/s while training"
RELOAD_S = 20  # of the page of a running run
MAX_SAMPLES = 40  # rows of the table, spread over the run
WINDOW_STEPS = 6  # trainer steps in the timeline window
WINDOW_S = 20.0  # length of the window without a trainer step
MAX_PROCESSES, MAX_KINDS = 12, 6  # processes and kinds of work drawn in the timeline
# Spans of other threads of the trainer and the names of their tracks.  The parts of a publish
# ("publish commit", ...) lie inside it and are not drawn.
_THREADS = {"publish": "publish", "rehearsal": "publish", "checkpoint write": "checkpoint"}
_PART = "publish "
_WORKERS = ("engine", "trainer", "ref_models")  # processes whose kinds of work get colours first
_Work = dict[tuple[str, str], list[Interval]]  # (process or track, kind of work) -> when
_SAMPLE_COLUMNS = (
    Column("Task"),  # of a mixture
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
    the run is still training, and the page reads itself again.  Raises RecordError when
    metrics.jsonl or samples.jsonl is damaged beyond a torn last line.
    """
    rows, spans = read_rows(run.metrics), read_spans(run.trace)
    samples, loads = read_lines(run.samples), read_lines(run.expert_load)
    entries, num_steps = entries_of(config), config.run.steps
    labels = [entry.label for entry in entries] if config.tasks else []
    roles = list(dict.fromkeys(role for entry in entries for role in entry.roles))
    has_agent = any(entry.kind.uses_chat for entry in entries)
    trained = [row for row in rows if row["step"] < num_steps]
    num_done = trained[-1]["step"] + 1 if trained else 0  # a last evaluation has its own row
    page = Page(
        kind="moerl run report",
        name=run.root.name,
        state=_state(num_done, num_steps, is_running),
        good=is_running or num_done >= num_steps,
        reload_s=RELOAD_S if is_running else 0,
        paragraphs=[_subtitle(config, rows)],
        cards=_cards(rows, spans, summary or {}, num_done, config.rollout.max_lag, run.began_s()),
        sections=[
            *chart_sections(rows, loads, labels, roles, has_agent=has_agent),
            *notice_section(read_lines(run.notices)),
            *scorer_section(rows),
            *_timeline(spans),
            *episode_section(samples),
            _samples(samples, by_task=bool(labels)),
            PageSection("Configuration", folded=("Resolved configuration", printed(config))),
        ],
    )
    return write_html(run.report, page)


# --- headline ------------------------------------------------------------------------------------
def reward_gain(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Mean reward of the first and of the last tenth of the steps; None without a reward."""
    rewards = _values(rows, "reward/mean")
    if not rewards:
        return None
    tenth = max(1, len(rewards) // 10)
    return fmean(rewards[:tenth]), fmean(rewards[-tenth:])


def held_out_words(rows: Sequence[Row]) -> tuple[str, str] | None:
    """The first and the last evaluation in words; None in a run that made none."""
    done = [
        f"{row['eval/reward_mean']:.3f} [{low:.3f}, {row['eval/reward_high']:.3f}]"
        for row in rows
        if (low := row.get("eval/reward_low")) is not None
    ]
    return (done[0], done[-1]) if done else None


def wall_time_s(rows: Sequence[Row], began_s: float | None = None) -> float:
    """Seconds from the start of the run to the end of the last step, pauses included.

    began_s: unix time of the first start; without it the run begins with its first step.
    """
    if not rows:
        return 0.0
    first = rows[0]["time_s"] - rows[0].get("perf/step_s", 0.0)
    return float(rows[-1]["time_s"] - (first if began_s is None else min(began_s, first)))


def _cards(
    rows: Sequence[Row],
    spans: Sequence[Span],
    summary: Mapping[str, float],
    num_done: int,
    max_lag: int,
    began_s: float | None,
) -> list[StatCard]:
    raised = [alerts(row) for row in rows]
    names = sorted({name.removeprefix("alert/") for row in raised for name in row})
    steps = f"in {sum(map(bool, raised))} of {num_done} steps; names in docs/metrics.md"
    alone = summary.get(ENGINE_ALONE)
    engine = summary.get(ENGINE_TRAINING, _rate(rows, "perf/rollout_tokens_per_s"))
    generated = "generated, while training" + (f"; alone {alone:,.0f}" if alone else "")
    trainer = _number(_rate(rows, "perf/train_tokens_per_s"), ",.0f")
    overlap = _number(decode_overlap(spans), ".0%")
    lag, refused = max(_values(rows, "async/lag_max"), default=None), _num_refused(rows)
    late = lag is not None and lag > max_lag
    return [
        *_reward_cards(rows),
        StatCard("Wall time", clock(wall_time_s(rows, began_s)), f"min:s, for {num_done:,} steps"),
        StatCard("Engine tokens/s", _number(engine, ",.0f"), generated),
        StatCard("Trainer tokens/s", trainer),
        StatCard("Overlap", overlap, "engine decoding while the trainer works"),
        _mismatch_card(rows),
        _coverage_card("Routing replayed", rows, "routing/replay_cover_frac"),
        _coverage_card("Sampling masks kept", rows, "keep/cover_frac"),
        StatCard("Largest lag", _number(lag, ".0f"), f"versions, limit {max_lag}", bad=late),
        StatCard("Alerts", ", ".join(names) or "none", steps, bad=bool(names)),
        StatCard("Records refused", f"{refused:,.0f}", "never trained on", bad=refused > 0),
    ]


def _reward_cards(rows: Sequence[Row]) -> list[StatCard]:
    cards = [StatCard("Reward", "-", "no step has a reward", wide=True)]
    if gain := reward_gain(rows):
        first, last = gain
        note = f"{last - first:+.3f}, mean of the first tenth of steps to mean of the last"
        cards = [StatCard("Reward", f"{first:.3f} \u2192 {last:.3f}", note, wide=True)]
    if words := held_out_words(rows):
        note = "held-out prompts with 95 % intervals, first evaluation to last"
        cards.append(StatCard("Held-out reward", " \u2192 ".join(words), note, wide=True))
    return cards


def _mismatch_card(rows: Sequence[Row]) -> StatCard:
    """Of lag-0 tokens where the probe measures them: tokens of older weights must differ."""
    fresh, every = (
        _number(max(_values(rows, name), default=None), ".2g")
        for name in ("probe/exact_abs_dlogp_max", "mismatch/abs_dlogp_max")
    )
    note = "max |dlogp| in nats"
    if fresh == "-":
        return StatCard("Largest mismatch", every, note)
    return StatCard("Largest mismatch", fresh, f"{note}, lag 0; all lags: {every}")


def _coverage_card(label: str, rows: Sequence[Row], name: str) -> StatCard:
    worst = min(_values(rows, name), default=None)
    text = "100%" if worst == 1.0 else _number(worst, ".4%")
    return StatCard(label, text, "of tokens, worst step", bad=worst not in (None, 1.0))


def _num_refused(rows: Sequence[Row]) -> float:
    """Sum over restarts: the metrics count since the controller's process started."""
    total = 0.0
    before: Row = {}
    for row in rows:
        for name in (name for name in row if name.startswith("refused/")):
            grown = row[name] - before.get(name, 0.0)
            total += grown if grown >= 0 else row[name]  # a restarted controller counts from 0
        before = row
    return total


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _rate(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a rate over the run, each step weighted by its seconds."""
    pairs = [(row[name], row.get("perf/step_s", 1.0)) for row in rows if name in row]
    total = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / total if total > 0 else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _state(num_done: int, num_steps: int, is_running: bool) -> str:
    if not (num_done or is_running):
        return "Stopped before the first step"
    word = "Running" if is_running else "Complete" if num_done >= num_steps else "Stopped"
    return f"{word}: {num_done} of {num_steps} steps"


def _subtitle(config: Config, rows: Sequence[Row]) -> str:
    entries = entries_of(config)
    tasks = ", ".join(f"{entry.label} ({entry.weight:g})" for entry in entries)
    top_p = dict.fromkeys(str(entry.sampling.top_p) for entry in entries)
    parts = [
        f"tasks {tasks}" if config.tasks else f"task {config.task.name}",
        f"engines {config.engine.count}",
        f"engine {config.engine.dtype}",
        f"trainer {config.trainer.dtype}",
        f"expert parallel {config.trainer.parallel.ep}",
        f"top-p {' or '.join(top_p)}",
        f"routing replay {config.replay.routing}",
        f"sampling mask {'kept' if config.replay.sampling_mask else 'off'}",
    ]
    used = [(one.chat_template, one.template_arguments) for one in entries]
    if words := dict.fromkeys(template_words(*one) for one in used if any(one)):
        parts.append(f"chat template {' or '.join(words)}")
    if rows:
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(rows[-1]["time_s"]))
        parts.append(f"last step {ended}")
    return ", ".join(parts)


# --- timeline ------------------------------------------------------------------------------------
def _timeline(spans: Sequence[Span]) -> list[PageSection]:
    """Work per process in a window around the middle of the run, and the overlap of all of it.

    [] without a span of an engine or trainer.
    """
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
    if (window := _window(spans)) is None:
        return []
    bars, num_hidden = _bars(spans, window)
    note = f"{num_hidden} more processes are not drawn." if num_hidden else ""
    svg = draw_timeline(bars, window[1] - window[0])
    drawn = Figure("Engine and trainer work", svg, note, wide=True)
    return [PageSection("Timeline", text, figures=[drawn])]


def _window(spans: Sequence[Span]) -> Interval | None:
    """A part of the trainer's work around its middle; of the engines' work without a step."""
    half = WINDOW_S / 2
    if work := trainer_work(spans):
        usual = median(end - start for start, end in intervals(spans, "trainer", STEP))
        half = WINDOW_STEPS / 2 * usual
    elif not (work := merge(intervals(spans, "engine", GENERATE))):
        return None
    middle = (work[0][0] + work[-1][1]) / 2
    return max(work[0][0], middle - half), min(work[-1][1], middle + half)


def _bars(spans: Sequence[Span], window: Interval) -> tuple[_Work, int]:
    """Work by (track, kind) in seconds from the start of the window; number of hidden processes.

    A step span contains its phases: only the rest of it is drawn as "step".
    """
    found: _Work = defaultdict(list)
    for span in spans:
        touches = span["start_s"] < window[1] and span["end_s"] > window[0]
        if touches and not str(span["name"]).startswith(_PART):
            key = (str(span["process"]), str(span["name"]))
            found[key].append((span["start_s"], span["end_s"]))
    processes = sorted({process for process, _ in found})
    processes.sort(key=lambda process: not process.startswith(_WORKERS))
    main, outside = _main_kinds(found), {STEP, *_THREADS}
    bars: _Work = defaultdict(list)
    for (process, kind), parts in sorted(found.items()):
        if process not in processes[:MAX_PROCESSES]:
            continue
        if kind == STEP:
            inside = [name for name in found if name[0] == process and name[1] not in outside]
            parts = subtract(parts, [part for name in inside for part in found[name]])
        track = f"{process} {_THREADS[kind]}" if kind in _THREADS else process
        shifted = [(a - window[0], b - window[0]) for a, b in intersect(parts, [window])]
        bars[track, kind if kind in main else "other"] += shifted
    return bars, len(processes[MAX_PROCESSES:])


def _main_kinds(found: _Work) -> set[str]:
    """The kinds of work with most seconds, engines and trainer first; the rest is "other"."""
    seconds: dict[str, float] = defaultdict(float)
    for (_, kind), parts in found.items():
        seconds[kind] += length(parts)
    of_workers = {kind for process, kind in found if process.startswith(_WORKERS)}
    order = sorted(seconds, key=lambda kind: (kind not in of_workers, -seconds[kind]))
    return set(order if len(order) <= MAX_KINDS else order[: MAX_KINDS - 1])


# --- samples -------------------------------------------------------------------------------------
def _samples(samples: Sequence[Any], *, by_task: bool) -> PageSection:
    """A table of at most MAX_SAMPLES rollouts, spread evenly over the run."""
    kept = spread([sample for sample in samples if isinstance(sample, dict)], MAX_SAMPLES)
    if not kept:
        note = "This run recorded no sample rollouts (observe.sample_rollouts sets how many)."
        return PageSection("Sample rollouts", note)
    rewards = [reward for sample in kept if (reward := reward_of(sample)) is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    first = 0 if by_task else 1
    return PageSection(
        "Sample rollouts",
        "Reward and text as they were scored, and the mean reward of the rollout's group. Lag is "
        "the number of weight updates between the weights that generated the text and the weights "
        "that trained on it. Version names the weights that generated it: restarts of the "
        "trainer, a dot, batches trained.",
        Table(_SAMPLE_COLUMNS[first:], [_sample(each, low, high)[first:] for each in kept]),
    )


def _sample(sample: Mapping[str, Any], low: float, high: float) -> list[str | tuple[str, float]]:
    """One row of the table; the badge's share is the reward between the lowest and the highest."""
    reward = reward_of(sample)
    share = (reward - low) / (high - low) if reward is not None and high > low else 0.0
    task, lag, version = (str(sample.get(k, "-")) for k in ("task", "lag", "version"))
    step = counted(sample.get("step"))
    badge = (_number(reward, ".3f"), round(share, 3))
    mean = _number(sample.get("group_mean"), ".3f")
    origin = f"{sample['origin']}:\n" if "origin" in sample else ""
    texts = (origin + str(sample.get("prompt", "")), _response(sample))
    return [task, step, badge, mean, lag, version, *texts]


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

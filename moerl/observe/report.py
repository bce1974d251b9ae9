"""report.html: one self-contained page that shows what a run did.

It is made from the files of the run alone (metrics.jsonl, samples.jsonl, trace/), so it can be
made again later, and for a run that died: whatever is missing leaves its place with a note.
Sampled text is foreign and is escaped; only SVG drawn by moerl.observe.charts enters as markup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from omegaconf import OmegaConf

from moerl.config.schema import Config
from moerl.observe.charts import Bar, draw_chart, draw_timeline
from moerl.observe.console import alerts, clock
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
from moerl.observe.report_sections import SECTIONS, Section
from moerl.observe.template import PAGE
from moerl.rundir import RunDir
from moerl.trace import read_spans

ENGINE_ALONE = "engine tokens/s alone"  # names in the summary of a run
ENGINE_TRAINING = "engine tokens/s while training"
MAX_SAMPLES = 40  # rows of the table, spread over the run
WINDOW_STEPS = 6  # trainer steps in the timeline window
# Spans of threads beside the trainer's steps, and what their lanes are called; the parts of a
# publish ("publish commit", ...) lie inside it and are not drawn.
_BESIDE = {"publish": "publish", "checkpoint write": "checkpoint"}
_PART = "publish "
_WORKERS = ("engine", "trainer", "frozen")  # processes whose kinds of work get colours first
WINDOW_S = 20.0  # its length when there is no trainer step
MAX_LANES, MAX_KINDS = 12, 6  # processes and kinds of work drawn in the timeline


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    note: str = ""
    wide: bool = False
    bad: bool = False


def write_report(
    run: RunDir,
    config: Config | Mapping[str, Any],
    summary: Mapping[str, float] | None = None,
    *,
    goes_on: bool = False,
) -> os.PathLike[str]:
    """Write report.html of a run in any state and return its path.

    summary: numbers measured outside the steps, named ENGINE_ALONE and ENGINE_TRAINING.
    goes_on: more steps will follow.
    Raises RecordError when metrics.jsonl or samples.jsonl is damaged beyond a torn last line.
    """
    settings: dict[str, Any] = asdict(config) if isinstance(config, Config) else dict(config)
    rows, spans = read_rows(run.metrics), read_spans(run.trace)
    num_steps = int(_setting(settings, "run.steps", 0))
    trained = [row for row in rows if not num_steps or row["step"] < num_steps]
    num_done = trained[-1]["step"] + 1 if trained else 0  # evaluations may have rows behind them
    page = (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(PAGE)
        .render(
            name=run.root.name,
            good=goes_on or 0 < num_steps <= num_done,
            state=_state(num_done, num_steps, goes_on),
            subtitle=_subtitle(settings, rows),
            tiles=_tiles(rows, spans, settings, summary or {}, num_done),
            sections=[_section(section, rows) for section in SECTIONS],
            timeline=_timeline(spans),
            samples=_samples(read_lines(run.samples)),
            config=OmegaConf.to_yaml(OmegaConf.create(settings)),
        )
    )
    unfinished = run.report.with_suffix(".tmp")
    unfinished.write_bytes(page.encode("utf-8", "replace"))  # model output may hold lone surrogates
    unfinished.replace(run.report)
    return run.report


# --- headline ------------------------------------------------------------------------------------
def reward_gain(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Mean reward of the first and of the last tenth of the steps; None without a reward."""
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if not rewards:
        return None
    tenth = max(1, len(rewards) // 10)
    return fmean(rewards[:tenth]), fmean(rewards[-tenth:])


def wall_time_s(rows: Sequence[Row]) -> float:
    """Seconds from the start of the first step to the end of the last, pauses included."""
    if not rows:
        return 0.0
    return float(rows[-1]["time_s"] - rows[0]["time_s"] + rows[0].get("perf/step_s", 0.0))


def _tiles(
    rows: Sequence[Row],
    spans: Sequence[Span],
    settings: Mapping[str, Any],
    summary: Mapping[str, float],
    num_done: int,
) -> list[Tile]:
    tiles = [_reward_tile(rows)]
    tiles.append(Tile("Wall time", clock(wall_time_s(rows)), f"min:s, for {num_done:,} steps"))
    tiles += _throughput_tiles(rows, summary)
    tiles.append(_overlap_tile(spans))
    tiles.append(_mismatch_tile(rows))
    tiles += [
        _coverage_tile("Routing replayed", rows, "routing/replay_cover_frac"),
        _coverage_tile("Sampling masks kept", rows, "keep/cover_frac"),
    ]
    limit = int(_setting(settings, "rollout.max_lag", 0))
    tiles.append(
        _extreme_tile(
            "Largest lag", rows, "async/lag_max", ".0f", f"versions, limit {limit}", limit
        )
    )
    raised = sorted({name.removeprefix("alert/") for row in rows for name in alerts(row)})
    steps = sum(bool(alerts(row)) for row in rows)
    where = f"in {steps} of {len(rows)} steps; names in docs/metrics.md"
    tiles.append(Tile("Alerts", ", ".join(raised) or "none", where, bad=bool(raised)))
    refused = _num_refused(rows)
    tiles.append(Tile("Records refused", f"{refused:,.0f}", "never trained on", bad=refused > 0))
    return tiles


def _num_refused(rows: Sequence[Row]) -> float:
    """Records refused in the run: each row counts since its process started, so growth is added."""
    total = 0.0
    before: Mapping[str, Any] = {}
    for row in rows:
        now = {name: value for name, value in row.items() if name.startswith("refused/")}
        for name, value in now.items():
            grown = value - before.get(name, 0.0)
            total += grown if grown >= 0 else value  # a restarted controller counts from 0
        before = now
    return total


def _reward_tile(rows: Sequence[Row]) -> Tile:
    gain = reward_gain(rows)
    if gain is None:
        return Tile("Reward", "-", "no step has a reward", wide=True)
    first, last = gain
    note = f"{last - first:+.3f}, mean of the first tenth of steps to mean of the last"
    return Tile("Reward", f"{first:.3f} \u2192 {last:.3f}", note, wide=True)


def _throughput_tiles(rows: Sequence[Row], summary: Mapping[str, float]) -> list[Tile]:
    alone = summary.get(ENGINE_ALONE)
    training = summary.get(ENGINE_TRAINING, _rate(rows, "perf/rollout_tokens_per_s"))
    note = "generated, while training"
    if alone:
        note += f"; alone {alone:,.0f}"
    return [
        Tile("Engine tokens/s", _number(training, ",.0f"), note, wide=alone is not None),
        Tile("Trainer tokens/s", _number(_rate(rows, "perf/train_tokens_per_s"), ",.0f")),
    ]


def _overlap_tile(spans: Sequence[Span]) -> Tile:
    share = decode_overlap(spans)
    return Tile("Overlap", _number(share, ".0%"), "engine decoding while the trainer works")


def _mismatch_tile(rows: Sequence[Row]) -> Tile:
    """Of fresh tokens where the probe names them, since old weights differ by right."""
    fresh = "probe/exact_abs_dlogp_max"
    of_all = _extreme(rows, "mismatch/abs_dlogp_max")
    if (worst := _extreme(rows, fresh)) is None:
        return Tile("Largest mismatch", _number(of_all, ".2g"), "max |dlogp| in nats")
    note = f"max |dlogp| in nats, lag 0; all lags: {_number(of_all, '.2g')}"
    return Tile("Largest mismatch", _number(worst, ".2g"), note)


def _extreme(rows: Sequence[Row], name: str) -> float | None:
    return max((row[name] for row in rows if name in row), default=None)


def _extreme_tile(
    label: str, rows: Sequence[Row], name: str, form: str, note: str, limit: float | None = None
) -> Tile:
    worst = _extreme(rows, name)
    bad = limit is not None and worst is not None and worst > limit
    return Tile(label, _number(worst, form), note, bad=bad)


def _coverage_tile(label: str, rows: Sequence[Row], name: str) -> Tile:
    worst = min((row[name] for row in rows if name in row), default=None)
    text = "100%" if worst == 1.0 else _number(worst, ".4%")
    return Tile(label, text, "of tokens, worst step", bad=worst is not None and worst != 1.0)


def _rate(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a rate over the run, each step weighted by its seconds."""
    pairs = [(row[name], row.get("perf/step_s", 1.0)) for row in rows if name in row]
    total = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / total if total > 0 else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _state(num_done: int, num_steps: int, goes_on: bool) -> str:
    if goes_on:
        return f"Going on: {num_done} of {num_steps} steps"
    if not num_done:
        return "Stopped before the first step"
    return f"{'Complete' if num_done >= num_steps else 'Stopped'}: {num_done} of {num_steps} steps"


def _subtitle(settings: Mapping[str, Any], rows: Sequence[Row]) -> str:
    get = partial(_setting, settings, default=None)
    facts = {
        "task": get("task.name"),
        "engines": get("engine.count"),
        "engine": get("engine.dtype"),
        "trainer": get("trainer.dtype"),
        "expert parallel": get("trainer.parallel.ep"),
        "top-p": get("sampling.top_p"),
        "routing replay": get("replay.routing"),
        "sampling mask": {True: "kept", False: "off"}.get(get("replay.sampling_mask")),
    }
    parts = [f"{label} {value}" for label, value in facts.items() if value is not None]
    if rows:
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(rows[-1]["time_s"]))
        parts.append(f"last step {ended}")
    return ", ".join(parts)


def _setting(settings: Mapping[str, Any], dotted: str, default: Any) -> Any:
    value: Any = settings
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


# --- body ----------------------------------------------------------------------------------------
def _section(section: Section, rows: Sequence[Row]) -> dict[str, Any]:
    charts = []
    for chart in section.charts:
        svg = draw_chart(chart, rows)
        names = ", ".join(line.name for line in chart.lines)
        charts.append({"title": chart.title, "svg": Markup(svg) if svg else None, "names": names})
    return {"title": section.title, "text": section.text, "charts": charts}


def _timeline(spans: Sequence[Span]) -> dict[str, Any]:
    """Work per process in a window around the middle of the run, and the overlap of all of it."""
    share = decode_overlap(spans)
    text = (
        "What each process did in a window around the middle of the run. generate: an engine "
        "answers requests; update: it takes new weights. step: forward, backward and optimizer; "
        "wait: for a batch; publish: new weights on their way to the engines. "
    )
    if share is not None:
        text += (
            f"Over the whole run an engine was decoding during {share:.1%} of the time in which "
            "the trainer worked (its steps, less waiting for a batch)."
        )
    window = _window(spans)
    if window is None:
        return {"text": text, "svg": None}
    bars, num_hidden = _bars(spans, window)
    if num_hidden:
        text += f" {num_hidden} more processes are not drawn."
    svg = draw_timeline(bars, window[1] - window[0])
    return {"text": text, "svg": Markup(svg) if svg else None}


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


def _bars(spans: Sequence[Span], window: Interval) -> tuple[list[Bar], int]:
    """Bars inside the window and how many processes were left out.

    A step span contains its phases: only what no phase covers is drawn as "step".
    """
    found: dict[tuple[str, str], list[Interval]] = {}
    for span in spans:
        inside = span["start_s"] < window[1] and span["end_s"] > window[0]
        if inside and not str(span["name"]).startswith(_PART):
            key = (str(span["process"]), str(span["name"]))
            found.setdefault(key, []).append((span["start_s"], span["end_s"]))
    lanes = sorted({lane for lane, _ in found})
    kept = set([x for x in lanes if x.startswith(_WORKERS)][:MAX_LANES])
    kept |= set([x for x in lanes if x not in kept][: MAX_LANES - len(kept)])
    names = _main_kinds(found)
    bars: dict[tuple[str, str], list[Interval]] = {}
    for (lane, name), parts in found.items():
        if lane not in kept:
            continue
        if name in _BESIDE:
            lane = f"{lane} {_BESIDE[name]}"
        if name == STEP:
            phases = [
                part
                for (own, kind), others in found.items()
                if own == lane and kind != STEP and kind not in _BESIDE
                for part in others
            ]
            parts = subtract(parts, phases)
        bars.setdefault((lane, name if name in names else "other"), []).extend(parts)
    shift = window[0]
    return [
        Bar(lane, kind, [(a - shift, b - shift) for a, b in intersect(parts, [window])])
        for (lane, kind), parts in sorted(bars.items())
    ], len(lanes) - len(kept)


def _main_kinds(found: Mapping[tuple[str, str], Iterable[Interval]]) -> set[str]:
    """The kinds that fill most time, those of engines and trainer first; others share a colour."""
    seconds: dict[str, float] = {}
    works: set[str] = set()
    for (lane, name), parts in found.items():
        seconds[name] = seconds.get(name, 0.0) + length(parts)
        if lane.startswith(_WORKERS):
            works.add(name)
    order = sorted(seconds, key=lambda name: (name not in works, -seconds[name]))
    return set(order if len(order) <= MAX_KINDS else order[: MAX_KINDS - 1])


def _samples(samples: Sequence[Any]) -> list[dict[str, str]]:
    """Rows of the table, spread evenly over what was kept, as text."""
    kept = [sample for sample in samples if isinstance(sample, dict)]
    if len(kept) > MAX_SAMPLES:
        last = len(kept) - 1
        kept = [kept[round(i * last / (MAX_SAMPLES - 1))] for i in range(MAX_SAMPLES)]
    rewards = [s["reward"] for s in kept if isinstance(s.get("reward"), int | float)]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return [_sample(sample, low, high) for sample in kept]


def _sample(sample: Mapping[str, Any], low: float, high: float) -> dict[str, str]:
    reward = sample.get("reward")
    score = float(reward) if isinstance(reward, int | float) else None
    share = (score - low) / (high - low) if score is not None and high > low else 0.0
    return {
        "step": str(sample.get("step", "-")),
        "version": str(sample.get("version", "-")),
        "lag": str(sample.get("lag", "-")),
        "reward": _number(score, ".3f"),
        "group_mean": _number(sample.get("group_mean"), ".3f"),
        "share": f"{share:.3f}",
        "prompt": _visible(str(sample.get("prompt", ""))),
        "response": _visible(str(sample.get("response", ""))),
    }


def _visible(text: str) -> str:
    """Control characters as their picture symbol, so that odd output is seen rather than lost."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)

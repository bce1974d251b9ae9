"""What algorithms and corrections do to learning, on the quickstart task at an exact lag.

    python bench/learning_curves.py --out runs/curves            (stopped? the same line goes on)
    python bench/learning_curves.py --out runs/curves --page     (the page again, of what is there)

GRPO, GSPO, CISPO and DeepSeek-V3.2 at `rollout.fixed_lag` 0 and 8, at lag 8 GRPO and DeepSeek-V3.2
also without their correction, each with several seeds.  A seed makes the initial weights and the
prompts, so all series of a seed start alike.  Runs are of optimizer steps at a lag that does not
depend on speed, so a busy machine changes nothing but the time.

Writes OUT/curves.html, and prints the table that it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from learning_arms import moerl

from moerl.config import load_config
from moerl.data.tiny_model import make_tiny_model
from moerl.observe.charts import Chart, Scale
from moerl.observe.metrics import Row, read_rows
from moerl.observe.page import Column, Page, PageSection, Table, figure, write_html
from moerl.runtime.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    name: str
    recipe: str
    lag: int
    settings: tuple[str, ...] = ()

    def folder(self, seed: int) -> str:
        words = [self.recipe, f"lag{self.lag}", *(["variant"] if self.settings else [])]
        return "-".join([*words, f"seed{seed}"])


# GRPO's recipe divides by the engine's log-probability and clips, which is a correction by itself;
# with `proximal` nothing knows how old a token is.  DeepSeek-V3.2's is the mask of drifted answers.
_BLIND = ("algorithm.ratio=proximal",)
_UNMASKED = ("algorithm.corrections=[]", "algorithm.off_policy_delta=0")
SERIES = (
    Series("GRPO", "grpo", 0),
    Series("GSPO", "gspo", 0),
    Series("CISPO", "cispo", 0),
    Series("DeepSeek-V3.2", "deepseek-v32", 0),
    Series("GRPO", "grpo", 8),
    Series("GRPO, ratio ignores age", "grpo", 8, _BLIND),
    Series("GSPO", "gspo", 8),
    Series("CISPO", "cispo", 8),
    Series("DeepSeek-V3.2", "deepseek-v32", 8),
    Series("DeepSeek-V3.2, no mask", "deepseek-v32", 8, _UNMASKED),
)
SETTINGS = (
    "rollout.groups_per_step=32",
    "trainer.parallel.dp=1",
    "trainer.parallel.ep=1",
    "checkpoint.every=0",
    "observe.engine_alone_s=0",
    "observe.sample_rollouts=0",
    "supervision.max_restarts=0",
)
CHARTS: tuple[tuple[str, str, str, Scale], ...] = (
    ("Reward", "reward/mean", "share of right digits", "auto"),
    ("Entropy", "loss/entropy", "nats", "auto"),
    ("Mismatch and staleness, k3", "mismatch/k3", "nats", "log"),
    ("Effective sample size of sequences", "mismatch/ess_seq_frac", "share", "share"),
    ("Gradient norm", "loss/grad_norm", "before clipping", "log"),
)


def missing(
    out: Path, series: Sequence[Series], seeds: int, steps: int
) -> list[tuple[Series, int]]:
    """Runs that are not whole; seeds outermost, so that every series has one before any has two."""
    return [
        (line, seed)
        for seed in range(seeds)
        for line in series
        if len(read_rows(RunDir(out / line.folder(seed)).metrics)) < steps
    ]


def train(out: Path, line: Series, seed: int, steps: int) -> None:
    """Train a run in its own folder, begun anew; its metrics stay."""
    run = RunDir(out / line.folder(seed))
    shutil.rmtree(run.root, ignore_errors=True)
    overrides = [*SETTINGS, *line.settings, f"rollout.fixed_lag={line.lag}", f"run.steps={steps}"]
    overrides += [f"run.seed={seed}", f"run.root={out}", f"model.path={_model(out, line, seed)}"]
    moerl(out, ["train", line.recipe, *overrides, "--run", run.root.name])
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    shutil.rmtree(run.hf, ignore_errors=True)


def _model(out: Path, line: Series, seed: int) -> Path:
    folder = out / f"model-{seed}"
    if not folder.is_dir():
        make_tiny_model(folder, load_config(line.recipe).model.tiny, seed)
    return folder


def run_all(out: Path, todo: Sequence[tuple[Series, int]], steps: int) -> None:
    print(f"{len(todo)} runs of {steps} steps to go", flush=True)
    begin = time.monotonic()
    for number, (line, seed) in enumerate(todo):
        train(out, line, seed, steps)
        rows = read_rows(RunDir(out / line.folder(seed)).metrics)
        minutes = (time.monotonic() - begin) / 60
        reward = fmean(r["reward/mean"] for r in rows[-max(1, steps // 10) :])
        left = minutes / (number + 1) * (len(todo) - number - 1)
        print(
            f"[{number + 1} of {len(todo)}] {line.name}, lag {line.lag}, seed {seed}: last tenth "
            f"{reward:.3f}; {minutes:.0f} min so far, about {left:.0f} to go",
            flush=True,
        )


# --- the page --------------------------------------------------------------------------------
HEAD = (
    "Series",
    "Lag",
    "Seeds",
    "Reward, last tenth",
    "Spread",
    "k3, median run",
    "ESS of sequences",
)


def load(out: Path, seeds: int, steps: int) -> dict[Series, list[list[Row]]]:
    """Rows by series and seed, of the runs that are whole."""
    found = {
        line: [
            rows
            for seed in range(seeds)
            if len(rows := read_rows(out / line.folder(seed) / "metrics.jsonl")) >= steps
        ]
        for line in SERIES
    }
    return {line: runs for line, runs in found.items() if runs}


def table(found: Mapping[Series, list[list[Row]]]) -> list[tuple[str, ...]]:
    """One line per series: means over seeds, spread = standard deviation over seeds."""
    lines = []
    for line, runs in found.items():
        last = [
            fmean(row["reward/mean"] for row in rows[-max(1, len(rows) // 10) :]) for rows in runs
        ]
        k3 = sorted(fmean(row["mismatch/k3"] for row in rows) for rows in runs)[len(runs) // 2]
        ess = fmean(row["mismatch/ess_seq_frac"] for rows in runs for row in rows)
        cells = [f"{fmean(last):.3f}", f"{pstdev(last):.3f}", f"{k3:.1e}", f"{ess:.3f}"]
        lines.append((line.name, str(line.lag), str(len(runs)), *cells))
    return lines


def chart_rows(found: Mapping[Series, list[list[Row]]], metric: str) -> list[dict[str, float]]:
    """Per step: mean over seeds under the series' name, their deviation under the name + band."""
    rows = []
    for step in range(max((len(run) for runs in found.values() for run in runs), default=0)):
        row: dict[str, float] = {"step": step}
        for line, runs in found.items():
            values = [run[step][metric] for run in runs if step < len(run) and metric in run[step]]
            if values:
                row |= {line.name: fmean(values), f"{line.name} band": pstdev(values)}
        rows.append(row)
    return rows


def write_page(out: Path, found: Mapping[Series, list[list[Row]]]) -> Path:
    steps = max(len(run) for runs in found.values() for run in runs)
    columns = [Column(HEAD[0]), *(Column(name, "number") for name in HEAD[1:])]
    sections = [PageSection("Series", table=Table(columns, table(found)))]
    for lag in sorted({line.lag for line in found}):
        here = {line: runs for line, runs in found.items() if line.lag == lag}
        lines = {series.name: series.name for series in here}
        bands = {name: f"{name} band" for name in lines}
        figures = [
            figure(
                Chart(f"{title}, lag {lag}", unit, lines, scale, bands, smooth=True),
                chart_rows(here, metric),
            )
            for title, metric, unit, scale in CHARTS
        ]
        sections.append(PageSection(f"Lag {lag}", figures=figures))
    note = (
        f"Quickstart task, {steps} optimizer steps; bands: deviation over seeds. Algorithms are "
        "described in docs/algorithms.md."
    )
    page = Page("moerl bench", "Learning curves", paragraphs=[note], sections=sections)
    return write_html(out / "curves.html", page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--page", action="store_true", help="write the page, train nothing")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    todo = [] if arguments.page else missing(out, SERIES, arguments.seeds, arguments.steps)
    if todo:
        out.mkdir(parents=True, exist_ok=True)
        run_all(out, todo, arguments.steps)
    found = load(out, arguments.seeds, arguments.steps)
    if not found:
        sys.exit(f"{out} holds no run of {arguments.steps} steps")
    for row in (HEAD, *table(found)):
        print("  ".join(cell.ljust(26 if i == 0 else 18) for i, cell in enumerate(row)))
    print(write_page(out, found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

"""What algorithms and corrections do to learning, on the quickstart task at an exact lag.

    python bench/learning_curves.py --out runs/curves            (stopped? the same line goes on)
    python bench/learning_curves.py --out runs/curves --page     (the page again, of what is there)

GRPO, GSPO, CISPO and DeepSeek-V3.2 at `rollout.fixed_lag` 0 and 8, at lag 8 GRPO and DeepSeek-V3.2
also without their correction, each with several seeds.  A seed makes the initial weights and the
prompts, so all series of a seed start alike.  One engine serves all runs: a new run's trainer is a
new incarnation and publishes its own weights before the first rollout.  Runs are of optimizer
steps at a lag that does not depend on speed, so a busy machine changes nothing but the time.

Writes OUT/curves.html, and prints the table that it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

import ray

from moerl.config import load_config, save_config
from moerl.core.types import PolicyVersion
from moerl.data.tiny_model import make_tiny_model
from moerl.distributed.torchrun import TorchrunJob
from moerl.launch.run_context import RunContext, trainer_command, trainer_environment
from moerl.launch.supervision.actors import ControllerActor, EngineActor, ScorerActor, place
from moerl.launch.train import prepare
from moerl.observe.charts import Chart, Scale
from moerl.observe.metrics import Row, read_rows
from moerl.observe.page import Column, Page, PageSection, Table, figure, write_html
from moerl.runtime.process_tree import become_subreaper, end_descendants
from moerl.runtime.run_dir import RunDir

_POLL_S = 0.5


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


class Bed:
    """Ray, one engine and one scorer that serve run after run."""

    def __init__(self, plan: RunContext, scratch: Path) -> None:
        self._plan = plan
        ray.init(
            address="local",
            num_cpus=0,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(scratch / "ray"),
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ray.init puts its own in place
        self._engine = place(EngineActor, plan, 0, plan.config.engine.tp)
        self._scorer = place(ScorerActor, plan)
        ray.get(self._engine.ask.remote("start", PolicyVersion(0, 0)))
        self._runs = 0

    def train(self, plan: RunContext) -> Iterator[Row]:
        """Rows of a run as its steps are done.  Raises the run's first failure."""
        self._runs += 1
        bed = self._plan
        plan = replace(
            plan,
            incarnation=self._runs,  # above 0, so that the trainer publishes before it asks
            token=bed.token,
            node=bed.node,
            blob_dir=bed.blob_dir,
        )
        sizes = {0: plan.config.engine.tp}
        controller = place(ControllerActor, plan, {0: self._engine}, sizes, self._scorer)
        endpoint = ray.get(controller.open.remote())
        watch = controller.watch.remote()
        ray.get(controller.engines_started.remote())
        log = plan.run.logs / "trainer.log"
        trainer = TorchrunJob(trainer_command(plan, endpoint), trainer_environment(plan), log)
        try:
            while (code := trainer.poll()) is None:
                if ray.wait([watch], timeout=_POLL_S)[0]:
                    ray.get(watch)
                yield from ray.get(controller.poll.remote())[1]
        finally:
            trainer.terminate()
            trainer.wait()
        if code:
            sys.exit(f"the trainer of {plan.run.root} ended with {code}; see {log}")
        yield from ray.get(controller.poll.remote())[1]
        ray.get(controller.stop.remote())
        ray.kill(controller)


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


def plan_of(out: Path, line: Series, seed: int, steps: int) -> RunContext:
    """The run's own folder, begun anew."""
    run = RunDir(out / line.folder(seed))
    shutil.rmtree(run.root, ignore_errors=True)
    run.create()
    overrides = [*SETTINGS, *line.settings, f"rollout.fixed_lag={line.lag}", f"run.steps={steps}"]
    overrides += [f"run.seed={seed}", f"run.root={out}", f"model.path={_model(out, line, seed)}"]
    config = load_config(line.recipe, overrides)
    plan = prepare(config, run, resume=False)
    save_config(plan.config, run.config)
    return plan


def _model(out: Path, line: Series, seed: int) -> Path:
    folder = out / f"model-{seed}"
    if not folder.is_dir():
        make_tiny_model(folder, load_config(line.recipe).model.tiny, seed)
    return folder


def run_all(out: Path, todo: Sequence[tuple[Series, int]], steps: int, scratch: Path) -> None:
    line, seed = todo[0]
    _say(f"{len(todo)} runs of {steps} steps to go; the engine starts\n")
    bed = Bed(plan_of(out / "engine", line, seed, steps), scratch)
    begin = time.monotonic()
    for number, (line, seed) in enumerate(todo):
        plan = plan_of(out, line, seed, steps)
        for row in bed.train(plan):
            _say(f"{line.name}, lag {line.lag}, seed {seed}: step {row['step'] + 1} of {steps}")
        shutil.rmtree(plan.run.checkpoints)  # metrics are the result
        shutil.rmtree(plan.run.hf)
        minutes = (time.monotonic() - begin) / 60
        reward = fmean(r["reward/mean"] for r in read_rows(plan.run.metrics)[-steps // 10 :])
        left = minutes / (number + 1) * (len(todo) - number - 1)
        _say(
            f"[{number + 1} of {len(todo)}] {line.name}, lag {line.lag}, seed {seed}: last tenth "
            f"{reward:.3f}; {minutes:.0f} min so far, about {left:.0f} to go\n"
        )


def _say(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stdout.isatty() or text.endswith("\n") else "", end="")
    sys.stdout.flush()


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
        become_subreaper()
        os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        scratch = Path(tempfile.mkdtemp(prefix="moerl-curves-"))
        try:
            run_all(out, todo, arguments.steps, scratch)
        finally:
            ray.shutdown()  # while its servers live: its client aborts the process without them
            end_descendants(grace_s=2.0)
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(Path("/dev/shm") / scratch.name, ignore_errors=True)
    found = load(out, arguments.seeds, arguments.steps)
    if not found:
        sys.exit(f"{out} holds no run of {arguments.steps} steps")
    for row in (HEAD, *table(found)):
        print("  ".join(cell.ljust(26 if i == 0 else 18) for i, cell in enumerate(row)))
    print(write_page(out, found))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

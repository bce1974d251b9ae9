"""Runs of several arms and seeds, and what their held-out rewards say; for the benches of learning.

The held-out reward is the mean over the evaluations of the first, or the last, tenth of the steps.
Differences are over the seeds; their standard error is the larger of two: from the spread of the
seeds, and from that of the answers.

A run that is whole is not repeated.  The results are in OUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from figures import ROOT, machine

from moerl.observe.metrics import Row, read_rows
from moerl.runtime.run_dir import RunDir

STILL = "trainer.optimizer={lr: 0, min_lr: 0, warmup_steps: 0}"  # the arm "rate 0"
RUN_S = 900.0  # longest run on a machine that others share
LEARNS, IDLES = 5.0, 2.0  # standard errors: at least, below


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out reward of one run: means over evaluations, and their standard errors."""

    arm: str
    seed: int
    first: float
    first_se: float
    last: float
    last_se: float
    seconds: float  # of `moerl train`, start and end included
    warm_s: float  # of `moerl sft`; 0 = from random weights
    refused: float  # records, over the run

    @property
    def tenths(self) -> tuple[tuple[float, float], tuple[float, float]]:
        return (self.first, self.first_se), (self.last, self.last_se)


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference over the seeds."""

    mean: float
    se: float

    @property
    def errors(self) -> float:
        if self.mean == 0:
            return 0.0
        return self.mean / self.se if self.se else math.copysign(math.inf, self.mean)


Found = Mapping[str, Sequence[HeldOut]]  # by arm
Verdicts = Mapping[str, tuple[Gain, bool]]  # by requirement; True: it is met


# --- runs ----------------------------------------------------------------------------------------
def todo(out: Path, seeds: int, arms: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Runs without a result; seeds outermost, so that every arm has one before any has two."""
    for seed in range(seeds):
        yield from ((arm, seed) for arm in arms if not result_path(out, arm, seed).exists())


def result_path(out: Path, arm: str, seed: int) -> Path:
    return out / f"{arm.replace(' ', '-')}-{seed}.json"


def train(out: Path, arm: str, seed: int, settings: Sequence[str], warm_s: float = 0.0) -> HeldOut:
    """Train once; settings: the recipe and its overrides."""
    run = RunDir(out / f"run-{arm.replace(' ', '-')}-{seed}")
    shutil.rmtree(run.root, ignore_errors=True)
    names = [f"run.root={out}", f"run.seed={seed}", "--run", run.root.name]
    seconds = moerl(out, ["train", *settings, *names])
    rows = read_rows(run.metrics)
    steps = 1 + max(int(row["step"]) for row in rows if "loss/total" in row)
    first = mean_reward(rows, 0, steps / 10)
    last = mean_reward(rows, steps - steps / 10, steps)
    refused = sum(row[name] for row in rows for name in row if name.startswith("refused/"))
    return HeldOut(arm, seed, *first, *last, seconds, warm_s, refused)


def first_model(out: Path, seed: int, command: Sequence[str]) -> tuple[Path, float]:
    """(the model that the runs of a seed begin with, made once by a command; seconds it took)."""
    run, done = RunDir(out / f"start-{seed}"), out / f"start-{seed}.json"
    if not done.exists():
        shutil.rmtree(run.root, ignore_errors=True)
        names = [f"run.root={out}", f"run.seed={seed}", "--run", run.root.name]
        done.write_text(json.dumps({"seconds": moerl(out, [*command, *names])}))
    return run.hf, json.loads(done.read_text())["seconds"]


def moerl(out: Path, arguments: Sequence[str], limit_s: float = RUN_S) -> float:
    """Run a command of moerl; its output is in OUT/log.txt.  Returns its seconds."""
    begin = time.monotonic()
    with (out / "log.txt").open("a") as log:
        command = [sys.executable, "-m", "moerl", *arguments]
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, timeout=limit_s, check=False
        )
    if done.returncode:
        sys.exit(f"moerl {' '.join(arguments)} ended with {done.returncode}; see {out}/log.txt")
    return time.monotonic() - begin


def mean_reward(rows: Sequence[Row], begin: float, end: float) -> tuple[float, float]:
    """Mean over the evaluations of versions in [begin, end], and its standard error."""
    found = [row for row in rows if "eval/step" in row and begin <= row["eval/step"] <= end]
    mean = statistics.fmean(row["eval/reward_mean"] for row in found)
    return mean, math.hypot(*(row["eval/reward_se"] for row in found)) / len(found)


# --- figures -------------------------------------------------------------------------------------
def gain(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Over seeds, from (difference, its standard error) of each."""
    values = [value for value, _ in pairs]
    by_answers = math.hypot(*(se for _, se in pairs)) / len(pairs)
    by_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Gain(statistics.fmean(values), max(by_answers, by_seeds))


def rise(runs: Sequence[HeldOut]) -> Gain:
    return gain([(run.last - run.first, math.hypot(run.first_se, run.last_se)) for run in runs])


def above(runs: Sequence[HeldOut], controls: Sequence[HeldOut]) -> Gain:
    of = {control.seed: control for control in controls}
    pairs = [(run, of[run.seed]) for run in runs if run.seed in of]
    return gain([(a.last - b.last, math.hypot(a.last_se, b.last_se)) for a, b in pairs])


def learns(arm: str, found: Found) -> dict[str, tuple[Gain, bool]]:
    """That an arm learns: against its own beginning, and against `rate 0`, as far as they ran."""
    runs, still = found[arm], found["rate 0"]
    said = {}
    if runs:
        said[f"{arm}: last tenth above first"] = rise(runs), rise(runs).errors >= LEARNS
    if {run.seed for run in runs} & {run.seed for run in still}:
        over = above(runs, still)
        said[f"{arm} above rate 0, last tenth"] = over, over.errors >= LEARNS
    return said


def load(out: Path, arm: str, seeds: int) -> list[HeldOut]:
    paths = [result_path(out, arm, seed) for seed in range(seeds)]
    return [HeldOut(**json.loads(path.read_text())) for path in paths if path.exists()]


# --- command -------------------------------------------------------------------------------------
def report(out: Path, found: Found, said: Verdicts) -> None:
    """Print the table and write the results."""
    print(f"{'arm':9}  seed  first tenth      last tenth       run s  warm s  refused")
    for run in (run for runs in found.values() for run in runs):
        means = [f"{mean:.3f} +- {se:.3f}" for mean, se in run.tenths]
        counts = f"{run.seconds:5.0f}  {run.warm_s:6.0f}  {run.refused:7.0f}"
        print(f"{run.arm:9}  {run.seed:4}  {means[0]}  {means[1]}  {counts}")
    for name, (difference, met) in said.items():
        errors = f"{difference.mean:+.3f}, {difference.errors:.1f} standard errors"
        print(f"{name:34} {errors:36} {'met' if met else 'NOT MET'}")
    print(machine())
    results = {
        "machine": machine(),
        "runs": [asdict(run) for runs in found.values() for run in runs],
        "gains": {name: asdict(difference) for name, (difference, _) in said.items()},
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def arguments(description: str | None, out: str, arms: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, help="train at most so many now")
    parser.add_argument("--arms", nargs="+", choices=tuple(arms), default=tuple(arms))
    parser.add_argument("--settings", nargs="*", default=[], help="settings of every run")
    return parser


def run_arms(
    options: argparse.Namespace,
    arms: Sequence[str],
    play: Callable[[Path, str, int], HeldOut],
    verdicts: Callable[[Found], Verdicts],
) -> bool:
    """Train what is missing, then report; True if all seeds of all arms meet every requirement."""
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for arm, seed in list(todo(out, options.seeds, options.arms))[: options.runs]:
        result = play(out, arm, seed)
        result_path(out, arm, seed).write_text(json.dumps(asdict(result)) + "\n")
    found = {arm: load(out, arm, options.seeds) for arm in arms}
    said = verdicts(found)
    report(out, found, said)
    whole = all(len(runs) == options.seeds for runs in found.values())
    return whole and all(met for _, met in said.values())

"""Does rounding to bf16 with a dither learn better than rounding to the nearest?

    python bench/lora_dither.py --out runs/lora-dither           (stopped? the same line again)
    python bench/lora_dither.py --out runs/lora-dither --runs 1  (one run, then the table)
    python bench/lora_dither.py --full --rates 1e-5 1e-6         (all weights, from fp32 masters)
    python bench/lora_dither.py --sft                            (moerl sft, by the loss: no engine)

Each seed makes a first model in bf16 by `moerl train quickstart`.  From it begins, per learning
rate, one run of `moerl train quickstart-lora` with lora.rounding=nearest and one with dither; with
--full `moerl train quickstart` with trainer.optimizer.rounding.  Learned is the mean reward of the
last quarter of the steps less that of the first model, which is the same for both.  With --sft both
commands are `moerl sft`, and the figure is minus loss/nll: the arms see the same batches, so a seed
has no noise of sampling.  The table says the difference over the seeds and its standard error, of
pairs with equal seeds, and the mean of lora/changed_frac.

A run that is whole is not repeated.  The results are in OUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from figures import machine
from learning_arms import first_model, moerl

from moerl.observe.metrics import Row, read_rows
from moerl.runtime.run_dir import RunDir

ROUNDINGS = ("nearest", "dither")
BF16 = ["trainer.dtype=bf16", "engine.dtype=bfloat16", "checkpoint.every=0"]
RUN_S = 1800.0  # longest run on a machine that others share


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    rounding: str
    rate: float
    seed: int
    first: float  # mean reward, or minus the loss, of the first step, before any update
    last: float  # of the last quarter of the steps
    changed: float  # mean lora/changed_frac; 0 with --full
    mismatch: float  # largest mismatch/abs_dlogp_max/lag_0
    seconds: float


def todo(out: Path, options: argparse.Namespace) -> Iterator[tuple[int, float, str]]:
    """Runs without a result; seeds outermost, so that every arm has one before any has two."""
    for seed in range(options.seeds):
        for rate in options.rates:
            for rounding in ROUNDINGS:
                if not result_path(out, seed, rate, rounding).exists():
                    yield seed, rate, rounding


def result_path(out: Path, seed: int, rate: float, rounding: str) -> Path:
    return out / f"{rounding}-{rate:g}-{seed}.json"


def train(out: Path, seed: int, rate: float, rounding: str, options: argparse.Namespace) -> Learned:
    command, figure, sign = "train", "reward/mean", 1
    if options.sft:
        command, figure, sign = "sft", "loss/nll", -1
    start = [command, "quickstart", *BF16, f"run.steps={options.start_steps}"]
    (model, _), field = first_model(out, seed, start), "lora.rounding"
    if options.full:
        field = "trainer.optimizer.rounding"
    run = RunDir(out / f"run-{rounding}-{rate:g}-{seed}")
    shutil.rmtree(run.root, ignore_errors=True)
    rates = f"trainer.optimizer={{lr: {rate}, min_lr: {rate}}}"
    settings = [*BF16, f"run.steps={options.steps}", rates, f"{field}={rounding}"]
    names = [f"run.root={out}", f"run.seed={seed}", f"model.path={model}", "--run", run.root.name]
    recipe = "quickstart" if options.full else "quickstart-lora"
    seconds = moerl(out, [command, recipe, *settings, *options.settings, *names], RUN_S)
    rows = [row for row in read_rows(run.metrics) if figure in row]
    late = rows[-max(1, len(rows) // 4) :]
    return Learned(
        rounding,
        rate,
        seed,
        sign * rows[0][figure],
        sign * mean(late, figure),
        mean(rows, "lora/changed_frac"),
        max(row.get("mismatch/abs_dlogp_max/lag_0", 0.0) for row in rows),  # none with --sft
        seconds,
    )


def mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean([float(row[name]) for row in rows if name in row] or [0.0])


def gain(runs: Sequence[Learned]) -> tuple[float, float, int]:
    """What the dither learned more: mean over the seeds, its standard error, seeds."""
    last = {(run.seed, run.rounding): run.last for run in runs}
    seeds = [seed for seed, rounding in last if rounding == "dither" and (seed, "nearest") in last]
    more = [last[seed, "dither"] - last[seed, "nearest"] for seed in seeds]
    if len(more) < 2:
        return (more or [0.0])[0], math.inf, len(more)
    return statistics.fmean(more), statistics.stdev(more) / math.sqrt(len(more)), len(more)


def report(out: Path, options: argparse.Namespace) -> None:
    """Print the table and write the results."""
    every, gains = [], {}
    print("rate     rounding  seed  first   last    changed  mismatch     s")
    for rate in options.rates:
        paths = [result_path(out, s, rate, r) for r in ROUNDINGS for s in range(options.seeds)]
        runs = [Learned(**json.loads(path.read_text())) for path in paths if path.exists()]
        for run in runs:
            figures = f"{run.first:.3f}   {run.last:.3f}   {run.changed:.4f}   {run.mismatch:.1e}"
            print(f"{rate:<7g}  {run.rounding:8}  {run.seed:4}  {figures}  {run.seconds:5.0f}")
        more, error, seeds = gain(runs)
        print(f"{rate:<7g}  dither - nearest: {more:+.4f} +- {error:.4f}, {seeds} seeds")
        every += runs
        gains[f"{rate:g}"] = {"mean": more, "se": error, "seeds": seeds}
    print(machine())
    found = {"machine": machine(), "full": options.full, "gains": gains}
    found["runs"] = [asdict(run) for run in every]
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/lora-dither"))
    parser.add_argument("--full", action="store_true", help="train all weights, without adapters")
    parser.add_argument("--sft", action="store_true", help="moerl sft in place of moerl train")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-2, 1e-3, 1e-4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--start-steps", type=int, default=16, help="of the first model")
    parser.add_argument("--runs", type=int, help="train at most so many now")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of every run")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for seed, rate, rounding in list(todo(out, options))[: options.runs]:
        result = train(out, seed, rate, rounding, options)
        result_path(out, seed, rate, rounding).write_text(json.dumps(asdict(result)) + "\n")
    report(out, options)


if __name__ == "__main__":
    main()

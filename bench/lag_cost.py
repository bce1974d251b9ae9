"""What stale data cost: held-out reward at exact lags, and as a recipe runs, against lag 0.

    python bench/lag_cost.py --out runs/lag --seeds 1             (stopped? the same line again)
    python bench/lag_cost.py --out runs/lag --first-seed 10 --seeds 10 --arms "lag 0" "lag 4 m2po"
    python bench/lag_cost.py --task tool-use --out runs/lag-tool

Arms differ in lag, correction and the treatment of rollouts in flight; the arms of a seed start
from one model and see the same prompts.  The first line screens; the winner is confirmed on fresh
seeds.  An arm is level with lag 0 if two one-sided tests at 5 % say so: the 90 % interval of the
paired difference of held-out reward after the last step, by Student's t over the seeds, lies inside
+-0.03.

The second table explains: how far the policy moves per version of lag (k3 over the mean lag, in
nats: another learning rate moves it further or less), and the effective sample size of sequences,
both as means over the steps of all seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, report, result
from learning_arms import (
    Found,
    HeldOut,
    Verdicts,
    above,
    arguments,
    first_model,
    load,
    run_arms,
    train,
)

from moerl.observe.metrics import Row, read_rows
from moerl.runtime.run_dir import RunDir

LEVEL = 0.03
# 95 % quantiles of Student's t with 1, 2, ... degrees of freedom
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
LAGS, LAG_0, RECIPE = (1, 2, 4), "lag 0", "as the recipe"
CORRECTIONS: dict[str, list[str]] = {
    "": [],
    " proximal": ["algorithm.ratio=proximal"],
    " m2po": [
        "algorithm.objective=importance", "algorithm.corrections=[m2]", "algorithm.m2_limit=0.04",
    ],
}  # fmt: skip
ARMS: dict[str, list[str]] = {
    LAG_0: ["rollout.fixed_lag=0"],
    RECIPE: [],
    "in place": ["rollout.in_flight_mode=in_place"],
} | {
    f"lag {lag}{name}": [f"rollout.fixed_lag={lag}", *settings]
    for lag in LAGS
    for name, settings in CORRECTIONS.items()
}
HELD_OUT = (
    "evaluation={every: 40, prompts: 1024, max_requests: 256, hold_s: 120, temperature: 1.0, "
    "top_p: 0.95, top_k: 64}",
    "checkpoint.every=0",
    "checkpoint.hf=off",
    "observe.engine_alone_s=0",
)


def play(options: argparse.Namespace, out: Path, arm: str, seed: int) -> HeldOut:
    """Train one arm; the seed's first model is made by `moerl sft` where the task needs one."""
    seed, settings = options.first_seed + seed, [*ARMS[arm], *options.settings]
    if options.task == "sort":
        made = ["quickstart", f"run.steps={options.steps}", *HELD_OUT, *settings]
        return train(out, arm, seed, made)
    model, warm_s = first_model(out, seed, ["sft", "tool-use-start"])
    steps = [f"run.steps={options.steps}", f"model.path={model}"]
    return train(out, arm, seed, ["tool-use", *settings, *steps], warm_s)


def verdicts(found: Found) -> Verdicts:
    """For each arm, whether it is level with lag 0."""
    said = {}
    for arm, runs in found.items():
        if arm == LAG_0 or len(runs) < 2 or len(found[LAG_0]) < len(runs):
            continue
        gain = above(runs, found[LAG_0])
        half = half_width(gain.se, len(runs))
        said[f"{arm} - lag 0"] = gain, abs(gain.mean) + half <= LEVEL
    return said


def half_width(se: float, seeds: int) -> float:
    """Of the 90 % interval of a mean over seeds."""
    return STUDENT[seeds - 2] * se


def rows_of(out: Path, arm: str, seeds: Sequence[int]) -> list[Row]:
    name = arm.replace(" ", "-")
    paths = [RunDir(out / f"run-{name}-{seed}").metrics for seed in seeds]
    return [row for path in paths if path.exists() for row in read_rows(path)]


def explain(rows: Sequence[Row]) -> tuple[float, float]:
    """(k3 per version of lag, effective sample size of sequences): means over steps."""
    moved = [
        row["mismatch/k3"] / row["async/lag_mean"] for row in rows if row.get("async/lag_mean")
    ]
    sizes = [row["mismatch/ess_seq_frac"] for row in rows if "mismatch/ess_seq_frac" in row]
    return (
        statistics.fmean(moved) if moved else math.nan,
        statistics.fmean(sizes) if sizes else math.nan,
    )


def figures_of(said: Verdicts, seeds: int, task: str) -> list[Figure]:
    made = []
    for name, (gain, _) in said.items():
        half = half_width(gain.se, seeds)
        what = f"{task}: {name}"
        low, high = gain.mean - half, gain.mean + half
        made.append(Figure(what, gain.mean, "+.3f", low=low, high=high, level=90, rounds=seeds))
    return made


def main() -> None:
    parser = arguments(__doc__, "runs/lag", list(ARMS))
    parser.add_argument("--task", choices=("sort", "tool-use"), default="sort")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of the seeds; results stay apart"
    )
    parser.add_argument("--json", type=Path, help="write the figures for tools/results")
    options = parser.parse_args()
    out = options.out = options.out.resolve() / f"from-{options.first_seed}"

    def once(out: Path, arm: str, seed: int) -> HeldOut:
        return play(options, out, arm, seed)

    level = run_arms(options, options.arms, once, verdicts)
    found = {arm: load(out, arm, options.seeds) for arm in options.arms}
    print(f"{'arm':22}  k3 per version  ESS of sequences")
    for arm in options.arms:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        moved, size = explain(rows_of(out, arm, seeds))
        print(f"{arm:22}  {moved:14.1e}  {size:16.3f}")
    report(result(figures_of(verdicts(found), options.seeds, options.task)), options.json)
    sys.exit(0 if level else 1)


if __name__ == "__main__":
    main()

"""Do two roles of one policy learn with a baseline each, and does one baseline for both keep them?

    python bench/roles_learn.py --out runs/roles      (stopped? the same line goes on)

Recipe `proposer-solver` (`examples/two_roles.py`): a proposer earns up to ten points, a solver up
to one.  With one baseline the advantage of a solver is its distance to the points of the proposer.
Prints the held-out reward of the solver by step, a line for each run; the seeds of the arms are
paired.

Required, over the seeds: with two baselines the last tenth is above the first, and above one
baseline, by 5 standard errors; with one baseline the last tenth is below 2 (`learning_arms.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from learning_arms import (
    IDLES,
    LEARNS,
    Found,
    HeldOut,
    Verdicts,
    above,
    arguments,
    rise,
    run_arms,
    train,
)

from moerl.observe.metrics import read_rows
from moerl.runtime.run_dir import RunDir

TWO, ONE = "two baselines", "one baseline"
ARMS = {TWO: [], ONE: [f"task.roles.{role}.baseline=group" for role in ("proposer", "solver")]}
SETTINGS = [
    "proposer-solver",
    "run.steps=60",
    "trainer.parallel={dp: 1, ep: 1}",  # one core trains while the other generates
    "evaluation.every=6",
    "evaluation.prompts=100",
    "evaluation.temperature=1.0",
    "evaluation.hold_s=60",
    "checkpoint.every=0",
    "observe.engine_alone_s=0",
]


def play(settings: Sequence[str], out: Path, arm: str, seed: int) -> HeldOut:
    return train(out, arm, seed, [*SETTINGS, *ARMS[arm], *settings])


def verdicts(found: Found) -> Verdicts:
    two, one, said = found[TWO], found[ONE], {}
    if two:
        said[f"{TWO}: last tenth above first"] = rise(two), rise(two).errors >= LEARNS
    if one:
        said[f"{ONE}: last tenth above first"] = rise(one), rise(one).errors < IDLES
    if {run.seed for run in two} & {run.seed for run in one}:
        over = above(two, one)
        said[f"{TWO} above {ONE}"] = over, over.errors >= LEARNS
    return said


def curves(out: Path, arms: Sequence[str], seeds: int) -> None:
    for arm in arms:
        for seed in range(seeds):
            run = RunDir(out / f"run-{arm.replace(' ', '-')}-{seed}")
            rows = [row for row in read_rows(run.metrics) if "eval/step" in row]
            points = [f"{row['eval/step']:.0f}:{row['eval/reward_mean']:.3f}" for row in rows]
            print(f"{arm:14} {seed}  {' '.join(points)}")


def main() -> None:
    options = arguments(__doc__, "runs/roles-bench", list(ARMS)).parse_args()
    is_met = run_arms(options, list(ARMS), partial(play, options.settings), verdicts)
    curves(options.out.resolve(), list(ARMS), options.seeds)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()

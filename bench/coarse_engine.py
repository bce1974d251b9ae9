"""What score centering does to learning when the engine's weights are coarse on purpose.

    python bench/coarse_engine.py --out runs/coarse              (stopped? the same line goes on)

The quickstart's task at an exact lag of 0, with objectives that weigh a token in three ways: not at
all, bounded, masked.  Each trains against an exact engine, against one whose weights are rounded
(bench/coarse_trainer.py), and against that one with score centering.  A seed makes the initial
weights and the prompts.  Prints, and writes into OUT/table.txt, means over the seeds of the whole
runs: the reward in the last tenth of the steps with its deviation, and k3.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from unittest import mock

from moerl.observe.metrics import Row, read_rows

OBJECTIVES = {
    "reinforce": ("algorithm.objective=reinforce",),
    "cispo": ("algorithm.objective=cispo", "algorithm.clip_low=1", "algorithm.clip_high=4"),
    "ppo_clip": (),
}
ARMS = {
    "exact": ("", "algorithm.centering=false"),
    "coarse": ("--coarse", "algorithm.centering=false"),
    "coarse-centred": ("--coarse", "algorithm.centering=true"),
}
SETTINGS = (
    *("rollout.fixed_lag=0", "trainer.parallel.dp=1", "trainer.parallel.ep=1"),
    *("checkpoint.every=0", "observe.engine_alone_s=0", "observe.sample_rollouts=0"),
)
HEAD = ("objective", "engine", "seeds", "reward", "spread", "k3")


def train(options: argparse.Namespace, objective: str, arm: str, seed: int) -> None:
    """Begin the run anew.  Raises CalledProcessError where it fails."""
    coarse, centering = ARMS[arm]
    name = f"{objective}-{arm}-{seed}"
    settings = [*SETTINGS, *OBJECTIVES[objective], centering, f"run.seed={seed}"]
    settings += [f"run.steps={options.steps}", f"run.root={options.out}"]
    shutil.rmtree(options.out / name, ignore_errors=True)
    command = [sys.executable, __file__, *([coarse] if coarse else []), "moerl", "train"]
    subprocess.run([*command, "quickstart", *settings, "--run", name], check=True)


def moerl(arguments: list[str], *, coarse: bool) -> None:
    """`moerl ARGUMENTS`, with the coarse trainer."""
    from moerl import cli
    from moerl.launch import run_context

    plain, script = run_context._rank, str(Path(__file__).with_name("coarse_trainer.py"))

    def rank(*given: object) -> list[str]:
        command = plain(*given)  # type: ignore[arg-type]
        at = command.index("moerl.trainer.main")
        return [*command[: at - 1], script, *command[at + 1 :]]

    with mock.patch.object(run_context, "_rank", rank if coarse else plain):
        sys.argv = ["moerl", *arguments]
        cli.main()


def rows_of(options: argparse.Namespace, objective: str, arm: str, seed: int) -> list[Row]:
    """Empty for a run that is not whole."""
    rows = read_rows(options.out / f"{objective}-{arm}-{seed}" / "metrics.jsonl")
    return rows if len(rows) >= options.steps else []


def table(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    yield HEAD
    for objective in OBJECTIVES:
        for arm in ARMS:
            every = [rows_of(options, objective, arm, seed) for seed in range(options.seeds)]
            runs = [rows for rows in every if rows]
            if runs:
                tenth = max(1, options.steps // 10)
                last = [fmean(row["reward/mean"] for row in rows[-tenth:]) for rows in runs]
                k3 = fmean(row["mismatch/k3"] for rows in runs for row in rows)
                cells = (f"{fmean(last):.3f}", f"{pstdev(last):.3f}", f"{k3:.1e}")
                yield (objective, arm, str(len(runs)), *cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/coarse"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--objectives", nargs="*", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--most", type=int, default=0, help="runs of this call; 0 = all")
    options = parser.parse_args()
    options.out = options.out.resolve()
    todo = [
        (objective, arm, seed)
        for seed in range(options.seeds)
        for objective in options.objectives
        for arm in ARMS
        if not rows_of(options, objective, arm, seed)
    ]
    for objective, arm, seed in todo[: options.most or None]:
        train(options, objective, arm, seed)
    lines = ["  ".join(cell.ljust(16) for cell in row) for row in table(options)]
    (options.out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    given = sys.argv[1:]
    if "moerl" in given[:2]:
        moerl(given[given.index("moerl") + 1 :], coarse=given[0] == "--coarse")
    else:
        main()

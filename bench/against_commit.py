"""This tree beside an earlier commit: seconds per step by part, engine tokens per second.

    python bench/against_commit.py COMMIT [--pairs 2] [--steps 40] [--json FILE]

Runs of the quickstart alternate between both trees, each from its own folder: the commit is checked
out below build/against, and both use this Python, so their locks should agree.  A ratio is this
tree / the commit, of medians over the steps of a run behind the first five; below 1 is faster for
seconds, above 1 for tokens.  Five minutes for two pairs on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from figures import ROOT, Figure, of_ratios, report, result

WARM = 5  # first steps of a run, which are left out
PARTS = {
    "seconds per step": "step",  # from row to row
    "trainer: optimizer step": "perf/step_s",
    "trainer: packing and loading routes": "perf/pack_s",
    "trainer: forward and backward": "perf/forward_backward_s",
    "trainer: waiting for a batch": "async/trainer_wait_s",
    "engine tokens per second": "perf/rollout_tokens_per_s",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    commit = _git("rev-parse", "--short=8", f"{args.commit}^{{commit}}")
    trees = {"this": ROOT, commit: checked_out(commit)}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for pair in range(args.pairs):
        for name in [*trees] if pair % 2 else [*reversed(trees)]:
            measured[name].append(parts_of(run(trees[name], f"{name}-{pair}", args.steps)))
            shown = ", ".join(f"{part} {s:.3g}" for part, s in measured[name][-1].items())
            print(f"[against] pair {pair}, {name}: {shown}", flush=True)
    figures = [ratio(part, commit, measured["this"], measured[commit]) for part in PARTS]
    report(result(figures, {"commit": commit, "runs": measured}), args.json)


def checked_out(commit: str) -> Path:
    """A work tree of the commit with the entry points of its own package."""
    folder = ROOT / "build" / "against" / commit
    if not folder.exists():
        _git("worktree", "add", "--detach", str(folder), commit)
    command = [sys.executable, "setup.py", "-q", "egg_info"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def run(tree: Path, name: str, steps: int) -> list[dict[str, float]]:
    """Rows of a quickstart of `steps` steps from a tree; its folder is made anew."""
    root = ROOT / "build" / "against" / "runs"
    env = os.environ | {"PYTHONPATH": str(tree)}
    subprocess.run(
        [sys.executable, "-m", "moerl.kernels.build"], cwd=tree, env=env, check=True,
        capture_output=True,
    )  # fmt: skip
    settings = [f"run.steps={steps}", f"run.root={root}", "run.console=lines"]
    words = ["quickstart", *settings, "observe.engine_alone_s=0", "checkpoint.hf=off"]
    folder = root / name
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    with (root.parent / f"{name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "moerl", "train", *words, "--run", name],
            cwd=tree, env=env, check=True, stdout=log, stderr=log,
        )  # fmt: skip
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def parts_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the steps of one run behind the first ones."""
    times = [row["time_s"] for row in rows]
    for row, begin in zip(rows[1:], times, strict=False):
        row["step"] = row["time_s"] - begin
    return {part: statistics.median(row[key] for row in rows[WARM:]) for part, key in PARTS.items()}


def ratio(
    part: str, commit: str, this: list[dict[str, float]], other: list[dict[str, float]]
) -> Figure:
    return of_ratios(
        f"{part}, this tree / {commit}",
        [a[part] / b[part] for a, b in zip(this, other, strict=True)],
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()

"""Where the pause of a publish goes, from the trace of a run: median and worst of every part.

    tools/quickstart --run pause run.steps=12
    python bench/publish_pause.py runs/pause [--skip 1]

The pause is the time in which an engine has no running request because of a commit:

    drain    before it: aborting what runs, until the last partial output is back
    reach    the commit request on its way to the schedulers: HTTP, a forward pass in flight, and
             the ranks telling each other that they hold the version
    commit   in the schedulers: the copy into live weights, hooks, emptied prefix cache
    - cpu    of that, the time on a CPU; on a machine without GPU the rest of the commit was spent
             waiting for a CPU that another process had, and so was most of `reach` and `rest`
    rest     the slowest rank, and the answer on its way back

    pause = reach + commit + rest; the target is 1.5 x the commit

The first publish is not counted: it makes the views that later ones use again.  With in_place and
retract nothing is drained and the pause is the commit.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_spans

PARTS = ("pause_s", "drain_s", "reach_s", "commit_s", "commit_cpu_s", "rest_s")
NAMES = {"commit_cpu_s": "- cpu"}


def updates(run: RunDir, skip: int) -> list[dict]:
    """The commits of all engines, the first `skip` of each left out."""
    found, seen = [], dict[str, int]()
    for span in read_spans(run.trace):
        if span["name"] == "update" and "commit_cpu_s" in span:
            seen[span["process"]] = seen.get(span["process"], 0) + 1
            if seen[span["process"]] > skip:
                rest_s = span["pause_s"] - span["reach_s"] - span["commit_s"]
                found.append(span | {"rest_s": max(0.0, rest_s)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--skip", type=int, default=1, help="first publishes of each engine")
    arguments = parser.parse_args()
    found = updates(RunDir(arguments.run), arguments.skip)
    if not found:
        raise SystemExit(f"{arguments.run} has no trace of a commit after the first")
    print(f"{len(found)} commits; load now {os.getloadavg()[0]:.1f}")
    print(f"{'ms':<10}{'median':>9}{'worst':>9}   in the worst pause")
    worst = max(found, key=lambda span: span["pause_s"])
    for part in PARTS:
        values = [1e3 * span[part] for span in found]
        print(
            f"{NAMES.get(part, part[:-2]):<10}{statistics.median(values):>9.1f}{max(values):>9.1f}"
            f"{1e3 * worst[part]:>12.1f}"
        )
    ratios = sorted(span["pause_s"] / span["commit_s"] for span in found)
    print(f"pause / commit: median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}")
    print(f"worst: {worst['process']}, version {worst['version']}")


if __name__ == "__main__":
    main()

"""The simulation of `moerl/planning/step_simulation.py` against the runs of bench/async_speedup.py.

    python bench/async_speedup.py && python bench/sim_pipeline.py [--work DIR]

Service times are taken from the synchronous runs alone: seconds of training, freezing, publishing
and pausing as the timeline has them, and decode times from `async_speedup.fit_decode`; a prompt's
prefill is not told from them.  Lengths are those seen, waits those of the task.
Every configuration is then predicted and compared with the median of its measured wall times:
within 15%, or exit status 1.  The asynchronous runs are predictions, the synchronous one a fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from async_speedup import GROUPS, ROOT, SCORERS, SIBLINGS, Result, fit_decode

from moerl.planning.step_simulation import Costs, Topology, Workload, simulate

LIMIT = 0.15
ENGINES = 1
SEEDS = 5  # simulated runs with other lengths, averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "async_speedup")
    args = parser.parse_args()
    kept = json.loads((args.work / "results.json").read_text())
    results = {int(depth): runs for depth, runs in kept["results"].items()}
    workload, costs = workload_of(results, Path(kept["task"])), costs_of(results[0])
    print(
        f"from the synchronous runs: train {statistics.fmean(costs.train_s):.3f} s, "
        f"decode step {costs.token_s * 1e3:.2f} ms + "
        f"{costs.request_token_s * 1e3:.3f} ms per request, "
        f"snapshot {costs.snapshot_s * 1e3:.0f} ms, "
        f"publish {costs.transfer_s * 1e3:.0f} ms, pause {costs.pause_s * 1e3:.0f} ms, overhead "
        f"{costs.overhead_s * 1e3:.0f} ms"
    )
    print(f"\n{'depth':>5} {'measured s':>11} {'simulated s':>12} {'error':>7}")
    holds = True
    for depth, runs in results.items():
        measured = statistics.median(run["wall_s"] for run in runs)
        wall_s = predict(workload, costs, depth, runs[0]["steps"])
        error = wall_s / measured - 1
        holds &= abs(error) <= LIMIT
        print(f"{depth:>5} {measured:>11.1f} {wall_s:>12.1f} {error:>+7.1%}")
    print(f"{'PASS' if holds else 'FAIL'}  every wall time within {LIMIT:.0%}")
    raise SystemExit(0 if holds else 1)


def predict(workload: Workload, costs: Costs, depth: int, steps: int) -> float:
    """Mean wall time over simulated runs that draw other lengths."""
    walls = []
    for seed in range(SEEDS):
        lengths = workload.lengths[seed:] + workload.lengths[:seed]  # type: ignore[operator]
        drawn = Workload(workload.groups_per_step, workload.group_size, lengths, workload.waits_s)
        walls.append(simulate(drawn, costs, Topology(ENGINES, depth), steps).wall_s)
    return statistics.fmean(walls)


def workload_of(results: dict[int, list[Result]], task: Path) -> Workload:
    """Lengths seen in all runs, brought to their exact mean; waits in the order of the task."""
    runs = [run for runs in results.values() for run in runs]
    lengths = [n for run in runs for n in run["lengths"]]
    waits = [json.loads(line)["wait_s"] for line in task.read_text().splitlines()]
    factor = statistics.fmean(run["length_mean"] for run in runs) / statistics.fmean(lengths)
    scaled = [max(1, round(n * factor)) for n in lengths]
    return Workload(GROUPS, SIBLINGS, scaled, waits)


def costs_of(runs: list[Result]) -> Costs:
    """Service times of synchronous runs."""
    token_s, request_token_s = fit_decode(runs)
    pause_s = median(runs, "pause_s")
    train_s = [seconds for run in runs for seconds in run["train_s"]]
    idle = [run["wall_s"] * (1 - run["trainer_idle"]) - run["trainer_busy_s"] for run in runs]
    return Costs(
        train_s=train_s,
        token_s=token_s,
        request_token_s=request_token_s,
        prefill_token_s=request_token_s,  # at most: a prompt token is cheaper than a decoded one
        snapshot_s=median(runs, "snapshot_s"),
        transfer_s=max(0.0, median(runs, "sync_s") - pause_s),
        pause_s=pause_s,
        overhead_s=max(0.0, statistics.fmean(idle) / runs[0]["steps"]),
        scorers=SCORERS,
    )


def median(runs: list[Result], name: str) -> float:
    """Over all values of all runs; 0 when there is none."""
    values = [value for run in runs for value in run[name]]
    return float(statistics.median(values)) if values else 0.0


if __name__ == "__main__":
    main()

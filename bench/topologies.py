"""Steps of engines and trainer divided and in turns: measured, and forecast before.

    python bench/topologies.py [--work DIR] [--steps 24] [WORKLOAD ...]

Real runs of `moerl train` on two cores, as two devices: divided has an engine on one and a trainer
rank on the other, turns have an engine and a trainer rank on both.  Service times come from short
synchronous runs of each topology: seconds of training, publishing, falling asleep and waking up,
and decode times by least squares from the divided one.  `moerl.planning.step_simulation` then
forecasts runs that have a batch more in flight; these are measured after that.

Where the topologies differ by more than 20 %, the forecast must have their order, or exit status 1.
A run that is done is not repeated: start the same command again after an interruption.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_speedup import ROOT, Result, run_once, write_task
from sim_pipeline import costs_of

from moerl.observe.metrics import read_rows
from moerl.observe.overlap import intervals, length
from moerl.planning.step_simulation import Costs, Topology, Workload, simulate
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_spans

DIFFER = 1.2
DEPTH, CALIBRATION = 1, 8  # rollout.buffer_depth of what is forecast; steps of a synchronous run
SIBLINGS = 8
WORKLOADS = {  # groups of a step, longest answer
    "short": (16, 8),
    "long": (4, 256),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "divided": {},
    "turns": {
        "cluster.colocated": "turns",
        "rollout.in_flight_mode": "retract",
        "engine.count": 2,
        "trainer.parallel.dp": 2,
    },
}
TOPOLOGIES = {"divided": Topology(1, DEPTH), "turns": Topology(0, DEPTH, shared=2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "topologies")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    args = parser.parse_args()
    holds = [compare(args.work / name, name, args.steps) for name in args.workloads]
    raise SystemExit(0 if all(holds) else 1)


def compare(folder: Path, name: str, steps: int) -> bool:
    """Forecast and measure one workload; whether the order is right."""
    folder.mkdir(parents=True, exist_ok=True)
    groups, longest = WORKLOADS[name]
    task = write_task(folder, groups * steps * 4, 0.0)
    shape = {"rollout.groups_per_step": groups, "sampling.max_new_tokens": longest}

    def run(topology: str, depth: int, steps: int) -> Result:
        changes = shape | SETTINGS[topology]
        run_name = f"{topology}-depth{depth}"
        return run_once(folder, run_name, depth, steps, task, pins=False, **changes)

    calibration = {topology: run(topology, 0, CALIBRATION) for topology in SETTINGS}
    forecast = {}
    for topology in SETTINGS:
        work = workload(calibration.values(), groups)
        costs = service(calibration, topology, RunDir(folder / f"{topology}-depth0"))
        print(f"{name}, {topology}: {shown(costs)}", flush=True)
        forecast[topology] = simulate(work, costs, TOPOLOGIES[topology], steps).wall_s / steps
    measured = {
        topology: (found := run(topology, DEPTH, steps))["wall_s"] / found["steps"]
        for topology in SETTINGS
    }
    print(f"\n{name:<12}{'measured s':>12}{'forecast s':>12}{'error':>10}")
    for topology, step_s in measured.items():
        error = forecast[topology] / step_s - 1
        print(f"{topology:<12}{step_s:>12.2f}{forecast[topology]:>12.2f}{error:>+10.1%}")
    ratio, told = (found["turns"] / found["divided"] for found in (measured, forecast))
    differ = max(ratio, 1 / ratio) > DIFFER
    right = (ratio > 1) == (told > 1)
    word = "the same" if not differ else "PASS" if right else "FAIL"
    print(
        f"{word}: turns take {ratio:.2f} times as long as divided, forecast {told:.2f}\n",
        flush=True,
    )
    return right or not differ


def workload(runs: Any, groups: int) -> Workload:
    """Lengths seen, brought to their exact mean."""
    runs = list(runs)
    lengths = [n for run in runs for n in run["lengths"]]
    factor = statistics.fmean(run["length_mean"] for run in runs) / statistics.fmean(lengths)
    return Workload(groups, SIBLINGS, [max(1, round(n * factor)) for n in lengths])


def service(calibration: dict[str, Result], topology: str, run: RunDir) -> Costs:
    """Service times of synchronous runs."""
    costs = costs_of([calibration["divided"]])
    if topology == "divided":
        return costs
    found, rows = calibration["turns"], read_rows(run.metrics)
    spans = read_spans(run.trace)
    parts = {
        part: length(intervals(spans, "trainer-0", part)) / found["steps"]
        for part in ("unpark", "hand over")
    }
    close_s, open_s = (
        statistics.median(row[name] for row in rows if name in row)
        for name in ("turn/close_s", "turn/open_s")
    )
    waits_s = found["wall_s"] * found["trainer_idle"]
    known_s = found["trainer_busy_s"] + waits_s + found["steps"] * sum(parts.values())
    return replace(
        costs,
        train_s=found["train_s"],
        snapshot_s=parts["hand over"],
        transfer_s=0.0,
        pause_s=0.0,
        close_s=close_s + parts["unpark"],
        open_s=open_s,
        overhead_s=max(0.0, found["wall_s"] - known_s) / found["steps"],
    )


def shown(costs: Costs) -> str:
    return (
        f"train {statistics.fmean(costs.train_s):.3f} s, decode step {costs.token_s * 1e3:.2f} + "
        f"{costs.request_token_s * 1e3:.3f} ms a request, publish "
        f"{costs.snapshot_s + costs.transfer_s + costs.pause_s:.3f} s, asleep {costs.close_s:.3f}, "
        f"awake {costs.open_s:.3f} s, overhead {costs.overhead_s:.3f} s"
    )


if __name__ == "__main__":
    main()

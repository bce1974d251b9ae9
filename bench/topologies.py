"""Steps of engines and trainer divided and in turns: measured, and forecast before.

    python bench/topologies.py [--work DIR] [--steps 24] [WORKLOAD ...]

Real runs of `moerl train` on two cores, as two devices: divided has an engine on one and a trainer
rank on the other, turns have an engine and a trainer rank on both.  Service times come from a short
synchronous run of each: seconds of training, publishing, falling asleep and waking up, decode times
by least squares, and what a batch takes besides, in the controller and for rewards.
`moerl.planning.step_simulation` then forecasts runs that have a batch more in flight, which are
measured after that.

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
from moerl.observe.overlap import intervals
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
ENGINES = {"divided": 1, "turns": 2}


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
    for topology, engines in ENGINES.items():
        found = calibration[topology]
        costs = service(found, engines, RunDir(folder / f"{topology}-depth0"))
        work = workload(found, groups)
        alone = simulate(work, costs, placed(topology, 0), CALIBRATION).step_s
        rest_s = max(0.0, step_s(found) - alone)
        work = replace(work, waits_s=(rest_s,))
        print(f"{name}, {topology}: {shown(costs)}, the rest of a batch {rest_s:.3f} s", flush=True)
        forecast[topology] = simulate(work, costs, placed(topology, DEPTH), steps).step_s
    measured = {topology: step_s(run(topology, DEPTH, steps)) for topology in SETTINGS}
    print(f"\n{name:<12}{'measured s':>12}{'forecast s':>12}{'error':>10}")
    for topology, seconds in measured.items():
        error = forecast[topology] / seconds - 1
        print(f"{topology:<12}{seconds:>12.2f}{forecast[topology]:>12.2f}{error:>+10.1%}")
    ratio, told = (found["turns"] / found["divided"] for found in (measured, forecast))
    differ = max(ratio, 1 / ratio) > DIFFER
    right = (ratio > 1) == (told > 1)
    word = "the same" if not differ else "PASS" if right else "FAIL"
    print(f"{word}: turns take {ratio:.2f} times as long as divided, forecast {told:.2f}\n")
    return right or not differ


def placed(topology: str, depth: int) -> Topology:
    count = ENGINES[topology]
    return Topology(0, depth, count) if topology == "turns" else Topology(count, depth)


def step_s(run: Result) -> float:
    """Seconds of a step, without the first two: the first batch warms engines and ranks up."""
    ends = run["step_ends_s"]
    return float(ends[-1] - ends[1]) / (len(ends) - 2)


def workload(run: Result, groups: int) -> Workload:
    """Lengths seen, brought to their exact mean."""
    factor = run["length_mean"] / statistics.fmean(run["lengths"])
    lengths = [max(1, round(n * factor)) for n in run["lengths"]]
    return Workload(groups, SIBLINGS, lengths)


def service(run: Result, engines: int, folder: RunDir) -> Costs:
    """Service times of a synchronous run, without its first step.  engines: share a batch."""
    warm = run | {
        "begin_s": run["step_ends_s"][0],
        "step_ends_s": run["step_ends_s"][1:],
        "longest": run["longest"][1:],
        "tokens": [tokens / engines for tokens in run["tokens"][1:]],
        "train_s": run["train_s"][1:],
    }
    # A forward pass of as many ranks as engines, each on a core.
    prefill_s = engines * sum(run["train_s"]) / sum(run["tokens"]) / 3
    costs = replace(costs_of([warm]), scorers=0, overhead_s=0.0, prefill_token_s=prefill_s)
    rows, spans = read_rows(folder.metrics), read_spans(folder.trace)
    if not any("turn/close_s" in row for row in rows):
        return costs
    hand_s, unpark_s = (
        statistics.median(end - begin for begin, end in intervals(spans, "trainer-0", name))
        for name in ("hand over", "unpark")
    )
    close_s, open_s = (
        statistics.median(row[name] for row in rows if name in row)
        for name in ("turn/close_s", "turn/open_s")
    )
    return replace(
        costs,
        snapshot_s=hand_s,
        transfer_s=0.0,
        pause_s=0.0,
        close_s=close_s + unpark_s,
        open_s=open_s,
    )


def shown(costs: Costs) -> str:
    return (
        f"train {statistics.fmean(costs.train_s):.3f} s, decode step {costs.token_s * 1e3:.2f} + "
        f"{costs.request_token_s * 1e3:.3f} ms a request, publish "
        f"{costs.snapshot_s + costs.transfer_s + costs.pause_s:.3f} s, asleep {costs.close_s:.3f}, "
        f"awake {costs.open_s:.3f} s"
    )


if __name__ == "__main__":
    main()

"""What asynchrony buys: one workload run synchronously and at buffer depths 1, 2 and 4.

    python bench/async_speedup.py [--work DIR] [--steps 12] [--repeats 3] [--quick]

Real runs of `moerl train`: one SGLang engine pinned to one core, one trainer rank to the other (the
rest runs beside the engine, where its CPU time counts against asynchrony).  Every run trains the
same number of steps of the same model on the same prompts.  Lengths are long-tailed by the tiny
model's own end-of-text probabilities, which differ by prompt; every group waits for a tool, a sleep
drawn from a Pareto distribution by its prompt.  A calibration run scales the waits to
`--wait-share` of a step's work.
Repetitions are interleaved, so that a noisy machine hits all alike.

Wall time is counted from the trainer's first request for a batch to the end of the last step: the
first batch, which nothing can overlap, is inside.  Idle is what the timeline says: the engine
without a call, the trainer waiting for a batch.

What overlap can remove: with the work of both sides as it is in the synchronous runs, the larger
side has to be done and the rest can be hidden behind it.  Required: that rest is at least 30% of
the synchronous wall time, and the best depth removes at least 80% of it.  Exit status 1 when not.

A deep buffer may remove more than overlap does, since requests of several batches share decode
steps.  So a second line says how far the best depth is from what no schedule can beat: the
trainer's work, the engine's at full occupancy (a decode step costs `a + b * requests`, by least
squares over the synchronous runs; at depth D at most `(D + 1) * groups * siblings` requests share
`a`), and the chain of versions (one batch in D + 1 waits for the training of another).

A run that is done is not repeated: start the same command again after an interruption.  Results
are in DIR/results.json, which bench/sim_pipeline.py reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from moerl.observe.metrics import read_rows
from moerl.observe.overlap import Interval, intersect, intervals, length
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_spans

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (0, 1, 2, 4)
GROUPS, SIBLINGS, MAX_TOKENS = 4, 8, 256
BOUND_AT_LEAST, REMOVED_AT_LEAST = 0.30, 0.80
RUN_S = 400.0  # longest run
SCORERS = 10
MODEL = {"hidden_size": 128, "num_layers": 4, "num_experts": 16, "initializer_range": 0.12}

Result = dict[str, Any]


# --- the task ------------------------------------------------------------------------------------
def tool_reward(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    """Waits once per group, like a tool that all siblings call; then a score that varies."""
    once = Path(extra["marks"]) / str(extra["index"])
    try:
        once.touch(exist_ok=False)
        time.sleep(extra["wait_s"])
    except FileExistsError:
        pass
    return sum(character.isdigit() for character in response) / max(1, len(response))


def write_task(folder: Path, count: int, scale_s: float) -> Path:
    """Prompts with a Pareto(1.3) wait each, mean about 4 before the cap at 12, times scale_s."""
    (folder / "marks").mkdir(parents=True, exist_ok=True)
    draw = random.Random(5)
    path = folder / f"task-{scale_s:.4f}.jsonl"
    with path.open("w") as file:
        for index in range(count):
            wait_s = min(12.0, draw.paretovariate(1.3)) * scale_s
            item = {"prompt": f"{draw.randrange(10**6)}=", "answer": "", "index": index}
            extra = {"wait_s": round(wait_s, 4), "marks": str(folder / "marks")}
            file.write(json.dumps(item | extra) + "\n")
    return path


# --- one run -------------------------------------------------------------------------------------
def settings(depth: int, steps: int, task: Path, **changes: object) -> list[str]:
    """changes: further settings, which replace those of the same name."""
    model = [f"model.tiny.{name}={value}" for name, value in MODEL.items()]
    found = [
        *model,
        f"run.steps={steps}",
        "run.console=quiet",
        "task.name=jsonl",
        f"task.path={task}",
        "task.reward=bench.async_speedup:tool_reward",
        "task.shuffle=false",
        f"task.scorer_workers={SCORERS}",
        "task.score_timeout_s=120",
        f"sampling.max_new_tokens={MAX_TOKENS}",
        "sampling.top_p=1.0",
        f"rollout.groups_per_step={GROUPS}",
        f"rollout.group_size={SIBLINGS}",
        f"rollout.buffer_depth={depth}",
        "rollout.max_lag=8",
        "trainer.parallel.dp=1",
        "trainer.parallel.ep=1",
        "trainer.optimizer.lr=1e-6",  # lengths stay what they are in all runs
        "trainer.optimizer.min_lr=1e-6",
        "checkpoint.every=0",
        "replay.probe=0",
        f"observe.sample_rollouts={steps}",
        "observe.engine_alone_s=0",
    ]
    whole = dict(item.split("=", 1) for item in found) | changes
    return [f"{name}={value}" for name, value in whole.items()]


def run_once(
    folder: Path,
    name: str,
    depth: int,
    steps: int,
    task: Path,
    *,
    pins: bool = True,
    **changes: Any,
) -> Result:
    """Train; returns the measured result, also kept in the run's folder."""
    done = folder / name / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.rmtree(folder / "marks", ignore_errors=True)
    (folder / "marks").mkdir()
    command = [sys.executable, "-m", "moerl", "train", "quickstart", f"run.root={folder}"]
    command += ["--run", name, *settings(depth, steps, task, **changes)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if pins:
                _pin(process, folder / name)
            code = process.wait(RUN_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
    if code:
        raise SystemExit(f"{name} failed: {(folder / f'{name}.txt').read_text()[-2000:]}")
    result = measure(RunDir(folder / name)) | {"depth": depth, "steps": steps}
    done.write_text(json.dumps(result))
    return result


def _pin(process: subprocess.Popen[bytes], run: Path) -> None:
    """Trainer ranks to the last core, everything else to the first, as soon as all are up."""
    import psutil

    deadline = time.monotonic() + RUN_S
    while not (run / "pids.json").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            return
        time.sleep(0.05)
    cores = sorted(os.sched_getaffinity(0))
    trainer = psutil.Process(json.loads((run / "pids.json").read_text())["trainer"])
    own = {member.pid for member in (trainer, *trainer.children(recursive=True))}
    for member in psutil.Process(process.pid).children(recursive=True):
        core = cores[-1] if member.pid in own else cores[0]
        for thread in Path(f"/proc/{member.pid}/task").glob("*"):
            try:
                os.sched_setaffinity(int(thread.name), {core})
            except (ProcessLookupError, OSError):
                continue


def measure(run: RunDir) -> Result:
    """Wall, busy and idle times of a finished run, and its service times for the simulation."""
    rows, spans = read_rows(run.metrics), read_spans(run.trace)
    begin = intervals(spans, "trainer-0", "wait")[0][0]
    end = rows[-1]["time_s"]
    window = [(begin, end)]

    def inside(process: str, name: str) -> list[Interval]:
        return intersect(intervals(spans, process, name), window)

    steps, calls = inside("trainer-0", "step"), inside("engine", "generate")
    wait_s = length(inside("trainer-0", "wait"))
    snapshots, updates = inside("trainer-0", "snapshot"), inside("engine", "update")
    tokens = sum(row["async/lag_mean"] * row["mismatch/tokens"] for row in rows)
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    return {
        "wall_s": end - begin,
        "engine_busy_s": length(calls),
        "trainer_busy_s": length(steps) + length(snapshots),
        "engine_idle": 1 - length(calls) / (end - begin),
        "trainer_idle": wait_s / (end - begin),
        "lag_mean": tokens / sum(row["mismatch/tokens"] for row in rows),
        "train_s": [b - a for a, b in steps],
        "snapshot_s": [b - a for a, b in snapshots],
        "sync_s": [b - a for a, b in intersect(intervals(spans, "trainer", "publish"), window)],
        "pause_s": [row["async/sync_pause_s"] for row in rows if "async/sync_pause_s" in row],
        "updates": len(updates),
        "longest": [row["sample/length_max"] for row in rows],
        "tokens": [row["mismatch/tokens"] for row in rows],
        "lengths": [len(sample["response"]) + 1 for sample in samples],
        "length_mean": statistics.fmean(row["sample/length_mean"] for row in rows),
        "length_max": max(row["sample/length_max"] for row in rows),
        "begin_s": begin,
        "step_ends_s": [row["time_s"] for row in rows],
        "calls": calls,
        "waits": [[a, b] for a, b in inside("trainer-0", "wait")],
    }


# --- all runs ------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "async_speedup")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wait-share", type=float, default=0.5, help="of a step's work")
    parser.add_argument("--quick", action="store_true", help="once, 8 steps, depths 0 and 2")
    args = parser.parse_args()
    steps, repeats, depths = args.steps, args.repeats, DEPTHS
    if args.quick:
        steps, repeats, depths = 8, 1, (0, 2)
    folder = args.work / f"steps{steps}"
    folder.mkdir(parents=True, exist_ok=True)
    scale_s = calibrate(folder, args.wait_share)
    task = write_task(folder, GROUPS * steps * 4, scale_s)
    results: dict[int, list[Result]] = {depth: [] for depth in depths}
    begin = time.monotonic()
    for repeat in range(repeats):
        for depth in depths:
            result = run_once(folder, f"depth{depth}-{repeat}", depth, steps, task)
            results[depth].append(result)
            print(
                f"[{time.monotonic() - begin:4.0f} s] depth {depth}, repetition {repeat}: wall "
                f"{result['wall_s']:.1f} s, idle engine {result['engine_idle']:.0%} trainer "
                f"{result['trainer_idle']:.0%}, lag {result['lag_mean']:.2f}",
                flush=True,
            )
    kept = {"scale_s": scale_s, "task": str(task), "results": results}
    (args.work / "results.json").write_text(json.dumps(kept))
    raise SystemExit(0 if report(results) else 1)


def calibrate(folder: Path, wait_share: float) -> float:
    """Scale of the waits: their mean over a batch's longest is wait_share of a step's work."""
    task = write_task(folder, 64, 0.0)
    found = run_once(folder, "calibration", 0, 6, task)
    work_s = (found["engine_busy_s"] + found["trainer_busy_s"]) / found["steps"]
    draw = random.Random(5)
    longest = statistics.fmean(
        max(min(12.0, draw.paretovariate(1.3)) for _ in range(GROUPS)) for _ in range(500)
    )
    scale_s = round(wait_share * work_s / longest, 4)
    engine_s, trainer_s = found["engine_busy_s"] / 6, found["trainer_busy_s"] / 6
    print(
        f"calibration: engine {engine_s:.2f} s and trainer {trainer_s:.2f} s of work per step; "
        f"waits are scaled by {scale_s:.3f} s",
        flush=True,
    )
    return scale_s


def report(results: dict[int, list[Result]]) -> bool:
    """The table and the two requirements; whether both hold."""
    print(f"\n{'depth':>5} {'wall s: median (min-max)':>27} {'idle engine':>12}", end="")
    print(f" {'idle trainer':>13} {'lag':>6} {'speedup':>8}")
    walls = {depth: _median(runs, "wall_s") for depth, runs in results.items()}
    for depth, runs in results.items():
        spread = [run["wall_s"] for run in runs]
        wall = f"{walls[depth]:.1f} ({min(spread):.1f}-{max(spread):.1f})"
        print(f"{depth:>5} {wall:>27} {_median(runs, 'engine_idle'):>12.0%}", end="")
        print(f" {_median(runs, 'trainer_idle'):>13.0%} {_median(runs, 'lag_mean'):>6.2f}", end="")
        print(f" {walls[0] / walls[depth]:>7.2f}x")
    best = min((depth for depth in walls if depth), key=lambda depth: walls[depth])
    sides = {side: _median(results[0], f"{side}_busy_s") for side in ("trainer", "engine")}
    larger = max(sides, key=lambda side: sides[side])
    removable = walls[0] - sides[larger]
    bound, removed = removable / walls[0], (walls[0] - walls[best]) / removable
    print(
        f"\nsynchronous work: trainer {sides['trainer']:.1f} s, engine {sides['engine']:.1f} s; "
        f"the {larger}'s cannot be hidden"
    )
    least = least_work(results[0], best)
    slowest = max(least, key=lambda what: least[what])
    print(
        f"no schedule of depth {best} ends before {least[slowest]:.1f} s "
        f"({', '.join(f'{what} {seconds:.1f}' for what, seconds in least.items())}); "
        f"measured {walls[best]:.1f} s, {walls[best] / least[slowest]:.2f} times that"
    )
    lengths = sorted(n for runs in results.values() for run in runs for n in run["lengths"])
    print(
        f"lengths: median {statistics.median(lengths):.0f}, 90% {lengths[len(lengths) * 9 // 10]}"
        f", longest {lengths[-1]} tokens"
    )
    checks = {
        f"overlap can remove {bound:.1%} of the synchronous wall time (at least "
        f"{BOUND_AT_LEAST:.0%})": bound >= BOUND_AT_LEAST,
        f"depth {best} removes {removed:.1%} of that (at least {REMOVED_AT_LEAST:.0%})": removed
        >= REMOVED_AT_LEAST,
    }
    for text, holds in checks.items():
        print(f"{'PASS' if holds else 'FAIL'}  {text}")
    return all(checks.values())


def least_work(runs: list[Result], depth: int) -> dict[str, float]:
    """Seconds that no schedule of a depth avoids, by what takes them.  runs: synchronous."""
    token_s, request_token_s = fit_decode(runs)
    requests = (depth + 1) * GROUPS * SIBLINGS
    tokens = statistics.median(sum(run["tokens"]) for run in runs)
    batch_s = statistics.median(sum(run["longest"]) for run in runs) * (token_s + request_token_s)
    trainer_s = _median(runs, "trainer_busy_s")
    return {
        "trainer": trainer_s,
        "engine": tokens * (token_s / requests + request_token_s),
        "chain": (batch_s + trainer_s) / (depth + 1),
    }


def fit_decode(runs: list[Result]) -> tuple[float, float]:
    """Seconds of a decode step and of each request in it, none negative, from synchronous runs.

    A batch makes as many decode steps as its longest rollout has tokens, so its calls take
    longest * token_s + tokens * request_token_s: least squares, best over subsets of the columns.
    """
    rows, seconds = [], []
    for run in runs:
        starts = [run["begin_s"], *run["step_ends_s"]]
        for step, (begin, end) in enumerate(itertools.pairwise(starts)):
            calls = [(a, b) for a, b in run["calls"] if begin <= a < end]
            rows.append([run["longest"][step], run["tokens"][step]])
            seconds.append(length(calls))
    a, b = np.array(rows, float), np.array(seconds)
    best: tuple[float, np.ndarray[Any, Any]] = (float("inf"), np.zeros(2))
    for columns in ([0], [1], [0, 1]):
        part, *_ = np.linalg.lstsq(a[:, columns], b, rcond=None)
        if (part < 0).any():
            continue
        whole = np.zeros(2)
        whole[columns] = part
        error = float(((a @ whole - b) ** 2).sum())
        best = min(best, (error, whole), key=lambda entry: entry[0])
    token_s, request_token_s = best[1]
    return float(token_s), float(request_token_s)


def _median(runs: list[Result], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


if __name__ == "__main__":
    main()

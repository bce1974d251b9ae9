"""A long run of the tiny model under kills: memory of every process and files stay bounded.

    python bench/soak.py [--publishes 1000] [--kills 50] [--calm 1000] [--seed 0] [--folder DIR]

`moerl train quickstart` with small batches; every step is published.  Whom to kill (engine, trainer
rank, scorer, controller) and when is drawn from the seed, spread over `--publishes` steps; then
`--calm` steps follow without a kill, in which every process lives long enough to show what it
keeps: between kills allocators and libraries still fill up.  The private memory (USS) of each role
is sampled by step.  Printed at the end:

    memory       of each role, in its longest life: samples, MiB at the start and at the end, slope
                 per 1,000 steps (least squares, without the first `--warm` steps of that life)
    files        largest size of journal, blobs, checkpoints, logs and trace in each half, MiB
    held         most processes of the run, dead ones that nobody collected among them, and most
                 open files of root and controller, in each half
    downtimes    per role: seconds until a death was seen, and until the process was back

Exit status 1: the run failed, a step is missing, a process was left, or a slope is above 5% of the
memory that the role has.  The full form needs about 25 minutes on two quiet cores; a short one
shows the mechanism only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moerl.config.schema import ClusterConfig
from moerl.launch.prepare import outside_name
from moerl.observe.metrics import read_rows
from moerl.run_dir import RunDir
from moerl.trace import read_spans

ROLES = ("engine-0", "trainer rank", "scorer", "controller")
SAMPLED = (*ROLES, "root", "engine-0-host")
SETTINGS = [
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.groups_per_request=4",
    "checkpoint.every=10",
    "supervision.backoff_s=0.1",
    "supervision.max_restarts=5",
    "supervision.window_s=1",  # these deaths are no fault of the engines: none is excluded
    "observe.engine_alone_s=0",
    "run.console=lines",
]

GROWTH = 0.05  # of its memory that a role may gain in 1,000 steps

Sample = tuple[int, float]  # step, MiB


def main() -> int:
    args = arguments()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    run, steps = RunDir(folder / "soak"), args.publishes + args.calm
    command = [sys.executable, "-m", "moerl", "train", "quickstart", *SETTINGS]
    command += [f"run.steps={steps}", f"run.root={folder}", "--run", "soak"]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        watch = Watch(run, random.Random(args.seed), args.publishes, args.kills)
        while process.poll() is None:
            watch.look()
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    if not watch.files:
        print(f"no step was made; see {folder / 'output.txt'}")
        return 1
    found = watch.findings(args.warm) | {"status": process.returncode, "load": os.getloadavg()[1]}
    print(json.dumps(found) if args.json else describe(found))
    whole = [row["step"] for row in read_rows(run.metrics)] == list(range(steps))
    flat = all(role["slope"] < GROWTH * role["last"] for role in found["memory"].values())
    return 0 if process.returncode == 0 and whole and flat and not found["left"] else 1


class Watch:
    """Samples and kills, from outside."""

    def __init__(self, run: RunDir, draw: random.Random, publishes: int, kills: int) -> None:
        self.run, self.draw = run, draw
        self.due = sorted(draw.randint(3, max(4, publishes - 10)) for _ in range(kills))
        self.memory: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        self.files: list[tuple[int, dict[str, int]]] = []
        self.held: list[tuple[int, dict[str, int]]] = []
        self.kills: list[tuple[str, float]] = []
        self.members: set[psutil.Process] = set()

    def look(self) -> None:
        rows = read_rows(self.run.metrics)
        step = rows[-1]["step"] if rows else -1
        if step < 0:
            return
        pids = self._pids()
        for role in SAMPLED:
            if role in pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pids[role])
                    self.members.add(process)
                    mib = process.memory_full_info().uss / 2**20
                    self.memory[role][process.pid].append((step, mib))
        self.files.append((step, self._sizes()))
        with contextlib.suppress(psutil.Error, KeyError):  # one of them is down
            self.held.append((step, self._held(pids)))
        if self.due and step >= self.due[0]:
            victim = self.draw.choice(ROLES)
            if victim in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[victim], signal.SIGKILL)
                    self.kills.append((victim, time.time()))
                    self.due.pop(0)

    def findings(self, warm: int) -> dict[str, Any]:
        time.sleep(2.0)
        alive = [p for p in self.members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return {
            "kills": len(self.kills),
            "left": [process.pid for process in alive],
            "memory": {role: slope(lives, warm) for role, lives in self.memory.items()},
            "files": growth(self.files, unit=2**20),
            "held": growth(self.held),
            "downtimes": self._downtimes(),
        }

    def _pids(self) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pids: dict[str, int] = json.loads((self.run.root / "pids.json").read_text())
            ranks = psutil.Process(pids["trainer"]).children() if "trainer" in pids else []
            workers = [rank.pid for rank in ranks if "moerl.trainer.main" in rank.cmdline()]
            return pids | ({"trainer rank": workers[0]} if workers else {})
        return {}

    def _sizes(self) -> dict[str, int]:
        names = ("journal", "checkpoints", "logs", "trace")
        sizes = {name: size_of(self.run.root / name) for name in names}
        sizes["blobs"] = size_of(Path(ClusterConfig().blob_dir) / outside_name(self.run))
        return sizes | {"metrics": self.run.metrics.stat().st_size}

    def _held(self, pids: dict[str, int]) -> dict[str, int]:
        root = psutil.Process(pids["root"])
        return {
            "processes": len(root.children(recursive=True)),
            "open files, root": root.num_fds(),
            "open files, controller": psutil.Process(pids["controller"]).num_fds(),
        }

    def _downtimes(self) -> dict[str, dict[str, float]]:
        downs = [span for span in read_spans(self.run.trace) if span["process"] == "supervisor"]
        seen, back, extra = defaultdict(list), defaultdict(list), defaultdict(list)
        for victim, when in self.kills:
            name = f"{victim.split()[0].replace('-', ' ')} down"
            span = next((s for s in downs if s["name"] == name and s["start_s"] >= when), None)
            if span is not None and span["start_s"] - when < 60:
                seen[victim].append(span["start_s"] - when)
                back[victim].append(span["end_s"] - when)
                extra[victim].append(span["end_s"] - when - span["starting_s"])
        return {
            victim: {
                "deaths": len(seen[victim]),
                "seen after, worst": max(seen[victim]),
                "back after, median": statistics.median(back[victim]),
                "beyond its own start, worst": max(extra[victim]),
            }
            for victim in seen
        }


def slope(lives: dict[int, list[Sample]], warm: int) -> dict[str, float]:
    """Of the longest life, MiB per 1,000 steps; infinite when it is too short to tell."""
    samples = max(lives.values(), key=lambda life: life[-1][0] - life[0][0])
    steps, mib = np.array(samples, float).T
    late = steps >= steps[0] + warm
    enough = late.sum() >= 10 and np.ptp(steps[late]) > 0
    per_step = float(np.polyfit(steps[late], mib[late], 1)[0]) if enough else np.inf
    return {
        "lives": float(len(lives)),
        "samples": float(late.sum()),
        "first": float(mib[0]),
        "last": float(mib[-1]),
        "slope": per_step * 1000,
    }


def growth(looks: list[tuple[int, dict[str, int]]], unit: int = 1) -> dict[str, dict[str, float]]:
    """The most in each half of the run."""
    middle = looks[len(looks) // 2][0]
    halves = {
        "first half": [found for step, found in looks if step <= middle],
        "second half": [found for step, found in looks if step > middle],
    }
    return {
        name: {
            half: max((found[name] for found in part), default=0) / unit
            for half, part in halves.items()
        }
        for name in looks[0][1]
    }


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it has just been replaced
            total += path.stat().st_size if path.is_file() else 0
    return total


def describe(found: dict[str, Any]) -> str:
    lines = [f"status {found['status']}, {found['kills']} kills, load {found['load']:.1f}"]
    lines += [f"processes left: {found['left'] or 'none'}"]
    for part in ("memory", "files", "held", "downtimes"):
        lines.append(part)
        for name, numbers in found[part].items():
            text = ", ".join(f"{key} {value:.2f}" for key, value in numbers.items())
            lines.append(f"  {name}: {text}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--publishes", type=int, default=1000, help="optimizer steps with kills")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--calm", type=int, default=1000, help="steps after them, without kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=int, default=300, help="steps of a life to leave out")
    parser.add_argument("--folder", type=Path, help="keep the run here")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

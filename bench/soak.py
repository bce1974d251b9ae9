"""A long run of the tiny model under kills, damage and full disks: one whole history, flat memory.

    python bench/soak.py [--publishes 1000] [--kills 50] [--damaged 10] [--full-disk 5]
                         [--calm 1000] [--seed 0] [--folder DIR]

`moerl train quickstart` with small batches; every step is published.  The events are drawn from the
seed and spread over `--publishes` steps:

    kill         SIGKILL of any process of the tree: engine server and host, trainer rank, torchrun,
                 scorer, controller; also Ray's raylet and GCS, the root process and `moerl train`
                 itself, which end the run: it is resumed (`--resume`)
    damaged      a sealed blob gets a flipped bit, or is cut, or emptied
    full disk    run directory and blobs are in a small tmpfs, which is filled for a few seconds;
                 needs root.  It may end the run with its cause; then it is resumed

Then `--calm` steps follow without an event, in which every process lives long enough to show what
it keeps: between kills allocators and libraries still fill up.  The private memory (USS) of each
role is sampled by step.  Printed at the end:

    events       how often each happened, and how often the run ended and was resumed

    memory       of each role, in its longest life: samples, MiB at the start and at the end, slope
                 per 1,000 steps (least squares, without the first `--warm` steps of that life)
    files        largest size of journal, blobs, checkpoints, logs and trace in each half, MiB
    held         most processes of the run, dead ones that nobody collected among them, and most
                 open files of root and controller, in each half
    downtimes    per role: seconds until a death was seen, and until the process was back

Exit status 1: the run failed, a step is missing or twice, a process or a blob was left, or a slope
is above 5% of the memory that the role has (only with `--calm`).  `--plan` prints the events and
the estimated time, and starts nothing.  A short form, such as `--publishes 40 --kills 4 --damaged 2
--full-disk 1 --calm 0`, shows the mechanism only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moerl.launch.train import outside_folder
from moerl.observe.metrics import read_rows
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_spans

LASTING = ("engine-0", "engine-0-host", "trainer rank", "trainer", "scorer", "controller")
DEADLY = ("raylet", "gcs_server", "root", "front")  # the run ends with them
SAMPLED = ("engine-0", "trainer rank", "scorer", "controller", "root", "engine-0-host")
SETTINGS = [
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "checkpoint.every=10",
    "supervision.backoff_s=0.1",
    "supervision.max_restarts=5",
    "supervision.window_s=1",  # these deaths are no fault of the engines: none is excluded
    "observe.engine_alone_s=0",
    "run.console=lines",
]

TRAINER = "moerl.trainer.main"
DISK_MIB, FULL_S = 512, 6.0
END_S = 100.0  # within which a run whose root, front or Ray was killed ends; Ray's own wait: 60 s
STUCK_S = 900.0  # without a new step
STEP_S, RESTART_S, RESUME_S = 0.6, 6.0, 40.0  # on two quiet cores, for the estimate

GROWTH = 0.05  # of its memory that a role may gain in 1,000 steps

Sample = tuple[int, float]  # step, MiB


Event = tuple[int, str]  # due after this step; what happens


def main() -> int:
    args = arguments()
    events = schedule(args)
    print(describe_plan(events, args))
    if args.plan:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the run
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    with small_disk(folder / "disk", wanted=args.full_disk > 0) as disk:
        soak = Soak(folder, disk, events, args.publishes + args.calm)
        try:
            soak.run()
        finally:
            soak.end()
        found = soak.findings(args.warm)
        shutil.copytree(soak.run_dir.logs, folder / "logs", dirs_exist_ok=True)
    print(json.dumps(found) if args.json else describe(found))
    flat = all(role["slope"] < GROWTH * role["last"] for role in found["memory"].values())
    return 0 if not found["faults"] and (flat or not args.calm) else 1


def schedule(args: argparse.Namespace) -> list[Event]:
    """Events by step; every second kill is of any process, the others of what is restarted."""
    draw = random.Random(args.seed)
    victims = [draw.choice(LASTING + DEADLY if i % 2 else LASTING) for i in range(args.kills)]
    kinds = [f"kill {victim}" for victim in victims]
    kinds += [f"damage {('flip', 'cut', 'empty')[i % 3]}" for i in range(args.damaged)]
    kinds += ["full disk"] * args.full_disk
    last = max(4, args.publishes * 7 // 10)  # what has to wait for a resume needs steps, too
    return sorted((draw.randint(3, last), kind) for kind in kinds)


def describe_plan(events: list[Event], args: argparse.Namespace) -> str:
    counts = Counter(kind for _, kind in events)
    resumes = sum(n for kind, n in counts.items() if is_deadly(kind))
    seconds = STEP_S * (args.publishes + args.calm) + RESUME_S * (resumes + 1)
    seconds += RESTART_S * (len(events) - resumes) + FULL_S * args.full_disk
    named = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
    return f"{len(events)} events: {named}; about {seconds / 60:.0f} minutes on two quiet cores"


def is_deadly(kind: str) -> bool:
    return kind.removeprefix("kill ") in DEADLY


@contextlib.contextmanager
def small_disk(folder: Path, *, wanted: bool) -> Iterator[Path]:
    """A folder of its own, on a small tmpfs if it is to be filled."""
    folder.mkdir(parents=True, exist_ok=True)
    if not wanted:
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "soak", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Soak:
    """The run, what happens to it, and what is seen from outside."""

    def __init__(self, folder: Path, disk: Path, events: list[Event], steps: int) -> None:
        self.folder, self.disk, self.events, self.steps = folder, disk, list(events), steps
        self.run_dir = RunDir(disk / "soak")
        self.watch = Watch(self.run_dir, outside_folder(str(disk), self.run_dir))
        self.happened: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ends: list[str] = []  # why the run ended before its last step
        self._resumed_at = -1  # last step before this start: a death before its first step ends it
        self.process = self._start()
        self._ends_by, self._roomy_at = math.inf, math.inf  # monotonic seconds

    def _start(self) -> subprocess.Popen[bytes]:
        """The run from its beginning, or its resume."""
        command = [sys.executable, "-m", "moerl", "train"]
        if (self.run_dir.root / "state.json").exists():
            command += ["--resume", str(self.run_dir.root)]
        else:
            command += ["quickstart", *SETTINGS, f"run.steps={self.steps}", "--run", "soak"]
            command += [f"run.root={self.disk}", f"cluster.blob_dir={self.disk}"]
        with (self.folder / "output.txt").open("a") as output:
            return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def run(self) -> None:
        """Until the last step; raises nothing: what is wrong is in `faults`."""
        progress = (-1, time.monotonic())
        while not self._is_over():
            step = self.watch.look(self.process.pid)
            if step > progress[0]:
                progress = (step, time.monotonic())
            if time.monotonic() - progress[1] > STUCK_S:
                self.faults.append(f"no new step after {step} for {STUCK_S:g} s")
                return
            self._happen(step)
            time.sleep(0.5)

    def _is_over(self) -> bool:
        """True when the last step is done; a run that ended early is resumed."""
        now = time.monotonic()
        if now > self._roomy_at:
            self._filler.unlink(missing_ok=True)
            self._roomy_at = math.inf
        if self.process.poll() is None:
            if now > self._ends_by:
                self.faults.append(f"the run has not ended {END_S:g} s after {self.ends[-1]}")
                self.process.kill()
                self.watch.end()
            return False
        if self.process.returncode == 0:
            return True
        if not math.isfinite(self._ends_by):
            self.ends.append(cause_in(self.folder / "output.txt"))
        self._ends_by = math.inf
        self.faults += [f"left after an end: {name}" for name in self.watch.survivors(END_S)]
        self.watch.end()
        if len(self.ends) > 2 * len(self.happened) + 3:
            self.faults.append("the run ends again and again")
            return True
        self._filler.unlink(missing_ok=True)
        self._resumed_at = self.watch.last_step()
        self.process = self._start()
        return False

    @property
    def _filler(self) -> Path:
        return self.disk / "filler"

    def _happen(self, step: int) -> None:
        """The next event, when it is due and the last one is over."""
        waits = math.isfinite(self._ends_by) or math.isfinite(self._roomy_at)
        if waits or step <= self._resumed_at or not self.events or step < self.events[0][0]:
            return
        kind = self.events[0][1]
        what, _, detail = kind.partition(" ")
        act = {"kill": self._kill, "damage": self._damage, "full": self._fill}[what]
        if act(detail):
            self.happened[kind] += 1
            self.events.pop(0)

    def _kill(self, victim: str) -> bool:
        pid = self.watch.pids(self.process.pid).get(victim)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.watch.kills.append((victim, time.time()))
        if victim in DEADLY:
            self.ends.append(f"the death of {victim}")
            self._ends_by = time.monotonic() + END_S
        return True

    def _damage(self, how: str) -> bool:
        """The newest blob: it is still to be read."""
        blobs = [path for path in self.watch.blobs.glob("[!.]*") if path.is_file()]
        if not blobs:
            return False
        with contextlib.suppress(FileNotFoundError):
            path = max(blobs, key=lambda blob: blob.stat().st_mtime)
            return self._spoil(path, how)
        return False

    @staticmethod
    def _spoil(path: Path, how: str) -> bool:
        with path.open("r+b") as file:
            if not (first := file.read(1)):
                return False  # it was emptied before
            if how == "flip":
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))
            else:
                file.truncate(path.stat().st_size // 2 if how == "cut" else 0)
        return True

    def _fill(self, _: str) -> bool:
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while file.write(bytes(2**20)):
                pass
        self._roomy_at = time.monotonic() + FULL_S
        return True

    def end(self) -> None:
        """End what this soak has started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.watch.end()

    def findings(self, warm: int) -> dict[str, Any]:
        steps = [row["step"] for row in read_rows(self.run_dir.metrics)]
        if steps != list(range(self.steps)):
            self.faults.append(f"{len(steps)} rows for {self.steps} steps")
        if self.events:
            self.faults.append(f"{len(self.events)} events did not happen: the run was too short")
        self.faults += [f"left at the end: {name}" for name in self.watch.survivors(10.0)]
        left = [folder for folder in (self.watch.blobs, self.run_dir.journal) if folder.exists()]
        self.faults += [f"left at the end: {path}" for folder in left for path in folder.iterdir()]
        happened = {kind: {"times": float(n)} for kind, n in sorted(self.happened.items())}
        return self.watch.findings(warm) | {
            "events": happened,
            "ends": self.ends,
            "faults": self.faults,
            "regenerated": regenerated(self.run_dir),
            "load": os.getloadavg()[1],
        }


def regenerated(run: RunDir) -> dict[str, dict[str, float]]:
    """Groups that were generated again, from the log: rows of redone steps are cut."""
    text = (run.logs / "controller.log").read_text()
    restarts = re.findall(r"(\d+) journaled groups lack blobs", text)
    return {
        "damaged": {"groups": float(text.count("are damaged, it is regenerated"))},
        "missing or short": {"groups": float(text.count("are lost, it is regenerated"))},
        "missing or short at a restart": {"groups": float(sum(map(int, restarts)))},
    }


def cause_in(path: Path) -> str:
    """The last cause that a run printed when it ended."""
    said = [line for line in path.read_text().splitlines() if line.startswith("moerl: ")]
    hints = ("logs are in", "of finished rollouts wait in")
    causes = [line for line in said if not any(hint in line for hint in hints)]
    return causes[-1][:200] if causes else "no cause was printed"


class Watch:
    """Samples, from outside."""

    def __init__(self, run: RunDir, blobs: Path) -> None:
        self.run, self.blobs = run, blobs
        self.memory: dict[str, dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        self.files: list[tuple[int, dict[str, int]]] = []
        self.held: list[tuple[int, dict[str, int]]] = []
        self.kills: list[tuple[str, float]] = []
        self.members: set[psutil.Process] = set()

    def look(self, front: int) -> int:
        """Take one sample; returns the last step."""
        step = self.last_step()
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(front)
            self.members |= {process, *process.children(recursive=True)}
        if step < 0:
            return step
        pids = self.pids(front)
        for role in SAMPLED:
            if role in pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pids[role])
                    mib = process.memory_full_info().uss / 2**20
                    if mib:  # 0: it is ending
                        self.memory[role][process.pid].append((step, mib))
        self.files.append((step, self._sizes()))
        with contextlib.suppress(psutil.Error, KeyError):  # one of them is down
            self.held.append((step, self._held(pids)))
        return step

    def last_step(self) -> int:
        rows = read_rows(self.run.metrics)
        return int(rows[-1]["step"]) if rows else -1

    def survivors(self, within_s: float) -> list[str]:
        """Processes of the run that are still there, in words."""
        deadline = time.monotonic() + within_s
        while left := [process for process in self.members if is_alive(process)]:
            if time.monotonic() > deadline:
                return [describe_process(process) for process in left]
            time.sleep(0.2)
        self.members.clear()
        return []

    def end(self) -> None:
        for process in self.members:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.members.clear()

    def findings(self, warm: int) -> dict[str, Any]:
        return {
            "memory": {role: slope(lives, warm) for role, lives in self.memory.items()},
            "files": growth(self.files, unit=2**20),
            "held": growth(self.held),
            "downtimes": self._downtimes(),
        }

    def pids(self, front: int) -> dict[str, int]:
        """Living processes of the run by name."""
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            tree = psutil.Process(front).children(recursive=True)
            named: dict[str, int] = json.loads((self.run.root / "pids.json").read_text())
            living = {process.pid for process in tree}
            found = {name: pid for name, pid in named.items() if pid in living}
            found |= {p.name(): p.pid for p in tree if p.name() in ("raylet", "gcs_server")}
            if "trainer" in found:
                ranks = psutil.Process(found["trainer"]).children()
                workers = [rank.pid for rank in ranks if TRAINER in rank.cmdline()]
                found |= {"trainer rank": workers[0]} if workers else {}
            return found | {"front": front}
        return {}

    def _sizes(self) -> dict[str, int]:
        names = ("journal", "checkpoints", "logs", "trace")
        sizes = {name: size_of(self.run.root / name) for name in names}
        return sizes | {"blobs": size_of(self.blobs), "metrics": self.run.metrics.stat().st_size}

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
        for span in downs:
            kills = [kill for kill in self.kills if kill[1] <= span["start_s"]]
            named = [kill for kill in kills if _down_name(kill[0]) == span["name"]]
            if named:  # the latest: an earlier one came while the run ended, and has no span
                victim, when = max(named, key=lambda kill: kill[1])
                if span["start_s"] - when < 60:
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


def _down_name(victim: str) -> str:
    """Name of the span in which the supervisor was without it; of a rank, its whole gang's."""
    return f"{victim.split()[0].removesuffix('-host').replace('-', ' ')} down"


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def describe_process(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline()[:4])}"
    return str(process.pid)


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
    lines = [f"faults: {'; '.join(found['faults']) or 'none'}", f"load {found['load']:.1f}"]
    lines += [f"resumed after: {end}" for end in found["ends"]]
    for part in ("events", "regenerated", "memory", "files", "held", "downtimes"):
        lines.append(part)
        for name, numbers in found[part].items():
            text = ", ".join(f"{key} {value:.2f}" for key, value in numbers.items())
            lines.append(f"  {name}: {text}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--publishes", type=int, default=1000, help="optimizer steps with kills")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--damaged", type=int, default=10, help="blobs that are damaged")
    parser.add_argument("--full-disk", type=int, default=5, help="times that the disk is full")
    parser.add_argument("--calm", type=int, default=1000, help="steps after them, without kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=int, default=300, help="steps of a life to leave out")
    parser.add_argument("--folder", type=Path, help="keep the run here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan", action="store_true", help="print the events and the time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""`moerl train` over several hosts: its front on the first, torchrun or engine nodes on others."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from moerl.observe.metrics import read_rows
from moerl.runtime.run_dir import RunDir
from tests.helpers.network_hosts import Host
from tests.helpers.patience import Patience, patience
from tests.helpers.train_runs import TrainedRecords, copying_records

START_S = 560.0  # of everything, on a loaded machine of two cores
RECIPE = (
    "cluster=hosts",
    "run.console=lines",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "replay.probe=1",
    "observe.engine_alone_s=0",
)


class ClusterRun:
    """`moerl train` on the first host, torchrun.sh or engine_node.sh on the others."""

    def __init__(
        self,
        made: list[Host],
        root: Path,
        *settings: str,
        engines: int = 1,
        recipe: str = "quickstart",
    ) -> None:
        """engines: hosts that are engine nodes, the first ones; the rest are trainer nodes, which
        ref_models.placement=separate gives a second trainer."""
        self.hosts, self.dir = made, RunDir(root / "run")
        self.output = root / "output.txt"
        nodes, trainers = made[:engines], made[engines:]
        self.processes: list[subprocess.Popen[str]] = []
        self.log = self.output.open("w")
        self.head = self.start(
            made[0],
            *(sys.executable, "-m", "moerl", "train", recipe, *RECIPE),
            *_named("engine", nodes),
            *_named("trainer", trainers),
            *(f"run.root={root}", "--run", "run", *settings),
        )
        self.trainers = [
            self.start(host, "tools/launch/torchrun.sh", str(self.dir.root), str(index))
            for index, host in enumerate(trainers)
        ]
        self.engine_nodes = [
            self.start(host, "tools/launch/engine_node.sh", str(self.dir.root), str(index))
            for index, host in enumerate(nodes[1:], 1)
        ]
        if "ref_models.placement=separate" in settings:
            self.trainers += [
                self.start(
                    host, "tools/launch/torchrun.sh", str(self.dir.root), str(index), "ref_models"
                )
                for index, host in enumerate(trainers)
            ]

    def start(self, host: Host, *command: str) -> subprocess.Popen[str]:
        process = host.start(command, self.log, copying_records(self.output.parent))
        self.processes.append(process)
        return process

    def rows(self) -> list[dict]:
        return read_rows(self.dir.metrics)

    @property
    def trained(self) -> TrainedRecords:
        return TrainedRecords(self.output.parent / "trained" / self.dir.root.name)

    def text(self) -> str:
        logs = [self.output, *sorted(self.dir.logs.glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def wait_for(self, what: Callable[[], bool], seconds: float = START_S) -> None:
        limit = Patience(seconds)
        while not what():
            assert self.head.poll() is None, f"the run ended early:\n{self.text()}"
            assert not limit.over(), f"nothing after {seconds} s:\n{self.text()}"
            time.sleep(0.1)

    def finish(self, seconds: float = START_S) -> None:
        limit = Patience(seconds)
        while self.head.poll() is None and not limit.over():
            time.sleep(0.1)
        assert self.head.poll() == 0, self.text()
        for process in self.trainers:
            assert process.wait(patience(60)) == 0, self.text()

    def members(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                front = psutil.Process(process.pid)
                found += [front, *front.children(recursive=True)]
        return found

    def end(self) -> None:
        """What a failed test left."""
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self.processes:
            process.wait()
        self.log.close()


def _named(group: str, made: list[Host]) -> tuple[str, str]:
    """Settings that give a group of nodes these hosts."""
    name = f"cluster.nodes.{group}"
    return f"{name}.count={len(made)}", f"{name}.hosts=[{','.join(h.address for h in made)}]"


@contextlib.contextmanager
def cluster_run(
    made: list[Host],
    root: Path,
    *settings: str,
    engines: int = 1,
    recipe: str = "quickstart",
) -> Iterator[ClusterRun]:
    run = ClusterRun(made, root, *settings, engines=engines, recipe=recipe)
    try:
        yield run
    finally:
        run.end()


def ranks_of(run: ClusterRun) -> list[psutil.Process]:
    found = []
    for member in run.members():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            is_python = "moerl.trainer.main" in member.cmdline()
            if is_python and "moerl.distributed.torchrun" not in member.cmdline():
                found.append(member)
    return found

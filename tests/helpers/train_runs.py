"""Start, watch and end real `moerl train` runs from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from moerl.config.load import load_saved
from moerl.launch.run_context import RunContext
from moerl.observe.metrics import read_rows
from moerl.run_dir import RunDir

START_S = 600.0  # a machine that many share


@dataclass
class Run:
    """One `moerl train` process and its run directory."""

    dir: RunDir
    process: subprocess.Popen[str]
    output: Path

    def text(self) -> str:
        return self.output.read_text()

    def rows(self) -> list[dict]:
        return read_rows(self.dir.metrics)

    def plan(self) -> RunContext:
        """Enough of the run's plan to score its kept records."""
        config = load_saved(self.dir.config)
        return RunContext(
            config=config,
            run=self.dir,
            model_path=Path(config.model.path),
            hf_config={},
            token="",
            incarnation=0,
            node="local",
            blob_dir=self.dir.records / "blobs",
            checkpoint=None,
            records=None,
        )

    def pids(self) -> dict[str, int]:
        return json.loads((self.dir.root / "pids.json").read_text())

    def members(self) -> list[psutil.Process]:
        """Every process of the run, the front included."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def wait_for(self, what: Callable[[], bool], seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            assert time.monotonic() < deadline, f"nothing after {seconds} s:\n{self.text()}"
            time.sleep(0.05)

    def finish(self, seconds: float = 400.0) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Only for a test that failed: end what this run still has."""
        if self.process.poll() is None:
            for member in self.members():
                member.kill()
            self.process.wait()


def start(root: Path, *args: str, name: str = "") -> Run:
    """`moerl train ARGS` in a new process; `root` holds its run directory and output."""
    root.mkdir(parents=True, exist_ok=True)
    output = root / f"output-{len(list(root.glob('output-*')))}.txt"
    command = [sys.executable, "-m", "moerl", "train", *args]
    if "--resume" not in args:
        command += [f"run.root={root}", "--run", name]
    else:
        name = Path(args[args.index("--resume") + 1]).name
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
    return Run(RunDir(root / name), process, output)


def survivors(members: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Members that still run when the time is up."""
    deadline = time.monotonic() + within_s
    while True:
        left = [m for m in members if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)

"""Settings of a run with a scorer in each home, and the parts of it that tests hurt."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moerl.config.schema import TinyModel
from moerl.data.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]


class SortedObject:
    """Scores in a Ray actor; it keeps a count."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompt: str, answer: object, response: str) -> dict[str, float]:
        self.calls += 1
        return {"reward": float(list(response) == sorted(response)), "calls": self.calls}


@dataclass
class Service:
    """`examples/score_service.py` in a process of its own."""

    port: int
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        command = [sys.executable, "examples/score_service.py", str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def service() -> Iterator[Service]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found = Service(probe.getsockname()[1])
    found.start()
    try:
        yield found
    finally:
        found.kill()


def every_home(folder: Path, port: int) -> str:
    """`task.rewards` with a function, actors, a service, and two judges of a tiny model."""
    make_tiny_model(folder / "judge", TinyModel(enabled=True), seed=3)
    judge: dict[str, Any] = {
        "where": "judge",
        "model": str(folder / "judge"),
        "choices": {"1": 1.0, "0": 0.0},
        "timeout_s": 60,
        "engine": {"max_total_tokens": 4096, "start_timeout_s": 600},
    }
    return "task.rewards=" + json.dumps(
        [
            {"name": "exact", "function": "exact_match"},
            {
                "name": "object",
                "where": "actors",
                "function": "tests.helpers.score_homes:SortedObject",
                "workers": 2,
                "cpus": 1,
                "timeout_s": 5,
            },
            {
                "name": "place",
                "where": "http",
                "url": f"http://127.0.0.1:{port}/",
                "timeout_s": 5,
            },
            {"name": "judge", "prompt": "{response}", **judge},
        ]
    )


def processes(run: psutil.Process, name: str) -> list[psutil.Process]:
    """Processes below a run whose command has these words."""
    found = []
    for one in run.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(one.cmdline()):
                found.append(one)
    return found


def spans(run: Path, process: str, name: str) -> list[dict[str, Any]]:
    """Events of a trace, with `begin` and `end` in microseconds."""
    found = json.loads((run / "trace.json").read_text())
    events = found if isinstance(found, list) else found["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    return [
        {**event["args"], "begin": event["ts"], "end": event["ts"] + event["dur"]}
        for event in events
        if event.get("ph") == "X" and event["name"] == name and names[event["pid"]] == process
    ]


def wait_until(true: Any, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.1)

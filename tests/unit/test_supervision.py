"""What keeps a run alive around its processes: stacks, local disks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ConfigError
from moerl.core.types import Prompt, Score
from moerl.launch import train
from moerl.launch.supervision.actors import RemoteScorer
from moerl.runtime.process_tree import error_in, serving
from moerl.runtime.stack_dump import stacks
from tests.helpers.episode_views import asked, view

HANGS = """
import sys, time
from pathlib import Path
from moerl.runtime.stack_dump import write_on_request
from tests.helpers.episode_views import asked, view

def the_function_that_hangs():
    print("here", flush=True)
    time.sleep(600)

if sys.argv[2] == "registered":
    write_on_request(Path(sys.argv[1]))
if sys.argv[2] == "server":
    import moerl.engine.plugin.server_process  # as every process of SGLang does
the_function_that_hangs()
"""


@pytest.mark.parametrize("how", ["registered", "server", "not"])
def test_stacks_of_a_process_that_hangs(how: str, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("an earlier line\n")
    with log.open("a") as errors:  # where a server's standard error goes
        process = subprocess.Popen(
            [sys.executable, "-c", HANGS, str(log), how],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        text = stacks([(process.pid, log)])
        assert "an earlier line" not in text
        assert ("the_function_that_hangs" in text) == (how != "not"), text
        assert process.poll() is None, "asking ended it"
    finally:
        process.kill()
        process.wait()
    assert stacks([(process.pid, log)]) == "", "a process that is gone is left out"


def test_a_journal_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train.file_system(Path("/proc/self")) == "proc"
    train._refuse_network(tmp_path)
    monkeypatch.setattr(train, "file_system", lambda folder: "nfs4")
    with pytest.raises(ConfigError, match=r"rollout\.journal_dir.*nfs4 is a network file system"):
        train._refuse_network(tmp_path)


def test_a_scorer_that_was_replaced_is_counted() -> None:
    processes = iter((7, 7, 8, 8, 9))

    async def score(task: str, term: str, asked: list[ScoreRequest]) -> Any:
        return next(processes), [Score(1.0)] * len(asked)

    actor = SimpleNamespace(score=SimpleNamespace(remote=score))
    scorer = RemoteScorer(actor)  # type: ignore[arg-type]
    prompt = Prompt(0, (1,), "", None, {})

    async def ask() -> int:
        assert await scorer.score("", "reward", asked(prompt, [view("")])) == [Score(1.0)]
        return scorer.restarts

    assert [asyncio.run(ask()) for _ in range(5)] == [0, 0, 1, 1, 2]


def test_the_error_that_a_log_is_read_for(tmp_path: Path) -> None:
    """Ranks fail after one another: the first that reports has the cause."""
    log = tmp_path / "a.log"
    assert error_in(log) == f"nothing in {log}"
    log.write_text("all is well\n")
    assert error_in(log) == "all is well"
    lines = [
        "x",
        "[rank0]: ValueError: one",
        "at KeyError: two",
        "moerl.core.errors.RpcError: 3",
        "y",
    ]
    log.write_text("\n".join(lines))
    assert error_in(log) == "moerl.core.errors.RpcError: 3"
    lines += ["TrainerError: trainer rank 0: no engine", "TrainerError: trainer rank 1: gloo", "z"]
    log.write_text("\n".join(lines))
    assert error_in(log) == "TrainerError: trainer rank 0: no engine"
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("\nTrainerError: of a later start\n")
    assert error_in(log, begin) == "TrainerError: of a later start"


def test_a_killed_rank_is_the_cause_of_all_others(tmp_path: Path) -> None:
    log, failure = (
        tmp_path / "a.log",
        (
            "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-28_10:00:00\n"
            "  host      : node\n  rank      : 1 (local_rank: 1)\n  exitcode  : -{} (pid: 77)\n"
            "  error_file: <N/A>\n  traceback : Signal {} received by PID 77\n" + "=" * 60 + "\n"
        ),
    )
    reported = "TrainerError: trainer rank 0: gloo: Connection closed by peer\n"
    log.write_text(reported + failure.format(9, 9))
    assert error_in(log) == "rank 1 (process 77) was ended by SIGKILL"
    log.write_text(reported + failure.format(15, 15))
    assert error_in(log) == reported.strip(), "torchrun itself ends the other ranks with SIGTERM"
    log.write_text("it was silent\n" + "=" * 60 + "\n")
    assert error_in(log) == "it was silent"


def test_stacks_are_read_from_the_logs_that_processes_write(tmp_path: Path) -> None:
    """`pids.json` says engine-0, the engine host writes engine0.log."""
    pids = {"controller": 1, "engine-0-host": 2, "engine-0": os.getpid(), "trainer": 3}
    names = {pid: log.name for pid, log in serving(pids, tmp_path)}
    assert names[1] == "controller.log"
    assert names[2] == "engine-0.host.log"
    assert names[os.getpid()] == "engine0.log"
    assert 3 not in names

"""What keeps a run alive around its processes: repeated requests, stacks, local disks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from moerl.errors import ConfigError, ProtocolError, TrainerError
from moerl.launch import prepare
from moerl.launch.nodes.process_tree import first_error, last_error, serving
from moerl.launch.supervision.actors import RemoteScorer
from moerl.messages import AskEngine, EngineHolds, Message, Ok, Refused
from moerl.serialization import decode, encode
from moerl.stack_dump import stacks
from moerl.trainer import controller_client
from moerl.trainer.controller_client import ControllerClient
from moerl.types import Episode, PolicyVersion, Prompt, Score

HOLDS = EngineHolds(PolicyVersion(0, 3), "")


class Door:
    """A controller's socket at a fixed port, which may die and come back."""

    def __init__(self, endpoint: str, replies: Callable[[Message], list[Message]]) -> None:
        self.asked: list[Message] = []
        self._endpoint, self._replies = endpoint, replies
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _serve(self) -> None:
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        while True:
            try:
                socket.bind(self._endpoint)
                break
            except zmq.ZMQError:  # the one before is closed by a thread of its own
                time.sleep(0.05)
        while not self._stop.is_set():
            if socket.poll(20):
                identity, _, name, data = socket.recv_multipart()
                self.asked.append(decode(data))
                for reply in self._replies(self.asked[-1]):
                    socket.send_multipart([identity, name, encode(reply)])
        socket.close(0)


@pytest.fixture
def endpoint(free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(controller_client, "_REPEAT_S", 0.1)
    return f"tcp://127.0.0.1:{free_port()}"


def test_a_request_outlives_the_controller(endpoint: str) -> None:
    """The first controller takes it and dies; its successor at the same place answers."""
    asking = ControllerClient(endpoint, "t", timeout_s=30.0)
    first = Door(endpoint, lambda message: [])
    second: list[Door] = []

    def replace() -> None:
        while not first.asked:
            time.sleep(0.01)
        first.close()
        second.append(Door(endpoint, lambda message: [HOLDS]))

    thread = threading.Thread(target=replace)
    thread.start()
    assert asking.expect(AskEngine(0), EngineHolds) == HOLDS
    thread.join()
    asking.close()
    second[0].close()


def test_a_late_reply_never_answers_a_later_question(endpoint: str) -> None:
    answers = {0: [Ok(), Ok(), Ok()], 1: [HOLDS]}
    controller_endpoint = Door(endpoint, lambda message: answers[message.engine])
    asking = ControllerClient(endpoint, "t", timeout_s=30.0)
    assert asking.request(AskEngine(0)) == Ok()
    assert asking.request(AskEngine(1)) == HOLDS, "one of the two that were left over came back"
    asking.close()
    controller_endpoint.close()


def test_nobody_there_and_a_refusal_are_errors(endpoint: str) -> None:
    asking = ControllerClient(endpoint, "t", timeout_s=0.3)
    with pytest.raises(ProtocolError, match=r"did not answer AskEngine in 0\.3 s"):
        asking.request(AskEngine(0))
    controller_endpoint = Door(endpoint, lambda message: [Refused("no")])
    with pytest.raises(TrainerError, match="AskEngine was refused: no"):
        ControllerClient(endpoint, "t", timeout_s=30.0).request(AskEngine(0))
    controller_endpoint.close()


HANGS = """
import sys, time
from pathlib import Path
from moerl.stack_dump import write_on_request

def the_function_that_hangs():
    print("here", flush=True)
    time.sleep(600)

if sys.argv[2] == "registered":
    write_on_request(Path(sys.argv[1]))
if sys.argv[2] == "server":
    import moerl.engine.server_process  # as every process of SGLang does
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
    assert prepare.file_system(Path("/proc/self")) == "proc"
    prepare._refuse_network(tmp_path)
    monkeypatch.setattr(prepare, "file_system", lambda folder: "nfs4")
    with pytest.raises(ConfigError, match=r"rollout\.journal_dir.*nfs4 is a network file system"):
        prepare._refuse_network(tmp_path)


def test_a_scorer_that_was_replaced_is_counted() -> None:
    processes = iter((7, 7, 8, 8, 9))

    async def score(prompt: Prompt, episodes: list[Episode], responses: list[list[str]]) -> Any:
        return next(processes), [Score(1.0)] * len(episodes)

    actor = SimpleNamespace(score=SimpleNamespace(remote=score))
    scorer = RemoteScorer(actor)  # type: ignore[arg-type]
    prompt = Prompt(0, (1,), "", None, {})

    async def ask() -> int:
        assert await scorer.score(prompt, [Episode("0.0", ())], [[""]]) == [Score(1.0)]
        return scorer.restarts

    assert [asyncio.run(ask()) for _ in range(5)] == [0, 0, 1, 1, 2]


def test_the_error_that_a_log_is_read_for(tmp_path: Path) -> None:
    """Of a job: the first line with one; of ranks, which fail after one another: the last cause."""
    log = tmp_path / "a.log"
    assert last_error(log) == f"nothing in {log}"
    log.write_text("all is well\n")
    assert first_error(log) == f"see {log}"
    assert last_error(log) == "all is well"
    lines = (
        "x",
        "[rank0]: ValueError: one",
        "at KeyError: two",
        "moerl.errors.TrainerError: 3",
        "y",
    )
    log.write_text("\n".join(lines))
    assert first_error(log) == "[rank0]: ValueError: one"
    assert last_error(log) == "moerl.errors.TrainerError: 3"


def test_stacks_are_read_from_the_logs_that_processes_write(tmp_path: Path) -> None:
    """`pids.json` says engine-0, the engine host writes engine0.log."""
    pids = {"controller": 1, "engine-0-host": 2, "engine-0": os.getpid(), "trainer": 3}
    names = {pid: log.name for pid, log in serving(pids, tmp_path)}
    assert names[1] == "controller.log"
    assert names[2] == "engine-0.host.log"
    assert names[os.getpid()] == "engine0.log"
    assert 3 not in names

"""A trainer node runs torchrun as long as the endpoints folder asks for this trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config
from moerl.config.clusters import placement
from moerl.config.schema import Config
from moerl.core.errors import ConfigError, TrainerError
from moerl.launch.cluster.node_commands import nth, slots_of
from moerl.launch.nodes import engine_node, trainer_node
from moerl.launch.nodes.lease import LeaseKeeper, LeaseReader, RunEnded
from moerl.launch.nodes.trainer_node import _torchrun
from moerl.runtime.run_dir import Endpoints, RunDir
from tests.helpers.patience import patience


def posted(root: Path) -> tuple[RunDir, str]:
    run = RunDir(root / "run")
    run.create()
    run.endpoints.open("tcp://127.0.0.1:1", "token")
    return run, run.endpoints.start()


def live_lease(run: RunDir, lease_s: float = 60.0) -> LeaseReader:
    """A reader that has seen the root process alive."""
    reader = LeaseReader(run.endpoints.lease)
    for count in (1, 2):
        run.endpoints.lease.write_text(f"{count:016d} {lease_s:015.3f}\n")
        alive = reader._look()
    assert alive
    return reader


def ended(run: RunDir, start: str, *command: str) -> int | None:
    log = run.logs / "torchrun-0.log"
    return _torchrun(list(command), dict(os.environ), log, run, start, live_lease(run))


def test_a_new_opening_of_the_endpoints_folder_ends_the_trainer(tmp_path: Path) -> None:
    """The supervisor gave it up, but its ranks live: they would train beside the next trainer."""
    run, start = posted(tmp_path)
    again = threading.Timer(0.2, run.endpoints.open, ("tcp://127.0.0.1:1", "token"))
    again.start()
    assert ended(run, start, "sleep", "60") is None
    assert run.endpoints.start() not in ("", start)


def test_a_closed_endpoints_folder_ends_the_trainer(tmp_path: Path) -> None:
    """The run is over: ranks without a controller would wait for hours."""
    run, start = posted(tmp_path)
    run.endpoints.close()
    assert ended(run, start, "sleep", "60") is None


def test_an_open_endpoints_folder_leaves_the_trainer_alone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    run, start = posted(tmp_path)
    assert ended(run, start, "sh", "-c", "sleep 1.2; exit 3") == 3
    answers = iter([start, OSError("stale file handle"), "", start])

    def stumbling(_endpoints: object) -> str:
        answer = next(answers, start)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(Endpoints, "start", stumbling)
    assert ended(run, start, "sh", "-c", "sleep 2.2; exit 4") == 4, "a file server stumbles"


def test_ranks_of_a_run_that_is_over_are_not_waited_for(tmp_path: Path) -> None:
    """Its endpoints folder may look open for ever: the root process was killed."""
    run, start = posted(tmp_path)
    closing = threading.Timer(0.2, run.endpoints.close_lease)
    closing.start()
    began = time.monotonic()
    with pytest.raises(RunEnded, match="the run has ended"):
        ended(run, start, "sleep", "60")
    assert time.monotonic() - began < patience(10.0)
    log, lease = run.logs / "torchrun-0.log", live_lease(run, lease_s=0.5)
    with pytest.raises(TrainerError, match="no sign of the run's root process for 1 s"):
        _torchrun(["sleep", "60"], dict(os.environ), log, run, start, lease)
    assert run.endpoints.start() == start, "control: nothing else says that it is over"
    trainer_node.end_descendants(0.0)


class Node:
    """`_until_done` of one slot, with a torchrun that ends as the test says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.start = posted(root)
        self.codes: list[Callable[[], int | None]] = []
        self.layouts: list[int] = []
        self.config = load_config("quickstart", ["supervision.backoff_s=0.01"])
        monkeypatch.setattr(trainer_node, "load_saved", lambda path: self.config)
        monkeypatch.setattr(trainer_node, "placement", lambda config: config)
        monkeypatch.setattr(trainer_node, "slots_of", lambda placed, job: [None])
        monkeypatch.setattr(trainer_node, "rank_environment", lambda config, slot: {})
        monkeypatch.setattr(trainer_node, "_command", self.command)
        monkeypatch.setattr(trainer_node, "_torchrun", lambda *_: self.codes.pop(0)())

    def command(self, config: Config, _slot: None, _gang: str) -> list[str]:
        self.layouts.append(config.run.steps)
        return []

    def until_done(self, job: str = "trainer") -> int:
        return trainer_node._until_done(self.run, job, 0, self.start, 0.3, live_lease(self.run))

    def step(self, number: int) -> int:
        with self.run.metrics.open("a") as file:
            file.write(json.dumps({"step": number, "version": "0.0", "time_s": 0.0}) + "\n")
        return 1

    def reopen(self, result: int | None = None) -> int | None:
        self.run.endpoints.open("tcp://127.0.0.1:1", "token")
        return result


def test_failures_with_steps_in_between_are_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    node.codes = [partial(node.step, number) for number in range(8)] + [lambda: 0]
    assert node.until_done() == 0
    assert not node.run.endpoints.given_up()


def test_a_node_that_gave_up_serves_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor may try again, and a resume may bring another layout."""
    node, responses = Node(tmp_path, monkeypatch), []
    other = load_config("quickstart", ["run.steps=7"])

    def supervisor() -> None:
        while not (cause := node.run.endpoints.given_up()):
            time.sleep(0.01)
        responses.append(cause)
        node.config = other
        node.reopen()

    threading.Thread(target=supervisor, daemon=True).start()
    node.codes = [lambda: 1] * 4 + [lambda: 0]
    assert node.until_done() == 0
    assert responses == ["trainer node 0: torchrun ended 4 times, see torchrun-0.log"]
    assert node.layouts[-1] == 7 != node.layouts[0]


def test_a_node_whose_controller_is_lost_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its node: nobody closes the endpoints folder, and nobody reads that this one gave up."""
    node = Node(tmp_path, monkeypatch)
    node.codes = [lambda: 1] * (node.config.supervision.max_restarts + 1)
    with pytest.raises(TrainerError, match="failed, and no supervisor answered"):
        node.until_done()
    assert node.run.endpoints.given_up()


def test_a_node_of_a_run_that_closed_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer was ended: without the lease it waits for a next opening, up to --wait-s."""
    node = Node(tmp_path, monkeypatch)

    def closed() -> None:
        node.run.endpoints.close()
        node.run.endpoints.close_lease()

    node.codes = [closed]
    began = time.monotonic()
    with pytest.raises(RunEnded):
        trainer_node._until_done(node.run, "trainer", 0, node.start, 60.0, live_lease(node.run))
    assert time.monotonic() - began < patience(10.0)


def test_a_node_waits_for_a_run_that_is_alive(tmp_path: Path) -> None:
    """A folder of a run that was killed names a controller too: nothing may be started for it."""
    run, start = posted(tmp_path)
    run.endpoints.lease.write_text(f"{7:016d} {60.0:015.3f}\n")
    with pytest.raises(TrainerError, match=r"names no living controller after 0\.6 s"):
        LeaseReader(run.endpoints.lease).wait(0.6)
    keeper, reader = LeaseKeeper(run.endpoints.lease, 0.5), LeaseReader(run.endpoints.lease)
    threading.Timer(0.25, keeper.renew).start()
    reader.wait(patience(30.0))
    assert trainer_node._next_opening(run, reader, 1.0) == start


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_an_engine_node_leaves_a_run_that_is_over(tmp_path: Path, how: str) -> None:
    run, _ = posted(tmp_path)
    run.endpoints.post_ray("127.0.0.1:1", "t")
    lease = live_lease(run, lease_s=60.0 if how == "ended" else 0.5)
    ray = subprocess.Popen(["sleep", "60"])
    try:
        if how == "ended":
            run.endpoints.close_ray()
            with pytest.raises(RunEnded, match="the run has ended"):
                engine_node._until_over(run, ray, ("127.0.0.1:1", "t"), lease)
        else:  # the head's address is there for ever
            with pytest.raises(TrainerError, match="root process"):
                engine_node._until_over(run, ray, ("127.0.0.1:1", "t"), lease)
    finally:
        ray.kill()
        ray.wait()
    run.endpoints.post_ray("127.0.0.1:1", "t")
    engine_node._until_over(run, ray, ("127.0.0.1:1", "t"), live_lease(run))  # Ray ended only here


ADOPTS = """
import subprocess, sys, threading, time
from pathlib import Path
import psutil
from moerl.launch.nodes import engine_node
from moerl.runtime.process_tree import Orphans, become_subreaper

class Lease:
    def check(self): pass

class Run:
    class endpoints:
        names_ray = staticmethod(lambda *_: True)

become_subreaper()
engine_node.Orphans, engine_node._LOOK_S = lambda: Orphans(0.3), 0.1
orphan = "import subprocess; subprocess.Popen(['sleep', '0.2'])"
subprocess.run([sys.executable, "-c", orphan])
ray = subprocess.Popen(["sleep", "1.5"])
engine_node._until_over(Run, ray, ("", ""), Lease())
print(len(psutil.Process().children()))
"""


def test_an_engine_node_collects_the_zombies_that_it_adopts() -> None:
    """Two to four for each restart of an engine there."""
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert done.stdout.split() == ["0"]


def test_the_end_of_a_trainer_that_was_given_up_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    node.codes = [partial(node.reopen, 0), lambda: 0]
    assert node.until_done() == 0
    assert not node.codes, "the new opening was served"


def test_reference_ranks_come_back_for_a_trainer_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch)
    starts = iter([0, 1, 1, 1])
    monkeypatch.setattr(trainer_node, "newest_incarnation", lambda run: next(starts, 1))

    def scored() -> int:
        node.run.endpoints.done(node.start)
        return 0

    node.codes = [lambda: 0, scored]
    assert node.until_done("ref_models") == 0
    assert not node.codes, "told to stop, asked again"


def test_a_slot_has_one_process(tmp_path: Path) -> None:
    run, _ = posted(tmp_path)
    lease = live_lease(run)
    with trainer_node._slot_taken(run, "trainer-0", 0.0, lease):
        with trainer_node._slot_taken(run, "trainer-1", 0.0, lease):
            pass
        with (
            pytest.raises(TrainerError, match="trainer-0 of this run is served by process"),
            trainer_node._slot_taken(run, "trainer-0", 0.1, lease),
        ):
            pass
    with trainer_node._slot_taken(run, "trainer-0", 0.0, lease):
        pass


def test_marks_of_another_opening_count_for_nothing(tmp_path: Path) -> None:
    run, start = posted(tmp_path)
    run.endpoints.done(start)
    assert run.endpoints.is_done()
    run.endpoints.open("tcp://127.0.0.1:1", "token")
    run.endpoints.done(start)
    assert not run.endpoints.is_done()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_node_that_the_run_does_not_have(index: int) -> None:
    config = load_config("qwen3-30b-a3b", ["cluster=slurm", "run.name=a"])
    slots = slots_of(placement(config), "trainer")
    assert nth(slots, 1, "trainer") is slots[1]
    with pytest.raises(ConfigError, match=rf"INDEX = {index} .*the run has 2 trainer node\(s\)"):
        nth(slots, index, "trainer")


@pytest.mark.parametrize("node", [trainer_node, engine_node])
def test_a_node_says_what_it_waits_for_and_gives_up_in_a_sentence(
    node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["node", str(tmp_path), "1", "--wait-s=0"])
    monkeypatch.setattr(node, "become_subreaper", lambda: None)
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    monkeypatch.setattr(trainer_node, "end_descendants", lambda _: 0)
    assert node.main() == 1
    waits, gives_up = capsys.readouterr().err.splitlines()
    assert waits == f"moerl: waits up to 0 s for {tmp_path}/endpoints"
    assert "after 0 s" in gives_up

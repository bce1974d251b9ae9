"""SIGKILL in mid-episode of `moerl train`, at three seeded moments for each kind of process.

Each group is trained once, text goes on where it was, and no process, blob or turn is left.  Under
the fake clock, at many more moments: `tests/unit/test_killed_processes.py`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from moerl.audit.verify_run import verify
from moerl.core.ids import episode_of, group_of, without_life
from moerl.core.serialization import decode_value
from moerl.core.types import EpisodeGroup, Segment
from moerl.records.header_check import blob_uris, group_uris
from moerl.runtime.process_tree import children_with
from tests.helpers.short_agent_runs import ROOT, SETTINGS
from tests.helpers.train_runs import Run, check_deletion, check_history, last_step, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

SEEDS, STEPS = range(3), 12
KILLED_RUN = [
    *SETTINGS,
    f"run.steps={STEPS}",
    "rollout.max_groups_in_flight=4",
    "rollout.buffer_depth=2",
    "rollout.journal_tokens=0",  # the journal has every reply of an open turn, so a test can see it
    "rollout.max_lag=4",
    "rollout.slice_tokens=8",
    "sampling.ignore_eos=true",
    "sampling.max_new_tokens=64",
    "supervision.backoff_s=1",
    "supervision.max_restarts=5",
    "supervision.window_s=1",  # these deaths are no fault of the engine
]
PROGRAM = [
    f"task.agent.command=[python, {ROOT}/tests/helpers/text_agent.py, '4', '20']",
    "task.max_turns=4",
]
ENVIRONMENT = [
    "task.environment=examples.live_environment:Locks",
    "task.environment_options={wait_s: 0.2}",
    "task.environment_workers=4",
    "task.max_turns=4",
]
BEHIND_STEPS = 16
BEHIND = [
    "checkpoint.every=2",
    "evaluation.every=0",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.durability=shared",  # the records of a run are in its folder, and go with a copy
    "observe.engine_alone_s=0",
    "stream.keep_steps=-1",
    "supervision.backoff_s=1",
    "supervision.max_restarts=5",
    "supervision.window_s=1",
]
RUNS = {
    "controller": ("quickstart",),
    "host": ("quickstart",),
    "program": ("digits-by-agent", *PROGRAM),
    "worker": ("quickstart", *ENVIRONMENT),
}


@dataclass(frozen=True)
class Kill:
    """replies: those of open turns that the journal had.  group_id: of a killed program, or -1."""

    replies: list[Segment]
    group_id: int = -1

    @property
    def groups(self) -> set[int]:
        return groups_of(self.replies)


@pytest.mark.parametrize("victim", RUNS)
def test_a_death_in_mid_episode_costs_no_group(victim: str, tmp_path: Path) -> None:
    recipe, *settings = RUNS[victim]
    run = start(tmp_path, recipe, *KILLED_RUN, *settings, name="x", copies=True)
    ever: set[psutil.Process] = set()
    try:
        kills: list[Kill] = []
        for seed in SEEDS:
            kills.append(kill_one(run, victim, seed, ever, kills))
        ever |= set(run.members())
        assert run.finish() == 0, run.text()
        assert not survivors(list(ever), 10.0)
    finally:
        run.end()
    check_trained_once(run, frozenset(kill.group_id for kill in kills) - {-1})
    check_text(run, kills)
    check_deletion(run, in_flight=16)
    assert not open_replies(run), "turns are left in the journal"


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize("victim", ["rank", "host", "controller"])
def test_deaths_behind_the_first_checkpoint_cost_no_step(
    victim: str, copied: bool, tmp_path: Path
) -> None:
    """copied: a copy of an interrupted run is resumed, and its processes are killed."""
    run = start(tmp_path, "quickstart", *BEHIND, f"run.steps={BEHIND_STEPS}", name="x", copies=True)
    draw = random.Random(f"{victim} {copied}")
    try:
        run.wait_for(lambda: run.dir.latest_checkpoint() is not None)
        if copied:
            run = resumed_copy(tmp_path, run)
        for _ in SEEDS:
            step = last_step(run) + 1
            run.wait_for(lambda step=step: last_step(run) >= step)
            time.sleep(draw.uniform(0.0, 1.0))
            run.wait_for(lambda: bool(processes(run, victim)))
            draw.choice(processes(run, victim)).kill()
        ever = run.members()
        assert run.finish() == 0, run.text()
        assert not survivors(ever, 10.0)
    finally:
        run.end()
    check_one_history(run, BEHIND_STEPS)
    if victim == "rank":
        assert run.text().count("was ended by SIGKILL") >= len(SEEDS)


def test_a_rank_that_dies_before_the_first_checkpoint_costs_its_steps(tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *BEHIND, "checkpoint.every=50", "run.steps=8", name="x")
    try:
        run.wait_for(lambda: last_step(run) >= 3)
        processes(run, "rank")[-1].kill()
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(8))
    assert {row["version"].split(".")[0] for row in rows} == {"1"}
    assert rows[-1]["journal/cut_steps"] >= 4
    assert re.search(r"trainer died.* rank \d \(process \d+\) was ended by SIGKILL", run.text())
    assert "begins again from the first weights" in run.text()
    assert not verify(run.dir.root).differences


def resumed_copy(root: Path, run: Run) -> Run:
    """A resume of a copy of the run, which is ended; the first one must stay as it is."""
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.text()
    for folder in (run.dir.root, run.trained.folder):
        shutil.copytree(folder, folder.with_name("copy"), symlinks=True)
    return start(root, "--resume", str(run.dir.root.with_name("copy")), copies=True)


def check_one_history(run: Run, steps: int) -> None:
    """Steps once each, groups once each and none of them lost, and a stream without a fault."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    trained = run.trained.groups(rows)
    check_history(run, trained)
    assert len(trained) == 4 * steps
    assert not verify(run.dir.root).differences


# --- kills ----------------------------------------------------------------------------------------
def kill_one(
    run: Run, victim: str, seed: int, ever: set[psutil.Process], before: list[Kill]
) -> Kill:
    """Kill a process at a moment of the seed, in which turns are open.

    A program or worker is killed when a second group has open turns, which are to go on, and no
    group that was open at an earlier kill: the third death of one group ends a run.
    """
    draw = random.Random(f"{victim} {seed}")
    step = last_step(run) + 1
    run.wait_for(lambda: last_step(run) >= step)
    time.sleep(draw.uniform(0.0, 0.5))
    plays = victim in ("program", "worker")
    earlier = set[int]().union(*(kill.groups for kill in before)) if plays else set()
    killed: list[int] = []

    def kills() -> bool:
        groups = groups_of(open_replies(run))
        found = processes(run, victim)
        if not found or len(groups) <= plays or groups & earlier:
            return False
        ever.update(run.members())
        with contextlib.suppress(psutil.Error):  # it has just ended
            killed.append(kill_running(draw.choice(found)))
        return bool(killed)

    run.wait_for(kills)
    return Kill(open_replies(run), killed[0])


def kill_running(process: psutil.Process) -> int:
    """SIGKILL a process that has not ended; the group that a program plays, or -1.

    Raises psutil.Error.
    """
    process.suspend()  # else it may end by itself before the signal comes
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.NoSuchProcess(process.pid)
    given = process.environ().get("MOERL_PROMPT")
    process.kill()
    return -1 if given is None else group_of(json.loads(given)["episode"])


def processes(run: Run, victim: str) -> list[psutil.Process]:
    """Running processes of a kind."""
    if victim == "rank":
        return [psutil.Process(pid) for pid, _ in children_with(run.pids()["trainer"], "RANK")]
    if victim in ("controller", "host"):
        pid = run.pids().get({"controller": "controller", "host": "engine-0-host"}[victim])
        return [] if pid is None or not psutil.pid_exists(pid) else [psutil.Process(pid)]
    is_one = _is_program if victim == "program" else _is_worker
    return list(_with_command(run.members(), is_one))


def _with_command(
    members: Iterable[psutil.Process], is_one: Callable[[list[str]], bool]
) -> Iterable[psutil.Process]:
    for member in members:
        try:
            if is_one(member.cmdline()):
                yield member
        except psutil.Error:
            continue


def _is_program(command: list[str]) -> bool:
    return bool(command[1:2]) and command[1].endswith("text_agent.py")


def _is_worker(command: list[str]) -> bool:
    return command[2:3] == ["-c"] and "environment_worker" in command[3]


def groups_of(replies: list[Segment]) -> set[int]:
    return {group_of(reply.rollout_id) for reply in replies}


def open_replies(run: Run) -> list[Segment]:
    """Replies to turns of open episodes, in the journal."""
    try:
        with sqlite3.connect(f"file:{run.dir.journal}/turns.sqlite?mode=ro", uri=True) as db:
            bodies = db.execute("select body from replies").fetchall()
    except sqlite3.OperationalError:  # it is not there, or being made
        return []
    return [decode_value(body, Segment) for (body,) in bodies]


# --- checks ---------------------------------------------------------------------------------------
def check_trained_once(run: Run, dropped: frozenset[int]) -> None:
    """dropped: groups whose program was killed."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    trained = run.trained.groups(rows)
    check_history(run, trained, dropped)
    assert len(trained) == 2 * STEPS


def check_text(run: Run, kills: list[Kill]) -> None:
    """Replies of turns that were open at a death are trained with their records."""
    groups = {group.group_id: group for _, group in run.trained.groups(run.rows())}
    again = played_again(run)
    seen = 0
    for kill in kills:
        for reply in kill.replies:
            group = groups.get(group_of(reply.rollout_id))
            if group is None or group.group_id in again:
                continue
            assert blob_uris(reply) <= group_uris(group), f"{reply.rollout_id} was sampled again"
            assert has_tokens(group, reply), f"{reply.rollout_id} is not where it was"
            seen += 1
    print(f"{seen} replies of {sum(len(kill.replies) for kill in kills)} are trained")
    assert seen, "no open turn was trained"


def has_tokens(group: EpisodeGroup, reply: Segment) -> bool:
    """Whether a row of the reply's episode has its tokens, in one piece."""
    name = without_life(episode_of(reply.rollout_id))
    (episode,) = (one for one in group.episodes if without_life(one.episode_id) == name)
    wanted = b"".join(piece.output_ids.astype("<i4").tobytes() for piece in reply.pieces)
    rows = (turn.rollout.token_ids.astype("<i4").tobytes() for turn in episode.turns)
    return any(wanted in row for row in rows)


def played_again(run: Run) -> set[int]:
    """Groups of which an environment died."""
    logs = "".join(log.read_text(errors="replace") for log in run.dir.logs.glob("*.log"))
    return {int(one) for one in re.findall(r"group (\d+) is played again", logs)}

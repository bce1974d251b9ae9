"""Deaths in mid-episode of `moerl train` with an agent of eight turns: finished turns stay."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest

from moerl.core.ids import life_of
from moerl.core.serialization import decode_value
from moerl.core.types import Rollout, Segment
from moerl.records.header_check import blob_uris
from tests.helpers.short_agent_runs import ROOT, SETTINGS, check_agent_run, check_scores
from tests.helpers.train_runs import Run, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

TURNS = 8
EIGHT_TURNS = [
    *SETTINGS,
    f"task.agent.command=[python, {ROOT}/tests/helpers/text_agent.py, '{TURNS}', '20']",
    f"task.max_turns={TURNS}",
    "sampling.ignore_eos=true",
    "sampling.max_new_tokens=24",
    "rollout.turn_rows=split",
    "rollout.journal_tokens=0",
    "replay.audit=true",
    "checkpoint.keep_versions=true",
    "supervision.backoff_s=5",  # the log is read, or deleted, before the next controller starts
    "run.steps=4",
]


def begin(folder: Path, *settings: str) -> Run:
    """A run that has trained a step and has open episodes with several finished turns."""
    run = start(folder, "digits-by-agent", *EIGHT_TURNS, *settings, name="x", copies=True)
    run.wait_for(lambda: bool(run.rows()) and len(finished(run)) >= TURNS)
    return run


def finished(run: Run) -> list[set[str]]:
    """Blobs of each reply in the log."""
    try:
        with sqlite3.connect(f"file:{run.dir.journal}/turns.sqlite?mode=ro", uri=True) as db:
            bodies = db.execute("select body from replies").fetchall()
    except sqlite3.OperationalError:  # it is not there, or being made
        return []
    return [blob_uris(decode_value(body, Segment)) for (body,) in bodies]


def total(run: Run, name: str) -> float:
    return sum(row.get(f"agent/{name}", 0.0) for row in run.rows())


def trained_again(run: Run) -> list[Rollout]:
    """Rows of a later controller with tokens that an earlier one got."""
    groups = [group for _, group in run.trained.groups(run.rows())]
    rows = [node.rollout for group in groups for e in group.episodes for node in e.turns]
    return [
        row for row in rows if min(map(life_of, blob_uris(row))) < life_of(row.rollout_id)
    ]  # fmt: skip


def check_kept(run: Run, folder: Path, replies: list[set[str]]) -> None:
    """Each finished turn was given out once, trained, and is exact."""
    check_agent_run(run, 4)
    assert (total(run, "replayed_turns"), total(run, "lost_turns")) == (len(replies), 0)
    copied = {path.name for path in (run.trained.folder / "blobs").iterdir()}
    assert {uri.rpartition("/")[2] for uris in replies for uri in uris} <= copied
    rows = trained_again(run)
    assert rows
    check_scores(run, folder, [row for row in rows if row.joined_from == row.num_sampled])


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "deleted"])
def test_a_dead_controller_costs_open_turns_only(tmp_path: Path, kept: bool) -> None:
    """Control: without the log, every turn of the open episodes is sampled again."""
    run = begin(tmp_path)
    members = run.members()
    try:
        os.kill(run.pids()["controller"], signal.SIGKILL)
        replies = finished(run)
        assert len(replies) >= TURNS
        if not kept:
            for path in run.dir.journal.glob("turns.sqlite*"):
                path.unlink()
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    assert not survivors(members, 10.0)
    if kept:
        check_kept(run, tmp_path, replies)
    else:
        check_agent_run(run, 4)
        assert (total(run, "replayed_turns"), trained_again(run)) == (0, [])


@pytest.mark.parametrize("durability", ["node", "shared"])
def test_a_resume_goes_on_with_open_episodes(tmp_path: Path, durability: str) -> None:
    """Every process is killed at once; journal and blobs of this machine are left."""
    run = begin(tmp_path, f"rollout.durability={durability}", "checkpoint.every=1")
    run.wait_for(lambda: any(run.dir.checkpoints.glob("step-*")) and len(finished(run)) >= TURNS)
    members = run.members()
    for member in members:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    assert not survivors(members, 30.0)
    assert len(finished(run)) >= TURNS
    again = start(tmp_path, "--resume", str(run.dir.root), copies=True)
    try:
        assert again.finish() == 0, again.text()
    finally:
        again.end()
    check_agent_run(again, 4)
    assert total(again, "replayed_turns") > 0
    assert trained_again(again)

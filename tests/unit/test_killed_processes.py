"""SIGKILL in mid-episode under the fake clock, at ten moments for each kind of process.

Each group is trained once, text goes on where it was, and nothing is left.  With real processes:
`tests/e2e/test_killed_processes.py`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.fake_kills import (
    VICTIMS,
    NewTokens,
    Store,
    check_cost,
    check_nothing_left,
    check_once,
    check_text,
    killed_run,
)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_in_mid_episode_costs_no_group(victim: str, seed: int, tmp_path: Path) -> None:
    story = killed_run(victim, seed, tmp_path)
    check_once(story)
    check_text(story)
    check_cost(story)
    check_nothing_left(story)
    other = {turn: [*ids[:-1], ids[-1] + 1] for turn, ids in story.known.items()}
    with pytest.raises(AssertionError, match="does not go on"):
        check_text(replace(story, known=other))


# --- controls -------------------------------------------------------------------------------------
def _execute(path: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(sql).rowcount == 1


def withhold_turn(journal: Path) -> None:
    _execute(
        journal / "turns.sqlite",
        "delete from replies where id = (select max(id) from replies)",
    )


def withhold_group(journal: Path) -> None:
    _execute(
        journal / "journal.sqlite",
        "delete from groups where id = (select max(id) from groups)",
    )


def test_a_turn_that_the_journal_lacks_is_seen(tmp_path: Path) -> None:
    story = killed_run("controller", 0, tmp_path, damage=withhold_turn)
    check_once(story)
    with pytest.raises(AssertionError, match="does not go on"):
        check_text(story)


def test_a_group_that_is_admitted_twice_is_seen(tmp_path: Path) -> None:
    story = killed_run("controller", 1, tmp_path, damage=withhold_group)
    with pytest.raises(AssertionError, match="admitted twice"):
        check_once(story)


def test_a_blob_that_is_left_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host nor the next controller deletes what the dead one has left."""
    monkeypatch.setattr(NewTokens, "deletes", False)
    monkeypatch.setattr(Store, "sweep", lambda store, uris: 0)
    with pytest.raises(AssertionError, match="blobs are left"):
        check_nothing_left(killed_run("controller", 0, tmp_path))

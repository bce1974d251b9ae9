"""The journal: what it holds survives its process, and damage costs groups, never correctness."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import SharedState
from moerl.controller.journal.shared_groups import SharedGroups
from moerl.core.errors import JournalError
from moerl.core.ids import ranges
from moerl.core.types import (
    EpisodeGroup,
    PolicyVersion,
)
from moerl.records.blob_copies import copied_blobs_of
from moerl.records.header_check import group_uris
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs
from tests.helpers.journals import START, JournalWorld, group_of


def ids(groups: list[EpisodeGroup]) -> list[int]:
    return sorted(group.group_id for group in groups)


def some_history(world: JournalWorld) -> None:
    """Steps 0 and 1 trained, 2 planned; 6 is ready, 7 given up."""
    world.journal.began((START,), 2, ())
    world.admit(0, 1, 2, 3, 4, 5, 6)
    for step in range(3):
        world.journal.planned(step, [2 * step, 2 * step + 1])
    world.journal.done(0, kept=[0])
    world.journal.done(1, kept=[])
    world.journal.dropped(7)


def test_disk_use_is_bounded(tmp_path: Path) -> None:
    world = JournalWorld(tmp_path)
    world.journal.began((START,), 1, ())
    sizes = []
    for step in range(400):
        world.admit(step)
        world.journal.planned(step, [step])
        world.journal.done(step, kept=[])
        if step % 10 == 9:
            world.journal.saved(step + 1)
            files = (tmp_path / "journal").iterdir()
            sizes.append(sum(file.stat().st_size for file in files))
    assert max(sizes[20:]) <= max(sizes[:20]) + 8192
    assert world.open().consumed == set(range(400))


def test_what_a_step_writes_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Every second group is given up, and no checkpoint is ever saved."""
    world = JournalWorld(tmp_path)
    world.journal.began((START,), 1, ())
    for step in range(100):
        world.admit(2 * step)
        world.journal.planned(step, [2 * step])
        world.journal.done(step, kept=[])
        world.journal.dropped(2 * step + 1)
    assert world.read("select count(*) from groups") == (0,)
    lengths = "select max(length(body)), max(length(bits)) from facts, pages"
    before = world.read(lengths)
    world.journal.began((START, PolicyVersion(0, 100)), 1, ranges(range(0, 100_000, 2)))
    world.journal.done(100, kept=[])
    body, bits = world.read(lengths)
    assert max(bits, before[1]) <= 8192 + 32
    assert body <= before[0] + 64, "one trainer more"
    past = world.open()
    assert past.consumed == set(range(0, 100_000, 2))
    assert past.dropped == set(range(1, 200, 2))


@pytest.mark.parametrize(
    "how", ["truncated", "flipped", "header", "facts", "ids", "not a database"]
)
def test_damage_is_cut_and_never_fatal(tmp_path: Path, how: str) -> None:
    world = JournalWorld(tmp_path)
    some_history(world)
    world.admit(*range(8, 40))
    world.close()
    data = bytearray(world.database.read_bytes())
    if how == "truncated":
        world.database.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        at = np.random.default_rng(0).integers(4096, len(data), 64)
        for one in at:
            data[one] ^= 0xFF
        world.database.write_bytes(data)
    elif how == "not a database":
        world.database.write_bytes(b"x" * 10000)
    else:
        db = sqlite3.connect(world.database)
        sql = {
            "header": "update headers set body = x'00' where id = 20",
            "facts": "update facts set body = x'00'",
            "ids": "update pages set bits = x'00' where kind = 'consumed'",
        }[how]
        with db:
            db.execute(sql)
        db.close()
    past = world.open()
    assert not past.is_whole, "the trainer would not be asked to start again"
    assert world.database.with_suffix(".aside").exists()
    if how == "ids":
        assert past.consumed == {0}, "of those without a header the trainer's checkpoint knows"
    if how == "header":
        assert past.lost == 1
        assert ids(past.ready) == [6, *range(8, 20), *range(21, 40)]
        assert {step: ids(groups) for step, groups in past.planned.items()} == {2: [4, 5]}
    if how in ("facts", "not a database"):
        assert past.ready == [], "nobody knows which tokens are legal"
    world.journal.began((START, PolicyVersion(1, 0)), 2, ())
    world.admit(100)
    again = world.open()
    assert again.is_whole
    assert 100 in ids(again.ready)


def test_shared_survives_every_node(tmp_path: Path) -> None:
    """Engine's and controller's node are lost, the run directory is not; without it all is."""
    folder = tmp_path / "run"
    server = RangeServer(tmp_path / "node", "127.0.0.1", 0, "t")
    engine = ClusterBlobs(tmp_path / "node", server.node, "t")
    reader = ClusterBlobs(tmp_path / "none", "", "t", timeout_s=0.3, copies=folder)
    journal = Journal(tmp_path / "a", reader, SharedGroups(folder))
    journal.load()
    journal.began((START,), 2, ())
    groups = {group_id: group_of(group_id, engine) for group_id in (4, 5)}
    for group in groups.values():
        journal.share(group)
        journal.admitted(group)
    journal.planned(0, [4])
    expected = {i: engine.read(uri) for i, group in groups.items() for uri in group_uris(group)}
    journal.close()
    server.close()
    shutil.rmtree(tmp_path / "node")

    blind = ClusterBlobs(tmp_path / "none", "", "t", timeout_s=0.3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    past = Journal(tmp_path / "b", blind).load()
    assert (past.lost, past.ready) == (2, [])

    past = Journal(tmp_path / "a", reader, SharedGroups(folder)).load()
    assert (ids(past.ready), ids(past.planned[0]), past.lost) == ([5], [4], 0)
    past = Journal(tmp_path / "c", reader, SharedGroups(folder)).load()
    assert (ids(past.ready), past.is_whole, past.lost) == ([4, 5], False, 0)
    rank = ClusterBlobs(tmp_path / "none", "", "t", timeout_s=0.3, copies=folder)
    for group in past.ready:
        assert rank.read(*group_uris(group)) == expected[group.group_id]
        (part,) = group.rollouts()[0].routing
        assert (rank.load(part.ids) == group.group_id).all()


def test_shipped_files_are_deleted_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was generated again meanwhile is not."""
    world = JournalWorld(tmp_path, shared=True)
    files = world.folder / "run"
    some_history(world)
    deleted: list[str] = []
    plain = Path.unlink
    monkeypatch.setattr(
        Path,
        "unlink",
        lambda path, **fields: (deleted.append(path.name), plain(path, **fields))[1],
    )
    world.journal.done(2, kept=[4])
    world.journal.left([6])
    world.journal.dropped(9)
    assert not [name for name in deleted if name.endswith(".group")], "that takes long"
    assert (files / "5.group").exists()
    (blob,) = (world.folder / "blobs").glob("6.*")
    plain(blob)
    world.admit(6)
    world.journal.sweep()
    assert sorted(path.stem for path in files.glob("*.group")) == ["0", "4", "6"]


def test_a_group_that_cannot_be_shipped_leaves_nothing(tmp_path: Path) -> None:
    world = JournalWorld(tmp_path, shared=True)
    assert world.segments is not None
    group = group_of(0, world.blobs)
    world.journal.share(group)
    world.blobs.delete(*group_uris(group))
    with pytest.raises(JournalError, match="group 0 was not copied"):
        world.journal.share(group)
    assert world.segments.held() == set()


def test_shipped_groups_of_other_settings_are_left_out(tmp_path: Path) -> None:
    """Their journal is lost, too."""
    world = JournalWorld(tmp_path, shared=True)
    assert world.segments is not None
    some_history(world)
    for settings, adopted in (("", [0, 4, 5, 6]), ("b", [])):
        folder = tmp_path / f"new{settings}"
        if settings:
            facts = replace(world.past.controller_state, begins=(START,), settings="a")
            world.segments.keep_state(SharedState(facts, (), ()))
        past = Journal(folder, world.blobs, world.segments, settings).load()
        assert ids(past.ready) == adopted
    assert world.segments.held() == set()


@pytest.mark.parametrize("how", ["header", "blob"])
def test_a_flipped_byte_of_a_segment_is_found(tmp_path: Path, how: str) -> None:
    world = JournalWorld(tmp_path, shared=True)
    some_history(world)
    path = tmp_path / "run" / "6.group"
    parts, data = copied_blobs_of(path), bytearray(path.read_bytes())
    assert parts is not None
    data[parts["" if how == "header" else "blob://n/6.0-s0"].offset + 3] ^= 1
    path.write_bytes(data)
    world.journal.close()
    world.database.unlink()
    world.blobs.delete("blob://n/6.0-s0")
    past = world.open()
    assert past.lost == 1
    assert ids(past.ready) == [0, 4, 5]


def test_a_damaged_segment_is_left_out(tmp_path: Path) -> None:
    world = JournalWorld(tmp_path, shared=True)
    some_history(world)
    path = tmp_path / "run" / "6.group"
    path.write_bytes(path.read_bytes()[:-1])
    world.journal.close()
    world.database.unlink()
    past = world.open()
    assert past.lost == 1
    assert 6 not in ids(past.ready)


def test_groups_of_other_settings_are_left_out(tmp_path: Path) -> None:
    world = JournalWorld(tmp_path)
    some_history(world)
    world.close()
    for settings, adopted in (("b", [6]), ("b", [6]), ("c", [])):
        journal = Journal(tmp_path / "journal", world.blobs, settings=settings)
        past = journal.load()
        assert ids(past.ready) == adopted
        journal.close()
    assert past.lost == 4
    assert past.consumed == {0, 1, 2, 3}
    assert past.controller_state.begins == (START,)
    assert not past.is_whole


def test_a_full_disk_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own error, in the middle of a transaction."""
    world = JournalWorld(tmp_path)
    some_history(world)
    (pages,) = world.read("pragma page_count")

    class Small(sqlite3.Connection):
        def executescript(self, script: str) -> sqlite3.Cursor:
            return super().executescript(script + f"pragma max_page_count = {pages};")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Small))
        world.open()
    with pytest.raises(JournalError, match="database or disk is full"):
        world.admit(*range(10, 400))
    assert {6, 10} - set(ids(world.open().ready)) <= {10}


@pytest.mark.parametrize(
    "code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_CANTOPEN]
)
def test_a_full_disk_at_the_opening_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Setting the journal aside would lose its groups."""
    world = JournalWorld(tmp_path)
    some_history(world)
    connect = sqlite3.connect

    def refuse(*_: Any, **__: Any) -> sqlite3.Connection:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises(JournalError, match="could not be opened"):
        world.open()
    monkeypatch.setattr(sqlite3, "connect", connect)
    assert ids(world.open().ready) == [6]


def test_names_do_not_repeat_after_damage_when_the_clock_steps_back(tmp_path: Path) -> None:
    lives = set()
    for _ in range(3):
        world = JournalWorld(tmp_path)
        world.close()
        world.database.write_bytes(b"no database")
        lives.add(world.open().controller_state.lives)
        world.close()
    assert len(lives) == 3

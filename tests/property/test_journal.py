"""The journal under any history of writes, kills, torn logs, full disks and lost nodes."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import RecoveredState
from moerl.controller.journal.shared_groups import SharedGroups
from moerl.core.errors import JournalError
from moerl.core.ids import ranges
from moerl.core.types import EpisodeGroup, PolicyVersion, Score
from moerl.records import BlobStore
from moerl.records.header_check import group_uris
from tests.helpers.journals import START, group_of
from tests.helpers.state_machines import explore

READY, PLANNED, TRAINED = "ready", "planned", "trained"


class FullDisk(sqlite3.Connection):
    """Refuses every commit while the disk is full."""

    is_full = False

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if FullDisk.is_full and sql == "commit":
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(sql, *args)


@dataclass
class State:
    """The journal's promise: what a controller that starts now gets back."""

    begins: tuple[PolicyVersion, ...] = ()
    done: int = 0
    rows: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # state, step, try
    consumed: set[int] = field(default_factory=set)  # without a row
    dropped: set[int] = field(default_factory=set)

    def of(self, state: str) -> list[int]:
        return sorted(one for one, row in self.rows.items() if row[0] == state)

    def move(self, ids: Iterable[int], state: str, step: int) -> None:
        for one in ids:
            self.rows[one] = (state, step, self.rows[one][2])

    def leave(self, ids: Iterable[int]) -> None:
        for one in ids:
            self.rows.pop(one, None)


def found(past: RecoveredState) -> State:
    """The state that a journal gave back."""
    rows = {g.group_id: (READY, -1, _try(g)) for g in past.ready}
    rows |= {g.group_id: (TRAINED, -1, _try(g)) for g in past.trained}
    for step, groups in past.planned.items():
        rows |= {g.group_id: (PLANNED, step, _try(g)) for g in groups}
    facts = past.controller_state
    return State(facts.begins, facts.done, rows, past.consumed, past.dropped)


def _try(group: EpisodeGroup) -> int:
    return int(group.prompt.text.split()[1])


def visible(state: State) -> State:
    """As a new controller sees it: trained groups count as consumed, their step is not told."""
    seen = deepcopy(state)
    seen.consumed |= set(state.of(TRAINED))
    seen.rows = {
        one: (where, -1 if where == TRAINED else step, number)
        for one, (where, step, number) in state.rows.items()
    }
    return seen


class Writes(RuleBasedStateMachine):
    """Model: `State`, as of each transaction; files of the run directory; writes that wait."""

    @initialize(shared=st.booleans())
    def begin(self, shared: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="journal-"))
        FullDisk.is_full = False
        connect = partial(sqlite3.connect, factory=FullDisk)
        self.patch = mock.patch("sqlite3.connect", connect)
        self.patch.start()
        self.blobs = BlobStore(self.root / "blobs", "n")
        self.shares = shared
        self.state, self.history = State(), [State()]
        self.copied: dict[int, int] = {}  # files of the run directory: the try of each group
        self.stale: set[int] = set()  # of these, to be deleted
        self.swept: set[int] = set()  # groups that have left, which a kill may bring back
        self.facts = State()  # in the run directory
        self.left: set[int] = set()  # writes that wait for room
        self.given_up: set[int] = set()
        self.failed = 0
        self.away: set[int] = set()  # ids that are generated again
        self.blobless: set[int] = set()
        self.lacks_blobs = False  # blobs of `history` are gone: no cut of the log leads there
        self.saved = [(0, frozenset[int]())]  # checkpoints: step, consumed
        self.next_id, self.number, self.lives, self.opened = 0, 0, 0, 0
        self.must_begin = True
        self.folder = self.root / "j0"
        self.open()
        self.restart_trainer(0)

    def teardown(self) -> None:
        self.journal.close()
        self.patch.stop()
        shutil.rmtree(self.root)

    # --- the model of a transaction ---------------------------------------------------------------
    def write(self, work: Callable[[], object], change: Callable[[State], object]) -> bool:
        """One transaction, which takes writes along that waited; a full disk changes nothing."""
        if FullDisk.is_full:
            with pytest.raises(JournalError, match="disk is full"):
                work()
            return False
        work()
        self.settle()
        change(self.state)
        self.history.append(deepcopy(self.state))
        return True

    def settle(self) -> None:
        self.state.leave(self.left)
        self.state.dropped |= self.given_up
        self.left, self.given_up = set(), set()

    def write_soon(self, left: Iterable[int] = (), dropped: Iterable[int] = ()) -> None:
        """After the call: written, or counted as failed and kept for the next write."""
        self.left |= set(left)
        self.given_up |= set(dropped)
        self.stale |= {*left, *dropped}
        if FullDisk.is_full:
            self.failed += 1
        else:
            self.settle()
            self.history.append(deepcopy(self.state))

    def ready(self) -> list[int]:
        return [one for one in self.state.of(READY) if one not in self.left]

    # --- groups -----------------------------------------------------------------------------------
    @rule(count=st.integers(1, 5), again=st.booleans())
    def admit(self, count: int, again: bool) -> None:
        for _ in range(count):
            if again and self.away:
                group_id = min(self.away)
            else:
                group_id, self.next_id = self.next_id, self.next_id + 1
            self.number += 1
            self.admit_one(group_of(group_id, self.blobs, number=self.number))

    @rule()
    def admit_late_siblings(self) -> None:
        """Of the newest group; they have no second try."""
        late = ~(self.next_id - 1)
        if self.next_id and late not in {*self.state.rows, *self.state.consumed, *self.left}:
            self.number += 1
            group = group_of(late, self.blobs, number=self.number)
            self.admit_one(replace(group, peers=(0.5,)))
            self.away.discard(late)

    def admit_one(self, group: EpisodeGroup) -> None:
        group_id, row = group.group_id, (READY, -1, self.number)
        self.journal.share(group)
        if self.shares:
            self.copied[group_id] = self.number
            self.stale.discard(group_id)
            self.swept.discard(group_id)
        self.away.add(group_id)
        if self.write(
            lambda: self.journal.admitted(group), lambda s: s.rows.update({group_id: row})
        ):
            self.away.discard(group_id)
            self.blobless.discard(group_id)

    @rule(count=st.integers(1, 3), full=st.booleans(), again=st.booleans())
    def leave(self, count: int, full: bool, again: bool) -> None:
        """full: the disk is full for a moment; again: they are generated before the next sweep."""
        ids, FullDisk.is_full = self.ready()[:count], full
        self.journal.left(ids)
        if ids:
            self.write_soon(left=ids)
            self.away |= {one for one in ids if one >= 0}
        FullDisk.is_full = False
        if ids and again:
            self.admit(count, again=True)
            self.sweep()

    @rule(full=st.booleans())
    def give_up(self, full: bool) -> None:
        FullDisk.is_full = full
        group_id = self.away.pop() if self.away else self.next_id
        self.next_id = max(self.next_id, group_id + 1)
        self.journal.dropped(group_id)
        self.write_soon(dropped=[group_id])
        FullDisk.is_full = False

    @rule()
    def sweep(self) -> None:
        self.journal.sweep()
        for one in self.stale:
            self.copied.pop(one, None)
        self.swept |= self.stale
        self.stale.clear()

    # --- steps ------------------------------------------------------------------------------------
    def plans(self) -> list[int]:
        return sorted({step for where, step, _ in self.state.rows.values() if where == PLANNED})

    @precondition(lambda self: self.ready())
    @rule(count=st.integers(1, 3))
    def plan(self, count: int) -> None:
        ids, step = self.ready()[:count], max([self.state.done - 1, *self.plans()]) + 1
        self.write(lambda: self.journal.planned(step, ids), lambda s: s.move(ids, PLANNED, step))

    @precondition(lambda self: self.plans())
    @rule()
    def unplan(self) -> None:
        ids = [one for one, row in self.state.rows.items() if row[1] == self.plans()[-1]]
        ids = [one for one in ids if self.state.rows[one][0] == PLANNED]
        self.write(lambda: self.journal.unplanned(ids), lambda s: s.move(ids, READY, -1))

    @precondition(lambda self: self.plans())
    @rule(keeps=st.booleans())
    def train(self, keeps: bool) -> None:
        """keeps: headers of every second group stay for a trainer that restarts."""
        step = self.plans()[0]
        ids = [one for one in self.state.of(PLANNED) if self.state.rows[one][1] == step]
        kept = ids[::2] if keeps else []
        gone = set(ids) - set(kept)

        def change(state: State) -> None:
            state.move(kept, TRAINED, step)
            state.leave(gone)
            state.consumed |= gone
            state.done = step + 1

        if self.write(lambda: self.journal.done(step, kept), change):
            self.stale |= gone

    @rule(back=st.integers(0, 1))
    def save(self, back: int) -> None:
        steps = max(self.saved[-1][0], self.state.done - back)
        rows = self.state.rows.items()
        ids = sorted(i for i, (where, s, _) in rows if where == TRAINED and s < steps)
        if FullDisk.is_full and ids:
            assert self.journal.saved(steps) == [], "asked again at the next step"
            self.failed += 1
            return
        assert sorted(self.journal.saved(steps)) == ids
        if ids:
            self.settle()
            self.state.leave(ids)
            self.state.consumed |= set(ids)
            self.stale |= set(ids)
            self.history.append(deepcopy(self.state))
        if steps == self.state.done:
            self.saved.append((steps, frozenset({*self.state.consumed, *self.state.of(TRAINED)})))

    @precondition(lambda self: not FullDisk.is_full)
    @rule(back=st.integers(0, 1))
    def restart_trainer(self, back: int) -> None:
        step, consumed = self.saved[max(0, len(self.saved) - 1 - back)]
        self.saved = [one for one in self.saved if one[0] <= step]
        begin = PolicyVersion(len(self.state.begins), step) if self.state.begins else START
        begins = (*self.state.begins, begin)

        def change(state: State) -> None:
            void = state.consumed | set(state.rows)
            state.move([*state.of(PLANNED), *state.of(TRAINED)], READY, -1)
            state.leave(consumed)
            state.consumed, state.begins, state.done = set(consumed), begins, step
            self.away |= void - set(state.rows) - consumed - state.dropped
            self.away = {one for one in self.away - consumed if one >= 0}

        self.write(lambda: self.journal.began(begins, 2, ranges(consumed)), change)
        if self.shares:
            self.stale |= consumed & set(self.copied)
            self.facts = deepcopy(self.state)
        self.must_begin = False

    @rule(steps=st.integers(1, 3), keeps=st.booleans(), ends=st.booleans())
    def go_on(self, steps: int, keeps: bool, ends: bool) -> None:
        """Steps in which nothing goes wrong; ends: the last one, too."""
        for number in range(steps):
            self.admit(2, again=True)
            if self.ready():
                self.plan(3)
            if self.plans() and (ends or number < steps - 1):
                self.train(keeps)
        self.sweep()

    # --- failures ---------------------------------------------------------------------------------
    @rule(full=st.sampled_from([True, False, False]))
    def fill(self, full: bool) -> None:
        FullDisk.is_full = full

    @rule(pick=st.integers(0, 10), kills=st.booleans())
    def lose_a_blob(self, pick: int, kills: bool) -> None:
        """kills: the controller dies before anybody sees it."""
        if rows := sorted(self.state.rows, key=lambda one: self.state.rows[one]):
            one = rows[pick % len(rows)]
            self.blobs.delete(f"blob://n/{one}.0-s{self.state.rows[one][2]}")
            self.blobless.add(one)
            self.lacks_blobs = True
        if kills:
            self.kill(1.0)

    @rule(keep=st.sampled_from([1.0, 1.0, 0.98, 0.7, 0.3, 0.0]))
    def kill(self, keep: float) -> None:
        """The next controller has the bytes on disk; a power cut loses the end of the log."""
        keep = 1.0 if self.lacks_blobs else keep
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.opened += 1
        self.folder = self.root / f"j{self.opened}"
        self.folder.mkdir(mode=0o700)
        for name, data in files.items():
            if name == "journal.sqlite-wal":
                data = data[: int(len(data) * keep)]
            if not name.endswith("-shm"):
                (self.folder / name).write_bytes(data)
        self.journal.close()
        self.left, self.given_up = set(), set()
        half = self.root / "run" / ".10.group"
        if self.copied:
            half.write_bytes(b"half a copy")
        self.open(torn=keep < 1.0)
        assert not half.exists()

    def open(self, *, torn: bool = False) -> None:
        FullDisk.is_full = False
        self.journal = Journal(
            self.folder, self.blobs, SharedGroups(self.root / "run") if self.shares else None
        )
        past = self.journal.load()
        self.check_blobs(past)
        seen = found(past)
        assert past.controller_state.dp_size == (2 if seen.begins else 0)
        if torn:
            assert past.is_whole or not seen.begins
            self.go_back(seen)
        else:
            self.lose_blobless(past)
            assert seen == visible(self.state)
            if past.is_whole:
                assert past.controller_state.lives == self.lives + 1
        self.lives = past.controller_state.lives
        self.failed = 0
        self.copied = {one: n for one, n in self.copied.items() if one in self.state.rows}
        self.stale.clear()
        self.history.append(deepcopy(self.state))
        known = {*self.state.rows, *self.state.consumed, *self.state.dropped}
        self.away = set(range(self.next_id)) - known
        if self.must_begin and self.opened:
            self.restart_trainer(0)

    def lose_blobless(self, past: RecoveredState) -> None:
        """Groups whose blobs are gone are generated again, unless they are trained."""
        lost = {one for one in self.blobless if one in self.state.rows}
        trained = lost & set(self.state.of(TRAINED))
        self.state.consumed |= trained
        self.must_begin |= bool(lost & set(self.state.of(PLANNED)))
        assert past.lost == len(lost - trained)
        assert past.is_whole == (not lost & set(self.state.of(PLANNED)))
        self.state.leave(lost)
        self.blobless.clear()

    def go_back(self, seen: State) -> None:
        """What was committed before the cut is all there, and nothing behind it."""
        at = next((one for one in reversed(self.history) if visible(one) == seen), None)
        assert at is not None, "a state that never was"
        self.state, self.must_begin = deepcopy(at), not at.begins
        self.saved = [one for one in self.saved if one[0] <= at.done] if at.begins else []
        self.saved = self.saved or [(0, frozenset())]
        self.copied = {one: n for one, n in self.copied.items() if one in at.rows}

    @precondition(lambda self: self.shares)
    @rule()
    def lose_the_node(self) -> None:
        """Journal and blobs are gone; the run directory has what was shared."""
        self.journal.close()
        shutil.rmtree(self.root / "blobs")
        self.blobs = BlobStore(self.root / "blobs", "n")
        self.opened += 1
        self.folder = self.root / f"j{self.opened}"
        ready = {i: (READY, -1, n) for i, n in self.copied.items() if i not in self.facts.consumed}
        facts = self.facts
        self.state = State(facts.begins, facts.done, ready, facts.consumed, facts.dropped)
        self.state = deepcopy(self.state)
        self.left, self.given_up, self.blobless = set(), set(), set()
        self.saved = [one for one in self.saved if set(one[1]) >= facts.consumed]
        FullDisk.is_full = False
        self.journal = Journal(self.folder, self.blobs, SharedGroups(self.root / "run"))
        past = self.journal.load()
        assert not past.is_whole, "the trainer would not be asked to start again"
        self.check_blobs(past)
        assert found(past) == visible(self.state)
        self.journal.close()
        self.lacks_blobs = False
        self.history, self.lives, self.must_begin = [], past.controller_state.lives, True
        self.open()

    def check_blobs(self, past: RecoveredState) -> None:
        """Each group comes back with its own rows."""
        planned = [group for groups in past.planned.values() for group in groups]
        for group in (*past.ready, *past.trained, *planned):
            rollout, expected = group.rollouts()[0], group.group_id + _try(group)
            assert rollout.token_ids.tolist() == [1, 2, 3, 4]
            assert rollout.logprobs.dtype == np.float32
            assert group.episodes[0].score == Score(float(group.group_id), errors=2.0)
            assert group.peers == ((0.5,) if group.group_id < 0 else ())
            assert rollout.logprobs.tolist() == [-0.5, -0.25]
            assert {*group_uris(group)} == {f"blob://n/{group.group_id}.0-s{_try(group)}"}
            assert (self.blobs.load(rollout.routing[0].ids) == expected % 256).all()

    # --- always -----------------------------------------------------------------------------------
    @invariant()
    def failures_are_counted(self) -> None:
        assert self.journal.take_failed() == self.failed
        self.failed = 0

    @invariant()
    def files_go_with_their_groups(self) -> None:
        if self.shares:
            files = SharedGroups(self.root / "run").held()
            assert files == set(self.copied)
            gone = self.stale | self.swept
            assert set(self.state.rows) - gone <= files, "a group would be lost with its node"


def test_any_history() -> None:
    explore(Writes, 75, 30)

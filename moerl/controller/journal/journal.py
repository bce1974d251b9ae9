"""Persistent state of the controller: admitted groups, plans, finished steps, and the history.

A SQLite database on node-local disk (write-ahead log).  Each row is written before its effect is
visible: blobs are sealed before a header is admitted, a plan is written before the trainer gets it,
a step before its reply.  Intents need no rows: an id that is neither consumed, dropped nor in the
buffer is regenerated.

- `facts`: one row with everything small (`ControllerState`).
- `groups`: one row per group that is in the buffer, or trained and needed by a restart. `headers`
  has their contents in a second table, because SQLite rewrites the whole row on a state change and
  the headers of a batch are tens of megabytes. Unused headers are deleted a few at a time.
- `pages`: consumed and dropped ids as bitmaps; with dynamic sampling there are as many dropped ids
  as groups.

All rows carry digests.  SQLite cuts a torn tail of its log; other damage is found by SQLite's check
and by the digests and is set aside.  Damaged groups are regenerated, and after any damage the
trainer must restart from its checkpoint, which knows what is consumed (`RecoveredState.is_whole`).

Durability `node` survives SIGKILL of every process.  It does not wait for the disk (`synchronous =
off`); damage by a power cut is found as above.  `shared` (with `SharedGroups`) survives the loss of
nodes: each admitted group, blobs included, is also one sealed file in the run directory.

A failed write (full disk) changes nothing, so the caller may repeat it; its effect stays invisible
until then.  Ids that left or were dropped need no repetition by the caller: they are written with
the next transaction.  A controller that dies before it finds such a group ready again, and leaves
it out or regenerates it for the same reason as before.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

import msgspec
from pyroaring import BitMap

from moerl.controller.journal.recovered_state import (
    ControllerState,
    RecoveredState,
    SharedState,
    digest_of,
)
from moerl.controller.journal.shared_groups import SharedGroups
from moerl.controller.journal.sqlite_files import remove_logs, set_up
from moerl.controller.journal.turn_log import TurnLog
from moerl.core.errors import JournalError
from moerl.core.ids import IdSet, Ranges, ranges
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import EpisodeGroup, PolicyVersion
from moerl.records.blob_store import BlobStore, sizes_of
from moerl.records.header_check import group_refs
from moerl.runtime.private_dir import private_dir

log = logging.getLogger(__name__)

_SCHEMA = """
create table if not exists facts(body blob not null, digest text not null);
create table if not exists groups(
    id integer primary key,
    state text not null,      -- ready | planned | trained
    step integer not null,    -- that plans it; -1 while ready
    header_digest text not null,
    digest text not null      -- of id, state, step and header_digest
);
create table if not exists headers(id integer primary key, body blob not null);
create table if not exists pages(
    kind text not null,       -- consumed: trained, beside the groups above | dropped: given up
    page integer not null,    -- of ids, _PAGE each
    bits blob not null,
    digest text not null,
    primary key (kind, page)
) without rowid;
"""
_READY, _PLANNED, _TRAINED = "ready", "planned", "trained"
_CONSUMED, _DROPPED, _LEFT = "consumed", "dropped", "left"
_DISK_ERRORS = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
)
_PRUNED = 4  # headers deleted per admitted one
_PAGE = 1 << 14  # ids whose bitmap is written together: at most 8 KiB


class Journal:
    """One run's journal; one process writes it."""

    def __init__(
        self,
        folder: Path,
        blobs: BlobStore,
        shared_groups: SharedGroups | None = None,
        settings: str = "",
    ) -> None:
        """shared_groups: copies every admitted group to the run directory (durability `shared`).

        settings: fingerprint of what defines a group; groups with another fingerprint are dropped.
        """
        self._folder, self._blobs, self._shared_groups = folder, blobs, shared_groups
        self._settings = settings
        self._path = folder / "journal.sqlite"
        self.turns = TurnLog(folder)  # of episodes that are open
        self._controller_state = ControllerState()
        self._db: sqlite3.Connection | None = None
        self._unused: set[int] = set()  # ids of headers to delete
        self._unwritten: dict[str, set[int]] = {_LEFT: set(), _DROPPED: set()}
        self._failed = 0  # writes since `take_failed`

    def load(self) -> RecoveredState:
        """Open the journal, set damaged rows aside, and return its contents.  Call once, first."""
        private_dir(self._folder, "rollout.journal_dir")
        is_new = not self._path.exists()
        damage = ""
        try:
            self._open()
            (answer,) = self._query("pragma quick_check").fetchone()
            damage = "" if answer == "ok" else str(answer)
        except sqlite3.DatabaseError as error:
            if _is_of_disk(error):  # setting a whole journal aside would lose its groups
                raise JournalError(f"{self._path} could not be opened: {error}") from error
            damage = str(error)
        recovered, cause = self._read()
        damage = damage or cause
        if self._shared_groups is not None and (is_new or damage):
            self._shared_groups.restore(recovered, self._blobs)
        if recovered.controller_state.settings not in ("", self._settings):
            damage = "its groups were made under other settings"
            count = (
                len(recovered.ready)
                + len(recovered.trained)
                + sum(map(len, recovered.planned.values()))
            )
            recovered = RecoveredState(
                recovered.controller_state,
                consumed=recovered.consumed,
                dropped=recovered.dropped,
                lost=count,
            )
        if damage:
            recovered.is_whole = False
            log.error("not all of the journal %s can be used: %s", self._path, damage)
            self._set_aside()
        if is_new or damage:
            self._write_all(recovered)
        self._leave_out_missing(recovered)
        if self._shared_groups is not None:
            self._shared_groups.keep_only(recovered.with_headers())
        ended = recovered.consumed | recovered.dropped | recovered.with_headers()
        self.turns.load(ended if recovered.is_whole else None)
        # after damage the number of lives is not known, but names of blobs must not repeat
        lives = recovered.controller_state.lives + 1 if recovered.is_whole else secrets.randbits(48)
        recovered.controller_state = replace(
            recovered.controller_state, lives=lives, settings=self._settings
        )
        self._write(recovered.controller_state)
        return recovered

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        self.turns.close()

    # --- written before the effect is visible ---------------------------------------------------
    def began(
        self,
        begins: tuple[PolicyVersion, ...],
        dp_size: int,
        consumed: Ranges,
        pair_cost: float = 0.0,
    ) -> None:
        """A trainer starts with the last of these weights; groups of later steps are ready again.

        begins: all starts that are known.
        """
        spent, controller_state = IdSet(consumed), self._controller_state
        again = sorted(one for one in self._ids(_TRAINED) if one not in spent)
        controller_state = replace(
            controller_state,
            begins=begins,
            dp_size=dp_size,
            pair_cost=pair_cost,
            done=begins[-1].step,
        )
        with self._transaction() as db:
            self._move(db, [*sorted(self._ids(_PLANNED)), *again], _READY, -1)
            self._forget(db, [one for one in self._ids() if one in spent])
            db.execute("delete from pages where kind = ?", (_CONSUMED,))
            self._note(db, _CONSUMED, spent)
            self._write(controller_state, db)
            self._sweep(db)
        if self._shared_groups is not None:
            self._shared_groups.remove([one for one in self._shared_groups.held() if one in spent])
            dropped = ranges(self._noted(_DROPPED))
            self._shared_groups.keep_state(SharedState(controller_state, consumed, dropped))

    @property
    def is_shared(self) -> bool:
        """Durability `shared`: a group is copied before it is admitted."""
        return self._shared_groups is not None

    def share(self, group: EpisodeGroup) -> None:
        """Copy the group and its blobs to the run directory.  Slow; thread-safe.

        Raises JournalError when that file system is full.
        """
        if self._shared_groups is not None:
            self._shared_groups.share(group, self._blobs)

    def sweep(self) -> None:
        """Delete copies that are no longer needed.  Slow; thread-safe."""
        if self._shared_groups is not None:
            self._shared_groups.sweep()

    def admitted(self, group: EpisodeGroup) -> None:
        header, group_id = encode_value(group), group.group_id
        header_digest = digest_of(header)
        row = (group_id, _READY, -1, header_digest)
        self._unused.discard(group_id)
        unused = list(islice(self._unused, _PRUNED))
        with self._transaction() as db:
            db.executemany("delete from headers where id = ?", [(i,) for i in unused])
            db.execute("insert or replace into headers values (?, ?)", (group_id, header))
            values = (*row, _row_digest(*row))
            db.execute("insert or replace into groups values (?, ?, ?, ?, ?)", values)
        self._unused.difference_update(unused)

    def planned(self, step: int, group_ids: Iterable[int]) -> None:
        with self._transaction() as db:
            self._move(db, group_ids, _PLANNED, step)

    def unplanned(self, group_ids: Iterable[int]) -> None:
        """These planned groups are ready again."""
        with self._transaction() as db:
            self._move(db, group_ids, _READY, -1)

    def done(self, step: int, kept: Iterable[int]) -> None:
        """A step is trained; headers of `kept` stay for a trainer that restarts before it."""
        planned, kept = self._ids(_PLANNED, step), set(kept)
        gone = planned - kept
        with self._transaction() as db:
            self._move(db, planned & kept, _TRAINED, step)
            self._forget(db, gone)
            self._note(db, _CONSUMED, gone)
            self._write(replace(self._controller_state, done=step + 1), db)
        self._unused |= gone
        self._unshare(gone)

    def saved(self, steps: int) -> list[int]:
        """A checkpoint holds `steps` steps: forget their groups and return their ids."""
        sql = "select id from groups where state = ? and step < ?"
        try:
            ids = [row[0] for row in self._query(sql, (_TRAINED, steps))]
            if ids:
                with self._transaction() as db:
                    self._forget(db, ids)
                    self._note(db, _CONSUMED, ids)
        except (JournalError, sqlite3.Error) as error:
            self._failed += 1
            log.error("groups of the checkpoint are kept until the next step: %s", error)
            return []
        if ids:
            self._unused.update(ids)
            self._unshare(ids)
        return ids

    def left(self, group_ids: Iterable[int]) -> None:
        """These groups left the buffer untrained and are regenerated."""
        group_ids = list(group_ids)
        if group_ids:
            self._write_soon(_LEFT, group_ids)
            self._unused.update(group_ids)
            self._unshare(group_ids)

    def dropped(self, group_id: int) -> None:
        """This id is dropped for good."""
        self._write_soon(_DROPPED, [group_id])
        self._unshare([group_id])  # of an earlier try that got no row

    def take_failed(self) -> int:
        """Number of failed writes since the last call that no caller has seen."""
        failed, self._failed = self._failed, 0
        return failed + self.turns.take_failed()

    def _write_soon(self, kind: str, group_ids: list[int]) -> None:
        """Write now, or with the next transaction."""
        self._unwritten[kind].update(group_ids)
        try:
            with self._transaction():
                pass
        except JournalError as error:
            self._failed += 1
            log.error("that groups %s were %s is written later: %s", group_ids, kind, error)

    # --- reading ------------------------------------------------------------------------------
    def _read(self) -> tuple[RecoveredState, str]:
        """(valid state, description of damage or "")."""
        recovered, damage = RecoveredState(ControllerState()), ""
        try:
            rows = self._query("select body, digest from facts").fetchall()
            if any(digest_of(body) != digest for body, digest in rows) or len(rows) > 1:
                return recovered, "the facts do not match their digest"
            if rows:
                recovered.controller_state = decode_value(rows[0][0], ControllerState)
            for row in self._query(
                "select id, state, step, body, header_digest, digest "
                "from groups left join headers using (id) order by id"
            ):
                if not self._take(row, recovered):
                    recovered.lost += 1
                    damage = f"the row of group {row[0]} does not match its digest"
            recovered.consumed |= self._noted(_CONSUMED)
            recovered.dropped |= self._noted(_DROPPED)
        except (sqlite3.DatabaseError, msgspec.MsgspecError, JournalError) as error:
            damage = str(error)
        if not recovered.controller_state.begins:  # without the history, legal tokens are unknown
            recovered = RecoveredState(
                recovered.controller_state, lost=recovered.lost + len(recovered.ready)
            )
        return recovered, damage

    @staticmethod
    def _take(row: tuple[int, str, int, bytes | None, str, str], recovered: RecoveredState) -> bool:
        group_id, state, step, header, header_digest, digest = row
        if _row_digest(group_id, state, step, header_digest) != digest:
            return False
        if header is None or digest_of(header) != header_digest:
            return False
        group = decode_value(header, EpisodeGroup)
        if state == _TRAINED:
            recovered.consumed.add(group_id)
            recovered.trained.append(group)
        elif state == _PLANNED:
            recovered.planned.setdefault(step, []).append(group)
        else:
            recovered.ready.append(group)
        return True

    def _leave_out_missing(self, recovered: RecoveredState) -> None:
        """Drop groups with missing or short blobs; they are regenerated."""

        def split(groups: list[EpisodeGroup]) -> tuple[list[EpisodeGroup], list[int]]:
            whole = [g for g in groups if not self._blobs.find(sizes_of(group_refs(g))).gone]
            return whole, [group.group_id for group in groups if group not in whole]

        recovered.ready, gone = split(recovered.ready)
        recovered.trained, unused = split(recovered.trained)
        for step, groups in list(recovered.planned.items()):
            recovered.planned[step], missing = split(groups)
            if missing:
                recovered.is_whole = (
                    False  # the trainer may have this plan, which cannot be built again
                )
                gone += missing
        if gone:
            log.error("%d journaled groups lack blobs and are regenerated", len(gone))
        recovered.lost += len(gone)
        self.left(gone)
        with self._transaction() as db:
            self._forget(db, unused)
            self._note(db, _CONSUMED, unused)
            self._sweep(db)

    # --- plumbing -----------------------------------------------------------------------------
    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        self._db.create_function("row_digest", 4, _row_digest, deterministic=True)
        set_up(self._db, _SCHEMA)

    def _set_aside(self) -> None:
        """Start a new database; keep the newest damaged one for inspection."""
        self.close()
        self._path.replace(self._path.with_suffix(".aside"))
        remove_logs(self._path)
        self._open()

    def _write_all(self, recovered: RecoveredState) -> None:
        planned = [(step, group) for step, groups in recovered.planned.items() for group in groups]
        rows = [(group, _READY, -1) for group in recovered.ready]
        rows += [(group, _PLANNED, step) for step, group in planned]
        rows += [
            (group, _TRAINED, recovered.controller_state.done - 1) for group in recovered.trained
        ]
        for group, state, step in rows:
            self.admitted(group)
            with self._transaction() as db:
                self._move(db, [group.group_id], state, step)
        with self._transaction() as db:
            self._note(db, _CONSUMED, recovered.consumed)
            self._note(db, _DROPPED, recovered.dropped)
            self._write(recovered.controller_state, db)

    def _sweep(self, db: sqlite3.Connection) -> None:
        """Delete all headers that no restart can use."""
        db.execute("delete from headers where id not in (select id from groups)")
        self._unused.clear()

    @staticmethod
    def _forget(db: sqlite3.Connection, ids: Iterable[int]) -> None:
        db.executemany("delete from groups where id = ?", [(i,) for i in ids])

    @staticmethod
    def _note(db: sqlite3.Connection, kind: str, ids: Iterable[int]) -> None:
        """Add ids of a kind; the cost is that of the pages of `ids`."""
        for page, added in groupby(sorted(ids), lambda one: one // _PAGE):
            held = BitMap(one % _PAGE for one in added)
            sql = "select bits from pages where kind = ? and page = ?"
            for (before,) in db.execute(sql, (kind, page)).fetchall():
                held |= BitMap.deserialize(before)
            bits = held.serialize()
            row = (kind, page, bits, _page_digest(kind, page, bits))
            db.execute("insert or replace into pages values (?, ?, ?, ?)", row)

    def _noted(self, kind: str) -> set[int]:
        """All ids of a kind.  Raises JournalError when a page does not match its digest."""
        found: set[int] = set()
        sql = "select page, bits, digest from pages where kind = ?"
        for page, bits, digest in self._query(sql, (kind,)):
            if _page_digest(kind, page, bits) != digest:
                raise JournalError(f"page {page} of {kind} ids does not match its digest")
            found.update(page * _PAGE + one for one in BitMap.deserialize(bits))
        return found

    def _query(self, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if self._db is None:
            raise sqlite3.DatabaseError("it could not be opened")
        return self._db.execute(sql, values)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.  Raises JournalError for a full or failing disk."""
        assert self._db is not None, "load comes first"
        try:
            self._db.execute("begin immediate")
            self._forget(self._db, sorted(self._unwritten[_LEFT]))
            self._note(self._db, _DROPPED, self._unwritten[_DROPPED])
            yield self._db
            self._db.execute("commit")
            for ids in self._unwritten.values():
                ids.clear()
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("rollback")
            if isinstance(error, sqlite3.Error):
                raise JournalError(f"{self._path} could not be written: {error}") from error
            raise

    def _move(self, db: sqlite3.Connection, ids: Iterable[int], state: str, step: int) -> None:
        db.executemany(
            "update groups set state = ?, step = ?, "
            "digest = row_digest(id, ?, ?, header_digest) where id = ?",
            [(state, step, state, step, group_id) for group_id in ids],
        )

    def _write(
        self, controller_state: ControllerState, db: sqlite3.Connection | None = None
    ) -> None:
        if db is None:
            with self._transaction() as own:
                self._write(controller_state, own)
            return
        body = encode_value(controller_state)
        db.execute("delete from facts")
        db.execute("insert into facts values (?, ?)", (body, digest_of(body)))
        self._controller_state = controller_state

    def _ids(self, state: str = "", step: int | None = None) -> set[int]:
        sql = "select id from groups where ? in ('', state) and (? is null or ? = step)"
        try:
            return {row[0] for row in self._query(sql, (state, step, step))}
        except sqlite3.Error as error:
            raise JournalError(f"{self._path} could not be read: {error}") from error

    def _unshare(self, ids: Iterable[int]) -> None:
        if self._shared_groups is not None:
            self._shared_groups.remove(ids)


def _is_of_disk(error: sqlite3.Error) -> bool:
    """True when the disk is full or fails on a write, so that the file may be whole."""
    code = getattr(error, "sqlite_errorcode", 0)
    is_read = code in (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)
    return code & 0xFF in _DISK_ERRORS and not is_read


def _row_digest(group_id: int, state: str, step: int, header_digest: str) -> str:
    return digest_of(f"{group_id} {state} {step} {header_digest}".encode())


def _page_digest(kind: str, page: int, bits: bytes) -> str:
    return digest_of(f"{kind} roaring {page} ".encode() + bits)

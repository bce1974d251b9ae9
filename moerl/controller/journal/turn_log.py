"""Replies of engines to the turns of open episodes, for the controller that comes after this one.

An agent cannot be stopped and continued: when the controller dies, what plays an episode ends, and
the next controller starts it again.  It then asks for the same turns.  A request that equals one of
the dead controller's is answered with that reply and its records, so a death costs open turns only.

Equal requests have the same tokens and the same of all that decides what is sampled and recorded.
They are answered in the order in which they were before, each reply once.  A reply is not given out
when the turn before it was sampled again, even to the same tokens: its rows continue other ones.

A reply is written before it leaves the controller's loop.  One that cannot be written leaves
anyway, and is sampled again after a death.  The log is a database of its own next to the journal,
so that damage to it costs turns and no groups; entries of a group are deleted when the group ends.
Rejected: whole turns (an update ends a request in mid-turn, whose tokens would be lost), the forest
of an episode (the state of the program is lost in any case, so it asks for every turn again).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from moerl.controller.journal.recovered_state import digest_of
from moerl.controller.journal.sqlite_files import remove_logs, set_up
from moerl.controller.rollout_builder import blob_uris
from moerl.core.ids import episode_of, group_of, without_life
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import Array, GenerateRequest, Segment

log = logging.getLogger(__name__)

_SCHEMA = """
create table if not exists replies(
    id integer primary key,
    group_id integer not null,
    episode text not null,    -- GROUP.SIBLING
    request text not null,    -- digest
    body blob not null,
    digest text not null      -- of group_id, episode, request and body
);
create index if not exists replies_by_group on replies(group_id);
"""
_Row = tuple[int, str, str, bytes, str]  # without the id


@dataclass(slots=True)
class _EarlierReplies:
    """Turns of one group that earlier controllers left."""

    # By episode and request: ids of rows that were not given out, in their order
    rows: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    uris: set[str] = field(default_factory=set)  # blobs to which no episode that runs refers
    anew: set[tuple[str, str]] = field(default_factory=set)  # by episode: contexts sampled anew


class TurnLog:
    """The log of one run; used by one thread of one process, which owns the folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "turns.sqlite"
        self._db: sqlite3.Connection | None = None
        self._groups: set[int] = set()  # with rows
        self._ended: set[int] = set()  # whose rows could not be deleted yet
        self._earlier: dict[int, _EarlierReplies] = {}
        self._failed = 0  # writes since `take_failed`
        self.lost = 0  # replies that `load` could not use

    def load(self, ended: Collection[int] | None) -> None:
        """Read the turns that an earlier controller left.  Call once, first.

        ended: groups that are not open any more; None: nothing that is there may be used.
        """
        if not self._path.exists():
            return
        try:
            (answer,) = self._query("pragma quick_check").fetchone()
            (self.lost,) = self._query("select count(*) from replies").fetchone()
            if answer != "ok" or ended is None:
                raise sqlite3.DatabaseError("the journal has damage" if answer == "ok" else answer)
            kept = self._read_all()
            self.lost -= kept
            log.info("%d turns of open episodes are kept, %d lost", kept, self.lost)
        except sqlite3.Error as error:
            log.error("turns of open episodes are sampled again, without %s: %s", self._path, error)
            self._start_again()
        for group_id in self._groups.intersection(ended or ()):
            self.end(group_id)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    @property
    def uris(self) -> set[str]:
        """Blobs of replies that may still be given out."""
        return set[str]().union(*(earlier.uris for earlier in self._earlier.values()))

    def take_failed(self) -> int:
        """Number of failed writes since the last call."""
        failed, self._failed = self._failed, 0
        return failed

    # --- replies of this controller -------------------------------------------------------------
    def add(self, request: GenerateRequest, reply: Segment) -> None:
        """Keep a reply of an engine for the next controller.  A failed write is counted."""
        group_id, episode = group_of(request.rollout_id), _episode(request)
        if earlier := self._earlier.get(group_id):
            sampled = [piece.output_ids for piece in reply.pieces]
            earlier.anew.add((episode, _tokens_digest(request.token_ids, *sampled)))
        row = (group_id, episode, _request_digest(request), encode_value(reply))
        self._groups.add(group_id)
        try:
            self._delete_ended()
            sql = "insert into replies values (null, ?, ?, ?, ?, ?)"
            self._query(sql, (*row, _row_digest(*row)))
        except sqlite3.Error as error:
            self._failed += 1
            log.error("a turn of group %d is not in %s: %s", group_id, self._path, error)

    def end(self, group_id: int) -> set[str]:
        """Forget a group that is not open any more.

        Returns blobs of earlier replies to which no episode of this controller refers.
        """
        earlier = self._earlier.pop(group_id, None)
        if group_id in self._groups:
            self._groups.discard(group_id)
            self._ended.add(group_id)
            try:
                self._delete_ended()
            except sqlite3.Error as error:
                self._failed += 1
                log.error("that group %d has ended is written later: %s", group_id, error)
        return set() if earlier is None else earlier.uris

    # --- replies of earlier controllers -----------------------------------------------------------
    def take(self, request: GenerateRequest) -> Segment | None:
        """The next reply to an equal request; it is not found again.

        `adopt` must be called when it is given out.
        """
        earlier = self._earlier.get(group_of(request.rollout_id))
        if earlier is None:
            return None
        episode = _episode(request)
        ids = earlier.rows.get((episode, _request_digest(request)))
        if not ids or (episode, _context_digest(request)) in earlier.anew:
            return None
        sql = "select group_id, episode, request, body, digest from replies where id = ?"
        try:
            return _decoded(self._query(sql, (ids.pop(0),)).fetchone())
        except sqlite3.Error as error:
            log.error("a turn of %s could not be read: %s", self._path, error)
            return None

    def adopt(self, reply: Segment) -> None:
        """This reply was given out: its blobs belong to an episode that runs."""
        if earlier := self._earlier.get(group_of(reply.rollout_id)):
            earlier.uris -= blob_uris(reply)

    # --- plumbing ---------------------------------------------------------------------------------
    def _read_all(self) -> int:
        """Number of replies that may be given out."""
        kept = 0
        for number, *row in self._query(
            "select id, group_id, episode, request, body, digest from replies order by id"
        ):
            group_id, episode, request, *_ = row
            self._groups.add(group_id)
            if (reply := _decoded(tuple(row))) is None:
                log.error("a turn of group %s does not match its digest", group_id)
                continue
            kept += 1
            earlier = self._earlier.setdefault(group_id, _EarlierReplies())
            earlier.rows.setdefault((episode, request), []).append(number)
            earlier.uris |= blob_uris(reply)
        return kept

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        set_up(self._db, _SCHEMA)

    def _start_again(self) -> None:
        """Delete the database; the next write makes a new one."""
        self.close()
        self._groups.clear()
        self._earlier.clear()
        self._path.unlink(missing_ok=True)
        remove_logs(self._path)

    def _query(self, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if self._db is None:
            self._open()
        assert self._db is not None, "it was opened"
        return self._db.execute(sql, values)

    def _delete_ended(self) -> None:
        """A group that is played again begins without the rows of its end."""
        for group_id in list(self._ended):
            self._query("delete from replies where group_id = ?", (group_id,))
            self._ended.discard(group_id)


def _episode(request: GenerateRequest) -> str:
    return without_life(episode_of(request.rollout_id))


def _request_digest(request: GenerateRequest) -> str:
    asked = (request.num_sampled, request.rows_known, request.audit, request.sampling)
    return _tokens_digest(request.token_ids) + digest_of(encode_value(asked))


def _context_digest(request: GenerateRequest) -> str:
    """Digest of the leading tokens whose rows earlier replies delivered; "" = there are none."""
    rows = request.num_tokens - 1 if request.num_sampled else request.rows_known
    return _tokens_digest(request.token_ids[: rows + 1]) if rows else ""


def _tokens_digest(*parts: Array) -> str:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.astype("<i4", copy=False).tobytes())
    return state.hexdigest()


def _row_digest(group_id: int, episode: str, request_digest: str, body: bytes) -> str:
    return digest_of(f"{group_id} {episode} {request_digest} ".encode() + body)


def _decoded(row: _Row | None) -> Segment | None:
    """The reply of a row; None when the row is missing or does not match its digest."""
    if row is None or _row_digest(*row[:4]) != row[4]:
        return None
    try:
        reply: Segment = decode_value(row[3], Segment)
    except msgspec.MsgspecError:  # of another release
        return None
    return reply

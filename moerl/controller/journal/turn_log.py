"""Replies of engines to the turns of open episodes, for the controller that comes after this one.

When the controller dies, every running episode ends, and the next controller plays it again.  It
then asks for the same turns.  A request that equals one of the dead controller's is answered with
that reply and its records: an agent gets its finished turns back, a long answer continues where an
update or a slice had cut it.

Equal requests have the same tokens and the same of all that decides what is sampled and recorded.
They are answered in the order in which they were before, each reply once.  A reply is not given out
when the turn before it was sampled again, even to the same tokens: its rows continue other ones.

A reply that cannot be written is sampled again after a death.  The log is a database of its own
next to the journal, so that damage to it costs turns and no groups; entries of an episode are
deleted when its group ends.  Rejected: whole turns (an update ends a request in mid-turn, whose
tokens would be lost), the forest of an episode (the state of a program is lost in any case, so it
asks for every turn again).
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from moerl.controller.journal.recovered_state import digest_of
from moerl.controller.journal.sqlite_files import remove_logs, set_up
from moerl.core.ids import episode_of, group_of, without_life
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import Array, GenerateRequest, Segment
from moerl.records.header_check import blob_uris

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
create index if not exists replies_by_episode on replies(episode);
"""
_Row = tuple[int, str, str, bytes, str]  # without the id


@dataclass(slots=True)
class _EarlierReplies:
    """Turns of one episode that earlier controllers left."""

    # By request: ids of rows that were not given out, in their order
    rows: dict[str, list[int]] = field(default_factory=dict)
    uris: set[str] = field(default_factory=set)  # blobs to which no episode that runs refers
    anew: set[str] = field(default_factory=set)  # contexts sampled anew


class TurnLog:
    """The log of one run; used by one thread of one process, which owns the folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "turns.sqlite"
        self._db: sqlite3.Connection | None = None
        self._episodes: set[str] = set()  # with rows, as GROUP.SIBLING
        self._ended: set[str] = set()  # whose rows could not be deleted yet
        self._earlier: dict[str, _EarlierReplies] = {}  # by episode
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
        gone = set(ended or ())
        self.end([episode for episode in self._episodes if group_of(episode) in gone])

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
    def add(self, asked: Sequence[tuple[GenerateRequest, Segment]]) -> None:
        """Keep replies of engines for the next controller.  A failed write is counted."""
        rows = [self._row(request, reply) for request, reply in asked]
        try:
            self._delete_ended()
            self._query("begin")
            for row in rows:
                self._query("insert into replies values (null, ?, ?, ?, ?, ?)", row)
            self._query("commit")
        except sqlite3.Error as error:
            self._failed += len(rows)
            log.error("%d turns are not in %s: %s", len(rows), self._path, error)
            with contextlib.suppress(sqlite3.Error):
                self._query("rollback")

    def _row(self, request: GenerateRequest, reply: Segment) -> _Row:
        group_id, episode = group_of(request.rollout_id), _episode(request)
        if earlier := self._earlier.get(episode):
            sampled = [piece.output_ids for piece in reply.pieces]
            earlier.anew.add(_tokens_digest(request.token_ids, *sampled))
        self._episodes.add(episode)
        row = (group_id, episode, _request_digest(request), encode_value(reply))
        return *row, _row_digest(*row)

    def end(self, episodes: Iterable[str]) -> set[str]:
        """Forget episodes that are not open any more.  episodes: their names.

        Returns blobs of earlier replies to which no episode of this controller refers.
        """
        names = set(map(without_life, episodes))
        earlier = [found for name in names if (found := self._earlier.pop(name, None))]
        if ended := names & self._episodes:
            self._episodes -= ended
            self._ended |= ended
            try:
                self._delete_ended()
            except sqlite3.Error as error:
                self._failed += len(ended)
                log.error("the end of %d episodes is written later: %s", len(ended), error)
        return set[str]().union(*(one.uris for one in earlier))

    # --- replies of earlier controllers -----------------------------------------------------------
    def take(self, request: GenerateRequest) -> Segment | None:
        """The next reply to an equal request; it is not found again.

        `adopt` must be called when it is given out.
        """
        if not self._earlier or (earlier := self._earlier.get(_episode(request))) is None:
            return None
        ids = earlier.rows.get(_request_digest(request))
        if not ids or _context_digest(request) in earlier.anew:
            return None
        sql = "select group_id, episode, request, body, digest from replies where id = ?"
        try:
            return _decoded(self._query(sql, (ids.pop(0),)).fetchone())
        except sqlite3.Error as error:
            log.error("a turn of %s could not be read: %s", self._path, error)
            return None

    def adopt(self, reply: Segment) -> None:
        """This reply was given out: its blobs belong to an episode that runs."""
        if earlier := self._earlier.get(without_life(episode_of(reply.rollout_id))):
            earlier.uris -= blob_uris(reply)

    # --- plumbing ---------------------------------------------------------------------------------
    def _read_all(self) -> int:
        """Number of replies that may be given out."""
        kept = 0
        for number, *row in self._query(
            "select id, group_id, episode, request, body, digest from replies order by id"
        ):
            _, episode, request, *_ = row
            self._episodes.add(episode)
            if (reply := _decoded(tuple(row))) is None:
                log.error("a turn of episode %s does not match its digest", episode)
                continue
            kept += 1
            earlier = self._earlier.setdefault(episode, _EarlierReplies())
            earlier.rows.setdefault(request, []).append(number)
            earlier.uris |= blob_uris(reply)
        return kept

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        set_up(self._db, _SCHEMA)

    def _start_again(self) -> None:
        """Delete the database; the next write makes a new one."""
        self.close()
        self._episodes.clear()
        self._earlier.clear()
        self._path.unlink(missing_ok=True)
        remove_logs(self._path)

    def _query(self, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if self._db is None:
            self._open()
        assert self._db is not None, "it was opened"
        return self._db.execute(sql, values)

    def _delete_ended(self) -> None:
        """An episode that is played again begins without the rows of its end."""
        for episode in list(self._ended):
            self._query("delete from replies where episode = ?", (episode,))
            self._ended.discard(episode)


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

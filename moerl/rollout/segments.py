"""Durability `shared`: one sealed file per admitted group in the run directory.

A file holds the group's header and its blobs behind a digest, so a run whose node is gone finds
everything it needs to train the group; `facts` beside them holds the history, without which nobody
could say which tokens are legal.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moerl.blob import BlobStore
from moerl.errors import BlobError, JournalError
from moerl.rollout.past import Facts, Past, digest_of, spread, uris_of
from moerl.types import EpisodeGroup
from moerl.wire import decode_value, encode_value

log = logging.getLogger(__name__)

_DIGEST_CHARS = 16


class Segments:
    """One sealed file per admitted group in the run directory: its header and its blobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ship(self, group: EpisodeGroup, blobs: BlobStore) -> None:
        uris = uris_of(group)
        try:
            body = msgspec.msgpack.encode(
                (encode_value(group), {uri: blobs.read(uri) for uri in uris})
            )
            self._seal(f"{group.group_id}.group", body)
        except (OSError, BlobError) as error:
            raise JournalError(f"group {group.group_id} was not shipped: {error}") from error

    def keep_facts(self, facts: Facts) -> None:
        try:
            self._seal("facts", encode_value(facts))
        except OSError as error:
            raise JournalError(f"the history was not shipped: {error}") from error

    def remove(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            (self._folder / f"{group_id}.group").unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self._folder.glob("*.group"):
            path.unlink()

    def restore(self, past: Past, blobs: BlobStore) -> None:
        """Add what was shipped and is not in the journal; the trainer has to say hello again."""
        facts = self._unseal(self._folder / "facts")
        if facts is None:
            return
        if not past.facts.begins:
            past.facts = decode_value(facts, Facts)
            past.consumed |= set(spread(past.facts.consumed))
        past.is_whole = False
        known = {g.group_id for g in (*past.ready, *past.trained)} | past.consumed
        known |= {group.group_id for groups in past.planned.values() for group in groups}
        for path in sorted(self._folder.glob("*.group")):
            body = self._unseal(path)
            if body is None:
                past.lost += 1
                path.unlink()
                continue
            header, files = msgspec.msgpack.decode(body, type=tuple[bytes, dict[str, bytes]])
            group = decode_value(header, EpisodeGroup)
            if group.group_id not in known:
                for uri, data in files.items():
                    blobs.put_back(uri, data)
                past.ready.append(group)

    def _seal(self, name: str, body: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = self._folder / f".{name}"
        with fresh.open("wb") as file:
            file.write(digest_of(body).encode() + body)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._folder / name)

    @staticmethod
    def _unseal(path: Path) -> bytes | None:
        """None when it is not there, or not what was written."""
        if not path.exists():
            return None
        data = path.read_bytes()
        if digest_of(data[_DIGEST_CHARS:]).encode() != data[:_DIGEST_CHARS]:
            log.error("%s does not match its digest", path)
            return None
        return data[_DIGEST_CHARS:]

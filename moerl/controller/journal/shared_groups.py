"""Durability `shared`: one sealed file per admitted group in the run directory.

A file holds the group's header and its blobs (`moerl.records.blob_copies`).  After the loss of an
engine's node readers find the blobs there; after the loss of the controller's node `restore` fills
the journal from them.  `facts` in the same folder has the history (`SharedState`), which decides
which tokens are legal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moerl.controller.journal.recovered_state import RecoveredState, SharedState
from moerl.core.errors import BlobError, JournalError
from moerl.core.ids import IdSet
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import EpisodeGroup
from moerl.records import BlobStore
from moerl.records.blob_copies import SUFFIX, copied_blobs_of, seal
from moerl.records.header_check import group_uris

log = logging.getLogger(__name__)

_HEADER = ""  # part name of the header; other parts are blobs


class SharedGroups:
    """The sealed files of admitted groups."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stale: set[int] = set()  # groups whose files are to be deleted
        self._lock = threading.Lock()  # protects _stale

    def share(self, group: EpisodeGroup, blobs: BlobStore) -> None:
        """Raises JournalError: no room, or a blob's node is gone."""
        path = self._path(group.group_id)
        with self._lock:
            self._stale.discard(group.group_id)  # it was regenerated
        try:
            parts = [(_HEADER, encode_value(group))]
            parts += [(uri, blobs.read(uri)) for uri in sorted(group_uris(group))]
            seal(path, parts)
        except (OSError, BlobError) as error:
            path.unlink(missing_ok=True)  # of an earlier try
            raise JournalError(f"group {group.group_id} was not copied: {error}") from error

    def keep_state(self, controller_state: SharedState) -> None:
        try:
            seal(self._folder / "facts", [(_HEADER, encode_value(controller_state))])
        except OSError as error:
            raise JournalError(f"the history was not copied: {error}") from error

    def remove(self, group_ids: Iterable[int]) -> None:
        """Mark groups as unneeded; the next `sweep` deletes their files."""
        with self._lock:
            self._stale.update(group_ids)

    def sweep(self) -> None:
        """Delete marked files; hundreds per step, on a network file system.  Slow; thread-safe.

        Failed deletions are tried again the next time.
        """
        while True:
            with self._lock:
                if not self._stale:
                    return
                group_id = self._stale.pop()
                try:
                    self._path(group_id).unlink(missing_ok=True)
                except OSError as error:
                    self._stale.add(group_id)
                    log.warning("the copy of group %d was not deleted: %s", group_id, error)
                    return

    def held(self) -> set[int]:
        """Groups that were copied and not removed."""
        paths = self._folder.glob(f"*{SUFFIX}")
        found = {int(path.stem) for path in paths if not path.name.startswith(".")}
        with self._lock:
            return found - self._stale

    def keep_only(self, group_ids: set[int]) -> None:
        """Remove all other groups and half-written files.  Only while no copy is being made."""
        self.remove(self.held() - group_ids)
        self.sweep()
        for path in self._folder.glob(".*"):
            path.unlink()

    def restore(self, recovered: RecoveredState, blobs: BlobStore) -> None:
        """Add copied groups that the journal lacks; the trainer must then say hello again.

        Blobs that cannot be read are put back into this node's store.
        """
        shipped = self._controller_state()
        if shipped is None:
            return
        if not recovered.controller_state.begins:
            recovered.controller_state = shipped.controller_state
            recovered.consumed.update(IdSet(shipped.consumed))
            recovered.dropped.update(IdSet(shipped.dropped))
        recovered.is_whole = False
        for group_id in sorted(self.held() - recovered.with_headers() - recovered.consumed):
            group = self._group(group_id, blobs)
            if group is None:
                recovered.lost += 1
            else:
                recovered.ready.append(group)

    def _path(self, group_id: int) -> Path:
        return self._folder / f"{group_id}{SUFFIX}"

    def _controller_state(self) -> SharedState | None:
        parts = copied_blobs_of(self._folder / "facts")
        try:
            return None if parts is None else decode_value(parts[_HEADER].read(), SharedState)
        except (BlobError, msgspec.MsgspecError) as error:
            log.error("the copied history is ignored: %s", error)
            return None

    def _group(self, group_id: int, blobs: BlobStore) -> EpisodeGroup | None:
        """A group with readable blobs; None when its file is damaged."""
        parts = copied_blobs_of(self._path(group_id))
        if parts is None:
            return None
        try:
            group: EpisodeGroup = decode_value(parts.pop(_HEADER).read(), EpisodeGroup)
            for uri in blobs.find({uri: part.num_bytes for uri, part in parts.items()}).gone:
                blobs.put_back(uri, parts[uri].read())
        except (BlobError, msgspec.MsgspecError) as error:
            log.error("the copy of group %d is ignored: %s", group_id, error)
            return None
        return group

"""Groups with sealed records, and a journal that is killed and opened again."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import RecoveredState
from moerl.controller.journal.shared_groups import SharedGroups
from moerl.core.types import (
    Episode,
    EpisodeGroup,
    Finish,
    PolicyVersion,
    Prompt,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Score,
    Turn,
    VersionSpan,
)
from moerl.records import BlobStore

START = PolicyVersion(0, 0)


def group_of(
    group_id: int, blobs: BlobStore, version: PolicyVersion = START, *, number: int = 0
) -> EpisodeGroup:
    """One episode of two prompt and two sampled tokens, its routes sealed.

    number: of its try, which is in its text and in the name of its blob.
    """
    rows = np.full((2, 3, 2), (group_id + number) % 256, np.uint8)
    (ref,) = blobs.seal(f"{group_id}.0-s{number}", [rows])
    rollout = Rollout(
        rollout_id=f"{group_id}.0",
        token_ids=np.array([1, 2, 3, 4], np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=(VersionSpan(0, version),),
        routing=(RoutingBlob(ref, 0, 3, version, (0, 1), 8),),
        sampling_mask=(),
        finish=Finish.LENGTH,
        sampling=SamplingParams(2),
        engine=0,
    )
    prompt = Prompt(group_id, (1, 2), f"try {number}", {"a": 1}, {})
    episode = Episode(f"{group_id}.0", (Turn(rollout),), Score(float(group_id), errors=2.0))
    return EpisodeGroup(group_id, prompt, (episode,))


class JournalWorld:
    """A journal that is killed and opened again; `close` would write its log back."""

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.folder = folder
        self.blobs = BlobStore(folder / "blobs", "n")
        self.segments = SharedGroups(folder / "run") if shared else None
        self._opened: list[Journal] = []  # SQLite writes back the log of one that is freed
        self.open()

    def read(self, sql: str) -> tuple[Any, ...]:
        """The first row, from the files."""
        with contextlib.closing(sqlite3.connect(self.database)) as db:
            found: tuple[Any, ...] = db.execute(sql).fetchone()
            return found

    def open(self) -> RecoveredState:
        self.journal = Journal(self.folder / "journal", self.blobs, self.segments)
        self._opened.append(self.journal)
        self.past = self.journal.load()
        return self.past

    def admit(self, *group_ids: int) -> None:
        for group_id in group_ids:
            group = group_of(group_id, self.blobs)
            self.journal.share(group)
            self.journal.admitted(group)

    @property
    def database(self) -> Path:
        return self.folder / "journal" / "journal.sqlite"

    def close(self) -> None:
        """Everything into the database file, so that it can be damaged there."""
        self.journal.close()

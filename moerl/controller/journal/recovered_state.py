"""State that a new controller restores from the journal, and the lineage of weight versions.

A trainer that resumes from the checkpoint of step s starts incarnation i there: versions of earlier
incarnations up to step s belong to its history, later ones to a discarded branch (`Lineage`).

Each checkpoint holds the starts that lead to it, and the trainer sends them with its hello.  The
journal alone would not do: a run that moves from node A to B and back finds a journal on A that
does not know the starts on B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from moerl.core.ids import Ranges
from moerl.core.types import EpisodeGroup, PolicyVersion


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The small part of the state."""

    begins: tuple[PolicyVersion, ...] = ()  # first version of each trainer
    dp_size: int = 0  # of the newest trainer
    done: int = 0  # optimizer steps finished in this history
    lives: int = 0  # number of controllers so far; part of rollout ids
    settings: str = ""  # fingerprint of the groups' settings
    pair_cost: float = 0.0  # of the newest trainer's model


@dataclass(frozen=True, slots=True)
class SharedState:
    """The part in the run directory with durability `shared`, since the newest trainer began."""

    controller_state: ControllerState
    consumed: Ranges
    dropped: Ranges


@dataclass(slots=True)
class RecoveredState:
    """State that a new controller restores."""

    controller_state: ControllerState
    ready: list[EpisodeGroup] = field(default_factory=list)
    planned: dict[int, list[EpisodeGroup]] = field(default_factory=dict)
    trained: list[EpisodeGroup] = field(default_factory=list)  # with blobs, for a restart
    consumed: set[int] = field(default_factory=set)  # trained ids, with or without a header
    dropped: set[int] = field(default_factory=set)  # ids dropped for good
    lost: int = 0  # groups with a damaged row or a missing blob
    is_whole: bool = True  # False: only the trainer's checkpoint knows what is consumed

    def with_headers(self) -> set[int]:
        """Ids of groups that may be trained, for the first time or again."""
        planned = (group for groups in self.planned.values() for group in groups)
        return {group.group_id for group in (*self.ready, *planned, *self.trained)}


def digest_of(data: bytes) -> str:
    """Digest of 16 characters."""
    return xxhash.xxh3_64_hexdigest(data)


class Lineage:
    """The versions at which incarnations began."""

    def __init__(self) -> None:
        self._begins: list[PolicyVersion] = []

    @property
    def begins(self) -> tuple[PolicyVersion, ...]:
        return tuple(self._begins)

    def joined(self, begins: Sequence[PolicyVersion]) -> tuple[PolicyVersion, ...]:
        """The known starts and those of a trainer's checkpoint, ascending.

        A checkpoint that does not know how its weights began leaves a gap in which steps may have
        been discarded: then only its own starts are known.
        """
        known = [] if begins[0].step else self._begins
        return tuple(sorted({*known, *begins}))

    def restore(self, begins: Iterable[PolicyVersion]) -> None:
        self._begins = list(begins)

    def knows(self, version: PolicyVersion, newest_step: int) -> bool:
        """True if some trainer may have published this version, discarded branches included."""
        return any(
            begin.incarnation == version.incarnation
            and begin.step <= version.step
            and (begin != self._begins[-1] or version.step <= newest_step)
            for begin in self._begins
        )

    def holds(self, version: PolicyVersion) -> bool:
        later = (b.step for b in self._begins if b.incarnation > version.incarnation)
        return all(version.step <= step for step in later)

    def in_lineage(self, group: EpisodeGroup) -> bool:
        """True if every token was sampled under weights of the current history."""
        return all(self.holds(span.version) for r in group.rollouts() for span in r.versions)

    def knows_trainer(self, group: EpisodeGroup) -> bool:
        """True if every token was sampled under weights of a trainer whose start is known."""
        starts = {begin.incarnation for begin in self._begins}
        versions = (span.version for r in group.rollouts() for span in r.versions)
        return all(version.incarnation in starts for version in versions)

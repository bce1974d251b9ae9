"""What a controller goes on from: the records that the journal and its segments keep.

Which weights belong to the surviving history of a run whose trainer may start again.

A trainer that continues from the checkpoint of step s begins incarnation i there: versions of
earlier incarnations up to step s are in its past, later ones lie on a branch that was given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from moerl.id_sets import Ranges
from moerl.types import EpisodeGroup, PolicyVersion


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The small part."""

    begins: tuple[PolicyVersion, ...] = ()  # first weights of each trainer
    dp_size: int = 0  # of the newest trainer
    done: int = 0  # optimizer steps finished in this history
    lives: int = 0  # controllers so far; names what they generate
    settings: str = ""  # fingerprint of what the groups were made with


@dataclass(frozen=True, slots=True)
class SharedState:
    """What of it is in the run directory, with durability `shared`, since the newest trainer
    began.
    """

    controller_state: ControllerState
    consumed: Ranges
    dropped: Ranges


@dataclass(slots=True)
class RecoveredState:
    """What a controller goes on from."""

    controller_state: ControllerState
    ready: list[EpisodeGroup] = field(default_factory=list)
    planned: dict[int, list[EpisodeGroup]] = field(default_factory=dict)
    trained: list[EpisodeGroup] = field(default_factory=list)  # with blobs; useful after a restart
    consumed: set[int] = field(default_factory=set)  # trained ids, with or without a header
    dropped: set[int] = field(default_factory=set)  # ids given up for good
    lost: int = 0  # groups left out: damaged row, or a blob is missing
    is_whole: bool = True  # False: what is consumed is known to the trainer's checkpoint only

    def with_headers(self) -> set[int]:
        """Ids of groups that may be trained, for the first time or again."""
        planned = (group for groups in self.planned.values() for group in groups)
        return {group.group_id for group in (*self.ready, *planned, *self.trained)}


def digest_of(data: bytes) -> str:
    """16 characters."""
    return xxhash.xxh3_64_hexdigest(data)


class Lineage:
    """The points at which incarnations began."""

    def __init__(self) -> None:
        self._begins: list[PolicyVersion] = []

    def begin(self, version: PolicyVersion) -> None:
        """A trainer starts with these weights; saying so again changes nothing."""
        if version not in self._begins:
            self._begins.append(version)

    def knows(self, version: PolicyVersion, newest_step: int) -> bool:
        """Whether some trainer may have published this version, given-up branches included."""
        return any(
            begin.incarnation == version.incarnation
            and begin.step <= version.step
            and (begin != self._begins[-1] or version.step <= newest_step)
            for begin in self._begins
        )

    def holds(self, version: PolicyVersion) -> bool:
        later = (b.step for b in self._begins if b.incarnation > version.incarnation)
        return all(version.step <= step for step in later)

    def holds_all(self, group: EpisodeGroup) -> bool:
        """Whether every token was sampled by weights of the surviving history."""
        return all(self.holds(span.version) for r in group.rollouts() for span in r.versions)

"""What a controller goes on from: the records that the journal and its segments keep."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from moerl.id_sets import Ranges
from moerl.types import EpisodeGroup, PolicyVersion


@dataclass(frozen=True, slots=True)
class Facts:
    """The small part."""

    begins: tuple[PolicyVersion, ...] = ()  # first weights of each gang
    dp_size: int = 0  # of the newest gang
    done: int = 0  # optimizer steps finished in this history
    lives: int = 0  # controllers so far; names what they generate
    settings: str = ""  # fingerprint of what the groups were made with


@dataclass(frozen=True, slots=True)
class Shipped:
    """What of it is in the run directory, with durability `shared`, since the newest gang began."""

    facts: Facts
    consumed: Ranges
    dropped: Ranges


@dataclass(slots=True)
class Past:
    """What a controller goes on from."""

    facts: Facts
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

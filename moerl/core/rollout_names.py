"""Names of rollouts, episodes and turns: GROUP.SIBLING, then .rLIFE-TRIES, then .tTURN."""

from __future__ import annotations

import re

_LIFE = re.compile(r"\.r(\d+)-\d+")


def name_rollout(group_id: int, sibling: int, life: int = 0, tries: int = 0) -> str:
    """Id of a rollout, unique in a run: blobs of an earlier try may still exist.

    life: controllers before this one.  tries: of this controller, before this one.
    """
    return f"{group_id}.{sibling}" + (f".r{life}-{tries}" if life or tries else "")


def life_of(name: str) -> int:
    """The life of the controller that asked for a rollout, from its id or a blob's name."""
    found = _LIFE.search(name)
    return int(found[1]) if found else 0


def without_life(name: str) -> str:
    """The part of a rollout's or turn's id that is the same in every life and try."""
    return _LIFE.sub("", name)


def group_of(name: str) -> int:
    """The group of a rollout or turn, from its id."""
    return int(name.partition(".")[0])


def episode_of(name: str) -> str:
    """The episode of a turn, which is named EPISODE.tNUMBER."""
    return name.rpartition(".")[0]

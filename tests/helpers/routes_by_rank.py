"""Whether the ranks of an engine captured the same experts: the record is that of one of them.

With expert parallelism a token whose ranks choose differently loses an expert, or has one twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parent


@contextmanager
def noted(folder: Path, *, other_rank: int | None = None) -> Iterator[None]:
    """Engines that start here note them.  other_rank: one rank has one choice wrong."""
    folder.mkdir()
    paths = [str(HELPERS / "noted_routes"), str(HELPERS.parents[1]), os.getenv("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("MOERL_TEST_ROUTES", str(folder))
        if other_rank is not None:
            patch.setenv("MOERL_TEST_OTHER_ROUTES", str(other_rank))
        yield


def compared(folder: Path, *, ranks: int) -> tuple[int, int]:
    """(requests, requests of which a rank has captured others)."""
    found = [
        dict(line.split() for line in (folder / f"rank-{rank}").read_text().splitlines())
        for rank in range(ranks)
    ]
    assert all(one.keys() == found[0].keys() for one in found), "each rank has every request"
    return len(found[0]), sum(len({one[name] for one in found}) > 1 for name in found[0])

"""Tokens of discarded weights are never trained, whichever node's journal holds them.

A run moves from node A to B and back.  The journal on A does not know the trainer that started on
B; its start comes with the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import Lineage
from moerl.core.messages import Hello, Ok
from moerl.core.types import PolicyVersion
from moerl.records import BlobStore
from tests.helpers.controllers import make, running
from tests.helpers.journals import group_of
from tests.helpers.stub_engine import StubEngine

BEGINS = (PolicyVersion(0, 0), PolicyVersion(1, 80), PolicyVersion(2, 100))


def node_a(folder: Path) -> BlobStore:
    """What the run left there: groups of steps before and after the checkpoint of step 80."""
    blobs = BlobStore(folder / "blobs", "n")
    journal = Journal(folder / "journal", blobs)
    journal.load()
    journal.began(BEGINS[:1], 1, ())
    for group_id, step in ((300, 79), (301, 80), (302, 98), (303, 100)):
        journal.admitted(group_of(group_id, blobs, PolicyVersion(0, step)))
    journal.close()
    return blobs


@pytest.mark.parametrize(
    ("begins", "kept", "refused", "branch"),
    [
        # the checkpoint on the shared file system was written by the trainer on B
        (BEGINS, {300, 301}, 0, 2),
        # control: what node A alone knows lets tokens of the discarded branch pass
        ((BEGINS[0], BEGINS[2]), {300, 301, 302, 303}, 0, 0),
        # a checkpoint that does not tell: nothing of an unknown history is trained
        (BEGINS[2:], set(), 4, 0),
    ],
    ids=["checkpoint", "journal", "unknown"],
)
async def test_there_and_back(
    tmp_path: Path, begins: tuple[PolicyVersion, ...], kept: set[int], refused: int, branch: int
) -> None:
    blobs = node_a(tmp_path)
    controller, _ = make(tmp_path, StubEngine(), blobs=blobs)
    context = controller.context

    async def work() -> None:
        assert {group.group_id for group in context.buffer.ready()} == {300, 301, 302, 303}
        said = Hello(1, 1, BEGINS[-1], ((0, 200),), begins)
        assert await controller.handle(said) == Ok()
        assert {group.group_id for group in context.buffer.ready()} == kept
        assert context.step_metrics["refused/lineage"] == refused
        assert context.step_metrics["async/dropped_branch_groups"] == branch

    await running(controller, work())
    past = Journal(tmp_path / "journal", blobs).load()
    assert {group.group_id for group in past.ready} == kept
    assert past.controller_state.begins == begins


def test_starts_that_only_this_controller_saw_stay_known() -> None:
    """A trainer that died before its first checkpoint is in no checkpoint."""
    lineage = Lineage()
    lineage.restore((PolicyVersion(0, 0), PolicyVersion(1, 0)))
    begins = lineage.joined((PolicyVersion(0, 0), PolicyVersion(2, 0)))
    assert begins == (PolicyVersion(0, 0), PolicyVersion(1, 0), PolicyVersion(2, 0))
    lineage.restore(begins)
    assert lineage.knows(PolicyVersion(1, 0), 5)
    assert lineage.holds(PolicyVersion(1, 0))
    assert not lineage.holds(PolicyVersion(1, 1))
    assert lineage.joined(begins) == begins

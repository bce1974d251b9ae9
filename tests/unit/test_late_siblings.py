"""Siblings carried into a later batch: their ids, their blobs, their baseline, a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moerl.controller.blob_ref_counts import BlobRefCounts
from moerl.controller.buffer import GroupBuffer
from moerl.controller.journal.journal import Journal
from moerl.core.types import EpisodeGroup, PolicyVersion
from moerl.records import BlobStore
from moerl.records.record_uris import group_uris
from tests.helpers.random_rollouts import advantages, group, make_rollout

V0 = PolicyVersion(0, 0)


def scored(tmp_path: Path, group_id: int, rewards: list[float]) -> EpisodeGroup:
    store = BlobStore(tmp_path, "n")
    rollouts = [
        make_rollout(store, f"{group_id}.{i}.{len(rewards)}", 2, 3, versions=(V0,))
        for i in range(len(rewards))
    ]
    return replace(group(0, rollouts, rewards), group_id=group_id)


@pytest.mark.parametrize("name", ["grpo_mean", "grpo_std", "rloo"])
def test_the_baseline_of_late_siblings_is_that_of_the_whole_group(
    tmp_path: Path, name: str
) -> None:
    """What they would have got beside the others; alone they would get something else."""
    other = scored(tmp_path / "o", 5, [0.0, 3.0])
    whole = scored(tmp_path / "w", 1, [0.0, 1.0, 1.0, 4.0])
    late = scored(tmp_path / "l", ~1, [1.0, 4.0])
    apart = advantages(name, other, replace(late, peers=(0.0, 1.0)))
    assert len(apart) == 4, "peers are not trained"
    assert apart[2:] == pytest.approx(advantages(name, whole)[2:])
    assert apart[:2] == pytest.approx(advantages(name, other)), "no other group sees them"
    assert apart[2:] != pytest.approx(advantages(name, late), abs=1e-3), "control: without peers"


def test_one_late_sibling_has_an_advantage(tmp_path: Path) -> None:
    late = scored(tmp_path, ~1, [4.0])
    assert advantages("grpo_mean", replace(late, peers=(0.0, 2.0))) == [2.0]
    assert advantages("grpo_mean", late) == [0.0], "control: a group of one"


def test_carried_ids_are_used_once_and_never_generated_again(tmp_path: Path) -> None:
    buffer = GroupBuffer(1, max_lag=4, depth=4)
    assert [buffer.start(), buffer.start()] == [0, 1]
    late = buffer.carry(0)
    assert late == ~0
    assert buffer.carry(0) is None, "a second try of group 0 has late siblings, too"
    assert buffer.carry(late) is None
    assert buffer.num_started == 3
    buffer.admit(replace(scored(tmp_path, late, [1.0, 0.0]), group_id=late))
    assert buffer.carry(0) is None
    assert [g.group_id for g in buffer.pop()] == [late], "the oldest come first"
    assert buffer.carry(0) is None
    other = buffer.carry(1)
    buffer.abandon(other)
    assert buffer.start() == 2, "the late siblings of 1 are left out"
    buffer.restart(0, ())
    assert buffer.start() == 3, "those of 0, whose step is void, too"
    buffer.restore(1, {late}, (), [])
    assert buffer.start() == 0


def test_a_journal_keeps_them_apart(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs", "n")
    journal = Journal(tmp_path / "journal", blobs)
    journal.load()
    journal.began((V0,), 1, ())
    rollouts = [make_rollout(blobs, f"1.{i}", 2, 3, versions=(V0,)) for i in range(4)]
    early = replace(group(1, rollouts[:2], [0.0, 1.0]), group_id=1)
    late = replace(group(1, rollouts[2:], [1.0, 4.0]), group_id=~1, peers=(0.0, 1.0))
    journal.admitted(early)
    journal.planned(0, [1])
    journal.admitted(late)
    journal.done(0, kept=[])
    journal.saved(1)
    past = Journal(tmp_path / "journal", blobs).load()
    assert past.consumed == {1}
    (again,) = past.ready
    assert (again.group_id, again.peers) == (~1, (0.0, 1.0))


def test_a_blob_goes_with_the_last_group_that_names_it(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, "n")
    ref_counts = BlobRefCounts(blobs)
    rollouts = [make_rollout(blobs, f"1.{i}", 2, 3, versions=(V0,)) for i in range(2)]
    first, second = rollouts
    second = replace(second, routing=first.routing)  # prompt rows of one call
    early, late = group(1, [first], [0.0]), group(1, [second], [0.0])
    common = group_uris(early) & group_uris(late)
    assert common
    ref_counts.share(common)
    ref_counts.release(group_uris(early))
    assert not blobs.missing(group_uris(late))
    assert blobs.missing(group_uris(early))
    ref_counts.release(group_uris(late))
    assert blobs.missing(group_uris(late)) == group_uris(late)

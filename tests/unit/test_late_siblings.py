"""Siblings carried into a later batch: their ids, their blobs, their baseline, a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moerl.core.types import EpisodeGroup, PolicyVersion
from moerl.records import BlobStore
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

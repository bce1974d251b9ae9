"""A batch is split by whole groups, alike on all ranks, anew for each batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moerl.algorithms.aggregation import plan_weights
from moerl.config.schema import AlgorithmConfig, ParallelConfig, TrainerConfig
from moerl.core.errors import ConfigError
from moerl.core.types import BatchPlan, PolicyVersion
from moerl.data.batching import plan_batch, split_plan
from moerl.records.blob_store import BlobStore
from tests.helpers.random_rollouts import group, make_rollout

V3 = PolicyVersion(0, 3)


@pytest.fixture
def plan(tmp_path: Path) -> BatchPlan:
    store = BlobStore(tmp_path, "n")
    groups = [
        group(index, [make_rollout(store, f"{index}.{i}", 2, 2 + index) for i in range(2)], [0, 1])
        for index in range(6)
    ]
    return plan_batch(3, V3, groups, dp_size=2, max_tokens_per_microbatch=12)


def trainer(minibatches: int) -> TrainerConfig:
    sizes = ParallelConfig(dp=2)
    return TrainerConfig(parallel=sizes, minibatches=minibatches, max_tokens_per_microbatch=12)


def test_one_minibatch_is_the_plan_itself(plan: BatchPlan) -> None:
    (part,) = split_plan(plan, trainer(1), seed=0)
    assert part.plan is plan
    assert part.of(list(range(12))) == list(range(12))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_every_row_is_in_one_minibatch_with_its_own_rollout(plan: BatchPlan, count: int) -> None:
    parts = split_plan(plan, trainer(count), seed=0)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(plan.rows)))
    for part in parts:
        assert len(part.plan.groups) == 6 // count
        assert (part.plan.step, part.plan.version) == (3, V3)
        microbatches = {(r.dp_rank, r.microbatch) for r in part.plan.rows}
        assert {m for _, m in microbatches} == set(range(part.plan.num_microbatches))
        for row, number in zip(part.plan.rows, part.rows, strict=True):
            mine, whole = part.plan, plan.rows[number]
            ours = mine.groups[row.group].episodes[row.episode].turns[row.turn].rollout
            assert ours is plan.groups[whole.group].episodes[whole.episode].turns[0].rollout


def test_denominators_are_those_of_the_minibatch(plan: BatchPlan) -> None:
    config = AlgorithmConfig(aggregation="token_mean")
    for part in split_plan(plan, trainer(3), seed=0):
        tokens = sum(r.num_sampled for g in part.plan.groups for r in g.rollouts())
        assert plan_weights(config, part.plan) == [1 / tokens] * len(part.rows)


def test_groups_are_dealt_by_seed_and_step(plan: BatchPlan) -> None:
    def dealt(plan: BatchPlan, seed: int) -> list[list[int]]:
        parts = split_plan(plan, trainer(2), seed=seed)
        return [[g.group_id for g in part.plan.groups] for part in parts]

    assert dealt(plan, 0) == dealt(plan, 0), "the same wherever it is made"
    later = [dealt(replace(plan, step=step), seed) for step in range(4) for seed in range(4)]
    assert len({str(one) for one in later}) > 4, "control: by chance"


def test_groups_that_do_not_divide_are_refused(plan: BatchPlan) -> None:
    with pytest.raises(ConfigError, match=r"trainer.minibatches = 4 .*must divide the 6 groups"):
        split_plan(plan, trainer(4), seed=0)

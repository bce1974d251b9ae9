"""Siblings that are too old leave their group; the others are trained, with the same baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.controller import controller as controller_module
from moerl.controller.blob_ref_counts import BlobRefCounts
from moerl.controller.buffer import GroupBuffer
from moerl.controller.controller import Controller
from moerl.controller.step_metrics import StepReport
from moerl.core.types import EpisodeGroup, Finish, GenerateRequest, PolicyVersion, Segment
from moerl.records import BlobStore
from moerl.records.header_check import group_uris
from tests.helpers import oracle_runs
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.fake_clock import run_with_fake_clock
from tests.helpers.oracle_engine import draw
from tests.helpers.random_rollouts import advantages, group, make_rollout
from tests.helpers.stub_engine import Reply, SealingEngine

STEPS = 6


def aged(store: BlobStore, rewards: list[float], steps: list[int], group_id: int) -> EpisodeGroup:
    """A group whose sibling i was sampled by the weights of steps[i]."""
    rollouts = [
        make_rollout(store, f"{group_id}.{i}", 2, 3, versions=(PolicyVersion(0, step),))
        for i, step in enumerate(steps)
    ]
    return replace(group(0, rollouts, rewards), group_id=group_id)


def buffer_with(*groups: EpisodeGroup, next_step: int) -> GroupBuffer:
    buffer = GroupBuffer(1, max_lag=1, depth=4)
    buffer.restore(next_step, (), (), groups)
    return buffer


@pytest.mark.parametrize("name", ["grpo_mean", "grpo_std", "rloo"])
def test_the_baseline_is_that_of_the_whole_group(tmp_path: Path, name: str) -> None:
    whole = aged(BlobStore(tmp_path, "n"), [0.0, 1.0, 1.0, 4.0], [0, 0, 2, 2], 1)
    buffer = buffer_with(whole, next_step=2)
    ((old, part),) = buffer.with_stale_siblings()
    assert old is whole
    assert [episode.episode_id for episode in part.episodes] == ["0.2", "0.3"]
    assert part.peers == (0.0, 1.0)
    assert advantages(name, part) == advantages(name, whole)[2:], "exactly"
    alone = advantages(name, replace(part, peers=()))
    assert alone != pytest.approx(advantages(name, part), abs=1e-3), "control: without peers"
    buffer.exchange(part)
    assert buffer.with_stale_siblings() == buffer.evict_stale() == []
    assert buffer.due() == [part]


def test_blobs_that_are_read_fall_when_they_were_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    whole = aged(store, [0.0, 1.0, 2.0], [0, 2, 2], 1)
    ((_, part),) = buffer_with(whole, next_step=2).with_stale_siblings()
    ref_counts, gone = BlobRefCounts(store), group_uris(whole) - group_uris(part)
    ref_counts.hold([whole])
    ref_counts.forget(whole, part)
    assert gone
    assert not store.missing(gone)
    ref_counts.hold(())
    assert store.missing(group_uris(whole)) == gone


class UnevenEngine(SealingEngine):
    """Samples four tokens per call; sibling `slow` of group 0 never ends, or begins late.

    begins_at: step of the weights under which the other siblings of group 0 begin.
    """

    def __init__(self, store: BlobStore, *, slow: int = -1, begins_at: int = 0) -> None:
        super().__init__(store)
        self.slow, self.begins_at = slow, begins_at

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Reply:
        group_id, sibling = map(int, request.rollout_id.split(".")[:2])
        waits = group_id == 0 and sibling > 0 and version.step < self.begins_at
        self.finishes = not waits
        reply = super()._reply(request, version)
        assert isinstance(reply, Segment)
        if waits:
            return replace(reply, finish=Finish.ABORT)
        if (group_id, sibling) != (0, self.slow) and len(reply.output_ids) == 4:
            return replace(reply, finish=Finish.STOP)
        return reply


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[EpisodeGroup], dict[str, float], Controller]]:
    """Groups that are trained, sums of metrics, and the controller, of a run that has ended."""

    async def nothing() -> None: ...

    monkeypatch.setattr(controller_module, "trim_memory_loop", nothing)

    def runs(stale_siblings: str, rollout: dict[str, object], **engine: int):
        folder = tmp_path / stale_siblings
        store = BlobStore(folder / "blobs", "n")
        config = replace(
            CONFIG,
            run=replace(CONFIG.run, steps=STEPS),
            sampling=replace(CONFIG.sampling, max_new_tokens=4000),
            rollout=replace(
                CONFIG.rollout,
                group_size=4,
                slice_tokens=4,
                stale_siblings=stale_siblings,  # type: ignore[arg-type]
                **rollout,
            ),
        )

        async def body():
            controller, reports = make(
                folder,
                UnevenEngine(store, **engine),
                config,
                blobs=store,
                moe_layers=1,
                saved_steps=lambda: STEPS,
            )
            plans = await running(controller, train(controller, STEPS))
            assert not controller.context.buffer.live
            sums: dict[str, float] = {}
            for report in reports:
                for name, value in report.metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
            return [g for plan in plans for g in plan.groups], sums, controller

        return run_with_fake_clock(body(), monkeypatch)

    return runs


CARRY = {"late_siblings": "carry", "group_quorum": 2, "cancel_lag": 1, "max_lag": 3}
EPISODES = {
    "text": ({"slice_tokens": 16}, {}),
    "in_place": ({"in_flight_mode": "in_place"}, oracle_runs.TURNS),
    "carry": (CARRY | {"in_flight_mode": "in_place", "slice_tokens": 16}, {}),
    "agents": ({}, oracle_runs.ENVIRONMENT),
    "agents_carry": (CARRY, oracle_runs.ENVIRONMENT),
}


@pytest.mark.parametrize("name", EPISODES)
def test_no_blob_is_left_and_none_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever siblings are: they share the rows of their prompt."""
    rollout, task = EPISODES[name]
    scenario = oracle_runs.Scenario(
        {"group_size": 4, "max_lag": 2, "cancel_lag": 0, "stale_siblings": "drop"} | rollout,
        world={"longest": lambda turn: 90 * (1 + draw(turn) % 3)},
        task=task,
        sampling={"max_new_tokens": 300},
    )
    made: list[tuple[Controller, list[StepReport]]] = []

    def kept(*args, **options):
        made.append(make(*args, **options, saved_steps=lambda: scenario.steps))
        return made[-1]

    monkeypatch.setattr(oracle_runs, "make", kept)
    monkeypatch.setitem(oracle_runs.SCENARIOS, name, scenario)
    oracle_runs.played(name, tmp_path)  # reads the records of each group
    ((controller, reports),) = made
    assert sum(report.metrics["async/dropped_stale_siblings"] for report in reports) > 0
    ready = group_uris(*controller.context.buffer.ready())
    assert {path.name for path in blobs_of(controller)} == {uri.split("/")[-1] for uri in ready}


def blobs_of(controller: Controller) -> list[Path]:
    return list(controller.context.services.blobs.root.iterdir())


def test_a_slow_sibling_is_dropped_and_the_others_are_trained(run) -> None:
    """Control: with `group` the whole group is played again, which never ends."""
    trained, sums, controller = run("drop", {"max_lag": 4, "cancel_lag": 1}, slow=3)
    ids = [rollout.rollout_id for one in trained for rollout in one.rollouts()]
    assert len(ids) == len(set(ids)) == 4 * len(trained) - 1
    (first,) = (one for one in trained if one.group_id == 0)
    assert [r.rollout_id.split(".")[1] for r in first.rollouts()] == ["0", "1", "2"]
    assert first.peers == (), "it was not scored"
    assert sums["async/dropped_stale_siblings"] == 1
    assert sums["async/cancelled_tokens"] > 0
    assert sums["async/cancelled_groups"] == 0
    assert blobs_of(controller) == []


def test_a_stale_sibling_leaves_a_ready_group_and_stays_in_the_baseline(run) -> None:
    """Control: with `group` the whole group is regenerated."""
    trained, sums, controller = run("drop", {"max_lag": 2}, begins_at=3)
    (first,) = (one for one in trained if one.group_id == 0)
    assert [e.turns[0].rollout.rollout_id for e in first.episodes] == ["0.1", "0.2", "0.3"]
    assert first.peers == (0.0,), "StubScorer gives each sibling its number"
    assert [e.score.reward for e in first.episodes if e.score] == [1.0, 2.0, 3.0]
    assert sums["async/dropped_stale_siblings"] == 1
    assert sums["async/cancelled_groups"] == 0
    assert blobs_of(controller) == []
    trained, sums, controller = run("group", {"max_lag": 2}, begins_at=3)
    (first,) = (one for one in trained if one.group_id == 0)
    assert len(first.rollouts()) == 4
    assert sums["async/dropped_stale_siblings"] == 0
    assert sums["async/dropped_stale_groups"] + sums["async/cancelled_groups"] > 0
    assert blobs_of(controller) == []

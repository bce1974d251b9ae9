"""Engines and scorers that misbehave: refused or asked again under a counted reason, never trained.

What only a real engine's reply can hold (routes cut short, NaN in JSON, a damaged payload) is in
test_engine_records.py; here a reply that passed, or bypassed, that door is wrong all the same.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.controller.controller import Controller
from moerl.controller.journal.write_retry import WriteRetry
from moerl.core.episode_view import EpisodeView
from moerl.core.errors import BlobError, ProtocolError, RecordError, ScoreError
from moerl.core.messages import TakePlan
from moerl.core.types import (
    Finish,
    GenerateRequest,
    PolicyVersion,
    Prompt,
    Score,
    Segment,
)
from moerl.records import BlobStore
from moerl.runtime import disk_wait
from tests.helpers.controllers import CONFIG, StubScorer, hello, make, running, train
from tests.helpers.stub_engine import StubEngine


def trained_once(plans: list) -> bool:
    return sorted(g.group_id for p in plans for g in p.groups) == list(range(8))


def cut(segment: Segment) -> Segment:
    """Its first two tokens, as an update leaves them: the turn is to go on."""
    first = segment.output_ids[:2], segment.logprobs[:2]
    return replace(segment, output_ids=first[0], logprobs=first[1], finish=Finish.ABORT)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda s: replace(s, logprobs=np.full_like(s.logprobs, np.nan)), "logprob_finite"),
        (lambda s: replace(s, logprobs=np.full_like(s.logprobs, 0.5)), "logprob_sign"),
        (lambda s: replace(s, logprobs=s.logprobs[:-1]), "length"),
        (lambda s: replace(s, output_ids=s.output_ids + 100), "token_range"),
        (lambda s: replace(s, rollout_id="99.0"), "rollout_id"),
        (lambda s: replace(s, version=PolicyVersion(7, 7)), "version"),
        (lambda s: cut(replace(s, version=PolicyVersion(7, 7))), "version"),
        (lambda s: RecordError("routing_rows", "cut short"), "routing_rows"),
    ],
    ids=["nan", "positive", "short", "tokens", "id", "version", "cut_version", "routes"],
)
async def test_a_bad_reply_is_refused_and_generated_again(
    tmp_path: Path, spoil: Callable[[Segment], object], reason: str
) -> None:
    controller, reports = make(tmp_path, StubEngine(spoil=spoil))
    plans = await running(controller, train(controller, 4))
    assert trained_once(plans)
    assert reports[-1].metrics[f"refused/{reason}"] == 2
    for rollout in (r for p in plans for g in p.groups for r in g.rollouts()):
        assert np.isfinite(rollout.logprobs).all()
        assert rollout.versions[-1].version.incarnation == 0


async def test_a_bad_reply_to_a_late_sibling_costs_the_late_ones_only(tmp_path: Path) -> None:
    rollout = replace(CONFIG.rollout, group_size=4, group_quorum=2, slice_tokens=4)
    rollout = replace(rollout, late_siblings="carry", max_lag=100)
    sampling = replace(CONFIG.sampling, max_new_tokens=4000)
    config = replace(CONFIG, rollout=rollout, sampling=sampling)
    refused: list[str] = []

    def late_one(request: GenerateRequest) -> RecordError | None:
        """Refuse the first reply to a sibling that was carried: its group has closed."""
        if request.num_sampled < 8 or refused:
            return None
        refused.append(request.rollout_id)
        return RecordError("nan", "the engine sampled from NaN logits")

    engine = StubEngine(lengths=(4, 8, 12, 16), refuses=late_one)
    controller, reports = make(tmp_path, engine, config)
    plans = await running(controller, train(controller, 4))
    ids = [group.group_id for plan in plans for group in plan.groups]
    assert len(ids) == len(set(ids)) == 4 * CONFIG.rollout.groups_per_step
    assert reports[-1].metrics["refused/nan"] == len(refused) == 1


async def test_replies_that_are_missing_are_a_failed_call(tmp_path: Path) -> None:
    engine = StubEngine(spoil=lambda segment: None, num_spoiled=1)
    controller, _ = make(tmp_path, engine)
    plans = await running(controller, train(controller, 4))
    assert trained_once(plans)


async def test_an_engine_that_hangs_is_given_up(tmp_path: Path) -> None:
    """Its groups go on when it answers again."""
    engine = StubEngine()
    engine.open.clear()
    rollout = replace(CONFIG.rollout, progress_timeout_s=0.2)
    controller, _ = make(tmp_path, engine, replace(CONFIG, rollout=rollout))
    asyncio.get_running_loop().call_later(0.5, engine.open.set)
    assert trained_once(await running(controller, train(controller, 4)))


class BadScorer(StubScorer):
    """Scores the first groups in a way of its own."""

    def __init__(self, bad: Callable[[list[Score]], list[Score]], times: int = 2) -> None:
        super().__init__()
        self.bad, self.times = bad, times

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        scores = await super().rewards(prompt, episodes)
        if self.times == 0:
            return scores
        self.times -= 1
        return self.bad(scores)


def raise_error(scores: list[Score]) -> list[Score]:
    raise ScoreError("it raised")


@pytest.mark.parametrize(
    "bad",
    [
        lambda scores: [Score(float("inf")) for _ in scores],
        lambda scores: [Score(float("nan")) for _ in scores],
        raise_error,
    ],
    ids=["infinite", "nan", "raises"],
)
async def test_a_bad_score_drops_its_group(tmp_path: Path, bad: Callable[..., list[Score]]) -> None:
    config = replace(CONFIG, task=replace(CONFIG.task, on_score_error="drop"))
    controller, reports = make(tmp_path, StubEngine(), config, scorer=BadScorer(bad))
    plans = await running(controller, train(controller, 4))
    rewards = [e.score.reward for p in plans for g in p.groups for e in g.episodes]
    assert np.isfinite(rewards).all()
    assert len(rewards) == 16
    assert sum(r.metrics["scorer/failed"] for r in reports) == 2


async def test_a_scorer_that_hangs_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moerl.controller.scorer_queue._START_S", 0.0)

    class Hangs(StubScorer):
        def __init__(self) -> None:
            super().__init__()
            self.times = 1

        async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]):
            if self.times:
                self.times -= 1
                await asyncio.sleep(60)
            return await super().rewards(prompt, episodes)

    task = replace(CONFIG.task, on_score_error="drop", score_timeout_s=0.5)
    controller, reports = make(tmp_path, StubEngine(), replace(CONFIG, task=task), scorer=Hangs())
    plans = await running(controller, train(controller, 4))
    assert {g.group_id for p in plans for g in p.groups} == set(range(8)), "none was lost"
    assert sum(r.metrics["scorer/failed"] for r in reports) == 0
    assert sum(r.metrics.get("scorer/repeated/reward", 0) for r in reports) >= 2


async def test_a_message_with_too_few_scores_is_asked_again(tmp_path: Path) -> None:
    scorer = BadScorer(lambda scores: scores[:-1])
    controller, reports = make(tmp_path, StubEngine(), scorer=scorer)
    plans = await running(controller, train(controller, 4))
    assert {g.group_id for p in plans for g in p.groups} == set(range(8)), "none was lost"
    assert sum(r.metrics.get("scorer/repeated/reward", 0) for r in reports) > 0


def fill_after_hello(controller: Controller) -> Callable[[], None]:
    """No write to the journal works once the trainer said hello; returns what ends that."""
    began = controller.context.services.journal.began

    def fill(*args) -> None:
        began(*args)
        controller.context.services.journal._db.execute("pragma query_only = on")

    controller.context.services.journal.began = fill
    return lambda: controller.context.services.journal._db.execute("pragma query_only = off")


async def test_a_journal_without_room_admits_nothing_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_wait, "PAUSE_S", 0.01)
    controller, reports = make(tmp_path, StubEngine())
    make_room = fill_after_hello(controller)
    failed = WriteRetry.failed

    def seen(*args) -> None:
        assert not controller.context.buffer.num_ready
        failed(*args)
        make_room()

    monkeypatch.setattr(WriteRetry, "failed", seen)
    assert trained_once(await running(controller, train(controller, 4)))
    assert sum(r.metrics["journal/failed_writes"] for r in reports) >= 1


async def test_a_disk_that_stays_full_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    """The trainer asks for a batch as long as it may wait, and is told what is in the way."""
    controller, reports = make(tmp_path, StubEngine())
    fill_after_hello(controller)

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(0, 0)))
        await controller.handle(TakePlan(0, 0.5, 0))

    with pytest.raises(ProtocolError, match=r"no batch of 2.*group .* not be written.*journal"):
        await running(controller, work())
    assert reports == []


def test_a_blob_that_finds_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path / "blobs", "n")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BlobError, match="No space left on device"):
        store.seal("0.0-s0", [np.zeros(8, np.uint8)])
    assert list(store.root.iterdir()) == []

"""Episodes of several turns: what is fed, what is trained, which rows are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.config.schema import TaskConfig
from moerl.controller.player import EnvironmentRunner, SingleTurn, TextReplies
from moerl.controller.step_metrics import batch_metrics
from moerl.core.errors import ConfigError, ScoreError
from moerl.core.types import (
    BlobRef,
    Finish,
    GenerateRequest,
    ModelShape,
    PolicyVersion,
    Prompt,
    RoutingBlob,
    SamplingParams,
    Segment,
)
from moerl.data.environments import check_digits, make_environment
from moerl.episodes.finished_episode import ENDED, sealed_uris, used_uris
from moerl.episodes.open_episode import EpisodeSpec, OpenEpisode, Outcome
from moerl.records.header_check import check as check_record
from tests.helpers.controllers import CONFIG, StubScorer, make, running, train
from tests.helpers.scripted_episode import ScriptedEpisode
from tests.helpers.stub_engine import StubEngine

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
PROMPT = Prompt(7, (1, 2), "p", "34", {})
SHAPE = ModelShape(10, 2, (0, 1), num_experts=4, top_k=2)
TASK = TaskConfig(environment="check_digits", max_turns=3)


class Asking(StubScorer):
    """Answers every turn but the last of an even prompt with two tokens."""

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        if self.error:
            raise self.error
        return "5 6" if len(responses) < 2 or prompt.index % 2 else ""


def rows(request: GenerateRequest, count: int, version: PolicyVersion) -> RoutingBlob:
    end = len(request.token_ids) + count - 1
    shape = (2, end - request.rows_from, 2)
    name = f"blob://n/{request.rollout_id}"
    return RoutingBlob(
        BlobRef(name, 0, "uint8", shape, "0"), request.rows_from, end, version, (0, 1), 4
    )


def answered(
    episode: ScriptedEpisode, version: PolicyVersion, count: int = 3, **changes: Any
) -> GenerateRequest:
    """One engine call, as far as an episode sees it."""
    request = episode.request()
    segment = Segment(
        request.rollout_id,
        np.full(count, 3, np.int32),
        np.full(count, -0.5, np.float32),
        version,
        Finish.STOP,
        rows(request, count, version),
        None, None, 0, 0, 0.0, 0.0,
    )  # fmt: skip
    episode.add(replace(segment, **changes))
    return request


def test_a_turn_is_fed_all_that_was_said_and_both_are_one_row() -> None:
    episode = ScriptedEpisode("7.0", PROMPT, SamplingParams(4))
    answered(episode, V0)
    episode.reply([8, 9])
    second = answered(episode, V0)
    assert second.token_ids.tolist() == [1, 2, 3, 3, 3, 8, 9]
    assert (second.num_sampled, second.rows_known, second.rows_from) == (0, 4, 4)
    (row,) = episode.rows("join")
    assert row.token_ids.tolist() == [1, 2, 3, 3, 3, 8, 9, 3, 3, 3]
    assert row.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3
    assert [(part.row_begin, part.row_end) for part in row.routing] == [(0, 4), (4, 9)]
    check_record(row, SHAPE)


def test_rows_of_other_weights_are_joined_and_nothing_is_sampled_again() -> None:
    """An update between two turns: the next call delivers the new rows, under its weights."""
    episode = ScriptedEpisode("7.0", PROMPT, SamplingParams(4))
    answered(episode, V0)
    episode.reply([8])
    assert answered(episode, V1).rows_known == 4
    (row,) = episode.rows("join")
    assert [(part.row_begin, part.version) for part in row.routing] == [(0, V0), (4, V1)]
    assert [(span.first, span.version) for span in row.versions] == [(0, V0), (3, V1)]
    assert row.joined_from == 3
    done = [episode.finish()]
    assert sealed_uris(done) == used_uris(done) == {"blob://n/7.0.t0", "blob://n/7.0.t1"}
    check_record(row, SHAPE)


@pytest.mark.parametrize("kept", [False, True])
def test_a_turn_behind_one_that_met_an_update_asks_for_new_rows_only(kept: bool) -> None:
    episode = ScriptedEpisode("7.0", PROMPT, SamplingParams(6))
    if kept:
        answered(episode, V1, kept_kv=True)
    else:
        answered(episode, V0, finish=Finish.ABORT)
        answered(episode, V1)
    before = episode.turns[0].num_sampled
    episode.reply([8])
    assert episode.request().rows_known == len(PROMPT.token_ids) + before - 1


def test_a_reply_without_room_for_a_further_turn_ends_the_episode() -> None:
    """Prompt 2, sampled 3, reply 2, the next turn up to 4: 11 tokens."""
    episode = ScriptedEpisode("8.0", PROMPT, SamplingParams(4))
    answered(episode, V0)
    spec = EpisodeSpec("8.0", PROMPT, SamplingParams(4), max_turns=3)

    def words(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    for context_tokens, ends in ((0, False), (11, False), (10, True)):
        replies = TextReplies(spec, Asking(), lambda ids: "", words, context_tokens)
        said = asyncio.run(replies.step(episode.turns))
        assert (said is None, bool(replies.counts)) == (ends, ends)
        assert ends or list(said) == [5, 6]


def test_an_episode_of_texts_ends_before_its_sampled_tokens_are_used_up() -> None:
    """Sampled 3, the next turn up to 4."""
    episode = ScriptedEpisode("8.0", PROMPT, SamplingParams(4))
    answered(episode, V0)
    spec = EpisodeSpec("8.0", PROMPT, SamplingParams(4), max_turns=3)
    for most, ends in ((0, False), (7, False), (6, True)):
        replies = TextReplies(spec, Asking(), lambda ids: "", lambda text: [5], 0, most)
        said = asyncio.run(replies.step(episode.turns))
        assert (said is None, dict(replies.counts)) == (
            ends,
            {"limits_reached": 1.0} if ends else {},
        )


@pytest.mark.parametrize("wall_s", [0.0, 0.1])
def test_an_episode_of_texts_has_its_seconds(wall_s: float) -> None:
    class Silent:
        def submit(self, call: Any) -> None: ...

        def withdraw(self, call: Any) -> None: ...

    async def body() -> Outcome:
        spec = EpisodeSpec("8.0", PROMPT, SamplingParams(4))
        episode = OpenEpisode(spec, Silent())
        runner = EnvironmentRunner(SingleTurn, lambda spec: wall_s)
        asyncio.get_running_loop().call_later(0.5, episode.end)
        return await runner.run(episode)

    outcome = asyncio.run(body())
    assert outcome.failure == ("timeout" if wall_s else ENDED)
    assert not wall_s or outcome.detail == "took longer than task.wall_s = 0.1"


async def test_a_run_trains_every_turn_once(tmp_path: Path) -> None:
    engine = StubEngine()
    config = replace(CONFIG, task=TASK)
    controller, _ = make(tmp_path, engine, config, scorer=Asking())
    plans = await running(controller, train(controller, 4))
    for plan in plans:
        turns = [
            (g, e, t)
            for g, group in enumerate(plan.groups)
            for e, episode in enumerate(group.episodes)
            for t in range(len(episode.turns))
        ]
        assert sorted((r.group, r.episode, r.turn) for r in plan.rows) == turns
        for group in plan.groups:
            want = 3 if group.group_id % 2 else 2
            for episode in group.episodes:
                assert [turn.parents for turn in episode.turns] == [()], "one row"
                row = episode.turns[0].rollout
                assert len(row.ends) == want
                between = row.token_ids[~row.loss_mask][len(group.prompt.token_ids) :]
                assert between.tolist() == [5, 6] * (want - 1)
                assert len(episode.turn_lengths()) == want
        found = batch_metrics(plan.groups, plan.step)
        lengths = [n for g in plan.groups for e in g.episodes for n, _ in e.turn_lengths()]
        assert found["sample/length_mean"] == sum(lengths) / len(lengths), "of turns"
        assert 2 <= found["sample/turns_mean"] <= 3
        assert found["sample/rows_mean"] == 1
        rows = [row for group in plan.groups for row in group.rollouts()]
        lasts = [np.flatnonzero(row.loss_mask)[[e.end - 1 for e in row.ends]] for row in rows]
        saved = 1 - sum(row.num_tokens - 1 for row in rows) / np.concatenate(lasts).sum()
        assert 0.3 < found["sample/shared_frac"] == pytest.approx(saved)


def test_an_environment_that_fails_ends_the_run_or_drops_the_group(tmp_path: Path) -> None:
    async def scenario(task: TaskConfig) -> None:
        scorer = Asking(ScoreError("it hangs"))
        config = replace(CONFIG, task=task)
        controller, _ = make(tmp_path, StubEngine(), config, scorer=scorer)
        await running(controller, train(controller, 1))

    with pytest.raises(ConfigError, match="it hangs"):
        asyncio.run(scenario(TASK))


def test_check_digits_stops_when_all_are_right() -> None:
    assert check_digits(PROMPT, ["34"]) == ""
    assert check_digits(PROMPT, ["34", "35"]) == "\n1 of 2\np"
    assert make_environment(TaskConfig()) is None


def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.environment = 'nobody' .*check_digits"):
        make_environment(TaskConfig(environment="nobody"))

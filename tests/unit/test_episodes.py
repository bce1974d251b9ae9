"""Episodes of several turns: what is fed, what is trained, which rows are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.schema import TaskConfig
from moerl.controller.rollout_builder import PartialEpisode, wasted_uris
from moerl.data.environments import check_digits, make_environment
from moerl.errors import ConfigError, ScoreError
from moerl.records.header_check import check as check_record
from moerl.types import (
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
from tests.unit.test_controller import CONFIG, StubEngine, StubScorer, make, running, train

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
PROMPT = Prompt(7, (1, 2), "p", "34", {})
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
        BlobRef(name, 0, "uint8", shape, "2:0"), request.rows_from, end, version, (0, 1), 4
    )


def answered(
    episode: PartialEpisode, version: PolicyVersion, count: int = 3, **changes: Any
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


def test_a_turn_is_fed_all_that_was_said_and_names_its_rows() -> None:
    episode = PartialEpisode("7.0", PROMPT, SamplingParams(4), audit=False, max_turns=3)
    answered(episode, V0)
    assert episode.listens
    episode.reply([8, 9])
    second = answered(episode, V0)
    assert second.token_ids.tolist() == [1, 2, 3, 3, 3, 8, 9]
    assert (second.num_sampled, second.rows_known, second.rows_from) == (0, 4, 4)
    episode.reply([])
    assert episode.finished
    first, last = (turn.rollout() for turn in episode.turns)
    assert last.token_ids.tolist() == [1, 2, 3, 3, 3, 8, 9, 3, 3, 3]
    assert last.loss_mask.tolist() == [False] * 7 + [True] * 3
    assert last.routing[0] == first.routing[0], "rows are named, not recorded again"
    for rollout in (first, last):
        check_record(rollout, ModelShape(10, 2, (0, 1), num_experts=4, top_k=2))


def test_rows_of_other_weights_are_not_named() -> None:
    """An update between two turns: the reply is put aside and the turn gets rows of its own."""
    episode = PartialEpisode("7.0", PROMPT, SamplingParams(4), audit=False, max_turns=2)
    answered(episode, V0)
    episode.reply([8])
    assert answered(episode, V1).rows_known == 4
    assert not episode.finished
    assert wasted_uris([episode]) == {"blob://n/7.0.t1"}
    assert answered(episode, V1).rows_known == 0
    assert episode.finished, "the last turn that is allowed"
    last = episode.turns[-1].rollout()
    assert [(part.row_begin, part.version) for part in last.routing] == [(0, V1)]
    assert episode.blob_uris() == {f"blob://n/7.0{x}" for x in ("", ".t1", ".t1.own")}


@pytest.mark.parametrize("kept", [False, True])
def test_rows_of_a_turn_that_met_an_update_are_not_named(kept: bool) -> None:
    episode = PartialEpisode("7.0", PROMPT, SamplingParams(6), audit=False, max_turns=2)
    if kept:
        answered(episode, V1, kept_kv=True)
    else:
        answered(episode, V0, finish=Finish.ABORT)
        answered(episode, V1)
    episode.reply([8])
    assert episode.request().rows_known == 0


def test_a_run_trains_every_turn_once(tmp_path: Path) -> None:
    async def scenario() -> None:
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
                    assert len(episode.turns) == want
                    assert [turn.parents for turn in episode.turns] == [(), (0,), (1,)][:want]
                    before, after = (t.rollout.token_ids.tolist() for t in episode.turns[:2])
                    assert after[: len(before) + 2] == [*before, 5, 6]

    asyncio.run(scenario())


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


@pytest.mark.parametrize("override", ["task.max_turns=2", "task.environment=check_digits"])
def test_turns_and_environment_belong_together(override: str) -> None:
    with pytest.raises(ConfigError, match="environment that answers"):
        check(load_config("quickstart", [override]))


def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.environment = 'nobody' .*check_digits"):
        make_environment(TaskConfig(environment="nobody"))

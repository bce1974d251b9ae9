"""A reward sees every turn, what the policy read before it, the branches and the graph."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from moerl.config.schema import TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.core.types import GraphTurn, Prompt, Score
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn
from moerl.scoring import ProcessScorer
from tests.helpers.episode_views import asked
from tests.helpers.patience import patience
from tests.helpers.recorded_turns import recorded, turn

PROMPT = Prompt(7, (1,), "the prompt", "2", {})


def played(*turns: RecordedTurn) -> FinishedEpisode:
    return FinishedEpisode("7.0", PROMPT, turns)


def words(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def branched() -> tuple[RecordedTurn, ...]:
    """0 - 1 - 2, 1 - 3, and 4 that stands alone; turn 1 reads a tool's 42."""
    first = recorded(0, turn([1], [2, 3]))
    second = recorded(1, turn([1, 2, 3, 42], [5]), first)
    return (
        first,
        second,
        recorded(2, turn([1, 2, 3, 42, 5, 6], [7]), second),
        recorded(3, turn([1, 2, 3, 42, 5, 8], [9, 9]), second),
        recorded(4, turn([3], [3])),
    )


def test_each_turn_has_what_was_read_and_said() -> None:
    judge = GraphTurn("7.0.t5", "", "judge", "other_model")
    episode = replace(played(*branched()), graph=(judge,))
    view = episode.view(words)
    assert [turn.read for turn in view.turns] == ["the prompt", "42", "6", "8", "3"]
    assert view.responses == ["2 3", "5", "7", "9 9", "3"]
    assert [turn.token_ids for turn in view.turns] == [(2, 3), (5,), (7,), (9, 9), (3,)]
    assert [turn.parent for turn in view.turns] == ["", "7.0.t0", "7.0.t1", "7.0.t1", ""]
    branches = [[turn.name[-2:] for turn in branch] for branch in view.branches]
    assert branches == [["t0", "t1", "t2"], ["t0", "t1", "t3"], ["t4"]]
    assert view.graph == (judge,)
    chain = played(*branched()[:3]).view(words)
    assert len(chain.branches) == 1, "control"


def test_a_stop_token_that_a_template_replaced_is_read() -> None:
    first = recorded(0, turn([1], [2, 0]))
    second = RecordedTurn(first, first.num_tokens - 1, "", "7.0.t1", turn([1, 2, 9, 4], [5]))
    view = played(first, second).view(words)
    assert [turn.read for turn in view.turns] == ["the prompt", "9 4"]


def test_a_reward_of_an_agent_gets_it_in_its_worker() -> None:
    judge = GraphTurn("7.0.t5", "", "judge", "other_model")
    episode = replace(played(*branched()[:3]), graph=(judge,))
    agent = AgentConfig(command=["true"])
    path = "tests.helpers.reward_forms:seen"
    scorer = ProcessScorer(TaskConfig(name="jsonl", agent=agent, reward=path), 1, patience(20.0))
    try:
        views = [episode.view(words), played(*branched()[:1]).view(words)]
        whole, first = asyncio.run(scorer.score(asked(PROMPT, views)))
    finally:
        scorer.close()
    counts = {"branches": 1.0, "longest": 3.0, "tool_said_42": 1.0, "judged": 1.0}
    assert whole == Score(1.0, turns=(2.0, 1.0, 1.0), metrics=counts)
    assert first.metrics == {"branches": 1.0, "longest": 1.0, "tool_said_42": 0.0, "judged": 0.0}

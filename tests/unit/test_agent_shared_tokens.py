"""Turns of an episode share the array of their tokens; each still has its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moerl.agents.turn_forest import Origin, TurnForest, TurnRequest
from moerl.controller.rollout_builder import PartialEpisode
from moerl.controller.turn_rows import SampledTurn
from moerl.core.errors import RecordError
from moerl.core.types import Finish, PolicyVersion, Prompt, SamplingParams, Segment


@pytest.mark.parametrize("seed", range(4))
def test_turns_that_share_their_tokens_do_not_change_each_other(seed: int) -> None:
    """Chains, siblings, branches and replaced ends in any order, against copies of each."""
    rng, forest = np.random.default_rng(seed), TurnForest()
    wanted: list[tuple[list[int], list[int]]] = []
    for number in range(60):
        turns = forest.turns
        recent = int(rng.integers(max(0, number - 3), number)) if number else 0
        parent = turns[recent] if number and rng.random() < 0.95 else None
        inherited = 0 if parent is None else parent.num_tokens - int(rng.random() < 0.1)
        known = [] if parent is None else whole(wanted[parent.index])[:inherited]
        prompt = known + rng.integers(0, 250, 3).tolist()
        output = rng.integers(0, 250, int(rng.integers(1, 9))).tolist()
        wanted.append((prompt, output))
        request = TurnRequest(parent, 0, Origin.CONTINUED, (b"", b""))
        forest.add(request, "", f"e.t{number}", sampled_turn(prompt, output), inherited)
    for turn, (prompt, output) in zip(forest.turns, wanted, strict=True):
        assert turn.token_ids.tolist() == prompt + output
        assert turn.sampled.prompt_ids.tolist() == prompt
        row = turn.rollout
        assert row.token_ids.tolist() == prompt + output
        assert np.flatnonzero(row.loss_mask).tolist() == [
            len(prompt) + place for place in range(len(output))
        ]
    shared = {id(turn.ids) for turn in forest.turns}
    assert len(shared) < len(wanted) / 2, "control: an array for each turn"


def test_a_turn_that_does_not_continue_its_parent_is_refused() -> None:
    forest = TurnForest()
    first = TurnRequest(None, 0, Origin.FIRST, (b"", b""))
    parent = forest.add(first, "", "e.t0", sampled_turn([1, 2], [3]), 0)
    request = TurnRequest(parent, 0, Origin.CONTINUED, (b"", b""))
    with pytest.raises(RecordError, match="turns"):
        forest.add(request, "", "e.t1", sampled_turn([1, 9, 3, 4], [5]), 3)
    assert forest.turns == [parent]
    assert forest.add(request, "", "e.t1", sampled_turn([1, 2, 3, 4], [5]), 3).continues


def test_an_episode_of_text_turns_keeps_its_tokens_once() -> None:
    """200,000 tokens in 200 turns of `task.environment`."""
    episode = PartialEpisode(
        "0.0", Prompt(0, (1, 2), "", None, {}), SamplingParams(9), audit=False, max_turns=200
    )
    said = [1, 2]
    for number in range(200):
        request = episode.request()
        assert len(request.token_ids) == len(said)
        (segment,) = sampled_turn([], [number, 7]).segments
        episode.add(replace(segment, rollout_id=request.rollout_id))
        said += [number, 7]
        if number < 199:
            result = list(range(number, number + 998))
            episode.reply(result)
            said += result
    (row,) = episode.rows("join")
    assert row.token_ids.tolist() == said
    assert len(said) > 199_000
    prompts = [turn.prompt_ids for turn in episode.turns]
    arrays = {id(ids.base): ids.base.nbytes for ids in prompts if ids.base is not None}
    assert sum(arrays.values()) <= 4 * row.token_ids.nbytes, "arrays that double"
    assert sum(ids.nbytes for ids in prompts) > 90 * row.token_ids.nbytes, "control: one each"


def whole(turn: tuple[list[int], list[int]]) -> list[int]:
    prompt, output = turn
    return prompt + output


def sampled_turn(prompt: list[int], output: list[int]) -> SampledTurn:
    segment = Segment(
        "e",
        np.asarray(output, np.int32),
        np.full(len(output), -0.1, np.float32),
        PolicyVersion(0, 0),
        Finish.STOP,
        None, None, None, 0, 0, 0.0, 0.0,
    )  # fmt: skip
    return SampledTurn(np.asarray(prompt, np.int32), (segment,), SamplingParams(9))

"""Turns of an episode share the array of their tokens; each still has its own."""

from __future__ import annotations

import numpy as np
import pytest

from moerl.core.errors import RecordError
from moerl.core.types import Finish, PolicyVersion, Prompt, SamplingParams, Segment
from moerl.episodes.finished_episode import RecordedTurn
from moerl.episodes.turn import SampledTurn
from tests.helpers.scripted_episode import ScriptedEpisode


@pytest.mark.parametrize("seed", range(4))
def test_turns_that_share_their_tokens_do_not_change_each_other(seed: int) -> None:
    """Chains, siblings, branches and replaced ends in any order, against copies of each."""
    rng = np.random.default_rng(seed)
    turns: list[RecordedTurn] = []
    wanted: list[tuple[list[int], list[int]]] = []
    for number in range(60):
        recent = int(rng.integers(max(0, number - 3), number)) if number else 0
        has_parent = number and rng.random() < 0.95
        parent = turns[recent] if has_parent else None
        inherited = 0 if parent is None else parent.num_tokens - int(rng.random() < 0.1)
        known = whole(wanted[recent])[:inherited] if has_parent else []
        prompt = known + rng.integers(0, 250, 3).tolist()
        output = rng.integers(0, 250, int(rng.integers(1, 9))).tolist()
        wanted.append((prompt, output))
        turns.append(recorded(number, prompt, output, parent, inherited))
    for turn, (prompt, output) in zip(turns, wanted, strict=True):
        assert turn.token_ids.tolist() == prompt + output
        assert turn.sampled.prompt_ids.tolist() == prompt
        row = turn.rollout
        assert row.token_ids.tolist() == prompt + output
        assert np.flatnonzero(row.loss_mask).tolist() == [
            len(prompt) + place for place in range(len(output))
        ]
    shared = {id(turn._ids) for turn in turns}
    assert len(shared) < len(wanted) / 2, "control: an array for each turn"


def test_a_turn_that_does_not_continue_its_parent_is_refused() -> None:
    parent = recorded(0, [1, 2], [3])
    with pytest.raises(RecordError, match="turns"):
        recorded(1, [1, 9, 3, 4], [5], parent, 3)
    assert recorded(1, [1, 2, 3, 4], [5], parent, 3).continues


def test_an_episode_of_text_turns_keeps_its_tokens_once() -> None:
    """200,000 tokens in 200 turns of `task.environment`."""
    prompt = Prompt(0, (1, 2), "", None, {})
    episode = ScriptedEpisode("0.0", prompt, SamplingParams(9))
    said = [1, 2]
    for number in range(200):
        request = episode.request()
        assert len(request.token_ids) == len(said)
        episode.add(segment(request.rollout_id, [number, 7]))
        said += [number, 7]
        if number < 199:
            result = list(range(number, number + 998))
            episode.reply(result)
            said += result
    (row,) = episode.rows("join")
    assert row.token_ids.tolist() == said
    assert len(said) > 199_000
    prompts = [turn.sampled.prompt_ids for turn in episode.turns]
    arrays = {id(ids.base): ids.base.nbytes for ids in prompts if ids.base is not None}
    assert sum(arrays.values()) <= 4 * row.token_ids.nbytes, "arrays that double"
    assert sum(ids.nbytes for ids in prompts) > 90 * row.token_ids.nbytes, "control: one each"


def whole(turn: tuple[list[int], list[int]]) -> list[int]:
    prompt, output = turn
    return prompt + output


def recorded(
    number: int,
    prompt: list[int],
    output: list[int],
    parent: RecordedTurn | None = None,
    inherited: int = 0,
) -> RecordedTurn:
    name = f"e.t{number}"
    said = SampledTurn(np.asarray(prompt, np.int32), (segment(name, output),), SamplingParams(9))
    return RecordedTurn(parent, inherited, "", name, said)


def segment(name: str, output: list[int]) -> Segment:
    return Segment(
        name,
        np.asarray(output, np.int32),
        np.full(len(output), -0.1, np.float32),
        PolicyVersion(0, 0),
        Finish.STOP,
        None, None, None, 0, 0, 0.0, 0.0,
    )  # fmt: skip

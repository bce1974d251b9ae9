"""What a score becomes on its way into the line: steps at tokens, and which episodes stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moerl.controller.episode_scores import spread_to_tokens
from moerl.core.episode_view import EpisodeView
from moerl.core.errors import ScoreError
from moerl.core.types import Prompt, Score
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn
from moerl.records.blob_store import BlobStore
from tests.helpers.controllers import StubScorer, make, running, sibling, train, with_rollout
from tests.helpers.random_rollouts import group, make_rollout
from tests.helpers.recorded_turns import recorded, turn
from tests.helpers.stub_engine import StubEngine

PROMPT = Prompt(7, (1,), "p", "2", {})
WORDS = {3: "ab", 4: "c", 5: ""}  # 5 is special: it ends a sequence and has no text


def chain(*outputs: list[int]) -> FinishedEpisode:
    """An episode of turns with these tokens, of which each continues the one before."""
    turns: list[RecordedTurn] = []
    for number, ids in enumerate(outputs):
        before = turns[-1] if turns else None
        read = before.token_ids.tolist() if before else [1]
        turns.append(recorded(number, turn(read, ids), before))
    return FinishedEpisode("7.0", PROMPT, tuple(turns))


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("text_steps", "steps"),
    [
        (((2, 1.0), (3, 2.0)), ((0, 1.0), (1, 2.0))),
        (((1, 1.0), (2, 2.0), (5, 4.0)), ((0, 3.0), (2, 4.0))),  # two steps end in one token
        (((0, 1.0),), ((0, 1.0),)),  # before any text
        ((), ()),
    ],
)
def test_a_step_ends_with_the_token_of_its_last_character(text_steps: tuple, steps: tuple) -> None:
    one = chain([3, 4, 3, 5])  # "ab" "c" "ab" ""
    assert spread_to_tokens(Score(1.0, text_steps=text_steps), one, decode).steps == steps


def test_steps_belong_to_the_last_turn() -> None:
    found = spread_to_tokens(Score(1.0, text_steps=((3, 1.0),)), chain([3, 4], [3, 4, 5]), decode)
    assert found.steps == ((3, 1.0),)


def test_a_turn_ends_with_its_last_token() -> None:
    two = chain([3, 4], [3, 4, 5])
    assert spread_to_tokens(Score(1.0, turns=(0.5, -1.0)), two, decode).steps == (
        (1, 0.5),
        (4, -1.0),
    )
    both = Score(1.0, turns=(0.5, -1.0), text_steps=((1, 2.0), (5, 4.0)))
    assert spread_to_tokens(both, two, decode).steps == ((1, 0.5), (2, 2.0), (4, 3.0))


def test_steps_of_branches_are_placed_unless_their_turns_are_side_by_side() -> None:
    first = recorded(0, turn([1], [3, 4]))
    left, right = (recorded(n, turn([1, 3, 4, n], [4]), first) for n in (1, 2))
    three = Score(1.0, turns=(1.0, 2.0, 4.0))
    found = spread_to_tokens(three, FinishedEpisode("7.0", PROMPT, (first, left, right)), decode)
    assert found.steps == ((1, 1.0), (2, 2.0), (3, 4.0))
    other = recorded(3, turn([1, 3, 4, 1, 4, 9], [4]), left)
    mixed = FinishedEpisode("7.0", PROMPT, (first, left, right, other))
    with pytest.raises(ScoreError, match="turns side by side"):
        spread_to_tokens(Score(1.0, turns=(1.0,) * 4), mixed, decode)


async def test_blobs_outlive_a_group_while_they_are_read(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine())
    store, ref_counts = BlobStore(tmp_path / "blobs", "n"), controller.context.ref_counts
    first, second = (group(i, [make_rollout(store, f"g{i}", 3, 4)], [1.0]) for i in range(2))
    count = len(list(store.root.iterdir()))
    ref_counts.hold([first])
    ref_counts.forget(first)
    assert len(list(store.root.iterdir())) == count, "somebody reads them"
    ref_counts.forget(second)
    assert len(list(store.root.iterdir())) == count / 2
    ref_counts.hold(())
    assert not list(store.root.iterdir())
    await controller.stop()


class Tooling(StubScorer):
    """Of four siblings two are correct; one of them made many errors."""

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        places = map(sibling, episodes)
        return [Score(float(i < 2), errors=100.0 * (i == 1)) for i in places]


async def test_an_oversampled_group_keeps_clean_successes_and_the_proportion(
    tmp_path: Path,
) -> None:
    config = with_rollout(oversample=2)
    controller, _ = make(tmp_path, StubEngine(), config, scorer=Tooling())
    plans = await running(controller, train(controller, 4))
    kept = [[e.episode_id for e in g.episodes] for p in plans for g in p.groups]
    assert all(len(group) == config.rollout.group_size for group in kept)
    rewards = {tuple(sorted(e.score.reward for e in g.episodes)) for p in plans for g in p.groups}
    assert rewards == {(0.0, 1.0)}, "half were correct, half of the kept must be"
    correct = [ids[0].split(".")[1] for ids in kept]
    assert correct.count("0") > correct.count("1"), "errors did not matter"

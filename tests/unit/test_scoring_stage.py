"""What a score becomes on its way into the line: steps at tokens, and which episodes stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from moerl.controller.scoring_stage import place_steps
from moerl.core.episode_view import EpisodeView
from moerl.core.types import Prompt, Score
from moerl.records.blob_store import BlobStore
from tests.helpers.controllers import StubScorer, make, running, train, with_rollout
from tests.helpers.random_rollouts import group, make_rollout
from tests.helpers.stub_engine import StubEngine

WORDS = {3: "ab", 4: "c", 5: ""}  # 5 is special: it ends a sequence and has no text


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
    one = [[3, 4, 3, 5]]  # "ab" "c" "ab" ""
    assert place_steps(Score(1.0, text_steps=text_steps), one, decode).steps == steps


def test_steps_belong_to_the_last_turn() -> None:
    placed = place_steps(Score(1.0, text_steps=((3, 1.0),)), [[3, 4], [3, 4, 5]], decode)
    assert placed.steps == ((3, 1.0),)


def test_a_turn_ends_with_its_last_token() -> None:
    two = [[3, 4], [3, 4, 5]]
    assert place_steps(Score(1.0, turns=(0.5, -1.0)), two, decode).steps == ((1, 0.5), (4, -1.0))
    both = Score(1.0, turns=(0.5, -1.0), text_steps=((1, 2.0), (5, 4.0)))
    assert place_steps(both, two, decode).steps == ((1, 0.5), (2, 2.0), (4, 3.0))


def test_blobs_outlive_a_group_while_they_are_read(tmp_path: Path) -> None:
    async def body() -> None:
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

    asyncio.run(body())


class Tooling(StubScorer):
    """Of four siblings two are correct; one of them made many errors."""

    async def score(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        return [Score(float(i < 2), errors=100.0 * (i == 1)) for i, _ in enumerate(episodes)]


def test_an_oversampled_group_keeps_clean_successes_and_the_proportion(tmp_path: Path) -> None:
    async def body() -> None:
        config = with_rollout(oversample=2)
        controller, _ = make(tmp_path, StubEngine(), config, scorer=Tooling())
        plans = await running(controller, train(controller, 4))
        kept = [[e.episode_id for e in g.episodes] for p in plans for g in p.groups]
        assert all(len(group) == config.rollout.group_size for group in kept)
        rewards = {
            tuple(sorted(e.score.reward for e in g.episodes)) for p in plans for g in p.groups
        }
        assert rewards == {(0.0, 1.0)}, "half were correct, half of the kept must be"
        correct = [ids[0].split(".")[1] for ids in kept]
        assert correct.count("0") > correct.count("1"), "errors did not matter"

    asyncio.run(body())

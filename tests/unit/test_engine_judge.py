"""A judge by prompt: what it is shown and what its choices are worth; and a pool of actors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from moerl.config.reward_terms import RewardTerm
from moerl.config.schema import TinyModel
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import AnswerError, ConfigError, EngineError, ScorerDown
from moerl.core.types import Prompt, Score
from moerl.data.tasks import load_tokenizer
from moerl.data.tiny_model import make_tiny_model
from moerl.launch.supervision import reward_actors
from moerl.launch.supervision.engine_judge import EngineJudge, first_tokens, mean_value
from moerl.launch.supervision.reward_actors import ActorPool
from tests.helpers.episode_views import asked, view

PROMPT = Prompt(4, (1, 2), "31", "13", {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("judge") / "model"
    make_tiny_model(found, TinyModel(enabled=True), seed=1)
    return found


def judge(folder: Path, prefers: Callable[[str], float], **fields: Any) -> EngineJudge:
    """prefers: the probability of the choice 1 beside 0, by the prompt's text."""
    term = RewardTerm("j", where="judge", model=str(folder), choices={"1": 1.0, "0": 0.0}, **fields)
    made = EngineJudge(term, "token", folder / "log")
    one, zero = made._values
    decode = load_tokenizer(folder).decode

    class Client:
        async def generate(self, body: dict[str, Any], took: Callable[..., None]) -> None:
            assert body["token_ids_logprob"] == [[one, zero]] * len(body["rid"])
            for place, ids in reversed(list(enumerate(body["input_ids"]))):
                share = prefers(decode(ids).partition("user: ")[2].partition("\n")[0])
                told = [[math.log(share) - 5.0, one, None], [math.log1p(-share) - 5.0, zero, None]]
                took(place, {"meta_info": {"output_token_ids_logprobs": [told]}})

    async def served() -> Any:
        return Client()

    made._served = served  # type: ignore[method-assign]
    return made


def test_the_reward_is_the_mean_of_the_choices(folder: Path) -> None:
    made = judge(
        folder, lambda text: 0.75 if text == "31:13" else 0.25, prompt="{prompt}:{response}"
    )
    found = asyncio.run(made.score(asked(PROMPT, [view("13"), view("31")])))
    assert [one.reward for one in found if isinstance(one, Score)] == pytest.approx([0.75, 0.25])


def test_fields_are_filled_once_and_a_response_fills_none(folder: Path) -> None:
    made = judge(folder, lambda text: 0.5, prompt="{prompt}{answer}{response}{other}")
    seen: list[str] = []
    made._has_template = False
    made._template = SimpleNamespace(  # type: ignore[assignment]
        tokenizer=SimpleNamespace(chat_template=""),
        encode_plain=lambda text, begin: seen.append(text) or [],
    )
    first, second = asked(PROMPT, [view("{answer}"), view("2")])
    made._filled(first)
    made._filled(first, second)
    assert seen == ["3113{answer}", "3113{answer}2"]


def test_pairs_are_judged_in_both_orders(folder: Path) -> None:
    """A judge that always prefers the first place is no signal; a real preference is one."""
    group = [
        ScoreRequest(f"{n}", PROMPT, view(text), group="g")
        for n, text in enumerate(("1", "2", "3"))
    ]
    fields = {"prompt": "{response}{other}", "unit": "group"}
    biased = judge(folder, lambda text: 0.9, **fields)
    assert [one.reward for one in asyncio.run(biased.score(group))] == pytest.approx([0.5] * 3)

    def larger(text: str) -> float:
        return 0.8 if text[0] > text[1] else 0.2

    fair = judge(folder, larger, **fields)
    assert [one.reward for one in asyncio.run(fair.score(group))] == pytest.approx([0.2, 0.5, 0.8])
    (alone,) = asyncio.run(fair.score(group[:1]))
    assert alone.reward == 0.5


def test_choices_must_begin_with_different_tokens() -> None:
    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    assert first_tokens(RewardTerm(choices={"Yes": 1.0, "No": 0.0}), encode) == {89: 1.0, 78: 0.0}
    with pytest.raises(ConfigError, match=r"task\.rewards\.choices"):
        first_tokens(RewardTerm(choices={"10": 1.0, "1": 0.1}), encode)


@pytest.mark.parametrize("told", [[], [[]], [[[-0.5, 7, None]]], None, [[[None, 5, None]]]])
def test_a_reply_without_the_choices_is_no_answer(told: Any) -> None:
    with pytest.raises(AnswerError, match="no log-probabilities of the choices"):
        mean_value({5: 1.0, 6: 0.0}, {"meta_info": {"output_token_ids_logprobs": told}})


# --- the pool ------------------------------------------------------------------------------------
class Actor:
    """Stands for a Ray actor's handle."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.ask = self.pid = SimpleNamespace(remote=self._call)

    async def _call(self, *asked: Any) -> Any:
        if not asked:
            return 1
        found = self.answer()
        return await found if asyncio.iscoroutine(found) else found


def pool_of(*answers: Callable[[], Any], timeout_s: float = 0.1) -> tuple[ActorPool, list[int]]:
    left, placed = list(answers), list[int]()

    def place(number: int) -> Any:
        placed.append(number)
        return Actor(left.pop(0))

    return ActorPool(place, 1, timeout_s), placed


def ask(pool: ActorPool) -> Sequence[Any]:
    return asyncio.run(pool.score(asked(PROMPT, [view("1")])))


def test_an_actor_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(reward_actors.ray, "kill", killed.append)
    pool, placed = pool_of(lambda: asyncio.sleep(60), lambda: [Score(2.0)])
    with pytest.raises(ScorerDown, match=r"actor 0 did not answer within 0\.1 s"):
        ask(pool)
    assert (len(killed), placed) == (1, [0, 0])
    assert ask(pool) == [Score(2.0)]


def test_an_actor_that_died_may_be_asked_again() -> None:
    def died() -> Any:
        raise ActorDiedError()

    pool, placed = pool_of(died)
    with pytest.raises(ScorerDown, match="the process of actor 0 died"):
        ask(pool)
    assert placed == [0], "Ray starts it again"


def test_an_actor_that_cannot_start_is_down() -> None:
    def fails() -> Any:
        raise EngineError("no model")

    pool, _ = pool_of(fails)
    with pytest.raises(ScorerDown, match="no model"):
        ask(pool)

"""The calculator of the recipe tool-use: its results, what it refuses, and its demonstrations."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from moerl.config.checks import check_model
from moerl.config.load import load_config
from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.core.types import BatchPlan, Finish, Prompt, TurnEnd
from moerl.data.demonstrations import demonstration_plan
from moerl.data.environments import calculate, calculator, demonstration, make_environment
from moerl.data.rewards import make_reward
from moerl.data.tasks import Products
from tests.helpers.episode_views import view
from tests.helpers.patience import patience

PROMPT = Prompt(0, (1,), "12*34=", "408", {})
EOS = 0


def test_results_are_those_of_python() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        numbers = [str(draw.randrange(10 ** draw.randrange(1, 10))) for _ in range(8)]
        chain = numbers[: draw.randrange(1, 9)]
        text = "".join(a + draw.choice("+-*") for a in chain[:-1]) + chain[-1]
        assert calculate(text) == str(eval(text)), text
    assert calculate("007*2") == "14"


@pytest.mark.parametrize(
    "text",
    [
        *("", "1+", "*2", "-3", "1**2", "9**9**9", "1 + 2", "1/0", "1.5", "(1)", "1_0", "0x1f"),
        *("1e9", "\u0663*\u0664", "\u00b2", "1\n", "__import__('os')", "a", "1234567890"),
        *("1+" * 8 + "1", "9" * 10**6, "1*" * 10**6 + "1"),
    ],
)
def test_all_else_is_an_error_and_costs_nothing(text: str) -> None:
    begin = time.perf_counter()
    assert calculate(text) == "error"
    assert time.perf_counter() - begin < patience(0.5)
    assert calculator(PROMPT, [f"<calc>{text}</calc>"]) == "\nerror\n"


def test_the_largest_result_is_short() -> None:
    assert len(calculate("*".join(["9" * 9] * 8))) == 72


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("<calc>12*34</calc>", "\n408\n"),
        ("so <calc>12*34</calc> and <calc>1</calc>", "\n408\n"),
        ("408", ""),
        ("<calc>12*34", ""),
        ("12*34</calc>", ""),
        ("<calc><calc>2</calc>", "\n2\n"),
    ],
)
def test_a_turn_without_a_call_ends_the_episode(turn: str, reply: str) -> None:
    environment = make_environment(TaskConfig(environment="calculator", max_turns=3))
    assert environment is not None
    assert environment(PROMPT, ["<calc>5</calc>", turn]) == reply


def test_the_reward_is_for_the_answer_of_the_last_turn() -> None:
    reward = make_reward(TaskConfig(name="calculator"))
    call = "<calc>12*34</calc>"
    assert [reward(PROMPT, view(*turns)).reward for turns in (["408"], [call, "408"], [call])] == [
        1,
        1,
        0,
    ]
    assert reward(PROMPT, view(call, "40")).reward == 0, "there are no shares for single digits"


def test_half_of_the_demonstrations_call() -> None:
    source = Products(TaskConfig(name="calculator", digits=3), 0)
    items = [source.item(index) for index in range(600)]
    shown = [item.extra["demonstration"] for item in items]
    assert {len(turns) for turns in shown} == {1, 3}
    assert 240 < sum(len(turns) == 3 for turns in shown) < 360
    for item, turns in zip(items, shown, strict=True):
        assert turns[-1] == item.answer == str(eval(item.prompt.rstrip("=")))
        assert len(item.prompt) == len("123*456=")
        if len(turns) == 3:
            assert turns[1] == calculator(PROMPT, turns[:1])


class Shown:
    """A stream of one prompt with this demonstration."""

    def __init__(self, turns: object) -> None:
        self._turns = turns

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (40, 41), "p", "408", {"demonstration": self._turns})


def plan(turns: object) -> BatchPlan:
    return demonstration_plan(
        0,
        [Shown(turns).prompt(0)],
        lambda text: [ord(c) for c in text],
        lambda prompt: [EOS],
        dp_size=1,
        max_tokens_per_microbatch=64,
    )


def test_every_turn_of_a_demonstration_is_learned_and_replies_are_context() -> None:
    """Prompt [40, 41]: the row is that of an episode, where each turn ends with the end token."""
    (rollout,) = plan(["ab", "\n7\n", "7"]).groups[0].rollouts()
    assert rollout.token_ids.tolist() == [40, 41, 97, 98, EOS, 10, 55, 10, 55, EOS]
    assert rollout.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 3 + [True] * 2
    assert rollout.turn_ends == (TurnEnd(3, Finish.STOP), TurnEnd(5, Finish.STOP))
    (single,) = plan(["408"]).groups[0].rollouts()
    assert single.turn_ends == ()


@pytest.mark.parametrize("turns", [[], ["a", "b"], ["a", "", "b"], ["a", 1, "b"], "abc", None])
def test_a_demonstration_in_another_form_is_refused(turns: object) -> None:
    with pytest.raises(ConfigError, match=r"task.path .*a list of texts that the policy begins"):
        plan(turns)


def test_a_recipe_without_its_first_model_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("tool-use")
    with pytest.raises(ConfigError, match=r"moerl sft tool-use-start --run tool-use-start makes"):
        check_model(config)


def test_the_demonstration_answers_its_own_call() -> None:
    assert demonstration("12*34") == ["<calc>12*34</calc>", "\n408\n", "408"]

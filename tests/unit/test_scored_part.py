"""The part of a response that every reward scores, and answers that math-verify misreads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moerl.config import load_config
from moerl.config.checks import check
from moerl.config.schema import TaskConfig
from moerl.core.types import Prompt, Score
from moerl.data.rewards import extracted, make_reward, math_verify
from tests.helpers.episode_views import view

BOXED = r"\boxed{4}"
CUT = f"<think>it is {BOXED}"
DONE = f"<think>is it 5?</think>it is {BOXED}"


def shown(prompt: str, answer: object, response: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Scores the first character as a step; its metric is the length of its text."""
    return {"reward": float(str(answer) in response), "steps": [[1, 0.5]], "size": len(response)}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    return float(solution_str.strip() == ground_truth)


OWN = f"{__name__}:shown"
VERL = f"verl:{__name__}:compute_score"


def scored(
    response: str, reward: str = "math_verify", answer: str = "4", text: str = "2+2=", **more: Any
) -> Score:
    task = TaskConfig(name="jsonl", reward=reward, **more)
    return make_reward(task)(Prompt(0, (1,), text, answer, {}), view(response))


@pytest.mark.parametrize("reward", ["math_verify", "exact_match"])
@pytest.mark.parametrize("rule", ["", "answer"])
def test_unfinished_thinking_holds_no_answer(reward: str, rule: str) -> None:
    said = BOXED if reward == "math_verify" else "4"
    assert scored(f"<think>{said}", reward, extract=rule).reward == 0.0
    assert scored(f"<think>{said}</think> {said}", reward, extract=rule).reward == 1.0
    assert scored(f"<think>{said}</think> 5", reward, extract=rule).reward == 0.0
    assert scored(f" {said}\n", reward, extract=rule).reward == 1.0, "no thinking: as it is"


def test_the_control_scores_the_whole_response() -> None:
    assert scored(CUT, extract="all").reward == 1.0
    assert scored(DONE, extract="all").reward == 1.0


def test_a_template_may_begin_to_think() -> None:
    begun = "user: 2+2=\nassistant: <think>\n"
    assert scored(f"it is {BOXED}", text=begun).reward == 0.0
    assert scored(f"hm</think>it is {BOXED}", text=begun).reward == 1.0
    assert scored(f"it is {BOXED}", text="user: 2+2=").reward == 1.0, "control"
    task = TaskConfig(name="jsonl", reward="math_verify", environment="check_digits", max_turns=2)
    two = view("hm</think>5", BOXED)
    prompt = Prompt(0, (1,), begun, "4", {})
    assert make_reward(task)(prompt, two).reward == 1.0, "the second turn began without"
    turns = (two.turns[0], replace(two.turns[1], read="no\n<think>\n"))
    assert make_reward(task)(prompt, replace(two, turns=turns)).reward == 0.0


@pytest.mark.parametrize(
    ("rule", "response", "part"),
    [
        ("all", DONE, DONE),
        ("answer", DONE, f"it is {BOXED}"),
        ("answer", CUT, ""),
        ("answer", "<think>a</think>b<think>c", "b"),
        ("tags", "<think><answer>5</answer></think><answer>4</answer>.", "4"),
        ("tags", "<think><answer>4</answer>", ""),
        ("last_number", "<think>5</think>It is 4.", "4"),
        (r"</think>(.*)", DONE, f"it is {BOXED}"),
        (r"#### (\S+)", "2+2: #### 3, no: #### 4", "4"),
        (r"#### (\S+)", "#### 4</think>none", ""),
        (r"#### (\S+)", "it is 4", ""),
    ],
)
def test_rules_name_the_part(rule: str, response: str, part: str) -> None:
    assert extracted(rule, "", response) == part


def test_every_reward_gets_the_part_that_is_asked_for() -> None:
    response = "<think>hm</think>4"
    own, verl = scored(response, OWN), scored(response, VERL)
    assert (own.metrics["size"], own.text_steps, verl.reward) == (len(response), ((1, 0.5),), 0.0)
    own = scored(response, OWN, extract="answer")
    verl = scored(response, VERL, extract="answer")
    assert (own.metrics["size"], own.text_steps, verl.reward) == (1, ((len(response), 0.5),), 1.0)
    assert own.answer == "4", "majorities compare the part"
    steps = scored("ab4", "position_steps", extract="(4)")
    assert (steps.reward, steps.text_steps) == (1.0, ((3, 1.0),))
    assert scored("<think>4", OWN, extract="answer").reward == 0.0
    assert scored("<think>4", OWN).reward == 1.0, "control: an own function gets all of it"


def test_the_rule_is_checked() -> None:
    for rule in ("", "all", "answer", "tags", "last_number", "#### (.*)"):
        check(load_config("quickstart-smoke", [f"task.extract='{rule}'"]), starts=False)


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("(A)", "The answer is (A)", True),
        ("A", "The answer is (A).", True),
        ("(A)", "The answer is A.", True),
        ("(a)", "so the answer is (a)", True),
        ("A", r"\boxed{\text{A}}", True),
        ("(A)", "**A**", True),
        ("(B)", "(A) is wrong, so (B)", True),
        ("A", "(A) is wrong, so (B)", False),
        ("(B)", "The answer is (A)", False),
        ("A", "A cat has 4 legs", False),
        ("A", r"not (A), but \boxed{B}", False),
        ("A", "P(A) is small", False),
        ("1000", "it is 1e3", True),
        ("1000", "it is 1E+3.", True),
        ("1e3", "1000", True),
        ("1.5e-3", r"\boxed{0.0015}", True),
        ("1000", "it is 1e4", False),
        ("1000", "it is 1", False),
        ("1", "it is 1e3", False),
        ("2e", r"\boxed{2e}", True),
        (r"\frac{1}{2}", "it is 0.5", True),
    ],
)
def test_choices_and_powers_of_ten(answer: str, response: str, right: bool) -> None:
    assert math_verify(Prompt(0, (1,), "", answer, {}), response) == float(right)


def test_a_power_that_is_too_large_stays_as_it_is() -> None:
    prompt = Prompt(0, (1,), "", "1000", {})
    assert math_verify(prompt, "it is 1e999999999") == 0.0

"""Reward functions: (prompt, episode) -> Score, in worker processes.

`make_reward` is called once per worker; the function it returns, once per response.  A reward may
raise, hang or return nonsense: `moerl.scoring` contains it.

Most rewards are a number for the last turn.  A process reward also gives each step of the last
response its reward, by the character at which the step ends (a reward sees text only); or each turn
its reward.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, cast

from moerl.config.functions import load_below
from moerl.config.schema import TaskConfig
from moerl.config.task_kinds import SOURCE
from moerl.config.task_tables import PACKAGE, REWARDS, SOURCES
from moerl.core.episode_view import EpisodeView
from moerl.core.errors import ConfigError, ScoreError
from moerl.core.types import Prompt, Score
from moerl.data.reward_calls import Reward, user_reward
from moerl.data.reward_values import MOST_ANSWER
from moerl.data.tasks import reasoning_gym_dataset


def make_reward(task: TaskConfig, *, objects: bool = False) -> Reward:
    """The reward of a task.  Raises ConfigError for an unknown or unimportable one.

    objects: a user's reward may be a class, whose object is made here and called.
    """
    if task.brings_reward:
        return _of_the_episode
    own = SOURCES[task.name].reward
    usual, reward = "all", None
    if own and task.reward in ("", SOURCE):
        usual, reward = "answer", _outcome(load_below(PACKAGE, own))
    elif task.name == "reasoning_gym":
        usual, reward = "tags", GymReward(task)
    elif task.reward in REWARDS:
        usual = "all" if REWARDS[task.reward].scores_steps else "answer"
        reward = _named(task.reward)
    return PartReward(reward or user_reward(task, objects=objects), task.extract or usual)


def prepare_reward(task: TaskConfig, reward: Reward, prompt: Prompt) -> None:
    """Do a reward's work that needs no response once for a prompt: imports and its entry."""
    if isinstance(reward, PartReward) and isinstance(reward.inner, GymReward):
        reward.inner.entry(prompt)
    elif task.reward == "math_verify":
        _parsed_gold(str(prompt.answer))


@dataclass(frozen=True, slots=True)
class PartReward:
    """A reward of the part of the last response that a rule of `task.extract` names."""

    inner: Reward
    rule: str

    def __call__(self, prompt: Prompt, episode: EpisodeView) -> Score:
        last = episode.turns[-1]
        begun = last.read if len(episode.turns) > 1 else prompt.text
        part = extracted(self.rule, begun, last.response)
        if part == last.response:
            return self.inner(prompt, episode)
        turns = (*episode.turns[:-1], replace(last, response=part))
        score = self.inner(prompt, replace(episode, turns=turns))
        begin = max(0, last.response.rfind(part))
        steps = tuple((begin + end, reward) for end, reward in score.text_steps)
        return replace(score, text_steps=steps, answer=score.answer or part[:MOST_ANSWER])


def extracted(rule: str, begun: str, response: str) -> str:
    """The part of a response that is scored; "" if it thinks up to its end, or has no such part.

    begun: the text before the response, in which a template may begin to think.
    """
    if rule == "all":
        return response
    _, thought, answer = response.rpartition("</think>")
    answer, _, _ = answer.partition("<think>")
    if not thought and begun.rstrip().endswith("<think>"):
        return ""
    if rule in EXTRACTS:
        return EXTRACTS[rule](answer)
    return next(reversed(re.findall(rule, thought + answer)), "")


def _of_the_episode(prompt: Prompt, episode: EpisodeView) -> Score:
    raise ScoreError("its program or environment gives the reward")


def right_positions(prompt: Prompt, response: str) -> float:
    """Share of positions that hold the right character; extra characters count as wrong."""
    want = str(prompt.answer)
    right = sum(a == b for a, b in zip(want, response, strict=False))
    return right / max(len(want), len(response), 1)


def position_steps(prompt: Prompt, responses: Sequence[str]) -> Score:
    """`right_positions` as a process reward: each character is a step and earns its share.

    Missing and surplus characters count as errors.
    """
    want, response = str(prompt.answer), responses[-1]
    size = max(len(want), len(response), 1)
    shares = [
        float(place < len(want) and want[place] == character) / size
        for place, character in enumerate(response)
    ]
    steps = tuple((place + 1, share) for place, share in enumerate(shares))
    errors = float(abs(len(want) - len(response)))
    return Score(sum(shares), text_steps=steps or ((0, 0.0),), errors=errors)


def turn_gains(prompt: Prompt, responses: Sequence[str]) -> Score:
    """`right_positions` as a reward per turn: each turn earns its gain over the previous one."""
    rights = [right_positions(prompt, response) for response in responses]
    before = [0.0, *rights[:-1]]
    gains = tuple(right - old for right, old in zip(rights, before, strict=True))
    return Score(rights[-1], turns=gains)


_POWER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\w)")
_CHOICE = re.compile(r"(?:\\text\{)?(?:\(([A-Za-z])\)|([A-Z]))\}?")
_LETTERS = (  # behind `answer is`, in brackets, or alone
    re.compile(r"(?i:\banswer)(?: is|:)*\W{0,4}([A-Z])\b"),
    re.compile(r"(?<!\w)\(([A-Za-z])\)"),
    re.compile(r"\A\W*([A-Z])\W*\Z"),
)


def exact_match(prompt: Prompt, response: str) -> float:
    """1 when response and answer are equal up to surrounding white space."""
    return float(response.strip() == str(prompt.answer).strip())


def math_verify(prompt: Prompt, response: str) -> float:
    """1 when the response holds an expression equal to the answer (package math-verify).

    Of a choice, A or (A), the letter is enough: `the answer is A`, `(A)`.
    Its time limit uses SIGALRM, so it works in the main thread of a process only.
    Raises ValueError when the answer itself cannot be read as mathematics.
    """
    from math_verify import parse, verify

    answer = str(prompt.answer)
    gold = _parsed_gold(answer)
    if not gold:
        raise ValueError(f"the answer {answer!r} is not mathematics that math-verify can read")
    if verify(gold, parse(_plain_powers(response))):
        return 1.0
    choice = _CHOICE.fullmatch(gold[-1])
    if choice is None or "\\boxed" in response:
        return 0.0
    said = next(filter(None, (one.findall(response) for one in _LETTERS)), [""])
    return float(said[-1].upper() == (choice[1] or choice[2]).upper())


def _plain_powers(text: str) -> str:
    """1e3 as 1000: math-verify reads e as Euler's number."""
    return _POWER.sub(lambda found: format(Decimal(found[0]), "f"), text)


def _named(name: str) -> Reward:
    """A reward of the table.  Raises ConfigError when the package that it needs is missing."""
    entry = REWARDS[name]
    if entry.requires and importlib.util.find_spec(entry.requires) is None:
        package = entry.requires.replace("_", "-")
        raise ConfigError("task.reward", name, f"the package {package} is not installed")
    function = load_below(PACKAGE, entry.function)
    if not entry.scores_steps:
        return _outcome(function)
    return lambda prompt, episode: cast(Score, function(prompt, episode.responses))


def _outcome(function: Callable[[Prompt, str], float]) -> Reward:
    return lambda prompt, episode: Score(float(function(prompt, episode.responses[-1])))


@lru_cache(maxsize=64)
def _parsed_gold(answer: str) -> list[Any]:
    """Boxed first: without an anchor a fraction may be read as its denominator."""
    from math_verify import parse

    answer = _plain_powers(answer)
    found: list[Any] = parse(
        answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    )
    return found


_NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d+(?:,\d{3})*(?:\.\d+)?")  # 5-3 ends in 3, not in -3


def last_number(response: str) -> str:
    """The last number of a response, or all of it: `1 + 8 = 9` and `The sum is 9.` answer 9."""
    found = _NUMBER.findall(response)
    return found[-1].replace(",", "") if found else response.strip()


def tagged(response: str) -> str:
    """The text inside <answer>, or all of it."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(response)
    return response.strip() if answer is None else str(answer)


EXTRACTS: dict[str, Callable[[str], str]] = {
    "answer": str,
    "tags": tagged,
    "last_number": last_number,
}


class GymReward:
    """The scorer of a reasoning-gym dataset, which has the prompt's entry made again."""

    def __init__(self, task: TaskConfig) -> None:
        self._entries = lru_cache(maxsize=64)(self._make)  # siblings of a group share an entry
        self._datasets = lru_cache(maxsize=2)(partial(reasoning_gym_dataset, task))

    def __call__(self, prompt: Prompt, episode: EpisodeView) -> Score:
        dataset, item = self.entry(prompt)
        return Score(float(dataset.score_answer(episode.responses[-1], item)))

    def entry(self, prompt: Prompt) -> tuple[Any, Any]:
        """(dataset, entry) of a prompt."""
        return self._entries(prompt.extra["seed"], prompt.extra["item"])

    def _make(self, seed: int, index: int) -> tuple[Any, Any]:
        dataset = self._datasets(seed)
        return dataset, dataset[index]

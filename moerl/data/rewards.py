"""Reward functions: (prompt, response text) -> number.  They run in worker processes.

`make_reward` is called once per worker; what it returns is called once per response.  A reward may
raise, hang or return nonsense: `moerl.scoring` contains it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from moerl.config.schema import TaskConfig
from moerl.data.tasks import reasoning_gym_dataset
from moerl.errors import ConfigError
from moerl.types import Prompt

Reward = Callable[[Prompt, str], float]
# What a user writes: function(prompt text, answer, response, extra fields) -> float.
UserReward = Callable[[str, Any, str, dict[str, Any]], float]


def make_reward(config: TaskConfig) -> Reward:
    """The reward of a task.  Raises ConfigError for an unknown or unimportable one."""
    if config.name == "sort_digits":
        return right_positions
    if config.name == "reasoning_gym":
        return _reasoning_gym(config)
    if config.reward in NAMED:
        _require(config.reward)
        return NAMED[config.reward]
    return _dotted(config.reward)


def right_positions(prompt: Prompt, response: str) -> float:
    """Share of positions that hold the right character; extra characters count as wrong."""
    want = str(prompt.answer)
    right = sum(a == b for a, b in zip(want, response, strict=False))
    return right / max(len(want), len(response), 1)


def exact_match(prompt: Prompt, response: str) -> float:
    """1 when response and answer are the same text but for surrounding white space."""
    return float(response.strip() == str(prompt.answer).strip())


def math_verify(prompt: Prompt, response: str) -> float:
    """1 when the response holds an expression equal to the answer (package math-verify).

    It keeps its own time by SIGALRM, so it works in the main thread of a process only.
    Raises ValueError when the answer itself cannot be read as mathematics.
    """
    from math_verify import parse, verify

    answer = str(prompt.answer)
    gold = _parsed_gold(answer)
    if not gold:
        raise ValueError(f"the answer {answer!r} is not mathematics that math-verify can read")
    return float(verify(gold, parse(response)))


NAMED: dict[str, Reward] = {"exact_match": exact_match, "math_verify": math_verify}


def _require(reward: str) -> None:
    if reward == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("task.reward", reward, "the package math-verify is not installed")


@lru_cache(maxsize=64)
def _parsed_gold(answer: str) -> list[Any]:
    """Boxed first: without an anchor a fraction may be read as its denominator."""
    from math_verify import parse

    return parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}")


def _reasoning_gym(config: TaskConfig) -> Reward:
    from reasoning_gym.utils import extract_answer

    @lru_cache(maxsize=64)  # siblings of a group share an entry
    def entry(seed: int, index: int) -> tuple[Any, Any]:
        dataset = reasoning_gym_dataset(config, seed)
        return dataset, dataset[index]

    def reward(prompt: Prompt, response: str) -> float:
        dataset, item = entry(prompt.extra["seed"], prompt.extra["item"])
        answer = extract_answer(response)
        return float(dataset.score_answer(response.strip() if answer is None else answer, item))

    return reward


def _dotted(path: str) -> Reward:
    """A user's `package.module:function`, looked up from the working directory too."""
    allowed = f"use {', '.join(NAMED)} or package.module:function"
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise ConfigError("task.reward", path, allowed)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: UserReward = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("task.reward", path, f"{error}; {allowed}") from error
    return lambda prompt, response: float(
        function(prompt.text, prompt.answer, response, prompt.extra)
    )

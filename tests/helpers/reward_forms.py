"""Rewards in every form that a user may write; named by dotted path in tests."""

from __future__ import annotations

import asyncio
import functools
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from moerl.core.episode_view import EpisodeView

VALUES: dict[str, Any] = {
    "bool": True,
    "int": 1,
    "Decimal": Decimal(1),
    "Fraction": Fraction(1),
    "numpy float16": np.float16(1),
    "numpy bool": np.bool_(True),
    "numpy array of one": np.array([1.0]),
    "torch bfloat16": torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True),
    "torch of one": torch.ones(1, 1),
    "None": None,
    "text": "0.5",
    "numpy text": np.str_("1"),
    "array of text": np.array("1"),
    "complex": 1j,
    "empty": {},
    "errors only": {"errors": 1},
    "list": [1.0],
    "two numbers": np.ones(2),
    "nan": float("nan"),
    "Decimal infinity": Decimal("Infinity"),
    "1e30": 1e30,
    "-2e19": np.float64(-2e19),
    "1e19": 1e19,
    "long integer": 10**400,
    "long text": "x" * 500,
    "step of 1e30": {"steps": [(0, 1e30)]},
    "sum of steps": {"steps": [(0, 1.5e19), (0, 1.5e19)]},
    "score": {"score": 1.0, "acc": 1.0},
    "metric mean": {"reward": 1.0, "mean": 1.0},
    "metric nan": {"reward": 1.0, "acc": float("nan")},
    "many metrics": {"reward": 1.0} | {f"m{n}": 0 for n in range(40)},
    "metrics": {"reward": 0.5, "acc": np.bool_(True), "cost": Decimal("2.5"), "pred": "12"},
    "lists": {"reward": 0.5, "other": [1], "none": None},
}


def value(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> Any:
    """The value that the response names."""
    return VALUES[response]


async def awaited(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return float(response == answer)


class Match:
    def __init__(self, right: float) -> None:
        self.right = right

    def __call__(self, prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
        return self.right * (response == answer)


class AsyncMatch(Match):
    async def __call__(self, *given: Any) -> float:  # type: ignore[override]
        return super().__call__(*given)


match, async_match = Match(1.0), AsyncMatch(1.0)


def _scaled(scale: float, prompt: str, answer: Any, response: str, extra: dict) -> float:
    return scale * (response == answer)


scaled = functools.partial(_scaled, 1.0)


def by_fields(prompt: str, answer: Any, response: str, **extra: Any) -> float:
    return float(response == answer and extra == {"level": 3})


def one_field(prompt: str, answer: Any, response: str, *, level: int) -> float:
    return float(response == answer and level == 3)


def three(prompt: str, answer: Any, response: str) -> float:
    return float(response == answer)


def whole_episode(prompt: str, answer: Any, response: str, extra: dict, episode: Any) -> float:
    assert isinstance(episode, EpisodeView)
    return float(episode.responses == [answer] and extra == {"level": 3})


def two(response: str, answer: Any) -> float:
    return 0.0


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict | None = None
) -> dict[str, Any]:
    """As verl's manual shows it."""
    right = solution_str == ground_truth and data_source == "gsm8k"
    right = right and extra_info == {"index": 7, "num_turns": 1}
    return {"score": float(right), "acc": right, "pred": solution_str}


async def async_score(data_source: str, solution_str: str, ground_truth: Any, **_: Any) -> float:
    return float(solution_str == ground_truth)


def no_verl(prompt: str, answer: Any, response: str, extra: dict) -> float:
    return 0.0


def trl_match(completions: list, solution: list, **columns: Any) -> list[float]:
    """As TRL's manual shows it, for text and for messages."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    assert [len(ids) for ids in columns["completion_ids"]] == [len(text) for text in texts]
    assert columns["level"] == [3]
    return [float(text == right) for text, right in zip(texts, solution, strict=True)]


def trl_prompt(prompts: list, completions: list, **columns: Any) -> list[float]:
    return [float(prompts == [[{"role": "user", "content": "1+1"}]])]


async def trl_none(prompts: list, completions: list, **columns: Any) -> list[float | None]:
    return [None]


def trl_number(prompts: list, completions: list, **columns: Any) -> float:
    return 1.0


def seen(prompt: str, answer: Any, response: str, extra: dict, episode: EpisodeView) -> dict:
    """Counts what a reward of an agent sees."""
    return {
        "reward": 1.0,
        "turns": [len(turn.token_ids) for turn in episode.turns],
        "branches": len(episode.branches),
        "longest": max(map(len, episode.branches)),
        "tool_said_42": any("42" in turn.read for turn in episode.turns),
        "judged": sum(turn.role == "judge" for turn in episode.graph),
    }

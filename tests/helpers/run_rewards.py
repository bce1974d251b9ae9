"""Rewards for runs whose outputs are long and meaningless: they only have to differ."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def digit_share(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    """Share of digits among the characters of the response."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def gated(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    """`digit_share`, not before the file that MOERL_TEST_GATE names is gone: no step without it."""
    while Path(os.environ["MOERL_TEST_GATE"]).exists():
        time.sleep(0.02)
    return digit_share(prompt, answer, response, extra)


def not_finite(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    return float("nan")


def slow_reply(prompt: str, answer: Any, responses: list[str], extra: dict[str, Any]) -> str:
    """An environment's reply to each turn, after a while."""
    time.sleep(0.2)
    return " again:"

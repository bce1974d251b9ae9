"""Rewards for runs whose outputs are long and meaningless: they only have to differ."""

from __future__ import annotations

from typing import Any


def digit_share(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    """Share of digits among the characters of the response."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def not_finite(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> float:
    return float("nan")

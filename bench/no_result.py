"""The calculator's place in a control: it answers each call, and never knows the result."""

from __future__ import annotations

from collections.abc import Sequence


def no_result(prompt: str, answer: object, turns: Sequence[str], extra: dict[str, object]) -> str:
    return "\n0\n" if "</calc>" in turns[-1] else ""

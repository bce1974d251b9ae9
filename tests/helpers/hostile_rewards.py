"""A reward and an environment that run the policy's text as Python: the worst of tasks."""

from __future__ import annotations

from typing import Any


def run_text(prompt: str, answer: Any, response: str, extra: dict[str, Any]) -> Any:
    """What the text leaves in `won`: a number, or steps."""
    scope: dict[str, Any] = {"extra": extra, "won": 0.0}
    exec(response, scope)
    return scope["won"]


def reply_text(prompt: str, answer: Any, responses: list[str], extra: dict[str, Any]) -> str:
    """What the text leaves in `reply`."""
    scope: dict[str, Any] = {"extra": extra, "reply": ""}
    exec(responses[-1], scope)
    return scope["reply"]

"""Environments: (prompt, responses so far) -> text between turns, empty = the end.

Environments run in the scorer's worker processes, with the same deadline as a reward.  The text is
appended to the turn unchanged: the environment writes the markup that the model expects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moerl.config.functions import load_below, look_up
from moerl.config.schema import TaskConfig
from moerl.config.task_tables import ENVIRONMENTS, PACKAGE
from moerl.core.types import Prompt

Environment = Callable[[Prompt, Sequence[str]], str]
# A user's function: function(prompt text, answer, turns so far, extra fields) -> text.
UserEnvironment = Callable[[str, Any, Sequence[str], dict[str, Any]], str]


def make_environment(config: TaskConfig) -> Environment | None:
    """The environment of a task, if it has one.  Raises ConfigError for an unknown one."""
    if not config.environment:
        return None
    if config.environment in ENVIRONMENTS:
        named: Environment = load_below(PACKAGE, ENVIRONMENTS[config.environment])
        return named
    function: UserEnvironment = look_up("task.environment", config.environment, ENVIRONMENTS)
    return lambda prompt, responses: function(prompt.text, prompt.answer, responses, prompt.extra)


def check_digits(prompt: Prompt, responses: Sequence[str]) -> str:
    """Says how many positions are right and asks again, until all are."""
    want = str(prompt.answer)
    right = sum(a == b for a, b in zip(want, responses[-1], strict=False))
    return "" if responses[-1] == want else f"\n{right} of {len(want)}\n{prompt.text}"

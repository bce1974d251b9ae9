"""Environments of texts: (prompt, responses so far) -> text between turns, empty = the end.

They run in the scorer's worker processes, with the same deadline as a reward.  The text is
appended to the turn unchanged: the function writes the markup that the model expects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from moerl.config.functions import import_object, load_below
from moerl.config.schema import TaskConfig
from moerl.config.task_kinds import TaskKind
from moerl.config.task_tables import ENVIRONMENT_NAMES, ENVIRONMENTS, PACKAGE
from moerl.core.types import Prompt

Environment = Callable[[Prompt, Sequence[str]], str]
# A user's function: function(prompt text, answer, turns so far, extra fields) -> text.
UserEnvironment = Callable[[str, Any, Sequence[str], dict[str, Any]], str]


def make_environment(task: TaskConfig) -> Environment | None:
    """The environment of a task with text replies.  Raises ConfigError for an unknown one."""
    if task.kind is not TaskKind.TEXT_REPLIES:
        return None
    if task.environment in ENVIRONMENTS:
        named: Environment = load_below(PACKAGE, ENVIRONMENTS[task.environment])
        return named
    function: UserEnvironment = import_object(
        "task.environment", task.environment, ENVIRONMENT_NAMES
    )
    return lambda prompt, responses: function(prompt.text, prompt.answer, responses, prompt.extra)


def check_digits(prompt: Prompt, responses: Sequence[str]) -> str:
    """Says how many positions are right and asks again, until all are."""
    want = str(prompt.answer)
    right = sum(a == b for a, b in zip(want, responses[-1], strict=False))
    return "" if responses[-1] == want else f"\n{right} of {len(want)}\n{prompt.text}"


# --- a calculator ---------------------------------------------------------------------------------
# A call is `<calc>127*348</calc>`, anywhere in a turn.  Expressions are texts of a policy and never
# run as code: any text but a short chain of short whole numbers is answered with `error`.
_CALL = re.compile(r"<calc>([^<>]*)</calc>")
# At most 8 numbers of 9 digits, so a result has at most 72.
_CHAIN = re.compile(r"[0-9]{1,9}(?:[-+*][0-9]{1,9}){0,7}")
_TERM = re.compile(r"([-+]?)([0-9*]+)")


def calculator(prompt: Prompt, responses: Sequence[str]) -> str:
    """The result of the last turn's first call; a turn without a call ends the episode."""
    call = _CALL.search(responses[-1])
    return _reply(calculate(call[1])) if call else ""


def calculate(expression: str) -> str:
    """The value of whole numbers joined by + - *, as text; `error` for everything else."""
    if not _CHAIN.fullmatch(expression):
        return "error"
    terms = ((sign, factors.split("*")) for sign, factors in _TERM.findall(expression))
    return str(sum(math.prod(map(int, factors), start=_SIGNS[sign]) for sign, factors in terms))


def demonstration(expression: str) -> list[str]:
    """Texts of policy and environment in turn: the call, the reply, the answer."""
    answer = calculate(expression)
    return [f"<calc>{expression}</calc>", _reply(answer), answer]


def _reply(result: str) -> str:
    return f"\n{result}\n"


_SIGNS = {"": 1, "+": 1, "-": -1}

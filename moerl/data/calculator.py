"""A calculator as the environment of a task: the policy writes a call, the reply is its result.

A call is `<calc>127*348</calc>`, anywhere in a turn.  Expressions are texts of a policy and never
run as code: what is not a short chain of short whole numbers is answered with `error`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from moerl.core.types import Prompt

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

"""Forms in which a user's reward is called, and whether its signature fits.

`task.reward=package.module:function` has the form of moerl; `verl:` or `trl:` before the path calls
the function as that library does (`moerl.data.reward_calls`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Literal

from moerl.config.functions import check_importable, defined_in
from moerl.core.errors import ConfigError

Form = Literal["", "verl", "trl"]
FORMS: tuple[Form, ...] = ("verl", "trl")
_WANTED = "function(prompt, answer, response, extra), or **extra instead of extra"
_BY_NAME = {
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": ("prompts", "completions", "completion_ids"),
}


@dataclass(frozen=True, slots=True)
class OwnForm:
    """How a function of moerl's form takes what goes beyond prompt, answer and response.

    positional: `extra` is its fourth argument.  fields: names of the fields of `extra` that are
    keywords; None: all of them.  episode: it has a parameter `episode`.
    """

    positional: bool
    fields: tuple[str, ...] | None
    episode: bool


def split_form(reward: str) -> tuple[Form, str]:
    """(form, path) of `task.reward`."""
    for form in FORMS:
        if reward.startswith(f"{form}:"):
            return form, reward.removeprefix(f"{form}:")
    return "", reward


def own_form(signature: Signature) -> OwnForm | None:
    """The way to call a function of moerl's form; None: there is none."""
    parameters = signature.parameters
    named = [name for name, one in parameters.items() if one.kind is Parameter.KEYWORD_ONLY]
    named = [name for name in named if name != "episode"]
    has_rest = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    episode = "episode" in parameters
    keywords = dict.fromkeys([*named, *(["episode"] if episode else [])])
    for positional in (True, False):
        if _binds(signature, [None] * (4 if positional else 3), keywords):
            fields = None if has_rest and not positional else tuple(named)
            return OwnForm(positional, fields, episode)
    return None


def signature_problem(form: Form, signature: Signature) -> str:
    """Why a function cannot be called in a form; "" if it can."""
    if not form:
        return "" if own_form(signature) else f"its parameters are {signature}; use {_WANTED}"
    given = dict.fromkeys(_BY_NAME[form])
    if form == "trl":  # columns of the data are further names, unknown here
        given |= dict.fromkeys(signature.parameters)
    if _binds(signature, [], given):
        return ""
    return f"its parameters are {signature}; {form} calls it with {', '.join(_BY_NAME[form])}"


def check_reward(field: str, reward: str, named: Iterable[str]) -> None:
    """Refuse a reward whose module, function or signature does not fit, without an import.

    Raises ConfigError naming `field`, the value and the allowed values.
    """
    form, path = split_form(reward)
    try:
        check_importable(field, path, named)
    except ConfigError as error:
        raise ConfigError(field, reward, error.allowed) from error
    found = defined_in(path)
    problem = signature_problem(form, found) if isinstance(found, Signature) else found
    if problem:
        raise ConfigError(field, reward, problem)


def _binds(signature: Signature, values: list[None], keywords: dict[str, None]) -> bool:
    try:
        signature.bind(*values, **keywords)
    except TypeError:
        return False
    return True

"""Calls of users' rewards, in the forms of moerl, verl and TRL.

Sources: `verl/workers/reward_manager/naive.py` (compute_score by keywords; `score` of a dict) and
`trl/trainer/grpo_trainer.py` (lists over completions, columns as keywords).
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from moerl.config.functions import import_object
from moerl.config.reward_checks import own_form, signature_problem, split_form
from moerl.config.schema import TaskConfig
from moerl.config.task_kinds import TaskKind
from moerl.config.task_tables import REWARD_NAMES
from moerl.core.episode_view import EpisodeView
from moerl.core.errors import ConfigError
from moerl.core.types import Prompt, Score
from moerl.data.reward_values import BadReturn, quoted, score_of

Reward = Callable[[Prompt, EpisodeView], Score]
Function = Callable[..., Any]
# Python's messages about arguments; a decorator or a function that the reward calls may hide them.
_WRONG_CALL = re.compile(r"missing \d+ required|takes .* positional arg|unexpected keyword arg")


def user_reward(task: TaskConfig, *, objects: bool = False) -> Reward:
    """The reward of `task.reward=[verl:|trl:]package.module:function`, or of an object's class.

    Raises ConfigError when it cannot be imported, or not be called in this form.
    """
    form, path = split_form(task.reward)
    named: Any = import_object("task.reward", path, REWARD_NAMES)
    made: Any = named() if objects and isinstance(named, type) else named
    function: Function = made
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(
            "task.reward", task.reward, f"it is {kind}; name a function or a callable"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C code
        signature = inspect.signature(lambda *values, **fields: None)
    if problem := signature_problem(form, signature):
        raise ConfigError("task.reward", task.reward, problem)
    if form == "verl":
        return _verl(function)
    if form == "trl":
        return _trl(function, task.columns.get("answer", "answer"))
    return _own(function, signature, with_turns=task.kind is not TaskKind.SINGLE_ANSWER)


def _own(function: Function, signature: inspect.Signature, *, with_turns: bool) -> Reward:
    form = own_form(signature)
    assert form is not None, "the signature was checked"

    def reward(prompt: Prompt, episode: EpisodeView) -> Score:
        extra = prompt.extra | ({"turns": episode.responses} if with_turns else {})
        names = extra if form.fields is None else form.fields
        if missing := [name for name in names if name not in extra]:
            raise BadReturn(f"has a parameter {missing[0]}, which is no field of its prompt,")
        given = {name: extra[name] for name in names}
        given |= {"episode": episode} if form.episode else {}
        values = [prompt.text, prompt.answer, episode.responses[-1]]
        values += [extra] if form.positional else []
        return score_of(_result(function, values, given))

    return reward


def _verl(function: Function) -> Reward:
    def reward(prompt: Prompt, episode: EpisodeView) -> Score:
        info = prompt.extra.get("extra_info")
        given = {
            "data_source": prompt.extra.get("data_source"),
            "solution_str": episode.responses[-1],
            "ground_truth": prompt.answer,
            "extra_info": (dict(info) if isinstance(info, Mapping) else {})
            | {"num_turns": len(episode.turns)},
        }
        return score_of(_result(function, [], given), key="score")

    return reward


def _trl(function: Function, answer_column: str) -> Reward:
    """None of a function means that it does not apply: nothing else scores the response."""

    def reward(prompt: Prompt, episode: EpisodeView) -> Score:
        last = episode.turns[-1]
        columns = {name: [value] for name, value in prompt.extra.items()}
        messages = columns.pop("messages", [None])[0]
        text, said = prompt.text, last.response
        given = columns | {
            answer_column: [prompt.answer],
            "prompts": [messages or text],
            "completions": [[{"role": "assistant", "content": said}] if messages else said],
            "completion_ids": [list(last.token_ids)],
        }
        found = _result(function, [], given)
        if isinstance(found, str | Mapping) or not hasattr(found, "__len__") or len(found) != 1:
            raise BadReturn(f"returned {quoted(found)}, want a list of one number")
        return score_of(found[0])

    return reward


def _result(function: Function, values: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """The value that a function returns, or that its coroutine does."""
    try:
        found = function(*values, **given)
    except TypeError as error:
        if _WRONG_CALL.search(str(error)):
            raise BadReturn(f"cannot be called: {error}") from error
        raise
    return _loop().run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found


@lru_cache(maxsize=1)
def _loop() -> asyncio.Runner:
    """One loop for all calls, so that clients which a function keeps stay usable."""
    return asyncio.Runner()

"""Checks of the terms of a reward: `task.rewards`."""

from __future__ import annotations

import re
from pathlib import Path

from moerl.config.reward_checks import check_reward
from moerl.config.reward_terms import RewardTerm, Where
from moerl.config.rules import Rows
from moerl.config.schema import Config
from moerl.config.task_kinds import SOURCE, TaskKind
from moerl.config.task_mixture import TaskEntry
from moerl.config.task_tables import REWARD_NAMES, SOURCES, STEP_REWARDS
from moerl.config.template_names import template_problems

_NAME = re.compile(r"[A-Za-z][\w-]{0,31}", re.ASCII)
_TAKEN = ("mean", "std", "zero_var_frac")  # metrics reward/... of moerl
# Fields that only some homes read
_HOMES: dict[str, tuple[Where, ...]] = {
    "function": ("function", "actors"),
    "url": ("http",),
    "api_key": ("http",),
    "workers": ("function", "actors", "judge"),
    "cpus": ("actors",),
    "gpus": ("actors", "judge"),
    "model": ("judge", "model"),
    "prompt": ("judge",),
    "choices": ("judge",),
    "chat_template": ("judge",),
    "template_arguments": ("judge",),
    "engine": ("judge",),
}


def check_terms(config: Config, task: TaskEntry) -> Rows:
    """Faults of `task.rewards`."""
    if not task.rewards:
        return
    if task.reward:
        yield "task.reward", "task.rewards has all terms; use one of both"
    names = [term.name for term in task.rewards]
    for place, term in enumerate(task.rewards):
        field = f"task.rewards.{place}"
        if not _NAME.fullmatch(term.name) or term.name in _TAKEN:
            allowed = "a term needs a name: a letter, then letters, digits, _ and -"
            yield f"{field}.name", f"{allowed}; not {', '.join(_TAKEN)}"
        if names.count(term.name) > 1:
            yield f"{field}.name", "use each name once"
        default = RewardTerm()
        for name, homes in _HOMES.items():
            if getattr(term, name) != getattr(default, name) and term.where not in homes:
                value = "(hidden)" if name == "api_key" else getattr(term, name)
                yield f"{field}.{name}", value, f"only where={' or '.join(homes)} reads it"
        yield from _of_home(config, task, term, field)


def check_roles(task: TaskEntry) -> Rows:
    """Faults of `task.roles`, and of terms that name them."""
    if task.roles and task.kind is TaskKind.SINGLE_ANSWER:
        allowed = "a single answer has one role: use an environment or an agent"
        yield "task.roles", list(task.roles), allowed
    for role, sampling in task.samplings.items():
        field = f"task.roles.{role}"
        if role and not _NAME.fullmatch(role):
            yield "task.roles", role, "a role is a letter, then letters, digits, _ and -"
        if sampling.truncates != task.sampling.truncates:
            allowed = "all roles truncate, or none: set top_p below 1, or top_k, alike"
            yield f"{field}.sampling.top_p", sampling.top_p, allowed
        if sampling.ignore_eos != task.sampling.ignore_eos:
            yield f"{field}.sampling.ignore_eos", sampling.ignore_eos, "it is the task's"
    for place, term in enumerate(task.rewards):
        field, known = f"task.rewards.{place}", ", ".join(task.roles) or "(none)"
        if set(term.roles) - set(task.roles):
            yield f"{field}.roles", f"task.roles has {known}"
        if term.roles and term.unit in ("step", "turn"):
            yield f"{field}.unit", "a term of roles has unit=episode or group"
        if term.name in task.roles:
            yield f"{field}.name", "a role has this name"


def _of_home(config: Config, task: TaskEntry, term: RewardTerm, field: str) -> Rows:
    by_entropy = term.unit == "step" and term.steps_by == "entropy"
    for name in ("entropy", "step_tokens") if not by_entropy else ():
        if getattr(term, name) != getattr(RewardTerm(), name):
            yield f"{field}.{name}", "only unit=step, steps_by=entropy reads it"
    if term.unit == "step" and not term.separator:
        yield f"{field}.separator", "a text that ends a step is needed"
    if term.unit == "group" and term.where not in ("http", "judge"):
        yield f"{field}.unit", f"{term.where} sees one episode; use http or judge"
    if term.where in ("function", "actors"):
        yield from _of_function(task, term, field)
    elif term.where == "own":
        if not task.kind.uses_chat:
            allowed = "only a program or an environment object brings a reward"
            yield f"{field}.where", allowed
        if term.unit != "episode":
            yield f"{field}.unit", "where=own has unit=episode"
    elif term.where == "http":
        if not term.url.startswith(("http://", "https://")):
            yield f"{field}.url", "it begins with http:// or https://"
        if "@" in term.url:
            yield f"{field}.url", "(hidden)", "it has no login; use api_key"
    elif term.where == "judge":
        yield from _of_judge(term, field)
    elif not term.model:
        yield f"{field}.model", "name the folder of a model with a value head"
    elif config.ref_models.placement != "separate":
        yield "ref_models.placement", "where=model needs reference ranks: separate"
    if term.gpus and not config.cluster.ray:
        yield f"{field}.gpus", "it needs cluster.ray, whose nodes offer free GPUs"


def _of_function(task: TaskEntry, term: RewardTerm, field: str) -> Rows:
    name = term.function
    if term.where == "actors" and task.isolation == "bwrap":
        yield f"{field}.where", "Ray actors are not isolated; use function, or process"
    if not name:
        yield f"{field}.function", "name a function"
    elif name == SOURCE and not SOURCES[task.name].reward and task.name != "reasoning_gym":
        yield f"{field}.function", f"the prompts of {task.name} bring no reward"
    elif name not in REWARD_NAMES and not _is_class(term):
        check_reward(f"{field}.function", name, REWARD_NAMES)
    if name in STEP_REWARDS and term.unit != "episode":
        yield f"{field}.unit", f"{name} scores the steps of an ended episode itself"


def _is_class(term: RewardTerm) -> bool:
    return term.where == "actors" and term.function.rpartition(":")[2][:1].isupper()


def _of_judge(term: RewardTerm, field: str) -> Rows:
    if not (Path(term.model) / "config.json").is_file():
        yield f"{field}.model", "a model folder with config.json is needed"
    allowed = ("{response}", "{turns}", "{step}")
    if not any(one in term.prompt for one in allowed):
        yield f"{field}.prompt", f"it must show {' or '.join(allowed)}"
    if term.unit == "group" and "{other}" not in term.prompt:
        yield f"{field}.prompt", "unit=group compares {response} with {other}"
    if len(term.choices) < 2:
        yield f"{field}.choices", "name two answers or more, with their rewards"
    yield from template_problems(field, term.chat_template, term.template_arguments)

"""Checks of the settings with which episodes are played: environment, program, limits."""

from __future__ import annotations

import re
import sys
from shutil import which

from moerl.config.clusters import is_local
from moerl.config.functions import check_importable, functions
from moerl.config.rules import Rows, refuse
from moerl.config.schema import Config
from moerl.config.scorer_checks import check_roles, check_terms
from moerl.config.secret_values import HIDDEN
from moerl.config.task_kinds import HTTP, SANDBOX_TOOLS, TaskKind
from moerl.config.task_mixture import TaskEntry, entries_of, naming
from moerl.config.task_programs import POLICY, AgentConfig, OtherModelConfig
from moerl.config.task_tables import ENVIRONMENT_NAMES, ENVIRONMENTS, REWARD_NAMES, STEP_REWARDS

_HTTP = ("http://", "https://")
_SCHEMES = (*_HTTP, "ws://", "wss://")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEY = re.compile(r"[!-~]*")
_OBJECTS = "a task.environment that is a class, sandbox_tools or http"
_OF_OBJECTS = ("environment_options", "environment_workers", "environment_s", "tools", "tool_s")
_REWARDS = [name for name in REWARD_NAMES if name not in STEP_REWARDS]
_FORMATS = ("call_format", "reasoning_format")


def check_episodes(config: Config) -> None:
    """Raises ConfigError."""
    for entry in entries_of(config):
        with naming(entry):
            refuse(vars(config) | {"task": entry}, _of_entry(config, entry))


def _of_entry(config: Config, task: TaskEntry) -> Rows:
    kind = task.kind
    yield from check_terms(config, task)
    yield from check_roles(task)
    if kind is TaskKind.PROGRAM:
        yield from _of_program(config, task)
    elif task.agent != AgentConfig():
        yield "task.agent.command", "the settings of an agent need its program, or a port"
    if task.environment not in ("", *ENVIRONMENTS, SANDBOX_TOOLS, HTTP):
        check_importable("task.environment", task.environment, ENVIRONMENT_NAMES)
    if kind is TaskKind.ENVIRONMENT:
        yield from _of_object(task)
    else:
        yield from _set(task, _OF_OBJECTS, f"it needs {_OBJECTS}")
    if kind.uses_chat:
        if task.reward in STEP_REWARDS:
            yield "task.reward", "rewards of steps have no place in branches"
    else:
        yield from _set(task, _FORMATS, f"it needs task.agent.command, or {_OBJECTS}")
        yield from _of_texts(task)


def _set(task: TaskEntry, fields: tuple[str, ...], reason: str) -> Rows:
    """Fields that are not as `TaskEntry` has them."""
    default = TaskEntry()
    for field in fields:
        if getattr(task, field) != getattr(default, field):
            yield f"task.{field}", reason


def _of_texts(task: TaskEntry) -> Rows:
    """Single answers, and replies of a function."""
    if task.max_turns < 2 and task.kind is TaskKind.TEXT_REPLIES:
        yield (
            "task.max_turns",
            f"use at least 2: the function {task.environment} answers between turns (the name of a "
            "class begins with a capital letter)",
        )
    if task.max_turns > 1 and task.kind is TaskKind.SINGLE_ANSWER:
        allowed = "several turns need a task.environment that answers, or task.agent.command"
        yield "task.max_turns", allowed
    answer = max(one.max_new_tokens for one in task.samplings.values())
    if 0 < task.max_sampled_tokens < answer:
        yield "task.max_sampled_tokens", f"use at least sampling.max_new_tokens = {answer}, or 0"
    longest = task.max_prompt_tokens + answer
    if 0 < task.context_tokens < longest:
        allowed = f"use at least task.max_prompt_tokens + sampling.max_new_tokens = {longest}, or 0"
        yield "task.context_tokens", allowed


def _of_object(task: TaskEntry) -> Rows:
    if task.environment == SANDBOX_TOOLS:
        if not task.tools:
            yield "task.tools", "sandbox_tools offers these: name at least one"
        if not (task.reward or task.rewards):
            yield "task.reward", f"sandbox_tools gives none; use {functions(_REWARDS)}"
    elif task.environment == HTTP:
        if not str(task.environment_options.get("url", "")).startswith(_SCHEMES):
            allowed = f"http needs a url that begins with {', '.join(_SCHEMES)}"
            yield "task.environment_options", allowed
        if task.isolation == "bwrap":
            yield "task.isolation", "the environment http needs a network; use process"


def program_path(name: str) -> str | None:
    """The program that a command names; `python` is moerl's own."""
    return sys.executable if name == "python" else which(name)


def _of_program(config: Config, task: TaskEntry) -> Rows:
    agent = task.agent
    player = "port" if agent.port else "command"
    if task.environment:
        yield "task.environment", f"task.agent.{player} plays the episodes; use one of both"
    if agent.port:
        yield from _of_port(config, agent)
    elif is_local(config.cluster) and program_path(name := agent.command[0]) is None:
        yield "task.agent.command", f"there is no program {name!r} on PATH"
    if agent.port and task.isolation == "bwrap":
        yield "task.isolation", "it is not for remote workers of task.agent.port"
    for model, endpoint in agent.models.items():
        yield from _of_model(model, endpoint)


def _of_port(config: Config, agent: AgentConfig) -> Rows:
    taken = [entry.agent.port for entry in entries_of(config)].count(agent.port) > 1
    if taken or not 1024 <= agent.port <= 65535:
        yield "task.agent.port", "use a port of its own from 1024 to 65535, or 0"
    if agent.command or agent.workers:
        field = "command" if agent.command else "workers"
        yield f"task.agent.{field}", "remote workers of task.agent.port play the episodes"


def _of_model(name: str, endpoint: OtherModelConfig) -> Rows:
    field, url = f"task.agent.models.{name}", endpoint.base_url
    if name == POLICY or not _MODEL.fullmatch(name):
        allowed = f"a name has letters, digits, _ and -, and is not {POLICY}, which is trained"
        yield "task.agent.models", name, allowed
    if not url.startswith(_HTTP):
        yield f"{field}.base_url", "it begins with http:// or https://"
    if "@" in url:
        yield f"{field}.base_url", HIDDEN, "it has no login; use api_key"
    if not _KEY.fullmatch(endpoint.api_key):
        yield f"{field}.api_key", HIDDEN, "it is a word of printable ASCII characters"

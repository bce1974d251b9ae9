"""Checks of `task.agent`: a program or an environment plays the episodes of such a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from shutil import which

from moerl.config.clusters import is_local
from moerl.config.functions import check_importable
from moerl.config.schema import Config
from moerl.config.secret_values import HIDDEN
from moerl.config.task_mixture import TaskEntry, entries_of, naming
from moerl.config.task_programs import POLICY, AgentConfig, OtherModelConfig
from moerl.config.task_tables import STEP_REWARDS
from moerl.core.errors import ConfigError

Problem = tuple[str, object, str]
SANDBOX_TOOLS = "sandbox_tools"
_HTTP = ("http://", "https://")
_SCHEMES = (*_HTTP, "ws://", "wss://")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_KEY = re.compile(r"[!-~]*")


def check_agent(config: Config) -> None:
    """Raises ConfigError."""
    entries = entries_of(config)
    for entry in entries:
        with naming(entry):
            _raise_first(_of_entry(config, entry))
    if any(entry.agent.plays for entry in entries):
        _raise_first(_of_run(config))


def _raise_first(problems: Iterator[Problem]) -> None:
    for field, value, reason in problems:
        raise ConfigError(field, value, reason)


def _of_entry(config: Config, task: TaskEntry) -> Iterator[Problem]:
    if task.agent.plays:
        yield from _of_task(task)
        yield from _of_player(config, task)
    elif task.agent != AgentConfig():
        yield (
            "task.agent.command",
            [],
            "the settings of an agent need its program, or task.agent.environment",
        )


def program_path(name: str) -> str | None:
    """The program that a command names; `python` is moerl's own."""
    return sys.executable if name == "python" else which(name)


def _of_task(task: TaskEntry) -> Iterator[Problem]:
    if task.agent.reward == "agent" and task.reward:
        yield (
            "task.reward",
            task.reward,
            "the agent gives the reward; leave it out, or task.agent.reward=task",
        )
    if task.reward in STEP_REWARDS:
        yield "task.reward", task.reward, "rewards of steps have no place in an agent's branches"
    if task.environment:
        yield "task.environment", task.environment, "the agent answers between turns; leave it out"
    if task.chat_template or task.system:
        field = "chat_template" if task.chat_template else "system"
        yield (
            f"task.{field}",
            getattr(task, field),
            "the agent writes the messages, and its gateway applies the template; leave it out",
        )


def _of_player(config: Config, task: TaskEntry) -> Iterator[Problem]:
    agent = task.agent
    if not agent.environment:
        yield from _of_program(config, task)
        return
    if agent.command:
        yield (
            "task.agent.environment",
            agent.environment,
            "task.agent.command plays the episodes; use one of both",
        )
    if agent.models:
        yield (
            "task.agent.models",
            list(agent.models),
            "only the program of task.agent.command calls",
        )
    if agent.environment == SANDBOX_TOOLS:
        if not agent.tools:
            yield "task.agent.tools", [], "sandbox_tools offers these: name at least one"
        if agent.reward != "task":
            yield "task.agent.reward", agent.reward, "sandbox_tools gives no reward; use task"
    elif agent.environment == "http":
        if not str(agent.options.get("url", "")).startswith(_SCHEMES):
            allowed = f"http needs a url that begins with {', '.join(_SCHEMES)}"
            yield "task.agent.options", agent.options, allowed
        if task.isolation == "bwrap":
            yield "task.isolation", "bwrap", "the environment http needs a network; use process"
    elif ":" not in agent.environment:
        names = f"{SANDBOX_TOOLS}, http or package.module:Class"
        yield "task.agent.environment", agent.environment, f"use {names}"
    elif is_local(config.cluster):
        check_importable("task.agent.environment", agent.environment, [SANDBOX_TOOLS, "http"])


def _of_program(config: Config, task: TaskEntry) -> Iterator[Problem]:
    agent, default = task.agent, AgentConfig()
    name = agent.command[0]
    if is_local(config.cluster) and program_path(name) is None:
        yield "task.agent.command", agent.command, f"there is no program {name!r} on PATH"
    if task.isolation == "bwrap":
        yield (
            "task.isolation",
            "bwrap",
            "the program of task.agent.command is not isolated by it, and needs a network; "
            "use process",
        )
    for field in ("options", "environment_workers", "environment_s", "tools", "tool_s"):
        if (value := getattr(agent, field)) != getattr(default, field):
            yield f"task.agent.{field}", value, "it needs task.agent.environment"
    for model, endpoint in agent.models.items():
        yield from _of_model(model, endpoint)


def _of_model(name: str, endpoint: OtherModelConfig) -> Iterator[Problem]:
    field, url = f"task.agent.models.{name}", endpoint.base_url
    if name == POLICY or not _MODEL.fullmatch(name):
        allowed = f"a name has letters, digits, _ and -, and is not {POLICY}, which is trained"
        yield "task.agent.models", name, allowed
    if not url.startswith(_HTTP):
        yield f"{field}.base_url", url, "it begins with http:// or https://"
    if "@" in url:
        yield f"{field}.base_url", HIDDEN, "it has no login; use api_key"
    if not _KEY.fullmatch(endpoint.api_key):
        yield f"{field}.api_key", HIDDEN, "it is a word of printable ASCII characters"


def _of_run(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.fixed_lag >= 0:
        yield (
            "rollout.fixed_lag",
            rollout.fixed_lag,
            "turns of an episode are sampled by several versions; use -1",
        )
    for name in ("group_quorum", "slice_tokens"):
        if value := getattr(rollout, name):
            yield f"rollout.{name}", value, "not with task.agent; use 0"

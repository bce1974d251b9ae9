"""Environments that a recipe names without a class of its own: `sandbox_tools` and `http`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeEnvironment,
    EpisodeStart,
    EpisodeTools,
    Observation,
    PolicyAnswer,
)
from moerl.agents.environments.http_environment import HttpEnvironment
from moerl.agents.environments.socket_environment import SocketEnvironment
from moerl.config.functions import import_object
from moerl.config.task_kinds import HTTP, SANDBOX_TOOLS
from moerl.config.task_tables import ENVIRONMENT_NAMES


class SandboxEnvironment:
    """The policy's calls are executed in its sandbox until it answers without one.

    Reward: `task.reward`, over the texts of its turns.
    """

    _tools: EpisodeTools

    async def reset(self, start: EpisodeStart) -> Observation:
        self._tools = start.tools
        return Observation(start.messages, tools=start.tools.schemas)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        if not answer.calls:
            return EpisodeEnd()
        return Observation(
            [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": await self._tools.call(call.name, call.arguments),
                }
                for call in answer.calls
            ]
        )

    async def close(self) -> None:
        """The sandbox ends with the episode."""


def _of_server(url: str, **options: str | float) -> EpisodeEnvironment:
    """By the form of its address."""
    is_socket = url.startswith(("ws://", "wss://"))
    made: Callable[..., EpisodeEnvironment] = SocketEnvironment if is_socket else HttpEnvironment
    return made(url, **options)


READY: Mapping[str, Callable[..., EpisodeEnvironment]] = {
    SANDBOX_TOOLS: SandboxEnvironment,
    HTTP: _of_server,
}


def environment_class(name: str) -> Callable[..., EpisodeEnvironment]:
    """Raises ConfigError for an unknown one."""
    if name in READY:
        return READY[name]
    found: Callable[..., EpisodeEnvironment] = import_object(
        "task.environment", name, ENVIRONMENT_NAMES
    )
    return found

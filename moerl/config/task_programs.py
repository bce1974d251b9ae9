"""Settings of the programs of a task: their limits, and an agent that plays the episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from moerl.config.bounds import Count, Natural, Positive


@dataclass(frozen=True)
class TaskLimits:
    """Limits of each isolated program: a worker with rewards and environments, or a tool."""

    memory_mb: Natural = 4096  # MiB of address space of each process; 0 = no limit
    # CPU seconds of each process in one score or reply; 0 = twice score_timeout_s
    cpu_s: Natural = 0
    processes: Annotated[int, Meta(ge=4)] = 64  # processes and threads at once
    file_mb: Natural = 64  # MiB of each file that it writes
    open_files: Annotated[int, Meta(ge=64)] = 1024
    reply_kb: Count = 1024  # KiB of a score with its steps, or of an environment's text
    output_kb: Natural = 64  # KiB of printed text that reach the log of the scorer
    # User of the programs when moerl runs as root; other: one without any file, where it can run
    user: Literal["other", "same"] = "other"


POLICY = "policy"  # the name by which agents call the model that is trained


@dataclass(frozen=True)
class OtherModelConfig:
    """A model behind an OpenAI-compatible endpoint that an agent may call; it is not trained."""

    base_url: str = ""  # up to and including /v1
    model: str = ""  # its name there; empty = the name that the agent uses
    # Bearer token; ${oc.env:JUDGE_KEY} keeps it out of the recipe
    api_key: str = field(default="", repr=False)
    timeout_s: Positive = 120.0  # of each call
    reply_kb: Count = 1024  # KiB of an answer


ToolName = Literal["python", "shell", "read_file", "write_file"]


@dataclass(frozen=True)
class AgentConfig:
    """The player of each episode (docs/agents.md): an external program through OpenAI's interface,
    or a stateful environment that answers the policy.
    """

    # Program and arguments; python is moerl's own interpreter
    command: list[str] = field(default_factory=list)
    # Programs that play many episodes each; 0 = a program for every episode
    workers: Natural = 0
    # sandbox_tools | http | package.module:Class; instead of a program
    environment: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the environment's class
    environment_workers: Count = 1  # processes that hold the open environments
    environment_s: Positive = 120.0  # of each answer of an environment; then the episode has failed
    # Tools in a sandbox that an environment may offer; a box for each episode that calls one
    tools: list[ToolName] = field(default_factory=list)
    tool_s: Positive = 20.0  # of each call; then it is ended, and the policy is told
    # agent: a program's last line of output is {"reward": NUMBER}, an environment gives it with its
    # answers; task: task.reward
    reward: Literal["agent", "task"] = "agent"
    # SGLang's names of parsers of tool calls and reasoning; empty = they stay text
    call_format: str = ""
    reasoning_format: str = ""
    # Clients may ask for answers of a grammar, if sampling masks are replayed; false: never
    grammars: bool = True
    # Other models that a program may call through its gateway, by the name that it uses
    models: dict[str, OtherModelConfig] = field(default_factory=dict)
    max_turns: Count = 64
    max_sampled_tokens: Count = 65536  # of all turns of an episode
    context_tokens: Natural = 0  # of prompt and answer of a turn; 0 = what the model takes
    wall_s: Positive = 3600.0  # then it is ended, and the episode has failed

    @property
    def plays(self) -> bool:
        """Whether an agent plays the episodes."""
        return bool(self.command or self.environment)

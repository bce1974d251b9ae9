"""Settings of the programs of a task: their limits, tools, and the agent that plays episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

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
    # User of the programs when moerl runs as root; other: one without any file; same: root without
    # capabilities, who can open the keys of other runs
    user: Literal["other", "same"] = "other"


POLICY = "policy"  # the name by which agents call the model that is trained


def policy_name(role: str) -> str:
    """The name by which agents call a role of the policy: `policy/solver`."""
    return f"{POLICY}/{role}" if role else POLICY


@dataclass(frozen=True)
class OtherModelConfig:
    """A model behind an OpenAI-compatible endpoint that an agent may call; it is not trained."""

    base_url: str = ""  # up to and including /v1
    model: str = ""  # its name there; empty = the name that the agent uses
    # Bearer token; ${oc.env:JUDGE_KEY} keeps it out of the recipe
    api_key: str = field(default="", repr=False)
    timeout_s: Positive = 120.0  # of each call
    reply_kb: Count = 1024  # KiB of an answer
    max_tokens: Count = 16384  # that a call can ask for, in all its answers together


ToolName = Literal["python", "shell", "read_file", "write_file"]


@dataclass(frozen=True)
class AgentConfig:
    """External programs that play the episodes through OpenAI's interface (docs/agents.md)."""

    # Program and arguments; python is moerl's own interpreter
    command: list[str] = field(default_factory=list)
    # Programs that play many episodes each; 0 = a program for every episode
    workers: Natural = 0
    # Port of 127.0.0.1 where remote workers ask for episodes, instead of a command; 0 = none
    port: Natural = 0
    # Clients may ask for answers of a grammar, if sampling masks are replayed; false: never
    grammars: bool = True
    # Other models that a program may call through its gateway, by the name that it uses
    models: dict[str, OtherModelConfig] = field(default_factory=dict)

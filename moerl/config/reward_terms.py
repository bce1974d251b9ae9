"""Settings of the terms of a reward: `task.rewards`, one scorer each (docs/scoring.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from moerl.config.bounds import Count, Natural, NonNegative, Positive, UserPath

Unit = Literal["step", "turn", "episode", "group"]
Where = Literal["function", "actors", "http", "judge", "model", "own"]
Need = Literal["text", "messages", "tokens", "graph"]
# Rewards that an advantage compares: of the role in its group, of the role in its episode
# (ROLE.1, ROLE.2, ...), of all roles in the group
Baseline = Literal["role", "episode", "group"]


@dataclass(frozen=True)
class RoleConfig:
    """A role of the policy in the episodes of a task."""

    baseline: Baseline = "role"
    loss_weight: NonNegative = 1.0  # factor of its tokens in the loss
    sampling: dict[str, Any] = field(default_factory=dict)  # as `sampling`, where it differs


@dataclass(frozen=True)
class RewardTerm:
    """A term of the reward of a task, and the scorer that gives it."""

    name: str = ""  # in metrics: reward/NAME, scorer/.../NAME
    weight: float = 1.0  # the reward is the sum of weight x term
    # function: in isolated processes, actors: in Ray actors, http: by a service, judge: by a model
    # on an engine of its own, model: by a model with a value head on the reference ranks, own: by
    # the task's program or environment object
    where: Where = "function"
    function: str = ""  # function, actors: as task.reward; actors: also package.module:Class
    url: str = ""  # http: of the service
    api_key: str = field(default="", repr=False)  # http: sent as bearer token
    # Asked about: a step of a turn, a turn, an episode when it has ended, a closed group at once
    unit: Unit = "episode"
    # unit=step: a step ends behind the text `separator`, or before a token whose entropy is high
    steps_by: Literal["separator", "entropy"] = "separator"
    separator: str = "\n\n"
    entropy: Positive = 1.0  # nats, at which a token begins a step; of what the engine records
    step_tokens: Count = 8  # steps_by=entropy: fewest tokens of a step
    needs: list[Need] = field(default_factory=lambda: ["text"])  # parts of an episode that it gets
    roles: list[str] = field(default_factory=list)  # whose turns it sees and scores; empty = all
    timeout_s: NonNegative = 0.0  # of a request; 0 = task.score_timeout_s
    retries: Natural = 2  # of a request that was not answered; of a function that raised: none
    batch: Count = 16  # most requests in a message
    in_flight: Count = 8  # most messages at once
    per_second: NonNegative = 0.0  # most messages; 0 = any number
    queue: Count = 4096  # requests; more of them keep groups from starting
    down_s: Positive = 600.0  # without any answer; then what waits cannot be scored
    workers: Count = 1  # function: processes, actors: actors, judge: engines
    cpus: NonNegative = 0.0  # actors: cores that Ray reserves for each
    gpus: NonNegative = 0.0  # actors, judge: GPUs of each
    model: UserPath = ""  # judge, model: folder of the model
    prompt: str = ""  # judge: text with {prompt}, {answer}, {response}; unit=group: {other}
    chat_template: str = ""  # judge: a file in place of the model's own template
    # judge: variables of its template: {enable_thinking: false}
    template_arguments: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, float] = field(default_factory=dict)  # judge: its answers, and rewards
    engine: dict[str, Any] = field(default_factory=dict)  # judge: as engine

"""A stateful environment: one object per episode, with three coroutines.

    class Guess:
        async def reset(self, start: EpisodeStart) -> Observation: ...
        async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd: ...
        async def close(self) -> None: ...

`task.environment` names the class; it is called without arguments, or with
`task.environment_options`.  It runs in a worker process
(`moerl.agents.environments.environment_worker`) that holds many episodes on one event loop, so it
must not block.  The form follows Gym and OpenEnv: each step has a reward, and the rewards of an
episode are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moerl.agents.chat_messages import Json


class EpisodeTools(Protocol):
    """The tools of `task.tools`, in the episode's own sandbox."""

    @property
    def schemas(self) -> Sequence[Json]:
        """As an `Observation` offers them to the policy."""
        ...

    async def call(self, name: str, arguments: str) -> str:
        """The answer as text, whatever goes wrong; it waits where too many calls run."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeStart:
    """A prompt: its messages in OpenAI's form, and its right answer.

    held_out: the episode belongs to an evaluation and is not trained.
    """

    episode: str
    prompt: str
    messages: Sequence[Json]
    answer: object
    extra: Mapping[str, object]
    tools: EpisodeTools
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """A call of a tool that the policy wrote; arguments: text, mostly JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """A turn of the policy.  finish: stop, tool_calls, or length, where it was cut."""

    text: str
    calls: tuple[AnswerCall, ...] = ()
    reasoning: str = ""
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Observation:
    """Text that the policy reads next.

    messages: in OpenAI's form, appended to the conversation.  tools: schemas; None: unchanged.
    reward: added to the episode's.  role: of the policy that reads them, in a conversation of its
    own: `solver`, or `solver.2` for a second one.
    """

    messages: Sequence[Json]
    tools: Sequence[Json] | None = None
    reward: float = 0.0
    role: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """The episode is over.  reward: added to the episode's; None: none was given at its end.

    roles: rewards of roles of the policy; a role without one has the episode's.
    """

    reward: float | None = None
    roles: Mapping[str, float] = field(default_factory=dict)


class EpisodeEnvironment(Protocol):
    """One episode."""

    async def reset(self, start: EpisodeStart) -> Observation:
        """The first messages; called once."""
        ...

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        """Called after each turn of the policy that was finished."""
        ...

    async def close(self) -> None:
        """Called once, at the end of any kind; `reset` or `step` may have been cancelled."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StartFields:
    """`EpisodeStart` without its tools, as it is sent to a worker."""

    episode: str
    prompt: str
    messages: list[Json]
    answer: object = None
    extra: dict[str, object] = field(default_factory=dict)
    held_out: bool = False

"""Agents for tests of episodes: programs that ask as clients do, environments in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moerl.agents.environments.environment_episodes import (
    EnvironmentEpisodes,
    EpisodeFailed,
    OpenEnvironment,
)
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.agents.episode_types import PlainAnswers, Policy
from moerl.agents.programs.agent_programs import AgentPrograms
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.core.types import (
    ModelShape,
    Prompt,
    SamplingParams,
)
from moerl.episodes.finished_episode import ENDED, FinishedEpisode
from moerl.episodes.open_episode import EpisodeRunner, OpenEpisode, Outcome
from tests.helpers.chat_tokenizer import END, SIZE, chat_tokenizer
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.one_engine import PROMPT, TurnEngine, open_episode
from tests.helpers.patience import patience
from tests.helpers.stub_engine import StubEngine

SHAPE = ModelShape(SIZE, 0, (), 4, top_k=0, eos_token_ids=(END,))
SAMPLING = SamplingParams(4, stop_token_ids=(END,))
# As a client of OpenAI's interface asks, without the seconds that the import of one takes.  Its
# prompt may name a fault.
AGENT = """
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
secret = task.pop("secret")
assert task == json.loads(os.environ["MOERL_PROMPT"])
fault, history = task["prompt"], task["messages"]
if fault == "no_turn":
    sys.exit()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(2):
    body = json.dumps({"model": "m", "messages": history, "logprobs": True}).encode()
    reply = urllib.request.urlopen(urllib.request.Request(url, body, headers))
    choice = json.load(reply)["choices"][0]
    assert len(choice["logprobs"]["content"]) == 4
    answer = choice["message"]
    history += [answer, {"role": "user", "content": "again"}]
if fault == "exit":
    sys.exit("lost")
if fault == "timeout":
    time.sleep(99)
print("done")
sibling = task["episode"].split(".")[1]
reward = sibling if fault == "no_reward" else int(sibling)
print(json.dumps({"reward": reward, "secret": secret}))
"""
BROKEN = EpisodeFailed("environment", "has an environment that raised")


def task_of(*command: str, **changes: Any) -> TaskConfig:
    """changes: of the agent where it has such a field, else of the task."""
    own = {name: changes.pop(name) for name in ("workers", "models") if name in changes}
    return TaskConfig(agent=AgentConfig(command=list(command), **own), **changes)


def python(code: str, **changes: Any) -> TaskConfig:
    return task_of("python", "-c", code, **changes)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def program_runner(tmp_path: Path, task: TaskConfig) -> AgentPrograms:
    policy = policy_of(logprobs=lambda rollout: np.full(rollout.num_sampled, -0.1))
    return AgentPrograms(task, policy, tmp_path / "agents.log", sockets=tmp_path)


def policy_of(context_tokens: int = 4000, **fields: Any) -> Policy:
    tokens = PromptTokens(chat_tokenizer())
    return Policy(tokens, StopFinder(tokens), PlainAnswers(), context_tokens, **fields)


async def play(
    agents: EpisodeRunner,
    engine: TurnEngine,
    name: str,
    prompt: Prompt = PROMPT,
    sampling: SamplingParams = SAMPLING,
    **spec: Any,
) -> FinishedEpisode:
    """An episode to its end."""
    episode = open_episode(engine, name, sampling, prompt, **spec)
    return episode.finish(await agents.run(episode))


def run_agents(
    tmp_path: Path, task: TaskConfig, engine: StubEngine, steps: int = 2, **changes: Any
) -> tuple[list[Any], list[Any]]:
    async def body() -> tuple[list[Any], list[Any]]:
        rollout = replace(CONFIG.rollout, **changes)
        config = replace(CONFIG, task=task, rollout=rollout, run=replace(CONFIG.run, steps=steps))
        controller, reports = make(
            tmp_path, engine, config, agents={"": program_runner(tmp_path, task)}, model=SHAPE
        )
        return await running(controller, train(controller, steps), 60), reports

    return asyncio.run(body())


class FakeRunner:
    """Episodes that last until they are ended, unless their name is in `fails`."""

    def __init__(self, *fails: str) -> None:
        self.fails, self.names, self.ends = fails, list[str](), dict[str, asyncio.Event]()
        self.episodes: dict[str, OpenEpisode] = {}

    async def start(self) -> None: ...

    async def run(self, episode: OpenEpisode) -> Outcome:
        name = episode.name
        self.names.append(name)
        self.episodes[name], self.ends[name] = episode, asyncio.Event()
        episode.uris.add(f"blob://n/{name}")
        if name not in self.fails:
            await self.ends[name].wait()
        failure = "exit" if name in self.fails else ENDED
        return Outcome(failure, f"the agent of {name} ended with exit code 1")

    def end(self, name: str) -> None:
        self.ends[name].set()

    async def close(self) -> None:
        pass


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(patience(10)):
        while not what():
            await asyncio.sleep(0.01)


@dataclass
class LocalEnvironments:
    """`Environments` in this process: each answers when its event is set."""

    steps: int = 2
    is_silent: bool = False  # no reward at the end
    waits: dict[str, asyncio.Event] = field(default_factory=dict)  # by episode; others do not wait
    fails: dict[str, Exception] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    held_out: dict[str, bool] = field(default_factory=dict)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, name: str) -> OpenEnvironment:
        self.names.append(name)
        return LocalEnvironment(name, self)


@dataclass
class LocalEnvironment:
    name: str
    pool: LocalEnvironments
    count: int = 0

    @property
    def counts(self) -> Mapping[str, float]:
        return {"tool/calls": 2.0}

    async def reset(self, start: StartFields) -> Observation:
        self.pool.held_out[self.name] = start.held_out
        return Observation(start.messages)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        self.count += 1
        if error := self.pool.fails.pop(self.name, None):
            raise error
        if event := self.pool.waits.get(self.name):
            await event.wait()
        if self.count < self.pool.steps:
            return Observation([{"role": "user", "content": "again"}], reward=0.25)
        return EpisodeEnd(None if self.pool.is_silent else float(self.name.split(".")[1]))

    async def close(self) -> None:
        self.pool.closed.append(self.name)


def environment_runner(
    task: TaskConfig, pool: LocalEnvironments, context_tokens: int = 4000
) -> EnvironmentEpisodes:
    return EnvironmentEpisodes(task, policy_of(context_tokens), pool)


@dataclass
class HeldOutEnvironments(LocalEnvironments):
    """Episodes of evaluations and of training; a reward is the number of the sibling."""

    breaks: tuple[str, ...] = ()  # beginnings of episodes that fail
    held: asyncio.Event | None = None  # episodes of evaluations wait for it behind a turn
    reached: list[str] = field(default_factory=list)

    async def open(self, name: str) -> Any:
        self.names.append(name)
        return HeldOutEnvironment(name, self)


@dataclass
class HeldOutEnvironment(LocalEnvironment):
    pool: HeldOutEnvironments

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        self.count += 1
        self.pool.reached.append(self.name)
        if self.name.startswith("eval") and self.pool.held is not None:
            while not self.pool.held.is_set():  # it belongs to another loop
                await asyncio.sleep(0.01)
        if self.name.startswith(self.pool.breaks or ("-",)):
            raise BROKEN
        if self.count < self.pool.steps:
            return Observation([{"role": "user", "content": "again"}])
        sibling = self.name.split(".")[2 if self.name.startswith("eval") else 1]
        return EpisodeEnd(float(sibling.removesuffix("-again")))

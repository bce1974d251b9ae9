"""Workers that ask for episodes over HTTP and submit rewards: once, and never for others."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moerl.agents.programs.agent_programs import AgentPrograms
from moerl.agents.programs.remote_workers import RemoteWorkers
from moerl.config.schema import TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.core.messages import Ok
from moerl.core.types import PolicyVersion, Prompt, Score
from moerl.episodes.finished_episode import FinishedEpisode
from tests.helpers.agent_stubs import SHAPE, play, policy_of
from tests.helpers.chat_tokenizer import SIZE, chat_tokenizer
from tests.helpers.controllers import CONFIG, hello, make, running, successor, train
from tests.helpers.patience import patience
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.stub_engine import StubEngine

OK = {"accepted": True}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/remote_worker.py"


def task_of(**changes: Any) -> TaskConfig:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return TaskConfig(agent=AgentConfig(port=free.getsockname()[1]), **changes)


def runner_of(tmp_path: Path, task: TaskConfig) -> AgentPrograms:
    remote = RemoteWorkers(task, tmp_path / "worker-token", tmp_path / "submitted.jsonl")
    return AgentPrograms(task, policy_of(), tmp_path / "agents.log", remote)


@dataclass
class Worker:
    """A worker as users write it."""

    http: aiohttp.ClientSession
    url: str
    token: str
    name: str = "one"
    key: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)  # of all submits

    async def call(self, what: str, body: object = None, key: str | None = None) -> Any:
        """(status, answer)."""
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        method = "GET" if what.startswith("status") else "POST"
        async with self.http.request(
            method, f"{self.url}/{what}", json=body, headers=headers
        ) as reply:
            return reply.status, (await reply.json() if reply.status != 204 else None)

    async def register(self) -> None:
        status, found = await self.call("register", {"name": self.name}, self.token)
        assert status == 200, found
        self.key = found["key"]

    async def take(self) -> dict[str, Any]:
        status, found = await self.call("task")
        assert status == 200, found
        return dict(found)

    async def turn(self, given: dict[str, Any]) -> None:
        """A turn of the policy, over the gateway."""
        body = {"model": "policy", "messages": given["messages"]}
        headers = {"Authorization": f"Bearer {given['api_key']}"}
        url = given["base_url"] + "/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()

    async def submit(self, episode: str, **body: Any) -> Any:
        return await self.call("submit", {"episode": episode, **body})

    async def state(self, episode: str) -> str:
        status, found = await self.call(f"status?episode={episode}")
        assert status == 200, found
        return str(found["state"])

    async def work(self, submits: int) -> None:
        """Play until cancelled; the reward is the number of the sibling."""
        while True:
            given = await self.take()
            await self.turn(given)
            name = given["episode"]
            for _ in range(submits):
                self.answers.append((await self.submit(name, reward=int(name.split(".")[1])))[1])


@asynccontextmanager
async def worker_of(tmp_path: Path, task: TaskConfig, name: str = "one") -> AsyncIterator[Worker]:
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{task.agent.port}/workers"
        worker = Worker(http, url, (tmp_path / "worker-token").read_text(), name)
        await worker.register()
        yield worker


def played(
    tmp_path: Path,
    body: Callable[[Worker, asyncio.Task[FinishedEpisode]], Awaitable[None]],
    **changes: Any,
) -> None:
    """`body` beside an episode 7.0 that waits for a worker."""

    async def run() -> None:
        engine, task = ScriptedEngine(), task_of(**changes)
        engine.say(*[[SIZE - 1] * 4 for _ in range(4)])
        agents = runner_of(tmp_path, task)
        await agents.start()
        try:
            async with asyncio.timeout(patience(30)), worker_of(tmp_path, task) as worker:
                await body(worker, asyncio.ensure_future(play(agents, engine, "7.0")))
        finally:
            await agents.close()

    asyncio.run(run())


def test_an_episode_is_taken_played_submitted_once_and_followed(tmp_path: Path) -> None:
    async def body(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        given = await worker.take()
        assert given | {"base_url": "", "api_key": ""} == {
            "episode": "7.0", "index": 7, "held_out": False, "prompt": "p", "answer": "34",
            "messages": [{"role": "user", "content": "p"}], "extra": {"hint": 5},
            "base_url": "", "api_key": "",
        }  # fmt: skip
        await worker.turn(given)
        assert await worker.state("7.0") == "open"
        assert await worker.submit("7.0", reward=0.5) == (200, OK | {"episode": "7.0"})
        ended = await playing
        assert await worker.submit("7.0", reward=9.0) == (200, OK | {"episode": "7.0"})
        assert (ended.own_score, len(ended.turns)) == (Score(0.5), 1)
        assert await worker.state("7.0") == "submitted"
        ended.on_retired("admitted")
        await asyncio.sleep(0.1)
        assert await worker.state("7.0") == "admitted"
        assert await worker.submit("7.0", reward=0.5) == (200, OK | {"episode": "7.0"})

    played(tmp_path, body)
    assert (tmp_path / "worker-token").stat().st_mode & 0o777 == 0o600


def test_keys_of_others_are_refused(tmp_path: Path) -> None:
    async def body(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        given = await worker.take()
        name = worker.key.partition(":")[0]
        for key in ("", "x", worker.token, given["api_key"], f"{name}:x", f"two{worker.key[3:]}"):
            for what in ("task", "submit", "status?episode=7.0"):
                status, found = await worker.call(what, {"episode": "7.0", "reward": 1}, key)
                assert (status, found["error"]["code"]) == (401, "invalid_api_key"), (what, key)
        for key in ("", worker.key, given["api_key"], worker.token + "x"):
            assert (await worker.call("register", {"name": "two"}, key))[0] == 401
        other = replace(worker, name="two")
        await other.register()
        for found in (await other.submit("7.0", reward=1), await worker.submit("8.0", reward=1)):
            assert found[0] == 404
            assert "allowed are the episodes of this worker" in found[1]["error"]["message"]
        assert not playing.done()
        await worker.turn(given)  # control: its own key
        assert (await worker.submit("7.0", reward=1))[0] == 200
        assert (await playing).own_score == Score(1.0)

    played(tmp_path, body)


@pytest.mark.parametrize(
    ("reward", "body", "message"),
    [
        ("", {}, "reward: None; allowed is a finite number"),
        ("", {"reward": "high"}, r"Expected `float \| null`, got `str` - at `\$.reward`"),
        ("", {"reward": None}, "reward: None; allowed is a finite number"),
        ("", {"rewards": 1}, 'unknown field `rewards`; allowed is {"episode": NAME'),
        ("exact_match", {"reward": 1}, "reward: 1; allowed is none, 'exact_match' scores"),
    ],
)
def test_a_wrong_reward_is_refused_and_the_episode_stays_open(
    tmp_path: Path, reward: str, body: dict[str, Any], message: str
) -> None:
    async def work(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        given = await worker.take()
        status, found = await worker.submit("7.0", reward=1)
        assert status == 400, "nothing was sampled by the engines of the run"
        assert "'7.0' has no finished turn of the gateway" in found["error"]["message"]
        await worker.turn(given)
        status, found = await worker.submit("7.0", **body)
        assert (status, found["error"]["code"]) == (400, "invalid_request")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(found["error"]["message"])
        assert not playing.done()
        good = {} if reward else {"reward": 1}
        assert (await worker.submit("7.0", **good))[0] == 200
        assert (await playing).own_score == (None if reward else Score(1.0))

    played(tmp_path, work, reward=reward)


def test_an_episode_that_was_ended_cannot_be_submitted(tmp_path: Path) -> None:
    async def body(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        await worker.turn(await worker.take())
        ended = await playing
        assert ended.failure == "timeout"
        ended.on_retired("dropped")
        await asyncio.sleep(0.1)
        status, found = await worker.submit("7.0", reward=1)
        assert (status, found["error"]["code"]) == (410, "episode_ended")
        assert "'7.0' was not submitted and is dropped" in found["error"]["message"]

    played(tmp_path, body, wall_s=0.5)


def test_time_runs_from_the_moment_in_which_a_worker_takes_an_episode(tmp_path: Path) -> None:
    async def body(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        await asyncio.sleep(1.5)
        await worker.turn(await worker.take())
        assert (await worker.submit("7.0", error="ValueError: no luck"))[0] == 200
        ended = await playing
        assert (ended.failure, ended.own_score) == ("error", None)
        assert ended.detail.endswith("has answered with an error: ValueError: no luck")

    played(tmp_path, body, wall_s=1.0)


def test_a_worker_that_registers_again_has_lost_its_episodes(tmp_path: Path) -> None:
    async def body(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        await worker.take()
        await replace(worker, name="two").register()  # control: another one
        await asyncio.sleep(0.1)
        assert not playing.done()
        await worker.register()
        assert (await playing).failure == "lost"
        assert (await worker.submit("7.0", reward=1))[0] == 410

    played(tmp_path, body)


async def test_each_submitted_episode_is_trained_once(tmp_path: Path) -> None:
    """Every submit is sent twice; a controller that follows a dead one answers it alike."""
    engine, task = StubEngine(), task_of()
    config = replace(CONFIG, task=task)
    agents = runner_of(tmp_path, task)
    dead, _ = make(tmp_path, engine, config, agents={"": agents}, model=SHAPE)

    async def first() -> list[Any]:
        await dead._player.started.wait()
        async with worker_of(tmp_path, task) as worker:
            working = asyncio.ensure_future(worker.work(submits=2))
            plans = await train(dead, 4)
            working.cancel()
            names = [answer["episode"] for answer in worker.answers if "episode" in answer]
            assert all(count == 2 for count in Counter(names).values())
            states = Counter([await worker.state(name) for name in set(names)])
            assert states["admitted"] >= 16, states
            return plans

    plans = await running(dead, first(), patience(60))
    groups = [group for plan in plans for group in plan.groups]
    assert len({group.group_id for group in groups}) == len(groups) == 8
    rewards = [[e.score.reward for e in group.episodes if e.score] for group in groups]
    assert rewards == [[0.0, 1.0]] * 8

    heir = runner_of(tmp_path, task)
    await heir.start()
    try:
        async with worker_of(tmp_path, task) as worker:
            for name, state in (("0.0", "admitted"), ("3.1", "admitted")):
                assert await worker.submit(name, reward=5) == (200, OK | {"episode": name})
                assert await worker.state(name) == state
            assert (await worker.submit("99.0", reward=5))[0] == 404
    finally:
        await heir.close()


async def test_a_controller_that_dies_trains_a_submitted_episode_once(tmp_path: Path) -> None:
    """Its group is open: the next controller plays it again, and an old submit changes nothing."""
    engine, task = StubEngine(), task_of()
    config, dead = replace(CONFIG, task=task), runner_of(tmp_path, task)
    first, _ = make(tmp_path, engine, config, agents={"": dead}, model=SHAPE)
    tasks = asyncio.create_task(first.run())
    assert await first.handle(hello(PolicyVersion(0, 0))) == Ok()
    await first._player.started.wait()
    async with worker_of(tmp_path, task) as worker:
        given = await worker.take()
        assert given["episode"] == "0.0"
        await worker.turn(given)
        assert (await worker.submit("0.0", reward=5))[0] == 200
        assert (await worker.take())["episode"] == "0.1"
        heir = {"": runner_of(tmp_path, task)}
        second, _ = successor(
            tmp_path, engine, first, config=config, agents=heir, model=SHAPE, trainer_alive=True
        )
        tasks.cancel()
        await dead.close()
        await second.rejoin([])

        async def rest() -> list[Any]:
            await second._player.started.wait()
            assert await worker.submit("0.0", reward=5) == (200, OK | {"episode": "0.0"})
            assert await worker.state("0.0") == "played_again"
            assert (await worker.submit("0.1", reward=5))[0] == 404
            working = asyncio.ensure_future(worker.work(submits=1))
            plans = await train(second, 4)
            working.cancel()
            return plans

        plans = await running(second, rest(), patience(60))
    groups = [group for plan in plans for group in plan.groups]
    assert sorted(group.group_id for group in groups) == list(range(8))
    rewards = [[e.score.reward for e in group.episodes if e.score] for group in groups]
    assert rewards == [[0.0, 1.0]] * 8


def test_what_was_submitted_but_not_admitted_is_played_again(tmp_path: Path) -> None:
    file = tmp_path / "submitted.jsonl"
    file.write_bytes(
        b'{"episode":"0.0","worker":"one","state":"submitted","accepted":true}\n{"episode": "0'
    )

    async def body(worker: Worker, playing: asyncio.Task[FinishedEpisode]) -> None:
        assert await worker.state("0.0") == "played_again"
        assert await worker.submit("0.0", reward=1) == (200, OK | {"episode": "0.0"})
        assert (await worker.take())["episode"] == "7.0"
        assert not playing.done()

    played(tmp_path, body)
    assert file.read_bytes().count(b"\n") == 1


def test_the_worker_of_the_examples_plays(tmp_path: Path) -> None:
    async def body() -> list[FinishedEpisode]:
        engine, task = ScriptedEngine(), task_of()
        engine.say(*[chat_tokenizer().convert_tokens_to_ids(list("1234")) for _ in range(9)])
        agents = runner_of(tmp_path, task)
        await agents.start()
        token = (tmp_path / "worker-token").read_text()
        worker = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), str(task.agent.port), "one",
            env=os.environ | {"WORKER_TOKEN": token},
        )  # fmt: skip
        try:
            prompts = [Prompt(8, (1,), "4321", answer, {}) for answer in ("1243", "1234")]
            plays = [play(agents, engine, f"8.{i}", prompt) for i, prompt in enumerate(prompts)]
            async with asyncio.timeout(patience(60)):
                return await asyncio.gather(*plays)
        finally:
            worker.kill()
            await worker.wait()
            await agents.close()

    played = asyncio.run(body())
    assert [episode.own_score for episode in played] == [Score(0.5), Score(1.0)]
    assert [len(episode.turns) for episode in played] == [3, 1]

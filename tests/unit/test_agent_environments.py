"""Stateful environments: workers and what goes wrong in them, tools, HTTP, and their episodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from moerl.agents.chat_messages import Json
from moerl.agents.environments import environment_pool
from moerl.agents.environments.environment_episodes import (
    EnvironmentEpisodes,
    EpisodeFailed,
    OpenEnvironment,
)
from moerl.agents.environments.environment_pool import EnvironmentPool
from moerl.agents.environments.episode_environment import (
    AnswerCall,
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.agents.episode_types import Policy
from moerl.agents.prompt_tokens import PromptTokens
from moerl.agents.stop_texts import StopFinder
from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError, EngineError
from moerl.core.types import Score
from moerl.episodes.finished_episode import BLOCKED, ENDED, LOST, FinishedEpisode
from tests.helpers.agent_stubs import (
    SHAPE,
    LocalEnvironment,
    LocalEnvironments,
    environment_runner,
    play,
)
from tests.helpers.chat_tokenizer import END, SIZE, chat_tokenizer
from tests.helpers.controllers import CONFIG, make, running, train, with_rollout
from tests.helpers.left_processes import left_children
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.stub_engine import StubEngine

COUNTING = "tests.helpers.episode_environments:Counting"
START = [{"role": "user", "content": "p"}]
T = TypeVar("T")


def task_of(environment: str, **changes: Any) -> TaskConfig:
    return TaskConfig(environment=environment, **changes)


def with_pool(task: TaskConfig, work: Callable[[EnvironmentPool], Awaitable[T]]) -> T:
    async def body() -> T:
        pool = EnvironmentPool(task)
        await pool.start()
        try:
            return await work(pool)
        finally:
            await pool.close()

    found = asyncio.run(body())
    assert not left_children(), "workers end with the pool"
    return found


async def begun(pool: EnvironmentPool, name: str, *, held_out: bool = False) -> OpenEnvironment:
    environment = await pool.open(name)
    seen = await environment.reset(StartFields(name, "p", list(START), held_out=held_out))
    assert seen.messages == START
    return environment


# --- workers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("isolation", ["process", "bwrap"])
def test_one_worker_holds_many_episodes_without_the_secrets_of_the_run(
    monkeypatch: Any, isolation: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")

    async def work(pool: EnvironmentPool) -> list[str]:
        opened = [await begun(pool, f"0.{place}") for place in range(300)]
        assert await opened[0].step(PolicyAnswer("go")) == Observation(
            [{"role": "user", "content": "step 1"}], reward=1.0
        )
        assert await opened[0].step(PolicyAnswer("go")) == EpisodeEnd(1.0), "it has a state"
        said = await asyncio.gather(*(one.step(PolicyAnswer("sees")) for one in opened[1:]))
        await asyncio.gather(*(one.close() for one in opened[:200]))
        said.append(await opened[200].step(PolicyAnswer("sees")))
        return [str(one.messages[0]["content"]) for one in said if isinstance(one, Observation)]

    task = replace(task_of(COUNTING), isolation=isolation)
    first, *_, last = with_pool(task, work)
    pid, opened, secret = first.split(" ")
    assert (opened, secret, last.split(" ")[1]) == ("300", "", "100")
    assert int(pid) != os.getpid()


def test_a_worker_tells_an_environment_that_its_episode_is_held_out() -> None:
    async def work(pool: EnvironmentPool) -> list[Observation | EpisodeEnd]:
        opened = [await begun(pool, "0.0"), await begun(pool, "eval-0.0", held_out=True)]
        return [await one.step(PolicyAnswer("held_out")) for one in opened]

    said = with_pool(task_of(COUNTING), work)
    assert said == [Observation([{"role": "user", "content": t}]) for t in ("False", "True")]


def test_what_an_environment_does_wrong_costs_its_own_episode() -> None:
    faults = {
        "raises": "raised ValueError: no such move",
        "returns_text": "returned a str",
        "is_too_long": "over task.limits.reply_kb",
        "cannot_be_sent": "cannot be sent",
        "has_no_form": "cannot be sent",
        "waits": "longer than task.environment_s = 2",
    }

    async def work(pool: EnvironmentPool) -> list[EpisodeFailed]:
        good = await begun(pool, "good")
        opened = [await begun(pool, f"0.{fault}") for fault in faults]
        steps = [one.step(PolicyAnswer(fault)) for one, fault in zip(opened, faults, strict=True)]
        found = await asyncio.gather(*steps, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in opened))
        assert isinstance(await good.step(PolicyAnswer("go")), Observation)
        await good.close()
        return [one for one in found if isinstance(one, EpisodeFailed)]

    failed = with_pool(task_of(COUNTING, environment_s=2.0), work)
    assert [one.reason for one in failed] == ["environment"] * 5 + ["timeout"]
    for one, sentence in zip(failed, faults.values(), strict=True):
        assert sentence in one.detail


@pytest.mark.parametrize("fault", ["exits", "blocks"])
def test_a_lost_worker_costs_its_episodes_and_is_replaced(monkeypatch: Any, fault: str) -> None:
    monkeypatch.setattr(environment_pool, "_CLOSE_S", 0.5)

    async def work(pool: EnvironmentPool) -> list[Any]:
        waits, idle, bad = [await begun(pool, f"0.{place}") for place in range(3)]
        waiting = asyncio.ensure_future(waits.step(PolicyAnswer("waits")))
        await asyncio.sleep(0.1)
        found = await asyncio.gather(bad.step(PolicyAnswer(fault)), return_exceptions=True)
        await bad.close()  # is not answered
        found += await asyncio.gather(idle.step(PolicyAnswer("go")), return_exceptions=True)
        found += await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.gather(waits.close(), idle.close())
        again = await begun(pool, "1.0")
        assert isinstance(await again.step(PolicyAnswer("go")), Observation)
        return found

    # A worker that blocks lets a step pass its time; one that is gone is known at once.
    limit_s = 60.0 if fault == "exits" else 3.0
    bad, idle, waits = with_pool(task_of(COUNTING, environment_s=limit_s), work)
    if fault == "exits":
        assert [one.reason for one in (bad, idle, waits)] == [LOST] * 3
        assert "worker ended its process with exit code 3" in waits.detail
        return
    assert [one.reason for one in (bad, idle, waits)] == ["timeout", BLOCKED, BLOCKED]
    assert "blocked its worker; use await, or a thread (task.environment_s = " in bad.detail
    assert "whose worker was blocked by episode 0.2 for " in waits.detail


def test_seconds_in_which_another_episode_blocks_do_not_count() -> None:
    async def work(pool: EnvironmentPool) -> list[Any]:
        slow, own = await begun(pool, "0.0"), await begun(pool, "0.1")
        waiting = asyncio.ensure_future(slow.step(PolicyAnswer("naps")))
        blocking = [asyncio.ensure_future(own.step(PolicyAnswer("computes")))]
        return await asyncio.gather(waiting, *blocking, return_exceptions=True)

    task = task_of(COUNTING, environment_s=3.0, environment_options={"busy_s": 2.6})
    rested, computed = with_pool(task, work)  # after 3.6 s
    assert [type(one) for one in (rested, computed)] == [Observation, Observation]
    late, computed = with_pool(replace(task, environment_options={"nap_s": 1.8}), work)
    assert (late.reason, type(computed)) == ("timeout", Observation), "control: its own 3.6 s"


def test_an_environment_that_blocks_in_a_task_of_its_own_is_found() -> None:
    async def work(pool: EnvironmentPool) -> list[Any]:
        waits, bad = await begun(pool, "0.0"), await begun(pool, "0.1")
        assert isinstance(await bad.step(PolicyAnswer("blocks_later")), Observation)
        await asyncio.sleep(0.5)
        found = await asyncio.gather(waits.step(PolicyAnswer("go")), return_exceptions=True)
        return found + await asyncio.gather(bad.step(PolicyAnswer("go")), return_exceptions=True)

    waits, bad = with_pool(task_of(COUNTING, environment_s=3.0), work)
    assert (waits.reason, bad.reason) == (BLOCKED, "timeout")


def test_an_environment_that_is_not_there_ends_the_run_at_its_start() -> None:
    async def work(pool: EnvironmentPool) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"task\.environment.*NoSuch"):
        with_pool(task_of("tests.helpers.episode_environments:NoSuch"), work)
    assert not left_children()


# --- tools ---------------------------------------------------------------------------------------
def call(name: str, text: str) -> PolicyAnswer:
    return PolicyAnswer("", (AnswerCall("c1", name, text),), finish="tool_calls")


def test_sandbox_tools_executes_calls_and_a_killed_box_is_an_answer() -> None:
    async def work(pool: EnvironmentPool) -> tuple[list[str], Mapping[str, float]]:
        environment = await pool.open("0.0")
        seen = await environment.reset(StartFields("0.0", "p", list(START)))
        assert seen.tools
        assert [tool["function"]["name"] for tool in seen.tools] == ["python", "shell"]  # type: ignore[index]
        said = [await told(environment, "python", "{\"code\": \"open('a', 'w').write('6')\"}")]
        said.append(await told(environment, "shell", '{"command": "cat a"}'))
        box = environment.tools._sandbox  # type: ignore[attr-defined]
        running = asyncio.ensure_future(told(environment, "shell", '{"command": "sleep 60"}'))
        await asyncio.sleep(0.5)
        os.kill(box.pid, signal.SIGKILL)
        said.append(await running)
        said.append(await told(environment, "shell", '{"command": "cat a; echo new"}'))
        said.append(await told(environment, "read_file", '{"path": "a"}'))
        assert await environment.step(PolicyAnswer("done")) == EpisodeEnd()
        await environment.close()
        return said, environment.counts

    task = task_of("sandbox_tools", tools=["python", "shell"], reward="source")
    said, counts = with_pool(task, work)
    assert said[:2] == ["", "6"]
    assert "its files are lost" in said[2]
    assert "new" in said[3]
    assert "there is no tool 'read_file'" in said[4]
    assert (counts["tool/calls"], counts["tool/ended/lost"]) == (5, 1)
    assert counts["tool/errors"] == 2, "lost, unknown tool"


async def told(environment: OpenEnvironment, name: str, arguments: str) -> str:
    seen = await environment.step(call(name, arguments))
    assert isinstance(seen, Observation)
    (message,) = seen.messages
    assert (message["role"], message["tool_call_id"]) == ("tool", "c1")
    return str(message["content"])


class Calls:
    """As Qwen writes them."""

    def parse(self, text: str, tools: Sequence[Json]) -> tuple[str, str, tuple[Any, ...]]:
        said, _, call = text.partition("<tool_call>")
        if not call or not tools:
            return "", text, ()
        found = json.loads(call.partition("</tool_call>")[0])
        return "", said, ((found["name"], json.dumps(found["arguments"])),)


def test_a_call_that_the_policy_samples_is_executed_and_answered() -> None:
    texts = [
        '<tool_call>\n{"name": "shell", "arguments": {"command": "echo $((41 + 1))"}}\n</tool_call>'
    ]
    tokenizer = chat_tokenizer(texts)
    tokens = PromptTokens(tokenizer)
    task = task_of("sandbox_tools", tools=["shell"], reward="source")

    async def body() -> FinishedEpisode:
        engine = ScriptedEngine()
        engine.say([tokenizer.convert_tokens_to_ids(texts[0]), END], [20, END])
        policy = Policy(tokens, StopFinder(tokens), Calls(), context_tokens=4000)
        episodes = EnvironmentEpisodes(task, policy, EnvironmentPool(task))
        await episodes.start()
        try:
            return await play(episodes, engine, "7.1")
        finally:
            await episodes.close()

    played = asyncio.run(body())
    assert (played.failure, played.counts["tool/calls"]) == ("", 1)
    first, second = played.turns
    assert "shell" in tokens.decode(first.sampled.prompt_ids.tolist()), "tools are in the prompt"
    assert "<|im_start|>tool\n42\n<|im_end|>" in tokens.decode(second.sampled.prompt_ids.tolist())
    assert second.continues
    assert second.before is first
    assert not left_children()


# --- HTTP ----------------------------------------------------------------------------------------
@dataclass
class Server:
    """Counts down from three for each episode; an action may name a fault."""

    left: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    held_out: dict[str, bool] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.Response:
        route, given = request.path.rpartition("/")[2], await request.json()
        episode = given["episode_id"]
        if route == "close":
            self.closed.append(episode)
            return web.Response(status=404)
        if route == "reset":
            self.left[episode] = 3
            self.held_out[episode] = given["held_out"]
            return self.state(episode, None)
        fault = given["action"]["message"]
        if fault == "status":
            return web.Response(status=500, text="broken")
        if fault == "long":
            return web.Response(text="x" * 10**6)
        if fault == "text":
            return web.Response(text="hello")
        if fault == "redirect":
            raise web.HTTPFound("/reset")
        if fault == "hangs":
            await asyncio.sleep(1000)
        self.left[episode] -= 1
        return self.state(episode, 0.5)

    def state(self, episode: str, reward: float | None) -> web.Response:
        left = self.left[episode]
        seen = {"observation": {"text": f"{left} left"}, "reward": reward, "done": not left}
        return web.json_response(seen)


def test_an_http_environment_and_what_its_server_does_wrong() -> None:
    server = Server()

    async def body() -> dict[str, str]:
        app = web.Application()
        app.router.add_post("/{route}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)  # one handler hangs
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        options = {"url": url, "observation_field": "text", "request_s": 2.0}
        pool = EnvironmentPool(task_of("http", environment_options=options))
        await pool.start()
        try:
            await plays(pool)
            return {fault: await failed(pool, fault) for fault in FAULTS}
        finally:
            await pool.close()
            await runner.cleanup()

    async def plays(pool: EnvironmentPool) -> None:
        environment = await pool.open("0.0")
        seen = await environment.reset(StartFields("0.0", "p", list(START), held_out=True))
        assert seen.messages == [{"role": "user", "content": "p\n\n3 left"}]
        assert server.held_out == {"0.0": True}
        for left in (2, 1):
            step = await environment.step(PolicyAnswer("down"))
            expected = [{"role": "user", "content": f"{left} left"}]
            assert step == Observation(expected, reward=0.5)
        assert await environment.step(PolicyAnswer("down")) == EpisodeEnd(0.5)
        await environment.close()
        assert server.closed == ["0.0"]

    async def failed(pool: EnvironmentPool, fault: str) -> str:
        environment = await pool.open(fault)
        await environment.reset(StartFields(fault, "p", list(START)))
        with pytest.raises(EpisodeFailed) as error:
            await environment.step(PolicyAnswer(fault))
        assert error.value.reason == "environment"
        await environment.close()
        return error.value.detail

    said = asyncio.run(body())
    for fault, sentence in FAULTS.items():
        assert sentence in said[fault]


FAULTS = {
    "status": "answered with status 500: broken",
    "long": "answered with more than 262144 bytes",
    "text": "answered what is no state",
    "redirect": "answered with status 302",
    "hangs": "raised TimeoutError",
}


# --- episodes ------------------------------------------------------------------------------------


def played_by(
    task: TaskConfig, pool: LocalEnvironments, names: list[str], **changes: Any
) -> list[FinishedEpisode]:
    async def body() -> list[FinishedEpisode]:
        engine = ScriptedEngine()
        engine.say(*[[SIZE - 1] * 4 for _ in range(20)])
        episodes = environment_runner(task, pool, **changes)
        await episodes.start()
        try:
            return await asyncio.gather(*(play(episodes, engine, name) for name in names))
        finally:
            await episodes.close()

    return asyncio.run(body())


def test_turns_of_an_environment_are_one_chain_and_its_rewards_add_up() -> None:
    pool = LocalEnvironments(steps=3)
    (played,) = played_by(task_of("a:B"), pool, ["7.1"])
    assert played.own_score == Score(1.5), "0.25 twice, and 1 at the end"
    assert [turn.before for turn in played.turns] == [None, *played.turns[:-1]]
    assert all(turn.continues for turn in played.turns[1:])
    assert played.counts["origin/continued"] == 2
    assert played.counts["tool/calls"] == 2
    (node,) = played.nodes("join")
    assert node.rollout.num_sampled == 12
    assert pool.closed == ["7.1"]
    (scored,) = played_by(task_of("a:B", reward="source"), LocalEnvironments(), ["7.1"])
    assert (scored.failure, scored.own_score) == ("", None), "task.reward scores it"


def test_an_environment_is_told_that_its_episode_is_held_out() -> None:
    pool = LocalEnvironments(steps=1)

    async def body() -> None:
        engine = ScriptedEngine()
        engine.say(*[[SIZE - 1] * 4 for _ in range(2)])
        episodes = environment_runner(task_of("a:B"), pool)
        await episodes.start()
        try:
            await play(episodes, engine, "7.1")
            await play(episodes, engine, "eval-0.1", held_out=True)
        finally:
            await episodes.close()

    asyncio.run(body())
    assert pool.held_out == {"7.1": False, "eval-0.1": True}


def test_an_episode_ends_at_its_limits_with_the_rewards_so_far() -> None:
    (cut,) = played_by(task_of("a:B", max_turns=2), LocalEnvironments(steps=9), ["7.1"])
    assert (cut.own_score, len(cut.turns), cut.counts["limits_reached"]) == (Score(0.5), 2, 1)
    (short,) = played_by(task_of("a:B"), LocalEnvironments(steps=9), ["7.1"], context_tokens=60)
    assert short.lacks_context
    assert 0 < len(short.turns) < 9


def test_failures_of_an_environment_are_named() -> None:
    pool = LocalEnvironments(
        fails={"7.1": EpisodeFailed("environment", "has an environment that raised")}
    )
    (played,) = played_by(task_of("a:B"), pool, ["7.1"])
    assert (played.failure, len(played.turns), pool.closed) == ("environment", 1, ["7.1"])

    async def slow() -> LocalEnvironments:
        return LocalEnvironments(waits={"7.1": asyncio.Event()})

    (late,) = played_by(task_of("a:B", wall_s=0.2), asyncio.run(slow()), ["7.1"])
    assert late.failure == "timeout"
    (silent,) = played_by(task_of("a:B"), LocalEnvironments(steps=1, is_silent=True), ["7.1"])
    assert silent.failure == "no_reward"


def test_an_error_in_one_episode_ends_no_other() -> None:
    """Half a character is text that no tokenizer takes; the whole one is the control."""

    class Greets(LocalEnvironments):
        async def open(self, name: str) -> OpenEnvironment:
            return _Greets(name, self)

    class _Greets(LocalEnvironment):
        async def reset(self, start: StartFields) -> Observation:
            text = "\ud83d" if self.name == "7.1" else "\U0001f600"
            return Observation([{"role": "user", "content": text}])

    broken, whole = played_by(task_of("a:B"), Greets(), ["7.1", "7.2"])
    assert (broken.failure, broken.turns) == ("error", ())
    assert "UnicodeEncodeError" in broken.detail
    assert (whole.failure, len(whole.turns)) == ("", 2)


def run_groups(
    tmp_path: Path, pool: LocalEnvironments, work: Callable[[Any], Awaitable[T]], **changes: Any
) -> tuple[T, Any]:
    async def body() -> tuple[T, Any]:
        task = task_of("a:B")
        config = replace(CONFIG, task=task, rollout=replace(CONFIG.rollout, **changes))
        controller, _ = make(
            tmp_path, StubEngine(), config, agents={"": environment_runner(task, pool)}, model=SHAPE
        )
        return await running(controller, work(controller), 60), controller

    return asyncio.run(body())


def test_no_episode_waits_for_another(tmp_path: Path) -> None:
    """Episodes of group 0 wait until all others were trained; a sibling of them has ended."""
    pool = LocalEnvironments()

    async def work(controller: Any) -> list[int]:
        pool.waits["0.1"] = asyncio.Event()  # in the loop of the agents it is only waited for
        plans = await train(controller, 2)
        assert "0.0" in pool.closed, "its sibling has ended"
        assert "0.1" in pool.names
        assert "0.1" not in pool.closed
        return sorted(group.group_id for plan in plans for group in plan.groups)

    trained, _ = run_groups(tmp_path, pool, work)
    assert trained == [1, 2, 3, 4]


def test_a_group_whose_worker_died_is_played_again_three_times_at_most(tmp_path: Path) -> None:
    lost = EpisodeFailed(LOST, "has an environment whose worker was ended by SIGKILL")
    pool = LocalEnvironments(fails={"0.1": lost})

    async def work(controller: Any) -> list[int]:
        plans = await train(controller, 1)
        return sorted(group.group_id for plan in plans for group in plan.groups)

    trained, controller = run_groups(tmp_path, pool, work, selection="strict")
    assert trained == [0, 1], "under its own id"
    assert len([name for name in pool.names if name.startswith("0.")]) == 4
    assert controller.context.step_metrics["scorer/failed"] == 0

    class Always(LocalEnvironments):
        async def open(self, name: str) -> OpenEnvironment:
            raise lost

    with pytest.raises(EngineError, match=r"could not be played 3 times.*SIGKILL"):
        run_groups(tmp_path / "again", Always(), work)


def test_neighbours_of_a_blocked_worker_are_played_again_and_not_counted(tmp_path: Path) -> None:
    blocked = EpisodeFailed(BLOCKED, "has an environment whose worker was blocked by episode 1.0")
    blocks = EpisodeFailed("timeout", "has an environment that blocked its worker")

    class Blocked(LocalEnvironments):
        tries = 0

        async def open(self, name: str) -> OpenEnvironment:
            self.tries += name.startswith("0.0")
            if name.startswith("0.0") and self.tries <= 5:  # a fault that counts ends the run
                raise blocked
            if name.startswith("1."):  # both: its own fault, and that of its sibling
                raise blocks if name.startswith("1.0") else blocked
            return await super().open(name)

    async def body(pool: LocalEnvironments) -> tuple[list[int], dict[str, float]]:
        task = task_of("a:B")
        config = replace(with_rollout(selection="strict"), task=task)
        agents = {"": environment_runner(task, pool)}
        controller, reports = make(tmp_path, StubEngine(), config, agents=agents, model=SHAPE)
        plans = await running(controller, train(controller, 1), 60)
        trained = [group.group_id for plan in plans for group in plan.groups]
        return trained, reports[0].metrics

    pool = Blocked()
    trained, counted = asyncio.run(body(pool))
    assert (sorted(trained), pool.tries) == ([0, 2], 6), "group 0 is played again, 1 is dropped"
    assert counted["scorer/failed"] == 1.0
    assert counted["agent/failed/timeout"] == 1.0
    assert "agent/failed/blocked" not in counted


def test_the_end_of_an_episode_reaches_an_environment_that_waits() -> None:
    async def body() -> FinishedEpisode:
        pool = LocalEnvironments(waits={"7.1": asyncio.Event()})
        engine = ScriptedEngine()
        engine.say([SIZE - 1] * 4)
        episodes = environment_runner(task_of("a:B"), pool)
        await episodes.start()
        playing = asyncio.ensure_future(play(episodes, engine, "7.1"))
        while not pool.names or not engine.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        episodes.end("7.1")
        try:
            return await playing
        finally:
            await episodes.close()

    assert asyncio.run(body()).failure == ENDED


async def test_an_episode_that_begins_behind_the_end_is_cancelled() -> None:
    """Not an error: the controller may start a group just before it stops."""
    episodes = environment_runner(task_of("a:B"), LocalEnvironments())
    await episodes.start()
    await episodes.close()
    episodes.end("7.1")
    with pytest.raises(asyncio.CancelledError):
        await play(episodes, ScriptedEngine(), "7.1")

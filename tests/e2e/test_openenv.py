"""A server of OpenEnv 0.3, unchanged and in an environment of its own, as `http` at a WebSocket."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from moerl.agents.environments.environment_episodes import EpisodeFailed, OpenEnvironment
from moerl.agents.environments.environment_pool import EnvironmentPool
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.config.schema import TaskConfig
from tests.helpers.agent_clients import PROGRAMS, PYTHON, environment

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    program = [str(PYTHON), str(PROGRAMS / "openenv_echo.py")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment()) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.terminate()


def task_at(port: int, field: str = "message") -> TaskConfig:
    options = {"url": f"ws://127.0.0.1:{port}", "observation_field": "echoed"}
    options |= {"action_field": field}
    return TaskConfig(environment="http", environment_options=options)


async def begun(pool: EnvironmentPool, name: str) -> OpenEnvironment:
    one = await pool.open(name)
    seen = await one.reset(StartFields(name, "p", [{"role": "user", "content": "p"}]))
    assert seen.messages == [{"role": "user", "content": f"p\n\n{name} begins"}]
    return one


def test_sessions_side_by_side_each_with_its_own_state(port: int) -> None:
    async def play(one: OpenEnvironment, say: str) -> list[Observation | EpisodeEnd]:
        answers = []
        for _ in range(3):
            answers.append(await one.step(PolicyAnswer(say)))
            await asyncio.sleep(0.7)  # longer than the server waits for the answer to a ping
        await one.close()
        return answers

    async def body() -> None:
        pool = EnvironmentPool(task_at(port))
        await pool.start()
        try:
            both = [await begun(pool, name) for name in ("0.0", "0.1")]
            with pytest.raises(EpisodeFailed, match="error CAPACITY_REACHED"):
                await begun(pool, "0.2")
            for say, answers in zip(
                "ab", await asyncio.gather(*map(play, both, "ab")), strict=True
            ):
                assert answers == [
                    Observation([{"role": "user", "content": f"1: {say}"}], reward=0.25),
                    Observation([{"role": "user", "content": f"2: {say}"}], reward=0.5),
                    EpisodeEnd(0.75),
                ]
            await asyncio.sleep(0.2)
            again = await begun(pool, "0.3")  # closing has freed the places
            with pytest.raises(EpisodeFailed, match="error EXECUTION_ERROR: no echo"):
                await again.step(PolicyAnswer("fail"))
            await again.close()
        finally:
            await pool.close()

    asyncio.run(body())


def test_an_action_that_the_server_does_not_know_fails_the_episode(port: int) -> None:
    async def body() -> None:
        pool = EnvironmentPool(task_at(port, field="move"))
        await pool.start()
        try:
            one = await begun(pool, "1.0")
            with pytest.raises(EpisodeFailed, match="error VALIDATION_ERROR"):
                await one.step(PolicyAnswer("x"))
            await one.close()
        finally:
            await pool.close()

    asyncio.run(body())

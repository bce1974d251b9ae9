"""Workers that play many episodes: side by side, bad lines, death, hanging, and the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moerl.agents.programs.agent_process import ProgramEnd
from moerl.agents.programs.agent_workers import AgentWorkers
from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.schema import TaskConfig
from moerl.config.task_programs import AgentConfig, TaskLimits
from moerl.core.types import Prompt, Score
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.sandbox.limits import isolation_of
from tests.helpers.agent_stubs import is_alive, play, program_runner
from tests.helpers.chat_tokenizer import SIZE, chat_tokenizer
from tests.helpers.left_processes import left_children
from tests.helpers.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
# It holds the answers to prompts with an `h` until one with an `o` comes, and does what others ask.
WORKER = """
import json, os, subprocess, sys, time
held = []
for line in sys.stdin:
    asked = json.loads(line)
    name, prompt = asked["episode"], asked["prompt"]
    own = {"episode": name, "secret": asked["secret"]}
    if prompt == "die":
        sys.exit("lost")
    if prompt == "print":
        print("loading data")
    if prompt == "unknown":
        print(json.dumps(own | {"episode": "no-such", "reward": 1}), flush=True)
    if prompt == "forged":
        print(json.dumps({"episode": name, "secret": "x", "reward": 1}), flush=True)
    if prompt == "long":
        print("x" * 3_000_000, flush=True)
    if prompt == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        print(json.dumps(own | {"reward": child.pid}), flush=True)
    if prompt == "error":
        print(json.dumps(own | {"error": "ValueError: no luck"}), flush=True)
    if prompt == "text":
        print(json.dumps(own | {"reward": "high"}), flush=True)
    if prompt.startswith("h"):
        held.append(own)
    if prompt == "o":
        for one in [own, *reversed(held)]:
            print(json.dumps(one | {"reward": os.getpid()}), flush=True)
        held.clear()
    sys.stdout.flush()
"""


def task_of(code: str = WORKER, workers: int = 1, **changes: Any) -> TaskConfig:
    agent = AgentConfig(command=["python", "-c", code], workers=workers)
    return TaskConfig(agent=agent, **changes)


def with_workers(
    task: TaskConfig, body: Callable[[AgentWorkers], Awaitable[T]], limit_s: float = 60.0
) -> T:
    async def run() -> T:
        workers = AgentWorkers(task, logging.getLogger("workers"))
        workers.start(isolation_of(task))
        try:
            async with asyncio.timeout(limit_s):
                return await body(workers)
        finally:
            await workers.close()

    found = asyncio.run(run())
    assert not left_children(), "everything has ended"
    return found


def ask(
    workers: AgentWorkers, name: str, prompt: str, end: asyncio.Event | None = None
) -> asyncio.Task[ProgramEnd]:
    given = {"episode": name, "secret": f"of {name}", "prompt": prompt}
    return asyncio.ensure_future(workers.play(name, given, end or asyncio.Event()))


def said(ended: ProgramEnd) -> str:
    return ended.err.decode()


def pid_of(ended: ProgramEnd) -> int:
    return int(ended.out.rpartition(b":")[2].strip(b" }\n"))


def test_episodes_are_played_side_by_side_and_answered_in_any_order() -> None:
    async def body(workers: AgentWorkers) -> list[ProgramEnd]:
        plays = [ask(workers, "0.0", "h"), ask(workers, "0.1", "h")]
        await asyncio.sleep(0.2)
        assert not any(play.done() for play in plays)
        return await asyncio.gather(*plays, ask(workers, "1.0", "o"))

    ends = with_workers(task_of(), body)
    assert [(end.code, end.why) for end in ends] == [(0, "exit")] * 3
    assert len({pid_of(end) for end in ends}) == 1
    assert b'"0.1"' in ends[1].out


def test_several_workers_share_the_episodes() -> None:
    async def body(workers: AgentWorkers) -> list[ProgramEnd]:
        return await asyncio.gather(ask(workers, "0.0", "o"), ask(workers, "0.1", "o"))

    first, second = with_workers(task_of(workers=2), body)
    assert pid_of(first) != pid_of(second)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("die", "ended with exit code 1: lost"),
        ("print", "printed 'loading data' on standard output, which is for answers: "),
        ("unknown", "the episode is not open"),
        ("forged", "the secret is not the episode's"),
        ("long", "printed a line of over 1048576 bytes on standard output"),
    ],
)
def test_a_worker_that_is_lost_fails_its_open_episodes_and_is_started_again(
    prompt: str, sentence: str
) -> None:
    async def body(workers: AgentWorkers) -> list[ProgramEnd]:
        waits = ask(workers, "0.0", "h")
        await asyncio.sleep(0)
        lost = await asyncio.gather(waits, ask(workers, "0.1", prompt))
        return [*lost, await ask(workers, "1.0", "o")]

    *lost, after = with_workers(task_of(), body)
    assert [end.why for end in lost] == ["lost"] * 2
    assert all(sentence in said(end) for end in lost), said(lost[0])
    assert after.code == 0


def test_a_worker_that_hangs_on_an_episode_is_replaced_when_the_others_have_ended() -> None:
    async def body(workers: AgentWorkers) -> list[ProgramEnd]:
        first = await ask(workers, "0.0", "o")
        hangs = ask(workers, "0.1", "never")
        assert (await hangs).why == "timeout"
        return [first, await ask(workers, "1.0", "o")]

    first, after = with_workers(task_of(wall_s=2.0), body)
    assert pid_of(first) != pid_of(after)


def test_an_episode_that_is_ended_does_not_touch_its_worker() -> None:
    async def body(workers: AgentWorkers) -> list[ProgramEnd]:
        end = asyncio.Event()
        ended = ask(workers, "0.0", "h", end)
        first = ask(workers, "0.1", "h2")
        await asyncio.sleep(0.5)
        end.set()
        assert (await ended).why == "ended"
        return await asyncio.gather(first, ask(workers, "1.0", "o"))  # "0.0" is answered as well

    first, after = with_workers(task_of(), body)
    assert pid_of(first) == pid_of(after)


def test_what_a_worker_started_ends_with_it() -> None:
    async def body(workers: AgentWorkers) -> ProgramEnd:
        return await ask(workers, "0.0", "child")

    assert not is_alive(pid_of(with_workers(task_of(), body)))


def test_a_program_that_cannot_stay_is_started_with_growing_pauses(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit('no data')"

    async def body(workers: AgentWorkers) -> ProgramEnd:
        lost = await ask(workers, "0.0", "h")
        await asyncio.sleep(1.2)
        return lost

    task = task_of(code, limits=TaskLimits(user="same"))  # it writes into a folder of ours
    assert said(with_workers(task, body)) == "ended with exit code 1: no data"
    assert 1 <= len((tmp_path / "starts").read_text()) <= 3


def test_answers_of_workers_are_scored_or_named(tmp_path: Path) -> None:
    async def body() -> list[FinishedEpisode]:
        engine = ScriptedEngine()
        engine.say(*[[SIZE - 1] * 4 for _ in range(4)])
        agents = program_runner(tmp_path, task_of(ASKS_FIRST + WORKER))
        await agents.start()
        try:
            prompts = [Prompt(8, (1,), text, None, {}) for text in ("error", "text", "o", "die")]
            names = [f"8.{place}" for place in range(4)]
            return [await play(agents, engine, *each) for each in zip(names, prompts, strict=True)]
        finally:
            await agents.close()

    played = asyncio.run(body())
    assert [episode.failure for episode in played] == ["error", "no_reward", "", "lost"]
    assert isinstance(played[2].own_score, Score)
    assert [episode.own_score for episode in played[:2]] == [None, None]
    error = "has answered with an error: ValueError: no luck"
    assert played[0].detail == f"the agent of 8.0 {error}"
    lost = "was lost with its worker, which ended with exit code 1: lost"
    assert played[3].detail == f"the agent of 8.3 {lost}"
    assert [len(episode.turns) for episode in played] == [1] * 4


# Each line is asked of the policy before the worker sees it.
ASKS_FIRST = """
import json, sys, urllib.request
def lines(given):
    for line in given:
        asked = json.loads(line)
        body = json.dumps({"model": "m", "messages": asked["messages"]}).encode()
        headers = {"Authorization": "Bearer " + asked["api_key"]}
        url = asked["base_url"] + "/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
        yield line
sys.stdin = lines(sys.stdin)
"""


def test_the_worker_of_the_examples_plays_at_once_and_stays(tmp_path: Path) -> None:
    file = str(ROOT / "examples/agent_worker.py")

    async def body() -> list[FinishedEpisode]:
        engine = ScriptedEngine()
        engine.say(*[chat_tokenizer().convert_tokens_to_ids(list("1234")) for _ in range(9)])
        task = TaskConfig(agent=AgentConfig(command=["python", file], workers=1))
        agents = program_runner(tmp_path, task)
        await agents.start()
        try:
            prompts = [Prompt(8, (1,), "4321", answer, {}) for answer in ("1243", "4321", "1234")]
            plays = [play(agents, engine, f"8.{i}", prompt) for i, prompt in enumerate(prompts)]
            done = await asyncio.gather(*plays)
            return [*done, await play(agents, engine, "9.0", Prompt(9, (1,), "", None, {}))]
        finally:
            await agents.close()

    *played, fails = asyncio.run(body())
    assert [episode.own_score for episode in played] == [Score(0.5), Score(0.0), Score(1.0)]
    assert [len(episode.turns) for episode in played] == [3, 3, 1]
    assert fails.failure == "error"
    assert "TypeError" in fails.detail
    assert not left_children()


def test_workers_are_settings_of_a_program() -> None:
    check(load_config("digits-by-agent", ["task.agent.workers=2"]))
    with pytest.raises(Exception, match=r"task\.agent\.workers"):
        load_config("digits-by-agent", ["task.agent.workers=-1"])

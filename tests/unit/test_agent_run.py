"""Episodes of external programs: programs, rows of branches, groups, and what can go wrong."""

from __future__ import annotations

import asyncio
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.agents.cross_loop_episode import CrossLoopEpisode
from moerl.agents.programs.agent_process import ProgramEnd, program_of, run_program
from moerl.config import resolve
from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.schema import TaskConfig
from moerl.config.task_programs import TaskLimits
from moerl.controller.controller import Controller
from moerl.controller.engine_choice import EngineChoice
from moerl.controller.step_metrics import shown_turns
from moerl.controller.turn_router import TurnRouter
from moerl.core.errors import ConfigError, EngineError
from moerl.core.types import (
    Episode,
    PolicyVersion,
    Prompt,
    Score,
)
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn
from moerl.episodes.open_episode import (
    EnginePin,
    EpisodeEnded,
    EpisodeSpec,
    OpenEpisode,
    Outcome,
    TurnRequest,
)
from moerl.observe.report import _response
from moerl.records.header_check import check as check_record
from moerl.sandbox.limits import isolation_of
from tests.helpers.agent_stubs import (
    AGENT,
    PROMPT,
    SAMPLING,
    SHAPE,
    FakeRunner,
    is_alive,
    play,
    program_runner,
    python,
    run_agents,
    task_of,
    until,
)
from tests.helpers.chat_tokenizer import END, SIZE
from tests.helpers.controllers import CONFIG, make, running
from tests.helpers.left_processes import left_children
from tests.helpers.recorded_turns import V0, recorded, turn
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.stub_engine import StubEngine, always, never

V1 = PolicyVersion(0, 1)


# --- programs ------------------------------------------------------------------------------------
async def ran(task: TaskConfig, given: bytes = b"", end: asyncio.Event | None = None) -> ProgramEnd:
    return await run_program(
        task, isolation_of(task), {"OPENAI_API_KEY": "k"}, given, end or asyncio.Event()
    )


def test_a_program_gets_its_input_and_its_environment_only(monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    code = "import os, sys; print(sys.stdin.read(), os.environ['OPENAI_API_KEY'], len(os.environ))"
    task = python(code + "; print('AWS_SECRET_ACCESS_KEY' in os.environ)")
    ended = asyncio.run(ran(task, b"hello"))
    assert (ended.code, ended.why) == (0, "exit")
    assert ended.out.split()[:2] == [b"hello", b"k"]
    assert ended.out.split()[-1] == b"False"


SPAWNS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("how", "sleep_s"), [("exit", 0.0), ("timeout", 99.0), ("ended", 99.0)])
def test_what_a_program_started_ends_with_it(tmp_path: Path, how: str, sleep_s: float) -> None:
    file = tmp_path / "pid"

    async def body() -> ProgramEnd:
        wall_s = 5.0 if how == "timeout" else 80.0
        same = TaskLimits(user="same")  # it writes into a folder of ours
        command = ("python", "-c", SPAWNS, str(file), str(sleep_s))
        task = task_of(*command, wall_s=wall_s, limits=same)
        end = asyncio.Event()
        playing = asyncio.create_task(ran(task, end=end))
        while how == "ended" and not file.exists():
            await asyncio.sleep(0.05)
        if how == "ended":
            end.set()
        return await playing

    assert asyncio.run(body()).why == how
    assert not is_alive(int(file.read_text()))


def test_the_last_bytes_of_a_long_output_are_kept() -> None:
    task = python("print('x' * 10**6); print('last')")
    ended = asyncio.run(ran(replace(task, limits=replace(task.limits, output_kb=1))))
    assert len(ended.out) == 1024
    assert ended.out.endswith(b"x\nlast\n")


def test_an_unknown_program_is_named() -> None:
    assert program_of(["python", "a"]) == [sys.executable, "a"]
    with pytest.raises(
        ConfigError, match=r"task\.agent\.command = .*there is no program 'no-such' on PATH"
    ):
        program_of(["no-such"])


# --- rows ----------------------------------------------------------------------------------------
def played(*turns: RecordedTurn) -> FinishedEpisode:
    return FinishedEpisode("7.0", PROMPT, turns)


def test_each_turn_is_trained_once_and_branches_share_their_beginning() -> None:
    """0 - 1 - 2, 1 - 3, and 4 that stands alone."""
    first = recorded(0, turn([1], [2, 3]), None, "first")
    second = recorded(1, turn([1, 2, 3, 4], [5]), first, "continued")
    episode = played(
        first,
        second,
        recorded(2, turn([1, 2, 3, 4, 5, 6], [7]), second, "continued"),
        recorded(3, turn([1, 2, 3, 4, 5, 8], [9, 9]), second, "branched"),
        recorded(4, turn([3], [3]), None, "new"),
    )
    nodes = episode.nodes("join")
    rows = [node.rollout for node in nodes]
    sampled = [row.token_ids[row.loss_mask].tolist() for row in rows]
    assert sampled == [[2, 3, 5, 7], [9, 9], [3]], "the second row has turns 0 and 1 as context"
    assert [node.parents for node in nodes] == [(), (0,), ()]
    assert len({row.rollout_id for row in rows}) == 3
    assert [node.origins for node in nodes] == [
        ("first", "continued", "continued"),
        ("branched",),
        ("new",),
    ]
    for row in rows:
        check_record(row, SHAPE)
    apart = episode.nodes("separate")
    assert [node.rollout.num_sampled for node in apart] == [2, 1, 1, 2, 1]
    assert [node.parents for node in apart] == [(), (0,), (1,), (1,), ()]


def test_samples_show_each_token_once_with_its_version() -> None:
    """The forest of the test above, whose turn 1 an update has cut, on a kept cache."""
    later = replace(turn([], [6], V1).segments[0], kept_kv=True)
    cut = turn([1, 2, 3, 4], [5])
    cut = replace(cut, segments=(*cut.segments, later))
    first = recorded(0, turn([1], [2, 3]), None, "first")
    second = recorded(1, cut, first, "continued")
    episode = played(
        first,
        second,
        recorded(2, turn([1, 2, 3, 4, 5, 6, 7], [8], V1), second, "continued"),
        recorded(3, turn([1, 2, 3, 4, 5, 6, 9], [8], V1), second, "branched"),
    )
    for kind in ("join", "separate"):
        shown = shown_turns(Episode("7.0", episode.nodes(kind)), str)
        assert [one["context"] for one in shown] == ["[1]", "[4]", "[7]", "[9]"], kind
        assert [one["answer"] for one in shown] == ["[2, 3]", "[5, 6]", "[8]", "[8]"]
        assert [one["origin"] for one in shown] == ["first", "continued", "continued", "branched"]
        assert [one["context_tokens"] for one in shown] == [1, 1, 1, 1]
        assert shown[1]["pieces"] == [
            {"version": "0.0", "kept_kv": False, "tokens": 1, "text": "[5]"},
            {"version": "0.1", "kept_kv": True, "tokens": 1, "text": "[6]"},
        ]
        assert (shown[3]["continues"], shown[3]["shared_tokens"]) == (kind == "separate", 6)
    assert [one["row"] for one in shown] == [0, 1, 2, 3]


def test_a_turn_whose_last_token_was_replaced_is_a_row_of_its_own() -> None:
    first = recorded(0, turn([1], [2, END]))
    second = RecordedTurn(first, first.num_tokens - 1, "", "7.0.t1", turn([1, 2, 9, 4], [5]))
    episode = played(first, second)
    rows = [node.rollout for node in episode.nodes("join")]
    assert [row.token_ids[row.loss_mask].tolist() for row in rows] == [[2, END], [5]]


# --- groups --------------------------------------------------------------------------------------


def test_a_run_trains_what_an_unchanged_client_asked_for(tmp_path: Path) -> None:
    engine = StubEngine()
    plans, reports = run_agents(tmp_path, python(AGENT), engine)
    groups = [group for plan in plans for group in plan.groups]
    assert sorted(group.group_id for group in groups) == list(range(4))
    for group in groups:
        assert [episode.score.reward for episode in group.episodes if episode.score] == [0, 1]
        for episode in group.episodes:
            assert sum(len(row.rollout.ends) for row in episode.turns) == 2
            assert sum(row.rollout.num_sampled for row in episode.turns) == 8
    totals = {name: sum(r.metrics.get(name, 0) for r in reports) for name in AGENT_TOTALS}
    assert totals["agent/episodes"] >= 8
    assert totals["agent/turns"] == 2 * totals["agent/episodes"]
    assert totals["agent/origin/continued"] == totals["agent/episodes"]
    assert totals["agent/tool_calls"] == totals["agent/replaced_ends"] == 0
    assert totals["agent/program_s"] > totals["agent/engine_s"] > 0
    assert "done" in (tmp_path / "agents.log").read_text()
    said = [sample["turns"] for report in reports for sample in report.samples]
    assert [[turn["answer"] for turn in turns] for turns in said] == [["3 3 3 3"] * 2] * 2
    assert not left_children()


AGENT_TOTALS = (
    "agent/episodes",
    "agent/turns",
    "agent/origin/continued",
    "agent/tool_calls",
    "agent/replaced_ends",
    "agent/program_s",
    "agent/engine_s",
)


def test_a_program_that_fails_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    says = r"task\.agent\.command = .*none of the first 4 groups could be scored"
    with pytest.raises(ConfigError, match=says) as error:
        run_agents(tmp_path, python("raise SystemExit('lost')"), StubEngine())
    assert "ended with exit code 1: lost" in str(error.value)


FAULTS = ("", "no_turn", "exit", "timeout", "no_reward")


def test_what_fails_is_named_and_never_scored(tmp_path: Path) -> None:
    async def body() -> list[FinishedEpisode]:
        engine = ScriptedEngine()
        engine.say(*[[SIZE - 1] * 4 for _ in range(2 * len(FAULTS))])
        agents = program_runner(tmp_path, python(AGENT, wall_s=8.0))
        await agents.start()
        try:
            prompts = [Prompt(8, (1,), fault, None, {}) for fault in FAULTS]
            names = [f"8.{place}" for place in range(len(FAULTS))]
            # half a character: no program can be given it
            half = Prompt(8, (1,), "\ud83d", None, {})
            plays = zip([*names, "8.9"], [*prompts, half], strict=True)
            return await asyncio.gather(*(play(agents, engine, *each) for each in plays))
        finally:
            await agents.close()

    *played, half = asyncio.run(body())
    assert (half.failure, half.turns, "UnicodeEncodeError" in half.detail) == ("error", (), True)
    assert [episode.failure for episode in played] == list(FAULTS)
    assert [episode.own_score for episode in played] == [Score(0.0), *[None] * 4]
    assert [len(episode.turns) for episode in played] == [2, 0, 2, 2, 2]
    assert "exit code 1: lost" in played[2].detail


def test_an_engine_that_dies_costs_no_episode(tmp_path: Path) -> None:
    plans, reports = run_agents(tmp_path, python(AGENT), StubEngine(fails_at=6))
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(4))
    assert not sum(report.metrics["scorer/failed"] for report in reports)


def faked(
    tmp_path: Path, agents: FakeRunner, engine: StubEngine | None = None, **changes: Any
) -> Controller:
    rollout = replace(CONFIG.rollout, max_groups_in_flight=1, **changes)
    config = replace(CONFIG, rollout=rollout, task=task_of("program"))
    controller, _ = make(tmp_path, engine or StubEngine(), config, agents={"": agents})
    controller.context.pool.incarnation = 0
    controller.context.lineage.restore([V0])  # as a trainer's hello does
    return controller


def opened(controller: Controller, **spec: Any) -> tuple[OpenEpisode, TurnRouter]:
    """An episode that is played without the producer."""
    context = controller.context
    context.pool.incarnation = 0
    engines = EngineChoice(context.pool, context.config.rollout, context.step_metrics)
    router = TurnRouter(context, engines)
    context.lineage.restore([V0])  # as a trainer's hello does
    context.tasks.spawn(router.run())
    return OpenEpisode(EpisodeSpec("8.0", PROMPT, SAMPLING, **spec), router), router


def request(**fields: Any) -> TurnRequest:
    return TurnRequest(np.asarray([1, 2], np.int32), **fields)


async def test_a_running_request_is_known_with_the_weights_that_it_was_sent_to(
    tmp_path: Path,
) -> None:
    engine = StubEngine()
    engine.open.clear()
    controller, _ = make(tmp_path, engine)
    episode, router = opened(controller)
    asking = asyncio.create_task(episode.sample(request()))
    await until(lambda: any(call.engine for call in episode.calls))
    assert not router.waiting
    assert episode.oldest_step(runs_through_updates=True) == 0
    assert episode.oldest_step(runs_through_updates=False) is None, "an update ends it first"
    engine.open.set()
    await asking
    assert not episode.calls
    await controller.stop()


async def test_a_failed_episode_ends_its_siblings_and_another_group_replaces_theirs(
    tmp_path: Path,
) -> None:
    agents = FakeRunner("0.1")
    controller = faked(tmp_path, agents)
    deleted: list[str] = []
    controller.context.ref_counts.release = lambda uris: deleted.extend(uris)  # type: ignore[method-assign]
    lanes: list[dict[str, float]] = []

    def both_play_again() -> bool:
        lanes.append(controller.status())
        return len(agents.names) == 4

    await running(controller, until(both_play_again))
    assert {"agent/open/program", "agent/open/siblings"} <= lanes[-1].keys()
    assert lanes[-1]["agent/open/program"] == 2
    assert agents.names == ["0.0", "0.1", "1.0", "1.1"]
    assert sorted(deleted) == ["blob://n/0.0", "blob://n/0.1"]
    counts = controller.context.step_metrics
    assert (counts["agent/failed/exit"], counts["agent/failed/ended"]) == (1, 1)
    assert counts["scorer/failed"] == 1


class Asking(FakeRunner):
    """Sibling 1 of each first try asks for a turn."""

    async def run(self, episode: OpenEpisode) -> Outcome:
        if episode.name != "0.1":
            return await super().run(episode)
        asking = asyncio.create_task(episode.sample(request()))
        outcome = await super().run(episode)
        episode.end()
        await asyncio.gather(asking, return_exceptions=True)
        return outcome


@pytest.mark.parametrize(
    ("mode", "hangs"), [("abort_resume", never), ("in_place", always), ("retract", always)]
)
async def test_a_group_that_is_too_old_is_played_again(
    tmp_path: Path, mode: Any, hangs: Any
) -> None:
    """A request that runs through updates may have tokens of the weights that it was sent to."""
    agents = Asking()
    controller = faked(tmp_path, agents, StubEngine(hangs=hangs), in_flight_mode=mode)
    through = mode != "abort_resume"

    async def work() -> None:
        await until(lambda: len(agents.names) == 2)
        old = agents.episodes["0.1"]
        await until(lambda: old.oldest_step(runs_through_updates=through) == 0)
        assert bool(old.turns) != through
        controller.context.buffer.next_step = 2
        controller.producer.cancel_stale()
        assert not any(end.is_set() for end in agents.ends.values()), "max_lag = 2"
        controller.context.buffer.next_step = 3
        controller.producer.cancel_stale()
        assert all(end.is_set() for end in agents.ends.values())
        controller.context.pool.engines[0].version = PolicyVersion(0, 3)
        await until(lambda: len(agents.names) == 4)

    await running(controller, work())
    assert [name.partition(".r")[0] for name in agents.names] == ["0.0", "0.1"] * 2
    assert len(set(agents.names)) == 4, "blobs of the first try may still be there"
    assert controller.context.step_metrics["async/cancelled_groups"] == 1


async def test_turns_stay_on_their_engine_and_never_meet_older_weights(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine(), more_engines=[StubEngine()])
    pool = controller.context.pool
    episode, router = opened(controller)
    await episode.sample(request())
    home = episode.engine
    await episode.sample(request())
    assert episode.engine == home
    pool.engines[home].leaving = True
    await episode.sample(request())
    assert episode.engine == 1 - home
    episode.newest = V1
    waiting = asyncio.create_task(episode.sample(request()))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "engines have older weights"
    assert router.waiting == {"8.0"}
    assert not any(call.engine for call in episode.calls)
    episode.end()
    with pytest.raises(EpisodeEnded):
        await waiting
    assert not router.waiting
    await controller.stop()


@pytest.mark.parametrize("is_pinned", [False, True])
async def test_tokens_are_heard_on_the_loop_of_the_agents_before_the_reply(
    tmp_path: Path, is_pinned: bool
) -> None:
    async def streamed(
        far: CrossLoopEpisode, loop: asyncio.AbstractEventLoop, engine: StubEngine
    ) -> list[Any]:
        found: list[Any] = []
        main = threading.main_thread()

        def heard(ids: np.ndarray) -> None:
            same = threading.current_thread() is main
            found.append((ids.tolist(), "the controller's" if same else "another thread"))
            loop.call_soon_threadsafe(engine.heard.set)

        turn = await far.sample(request(on_tokens=heard))
        await far.sample(request())
        return [*found, turn.output_ids.tolist()]

    engine = StubEngine(streams=True)
    controller, _ = make(tmp_path, engine)
    episode, _ = opened(controller, pin=EnginePin(0, V0) if is_pinned else None)
    far = CrossLoopEpisode(episode, asyncio.get_running_loop())
    found = await asyncio.to_thread(asyncio.run, streamed(far, asyncio.get_running_loop(), engine))
    assert found == [([3, 3], "another thread"), [3, 3, 3, 3]]
    assert not controller.context.pool.engines[0].calls._listeners
    await controller.stop()


@pytest.mark.parametrize("is_heard", [True, False])
async def test_a_stream_whose_tokens_died_with_their_engine_fails(
    tmp_path: Path, is_heard: bool
) -> None:
    """Control: a request that tells nothing is sampled again."""
    engine = StubEngine(streams=is_heard, hangs=lambda _: len(engine.requests) == 1)
    controller, _ = make(tmp_path, engine)
    episode, _ = opened(controller)
    told: list[list[int]] = []
    asking = asyncio.create_task(
        episode.sample(request(on_tokens=lambda ids: told.append(ids.tolist())))
    )
    await until(lambda: bool(told if is_heard else engine.requests))
    engine.heard.set()
    engine.killed.set()  # the call that hangs raises
    if is_heard:
        with pytest.raises(EngineError, match="has heard are lost"):
            await asking
        assert told == [[3, 3]]
    else:
        assert (await asking).output_ids.tolist() == [3, 3, 3, 3]
        assert len(engine.requests) == 2
    await controller.stop()


async def test_an_error_of_a_client_that_is_asked_for_an_end_costs_its_turn(tmp_path: Path) -> None:
    async def broken(output_ids: np.ndarray) -> bool:
        raise ValueError(f"{len(output_ids)} tokens")

    controller, _ = make(tmp_path, StubEngine(lengths=[4]))
    episode, _ = opened(controller)
    with pytest.raises(ValueError, match="4 tokens"):
        await episode.sample(request(ends=broken))
    assert (await episode.sample(request())).num_sampled == 4
    assert not controller.context.tasks.failure.done()
    await controller.stop()


def test_the_report_shows_each_turn_behind_what_it_answers() -> None:
    turns = [{"context": "a", "answer": "b"}, {"context": "c", "answer": "d"}]
    shown = _response({"response": "b c d", "turns": turns})
    assert [line for line in shown.splitlines() if "--" not in line] == ["a", "b", "c", "d"]
    assert _response({"response": "b", "turns": turns[:1]}) == "b"


def _commands(page: str) -> list[list[str]]:
    """Recipe and overrides of the `moerl train` commands of a page that name a recipe."""
    text = Path(__file__).parents[2].joinpath("docs", page).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("moerl train ")]
    return [words for line in lines if (words := shlex.split(line)[2:])[0] != "RECIPE"]


def test_the_command_for_a_released_model_passes_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control has no agent, which gives the reward."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "12=", "answer": "12"}\n')
    (words,) = [words for words in _commands("agents.md") if words[0].startswith("qwen3")]
    check(resolve(load_config(words[0], words[1:])), starts=False)
    kept = [word for word in words[1:] if not word.startswith("task.agent.command")]
    with pytest.raises(ConfigError, match=r"task\.reward"):
        check(resolve(load_config(words[0], kept)), starts=False)

"""Calls of an agent to other models: what is passed on, what is refused, and the graph of turns."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.config.task_programs import OtherModelConfig
from moerl.controller.player import EnvironmentRunner, TextReplies
from moerl.core.errors import EngineError, RecordError
from moerl.core.serialization import encode_value
from moerl.core.types import (
    Episode,
    EpisodeGroup,
    GraphTurn,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Turn,
)
from moerl.episodes.finished_episode import FinishedEpisode, TurnRows, checked_graph
from moerl.episodes.open_episode import Outcome, TurnRequest
from moerl.sandbox.isolation import Isolation
from moerl.scoring.process import WorkerProcess
from tests.helpers.agent_stubs import PROMPT, play, python, run_agents
from tests.helpers.chat_tokenizer import END
from tests.helpers.controllers import StubScorer
from tests.helpers.journals import JournalWorld
from tests.helpers.one_engine import far, open_episode
from tests.helpers.patience import patience
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.served_gateway import HELLO, Served, ids, run, serve
from tests.helpers.stub_engine import StubEngine
from tests.helpers.stub_model import SAID, StubModel, completion, stub_model

KEY = "s3cr3t-key"
JUDGE: dict[str, Any] = {"model": "judge", "messages": HELLO, "temperature": 0.25, "seed": 3}


def model_of(stub: StubModel, **changes: Any) -> OtherModelConfig:
    return replace(OtherModelConfig(stub.base_url, "big", KEY), **changes)


def judged(
    work: Callable[[Served], Any], stub: StubModel, *answers: list[int], **changes: Any
) -> None:
    """Do `work` with a gateway that has the model `judge`."""

    async def body() -> None:
        async with serve(*answers, models={"judge": model_of(stub, **changes)}) as served:
            await work(served)

    run(body)


# --- passed on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("route", ["/chat/completions", "/completions"])
def test_a_request_goes_to_the_endpoint_with_its_name_and_key(route: str) -> None:
    async def work(served: Served) -> None:
        status, reply, _ = await served.post(route, json=JUDGE)
        assert (status, reply) == (200, completion())
        ((path, headers, body),) = stub.asked
        assert path == "/v1" + route
        assert body == JUDGE | {"model": "big", "max_tokens": 16384}, "all else is the client's"
        assert headers["Authorization"] == f"Bearer {KEY}"
        assert served.episode.key not in str(headers), "the episode's key stays here"
        models = [model.id for model in (await served.client.models.list()).data]
        assert models == ["policy", "judge"]
        assert not served.engine.requests

    with stub_model() as stub:
        judged(work, stub)


def test_a_stream_is_passed_on_in_one_piece() -> None:
    events = b'data: {"choices": []}\n\ndata: [DONE]\n\n'

    async def work(served: Served) -> None:
        create = served.client.chat.completions.create
        chunks = [c async for c in await create(model="judge", messages=HELLO, stream=True)]
        assert [chunk.choices for chunk in chunks] == [[]]
        assert stub.asked[0][2]["stream"] is True

    with stub_model(body=events, headers={"Content-Type": "text/event-stream"}) as stub:
        judged(work, stub)


def test_without_a_model_of_its_own_name_and_key_the_clients_name_is_sent_and_no_key() -> None:
    async def work(served: Served) -> None:
        await served.post(json=JUDGE)
        _, headers, body = stub.asked[0]
        assert body["model"] == "judge"
        assert "Authorization" not in headers

    with stub_model() as stub:
        judged(work, stub, model="", api_key="")


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        ({}, {"max_tokens": 100}),
        ({"n": 4}, {"n": 4, "max_tokens": 25}),
        ({"n": None, "max_completion_tokens": 100}, {"n": None, "max_completion_tokens": 100}),
        ({"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "max_tokens": 50}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3], "max_tokens": 100}),
        ({"n": 101}, None),
        ({"max_tokens": 101}, None),
        ({"max_tokens": 1, "max_completion_tokens": 101}, None),
        ({"n": 3, "max_tokens": 50}, None),
        ({"best_of": 3, "max_tokens": 50}, None),
        ({"prompt": ["a", "b"], "n": 2, "max_tokens": 50}, None),
        ({"prompt": [[1], [2]], "max_tokens": 51}, None),
    ],
)
def test_a_call_asks_for_a_bounded_number_of_tokens(asked: Any, passed: Any) -> None:
    async def work(served: Served) -> None:
        status, reply, _ = await served.post("/completions", json=JUDGE | asked)
        if passed is not None:
            assert (status, stub.asked[0][2]) == (200, JUDGE | {"model": "big"} | passed)
            return
        assert (status, reply["error"]["code"]) == (400, "token_limit_exceeded")
        assert "task.agent.models.judge.max_tokens = 100 is" in reply["error"]["message"]
        assert not stub.asked

    with stub_model() as stub:
        judged(work, stub, max_tokens=100)


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": "many"}, {"max_tokens": -1}, {"n": 1e30}])
def test_an_amount_that_is_none_is_refused(bad: Any) -> None:
    async def work(served: Served) -> None:
        status, reply, _ = await served.post(json=JUDGE | bad)
        assert (status, reply["error"]["code"]) == (400, "invalid_request")

    with stub_model() as stub:
        judged(work, stub)
    assert not stub.asked


# --- context, never loss -------------------------------------------------------------------------
async def conversation(served: Served, failure: tuple[str, str] = ("", "")) -> FinishedEpisode:
    """The policy answers, the judge reads it, and the policy reads the judge."""
    create, history = served.client.chat.completions.create, list(HELLO)
    for _ in range(2):
        said = (await create(model="policy", messages=history)).choices[0].message.content
        told = (await create(model="judge", messages=HELLO)).choices[0].message.content
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    return await served.end(failure)


def played(work: Callable[[Served], Any] = conversation) -> FinishedEpisode:
    """An episode of two turns of the policy and two calls of the judge."""
    found: list[FinishedEpisode] = []

    async def play(served: Served) -> None:
        found.append(await work(served))

    with stub_model() as stub:
        judged(play, stub, [*ids("ab"), END], [*ids("cd"), END])
    return found[0]


JUDGED = [
    GraphTurn("e.t0", "", "policy", "", (PolicyVersion(0, 0),), 3),
    GraphTurn("e.t1", "", "judge", "other_model"),
    GraphTurn("e.t2", "e.t0", "policy", "", (PolicyVersion(0, 0),), 3),
    GraphTurn("e.t3", "", "judge", "other_model"),
]


@pytest.mark.parametrize("kind", ["join", "separate"])
def test_what_another_model_says_is_context(kind: TurnRows) -> None:
    episode = played()
    assert list(episode.graph) == JUDGED
    nodes = episode.nodes(kind)
    assert checked_graph(episode, nodes) == episode.graph
    row = nodes[-1].rollout
    said = ids(SAID)
    begin = next(
        place
        for place in range(row.num_tokens)
        if row.token_ids[place:][: len(said)].tolist() == said
    )
    assert not row.loss_mask[begin : begin + len(said)].any(), "the policy has read it"
    trained = [token for node in nodes for token in node.rollout.token_ids[node.rollout.loss_mask]]
    assert trained == [*ids("ab"), END, *ids("cd"), END]


def test_a_row_that_trains_what_another_model_said_is_refused() -> None:
    """Control of the test above: the same rows, with its text in the loss."""
    episode = played()
    (node,) = episode.nodes("join")
    row = node.rollout
    places = np.flatnonzero(row.loss_mask)
    mask = np.zeros_like(row.loss_mask)
    mask[places[0] : places[-1] + 1] = True
    wrong = Turn(replace(row, loss_mask=mask, logprobs=np.zeros(mask.sum(), np.float32)))
    assert wrong.rollout.num_sampled > row.num_sampled
    with pytest.raises(RecordError, match=r"the graph trains 6 tokens of 0\.0, its rows"):
        checked_graph(episode, [wrong])


@pytest.mark.parametrize(
    "graph",
    [
        (),
        JUDGED[:2],
        [replace(turn, left_out="") for turn in JUDGED[1:]],
        [replace(turn, versions=(PolicyVersion(0, 1),)) for turn in JUDGED],
        [replace(turn, left_out="held_out") for turn in JUDGED],
    ],
    ids=["empty", "a turn too few", "another turn", "another version", "held out"],
)
def test_rows_that_are_not_the_graphs_are_refused(graph: Any) -> None:
    episode = played()
    nodes = episode.nodes("join")
    with pytest.raises(RecordError) as error:
        checked_graph(replace(episode, graph=tuple(graph)), nodes)
    assert error.value.reason == "graph"


def test_the_journal_keeps_the_graph(tmp_path: Path) -> None:
    episode, world = played(), JournalWorld(tmp_path)
    graph = (replace(episode.graph[0], tools=("get", "add")), *episode.graph[1:])
    rows = Episode("7.0", episode.nodes("join"), graph=graph)
    world.journal.began((PolicyVersion(0, 0),), 1, ())
    world.journal.admitted(EpisodeGroup(7, PROMPT, (rows,)))
    ((found,),) = (group.episodes for group in world.open().ready)
    assert found.graph == graph
    assert [turn.trained for turn in found.graph] == [True, False, True, False]


def test_turns_of_an_environment_are_a_graph_too() -> None:
    episode = asyncio.run(of_text())
    assert episode.graph == (
        GraphTurn("7.0.t0", "", "policy", "", (PolicyVersion(0, 0),), 2),
        GraphTurn("7.0.t1", "7.0.t0", "policy", "", (PolicyVersion(0, 1),), 2),
    )
    assert checked_graph(episode, episode.nodes("split"))


async def of_text() -> FinishedEpisode:
    """Two turns with a reply between them, each under its own version."""

    class Says(StubScorer):
        async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
            engine.version = 1
            return "5"

    engine = ScriptedEngine()
    engine.say([3, END], [4, END])
    runner = EnvironmentRunner(lambda spec: TextReplies(spec, Says(), str, lambda _: [5], 0))
    start = np.asarray([1, 2], np.int32)
    return await play(runner, engine, "7.0", prompt_ids=start, max_turns=2)


# --- what is left out ----------------------------------------------------------------------------
def graph_of(work: Callable[[Served], Any], *answers: list[int]) -> list[tuple[str, str]]:
    """Role and reason of each turn."""
    found: list[GraphTurn] = []

    async def play(served: Served) -> None:
        await work(served)
        found.extend((await served.end()).graph)

    with stub_model() as stub:
        judged(play, stub, *answers)
    assert [turn.name for turn in found] == [f"e.t{place}" for place in range(len(found))]
    return [(turn.role, turn.left_out) for turn in found]


def test_turns_without_a_record_are_in_the_graph() -> None:
    async def work(served: Served) -> None:
        policy = {"messages": HELLO}
        for fails in (RecordError("rows", "wrong"), EngineError("gone"), None):
            served.engine.fails = fails
            await served.post(json=policy)
        served.engine.hangs = True
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await served.post(json=policy)

    reasons = [("policy", reason) for reason in ("refused", "no_answer", "", "cancelled")]
    assert graph_of(work, [*ids("a"), END]) == reasons


def test_held_out_turns_are_left_out() -> None:
    async def body() -> None:
        async with serve([*ids("a"), END]) as served:
            greedy = SamplingParams(9, temperature=0.0, stop_token_ids=(END,))
            opened = open_episode(served.engine, "held", greedy, held_out=True)
            episode = served.gateway.open_episode(far(opened), served.episode.limits)
            headers = {"Authorization": f"Bearer {episode.key}"}
            client = served.client.with_options(
                base_url=served.gateway.base_url("held"),
                api_key=episode.key,
                default_headers=headers,
            )
            await client.chat.completions.create(model="policy", messages=HELLO)
            await served.gateway.end_episode("held")
            (turn,) = opened.finish(Outcome()).graph
            assert (turn.left_out, turn.num_sampled) == ("held_out", 2)

    run(body)


@pytest.mark.parametrize(("failure", "reason"), [("exit", "failed"), ("ended", "ended")])
def test_no_turn_of_a_failed_episode_is_trained(failure: str, reason: str) -> None:
    done = played(lambda served: conversation(served, (failure, "x")))
    assert (done.failure, done.own_score) == (failure, None)
    assert [turn.left_out for turn in done.graph] == [reason, "other_model"] * 2


async def test_a_turn_that_nobody_waits_for_has_no_age() -> None:
    engine = ScriptedEngine(version=1)
    engine.say([3, END], [4, END], [5, 6, END])
    episode = open_episode(engine, "7.0", SamplingParams(9, stop_token_ids=(END,)))
    request = TurnRequest(np.asarray([1, 2], np.int32))
    first = await episode.sample(request)
    engine.version = 4
    await episode.sample(request)
    assert episode.oldest_step(runs_through_updates=False) == 1
    episode.leave_out(first.name, "cancelled")
    assert episode.oldest_step(runs_through_updates=False) == 4
    engine.version, engine.goes_on = 1, asyncio.Event()
    asking = asyncio.create_task(episode.sample(replace(request, on_tokens=lambda _: None)))
    while not engine.told:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    engine.goes_on.set()
    await asyncio.sleep(0.01)
    assert episode.oldest_step(runs_through_updates=False) == 4, "what arrives later, too"
    assert episode.newest == PolicyVersion(0, 4)


# --- errors --------------------------------------------------------------------------------------
TEXT = {"Content-Type": "text/plain"}
FAULTS: list[tuple[dict[str, Any], int, str]] = [
    ({"status": 500, "body": b"down"}, 502, "answered with status 500: down"),
    ({"status": 401, "body": f"wrong key {KEY}".encode()}, 502, r"wrong key \(hidden\)"),
    ({"status": 400, "body": b"too long"}, 400, "answered with status 400: too long"),
    ({"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, 502, "status 302"),
    ({"body": b"<html>", "headers": TEXT}, 502, "what is no completion"),
    ({"body": b"[1]"}, 502, "what is no completion"),
    ({"body": b"x" * 3000}, 502, "more than 2048 bytes"),
    ({"hangs": True}, 504, r"within task\.agent\.models\.judge\.timeout_s = 0\.5"),
]


@pytest.mark.parametrize(("fault", "status", "said"), FAULTS, ids=lambda value: str(value)[:30])
def test_a_failure_is_one_sentence_with_the_name_and_without_the_key(
    fault: dict[str, Any], status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(served: Served) -> None:
        found, reply, headers = await served.post(json=JUDGE)
        assert (found, reply["error"]["code"]) == (status, "other_model_failed")
        assert reply["error"]["message"].startswith("the model judge ")
        assert KEY not in json.dumps(reply)
        assert ("x-should-retry" in headers) == (status == 400)
        (turn,) = (await served.end()).graph
        assert (turn.role, turn.left_out) == ("judge", "no_answer")
        shown.append(reply["error"]["message"])

    shown: list[str] = []
    caplog.set_level(logging.DEBUG)
    with stub_model(**fault) as stub:
        judged(work, stub, timeout_s=0.5, reply_kb=2)
    assert len(stub.asked) == 1, "a request that was sent is not sent again"
    assert KEY not in caplog.text
    assert re.search(said, shown[0])


def test_an_endpoint_that_does_not_listen_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        stub = StubModel(f"http://127.0.0.1:{free.getsockname()[1]}/v1")

        async def work(served: Served) -> None:
            status, reply, _ = await served.post(json=JUDGE)
            assert (status, reply["error"]["code"]) == (502, "other_model_failed")
            assert "the model judge cannot be reached" in reply["error"]["message"]

        judged(work, stub)


def test_unknown_names_are_refused_where_there_are_other_models() -> None:
    async def work(served: Served) -> None:
        for path in ("/chat/completions", "/completions", "/responses"):
            asked = {"model": "gpt-4o", "messages": HELLO, "prompt": "a", "input": "a"}
            status, reply, headers = await served.post(path, json=asked)
            assert (status, reply["error"]["code"]) == (404, "model_not_found"), path
            assert reply["error"]["message"].endswith("allowed are policy, judge")
            assert headers["x-should-retry"] == "false"
        status, reply, _ = await served.post("/responses", json={"model": "judge", "input": "a"})
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert "chat/completions and completions only" in reply["error"]["message"]
        status, _, _ = await served.post(json={"messages": HELLO})
        assert status == 200, "a request without a name is for the policy"
        assert not stub.asked

    with stub_model() as stub:
        judged(work, stub, [*ids("a"), END])


# --- limits --------------------------------------------------------------------------------------
def test_a_call_is_one_of_the_episodes_turns() -> None:
    async def work(served: Served) -> None:
        served.episode.limits = replace(served.episode.limits, turns=2)
        assert (await served.post(json=JUDGE))[0] == 200
        assert (await served.post(json={"messages": HELLO}))[0] == 200
        status, reply, _ = await served.post(json=JUDGE)
        assert (status, reply["error"]["code"]) == (400, "turn_limit_exceeded")
        await served.end()
        status, reply, _ = await served.post(json=JUDGE)
        assert (status, reply["error"]["code"]) == (410, "episode_ended")

    with stub_model() as stub:
        judged(work, stub, [*ids("a"), END])
    assert len(stub.asked) == 1


@pytest.mark.parametrize("how", ["hangs up", "ends"])
def test_a_client_that_leaves_ends_the_call(how: str) -> None:
    async def work(served: Served) -> None:
        asking = asyncio.ensure_future(served.post(json=JUDGE))
        async with asyncio.timeout(patience(10.0)):
            while not stub.asked:
                await asyncio.sleep(0.02)
        if how == "hangs up":
            asking.cancel()
        done = None if how == "hangs up" else await served.end()
        assert await asyncio.to_thread(stub.left.wait, 10.0), "the endpoint's client is gone"
        done = done or await served.end()
        assert [(turn.role, turn.left_out) for turn in done.graph] == [("judge", "cancelled")]
        if how == "ends":
            assert (await asking)[0] == 410

    with stub_model(hangs=True) as stub:
        judged(work, stub)


# --- runs ----------------------------------------------------------------------------------------
AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
print(task, dict(os.environ), file=sys.stderr)
history = task["messages"]
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
def ask(model, messages):
    body = json.dumps({"model": model, "messages": messages}).encode()
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
    return reply["choices"][0]["message"]["content"]
for _ in range(2):
    history.append({"role": "assistant", "content": ask("policy", history)})
    history.append({"role": "user", "content": ask("judge", history)})
print(json.dumps({"reward": 1, "secret": task["secret"]}))
"""


def test_a_run_records_the_graph_and_trains_the_policys_turns_only(tmp_path: Path) -> None:
    with stub_model() as stub:
        task = python(AGENT, models={"judge": model_of(stub)})
        plans, reports = run_agents(tmp_path, task, StubEngine())
    episodes = [e for plan in plans for group in plan.groups for e in group.episodes]
    assert len(episodes) == 8
    for episode in episodes:
        assert [turn.role for turn in episode.graph] == ["policy", "judge"] * 2
        assert [turn.trained for turn in episode.graph] == [True, False] * 2
        assert [len(node.rollout.ends) for node in episode.turns] in ([2], [1, 1])
        trained = [turn.num_sampled for turn in episode.graph if turn.trained]
        assert sum(trained) == sum(node.rollout.num_sampled for node in episode.turns) == 8
    totals = [
        sum(report.metrics.get(f"agent/graph/{how}", 0) for report in reports)
        for how in ("policy/trained", "judge/other_model")
    ]
    assert totals[0] == totals[1] >= 16
    printed = (tmp_path / "agents.log").read_text()
    assert "OPENAI_API_KEY" in printed
    assert KEY not in printed, "the program is not given it"


# --- settings ------------------------------------------------------------------------------------
def test_workers_of_rewards_get_no_keys() -> None:
    task = python("x", models={"judge": OtherModelConfig("http://h/v1", "big", KEY)})
    box = WorkerProcess(Isolation(task.limits, {}), task, 1.0)
    assert KEY.encode() not in encode_value(box._setup)
    assert KEY.encode() in encode_value(task), "control"

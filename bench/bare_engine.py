"""The engine part of bench/bare.py: one set of requests through bare SGLang and the whole path.

Legend: an arm is one way of having requests answered; in each round every arm answers the same
requests, and the arms take turns.  Idle servers sleep, so they cost the others nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import ray

from moerl.controller.context import Context
from moerl.core.messages import Hello, Ok, Plan, SetEngines, StepDone, TakePlan
from moerl.core.rpc import Keys, RpcClient
from moerl.core.types import PolicyVersion
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.record_files import FIELD
from moerl.engine.weight_layout import MODULES_CHECKED
from moerl.launch.nodes.ray_nodes import start_ray
from moerl.launch.run_context import RunContext
from moerl.launch.supervision.actors import ControllerActor, RayActors, place
from moerl.launch.supervision.ray_proxy import ActorProxy

BARE, RECORDS, DIRECT, PATH = "bare", "bare, records on", "moerl's server", "whole path"
ARMS = (BARE, RECORDS, DIRECT, PATH)
FIRST = PolicyVersion(0, 0)
LIMIT_S = 600.0  # longest turn
OTHER = 1_000_000  # first prompt of the arm that shares its server, and so its prefix cache


@dataclass(frozen=True, slots=True)
class Turn:
    """What an arm did with the requests of one round."""

    tokens: int
    wall_s: float
    cpu_s: float  # of the arm's processes and of this one

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_rate(self) -> float:
        return self.tokens / self.cpu_s


Answer = Callable[[int], Awaitable[int]]  # number of a round: tokens that were sampled
Roots = Callable[[], Sequence[psutil.Process]]  # of an arm's processes


@dataclass(frozen=True, slots=True)
class Arm:
    answer: Answer
    roots: Roots
    settle: Callable[[int], None] = lambda number: None  # after the round, not timed

    async def turn(self, number: int) -> Turn:
        processes = [one for root in self.roots() for one in _tree(root)]
        processes.append(psutil.Process())
        before, begin = _cpu_s(processes), time.perf_counter()
        tokens = await self.answer(number)
        wall_s, after = time.perf_counter() - begin, _cpu_s(processes)
        self.settle(number)
        return Turn(tokens, wall_s, sum(after[pid] - before[pid] for pid in after))


def _tree(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def _cpu_s(processes: Sequence[psutil.Process]) -> dict[int, float]:
    """CPU seconds so far, by pid, of those that live."""
    found = {}
    for one in processes:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            found[one.pid] = times.user + times.system
    return found


async def measure(plan: RunContext, rounds: int, scratch: Path) -> dict[str, list[Turn]]:
    """Turns of all arms by round, without the first, which warms up."""
    found: dict[str, list[Turn]] = {name: [] for name in ARMS}
    async with AsyncExitStack() as stack:
        arms = await _open(plan, scratch, stack)
        for number in range(rounds + 1):
            shift = number % len(ARMS)
            turns = {name: await arms[name].turn(number) for name in (*ARMS[shift:], *ARMS[:shift])}
            _check_equal(turns)
            shown = ", ".join(f"{name} {turns[name].rate:,.0f}" for name in ARMS)
            print(f"engine {number:2d}/{rounds}, tokens/s: {shown}", flush=True)
            if number:
                for name, turn in turns.items():
                    found[name].append(turn)
    return found


def _check_equal(turns: Mapping[str, Turn]) -> None:
    tokens = {name: turn.tokens for name, turn in turns.items()}
    assert len(set(tokens.values())) == 1, f"the arms sampled different numbers of tokens: {tokens}"


async def _open(plan: RunContext, scratch: Path, stack: AsyncExitStack) -> dict[str, Arm]:
    path = await stack.enter_async_context(_whole_path(plan, scratch))
    arms = {PATH: path.arm}
    ask = Requests(plan)
    for name in (BARE, RECORDS):
        server = await stack.enter_async_context(_bare_server(plan, records=name == RECORDS))
        http = await stack.enter_async_context(_http(server.url, plan.token))
        root = psutil.Process(server.pid)
        arms[name] = Arm(ask.through(http, name, 0), lambda root=root: [root])
    http = await stack.enter_async_context(_http(path.server_url(), plan.token))
    arms[DIRECT] = Arm(ask.through(http, DIRECT, OTHER), lambda: [path.server])
    return arms


# --- requests over HTTP ---------------------------------------------------------------------------
class Requests:
    """The prompts that the controller sends in a round, as one batch of SGLang's `/generate`."""

    def __init__(self, plan: RunContext) -> None:
        self.prompts, self.config = plan.prompts(), plan.config

    def through(self, http: aiohttp.ClientSession, arm: str, first: int) -> Answer:
        async def answer(number: int) -> int:
            rollout = self.config.rollout
            begin = first + number * rollout.groups_per_step
            prompts = map(self.prompts.prompt, range(begin, begin + rollout.groups_per_step))
            ids = [p.token_ids for p in prompts for _ in range(rollout.group_size)]
            async with http.post("/generate", json=self._body(ids, arm)) as reply:
                replies = orjson.loads(await reply.read())
            if not number:
                check_records(replies[0], arm)
            return sum(len(one["output_ids"]) for one in replies)

        return answer

    def _body(self, ids: Sequence[Sequence[int]], arm: str) -> dict[str, Any]:
        given = self.config.sampling
        names = ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos")
        body: dict[str, Any] = {
            "input_ids": [list(one) for one in ids],
            "sampling_params": {name: getattr(given, name) for name in names},
        }
        if arm != BARE:
            body |= {"return_routed_experts": True, "return_sampling_mask": True}
            body["sampling_logprobs_mode"] = "selected"
        return body


def check_records(reply: Any, arm: str) -> None:
    """That an arm records what it says, and in its own way."""
    meta = reply.get("meta_info", {}) if isinstance(reply, dict) else {}
    assert meta, f"{arm}: {orjson.dumps(reply)[:300].decode()}"
    in_json = bool(meta.get("routed_experts")) and bool(meta.get("output_token_sampling_mask"))
    in_files = FIELD in (meta["finish_reason"] or {})
    assert in_json == (arm == RECORDS), f"{arm}: routes and masks in JSON: {in_json}"
    assert in_files == (arm == DIRECT), f"{arm}: routes and masks in files: {in_files}"


@asynccontextmanager
async def _http(url: str, token: str) -> AsyncIterator[aiohttp.ClientSession]:
    # A server closes a connection that rests for 5 s, which the next turn would find out.
    connector = aiohttp.TCPConnector(force_close=True)
    session = aiohttp.ClientSession(
        connector=connector,
        base_url=url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(LIMIT_S),
        trust_env=False,
        raise_for_status=True,
    )
    async with session:
        yield session


# --- bare SGLang ----------------------------------------------------------------------------------
class BareServer(EngineServer):
    """SGLang with the arguments of a run, and none of moerl's hooks but those for a plain CPU."""

    program = (str(Path(__file__).with_name("bare_server.py")),)

    def _check_ranks(self) -> None:
        """A bare server has no check of its weights' layout: that it says so is an error."""
        assert MODULES_CHECKED not in self.log.read_text(), f"{self.log}: moerl's hooks are there"


@asynccontextmanager
async def _bare_server(plan: RunContext, *, records: bool) -> AsyncIterator[BareServer]:
    name = "records" if records else "bare"
    server = BareServer(
        plan.config.engine,
        plan.model_path,
        routing=records,
        version="0",
        token=plan.token,
        log=plan.run.logs / f"{name}.log",
    )
    client = EngineClient(server.url)
    try:
        await server.start(client)
        print(f"engine: the server '{name}' is up", flush=True)
        yield server
    finally:
        await client.close()
        await server.stop()


# --- the whole path -------------------------------------------------------------------------------
class PacedController(ControllerActor):
    """The controller of a run, which lets this bench say when a batch begins."""

    async def next_batch(self) -> None:
        admit_batch(self._controller.context)


def admit_batch(context: Context) -> None:
    """Admit one batch more under the version that the engine serves: none is published."""
    context.buffer.depth += 1
    context.tasks.notify()


class WholePath:
    """Ray, controller, scorer and engine host of a run; this process is its trainer's rank 0.

    A turn is a batch: admitted, generated, sealed, scored, journaled and planned.
    """

    def __init__(self, plan: RunContext) -> None:
        actors = RayActors()
        self._scorer = actors.scorer(plan)
        self._host = actors.engine(plan, 0, 1).actor
        hosts = {0: ActorProxy(self._host, "engine 0")}
        self._controller = place(PacedController, plan, hosts, {0: 1}, self._scorer)
        keys = Keys.read(plan.run.endpoints.keys)
        self._trainer = RpcClient(
            str(ray.get(self._controller.open.remote())), keys, timeout_s=LIMIT_S
        )
        status = ray.get(self._host.ask.remote("start", FIRST))
        self.server = psutil.Process(status.pid)
        self._running = self._controller.ask.remote("run")
        ray.get(self._controller.ask.remote("engines_started"))
        self._trainer.request(Hello(1, 1, FIRST, (), (FIRST,)))
        self.arm = Arm(self.answer, self._processes, self.finish)

    async def answer(self, number: int) -> int:
        """Take the plan of one step.  The first batch began with the controller."""
        if number:
            ray.get(self._controller.next_batch.remote())
        ask = TakePlan(number, LIMIT_S, 0)
        while not isinstance(told := self._trainer.request(ask), Plan):  # it takes longer
            assert isinstance(told, Ok | SetEngines), told
        return sum(rollout.num_sampled for rollout in told.plan.rollouts())

    def finish(self, number: int) -> None:
        """The step is done, as far as the controller is concerned."""
        report = StepDone(number, PolicyVersion(0, number + 1), {"mismatch/tokens": 1.0}, "")
        self._trainer.expect(report, Ok)

    def server_url(self) -> str:
        listening = (
            one.laddr
            for process in _tree(self.server)
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        )
        address = next(listening)
        return f"http://{address.ip}:{address.port}"

    def _processes(self) -> list[psutil.Process]:
        """All that Ray started, and the server with them."""
        found = []
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "bare_server" not in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def close(self) -> None:
        self._trainer.close()
        ray.get(self._controller.stop.remote())
        ray.get(self._host.ask.remote("stop"))


@asynccontextmanager
async def _whole_path(plan: RunContext, scratch: Path) -> AsyncIterator[WholePath]:
    start_ray(plan.config, plan.run, scratch)
    try:
        path = WholePath(plan)
        print("engine: the whole path is up", flush=True)
        yield path
        path.close()
    finally:
        ray.shutdown()
        shutil.rmtree(plan.blob_dir, ignore_errors=True)

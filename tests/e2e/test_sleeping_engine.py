"""A real SGLang server gives its memory back and takes it again, under running requests.

Its pages return to the system, and a request that would touch them while they are away ends the
server: so every way to such a request is closed, and the control opens one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from moerl.config.schema import EngineConfig
from moerl.core.errors import EngineError, RecordError
from moerl.core.messages import AskEngine, EngineVersion, MemoryState, SleepEngine, WakeEngine
from moerl.core.types import Array, ModelShape, PolicyVersion, Rollout, SamplingParams, Segment
from moerl.engine.protocol import MEMORY_PARTS, RETRACT_AUDIT
from moerl.records.blob_ranges import read_mask, read_routes
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.patience import patience
from tests.helpers.replay_scenario import FULL, TRUNCATED, Scoring, World, row_of, start, tokens
from tests.helpers.session_publisher import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KV = ("kv_cache",)
LIMIT_S = 60.0
SURE = replace(TRUNCATED, max_new_tokens=150, temperature=2e-6)  # no second token is likely
MAX_GAP, CONTROL = 5e-5, 1e-3  # nats, fp32
VERSIONS = [PolicyVersion(0, step) for step in range(220)]
NO_GUARD = Path(__file__).parents[1] / "helpers" / "no_guard"
MODES = {"abort_resume": "", "retract": RETRACT_AUDIT}


# --- what the tests do with an engine -------------------------------------------------------------
class Sleeper:
    """An engine, and a trainer of one rank that publishes to it."""

    def __init__(self, world: World) -> None:
        self.world, self._newest = world, 0
        folders = list(world.folders.values())
        world.folders = {version: folders[version.step % len(folders)] for version in VERSIONS}
        self.publisher = Publisher(world.host, world.folders, live=True)

    async def sleep(self, *parts: str) -> MemoryState:
        wait_s = patience(LIMIT_S)
        return await self.world.host.move_memory(SleepEngine(0, parts or MEMORY_PARTS, wait_s))

    async def wake(self, *parts: str) -> MemoryState:
        wait_s = patience(LIMIT_S)
        return await self.world.host.move_memory(WakeEngine(0, parts or MEMORY_PARTS, wait_s))

    async def write(self, steps: int = 1) -> PolicyVersion:
        """Publish a later version."""
        self._newest += steps
        await self.publisher.stage(VERSIONS[self._newest])
        await self.publisher.commit(VERSIONS[self._newest], patience(LIMIT_S))
        return VERSIONS[self._newest]

    async def switch(self, steps: int = 1) -> MemoryState:
        """To sleep as a whole, and back with a later version."""
        slept = await self.sleep()
        await self.wake("weights")
        await self.write(steps)
        await self.wake("kv_cache")
        return slept

    async def play(
        self,
        name: str,
        switches: Sequence[Callable[[], Any]] = (),
        sampling: SamplingParams = SURE,
    ) -> list[Rollout]:
        """Three requests; each switch comes after some two dozen tokens of them."""
        turns = [start(f"{name}.{i}", tokens(20 + 30 * i, i), sampling) for i in range(3)]
        seen = self.world.prefills()
        running = asyncio.create_task(self.finish(turns))
        for switch in switches:
            await self.world.decode_a_while(running, seen)
            assert not running.done(), "they ended before the switch"
            seen = self.world.prefills()
            await switch()
        await running
        return [row_of(turn) for turn in turns]

    async def finish(self, turns: Sequence[Any]) -> None:
        """Resume what is interrupted, as the controller does."""
        while left := [turn for turn in turns if not turn.finished]:
            await self.world.call(left)

    async def state(self) -> EngineVersion:
        found = await self.world.host.session(AskEngine(0))
        assert isinstance(found, EngineVersion)
        return found

    def cpu_s(self) -> float:
        """CPU time of the schedulers."""
        times = [one.cpu_times() for one in self.schedulers()]
        return float(sum(one.user + one.system for one in times))

    def schedulers(self) -> list[psutil.Process]:
        server = self.world.host._server
        assert server is not None
        return [one for one in server._children if "scheduler" in " ".join(one.cmdline())]

    def rss(self) -> int:
        """Resident bytes of rank 0's scheduler, without memory that it shares (staging)."""
        text = Path(f"/proc/{self.schedulers()[0].pid}/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) << 10


def records(world: World, rollout: Rollout) -> list[Array]:
    """Everything that was recorded of a rollout, except its log-probabilities."""
    rows = read_routes(world.store, rollout.routing, layers=world.shape.moe_layers)
    offsets, ids = read_mask(world.store, rollout.sampling_mask)
    return [rollout.token_ids, rollout.loss_mask, offsets, ids, *rows.values()]


def equal(world: World, one: Sequence[Rollout], other: Sequence[Rollout]) -> bool:
    return all(
        np.array_equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(records(world, x), records(world, y), strict=True)
    )


@dataclass
class Slept:
    """What a scenario left behind."""

    world: World
    whole: list[Rollout] = field(default_factory=list)  # uninterrupted
    over: dict[str, list[Rollout]] = field(default_factory=dict)
    memory: dict[str, MemoryState] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    states: dict[str, EngineVersion] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)  # requests that reached the server
    readable: bool | None = None  # tokens of a sleeping engine without the guard are the right ones
    unguarded: list[int] = field(default_factory=list)
    cut: Segment | RecordError | None = None  # reply to a request that was aborted asleep
    core: float = 0.0  # share of a core that the sleeping scheduler used
    scores: Scoring | None = None


class Scenario(Sleeper):
    def __init__(self, world: World, switch: Path) -> None:
        super().__init__(world)
        self.slept, self._open = Slept(world), switch
        self._pace_s = 0.0  # that the server takes for some two dozen tokens

    async def run(self) -> Slept:
        slept, updates = self.slept, self.world.host._updates
        begin = asyncio.get_running_loop().time()
        await self.world.complete([start("pace", tokens(40, 40), FULL)])
        self._pace_s = asyncio.get_running_loop().time() - begin
        slept.whole = await self.play("whole")
        for mode, how in MODES.items():
            updates.mode = how
            slept.over[f"{mode} kv"] = await self.play(f"{mode}.kv", [self.doze, self.doze])
            slept.over[f"{mode} same"] = await self.play(f"{mode}.same", [lambda: self.switch(3)])
        for mode, how in MODES.items():
            updates.mode = how
            many = replace(TRUNCATED, max_new_tokens=SURE.max_new_tokens)
            rollouts = await self.play(f"{mode}.new", [self.switch, self.switch], many)
            slept.over[f"{mode} new"] = rollouts
            await self.switch(1)  # to the first weights again
        await self.abort_asleep()
        await self.misuse()
        return slept

    async def doze(self) -> None:
        """The KV cache alone, for a while in which requests would have gone on."""
        self.slept.memory["kv"] = await self.sleep(*KV)
        await asyncio.sleep(2 * self._pace_s)
        await self.wake(*KV)

    async def abort_asleep(self) -> None:
        """A request that runs is aborted while it has no cache."""
        request, seen = start("cut", tokens(30, 30), SURE).request(), self.world.prefills()
        running = asyncio.create_task(self.world.host.generate([request]))
        await self.world.decode_a_while(running, seen)
        await self.sleep(*KV)
        await self.world.host.abort([request.name])
        await asyncio.sleep(0.2)
        assert not running.done()
        await self.wake(*KV)
        (self.slept.cut,) = await running

    async def misuse(self) -> None:
        slept, client = self.slept, self.world.host._client
        assert client is not None
        reached, move = slept.asked, client.move_memory

        async def counted(what: str, parts: Sequence[str]) -> Any:
            reached[what] = reached.get(what, 0) + 1
            return await move(what, parts)

        client.move_memory = counted  # type: ignore[method-assign]
        slept.memory["awake"] = await self.wake()
        slept.memory["first"] = await self.sleep()
        slept.memory["second"] = await self.sleep()
        slept.states["asleep"] = await self.state()
        late = asyncio.create_task(self.play("late"))
        await self.refused("publish", self.write())
        await self.refused("kv", self.wake(*KV))
        for path in ("release", "resume"):
            await self.refused(
                path, self.world.ask("POST", f"/{path}_memory_occupation", tags=None)
            )
        await self.refused("unknown part", client.move_memory("sleep", ["graphs"]))
        await client.pulse()  # its heartbeat reaches every scheduler
        assert await client.healthy()
        before = self.cpu_s()
        await asyncio.sleep(3)
        slept.core = (self.cpu_s() - before) / 3
        assert not late.done()
        await self.wake("weights")
        slept.states["dirty"] = await self.state()
        await self.refused("dirty kv", self.wake(*KV))
        await self.write(2)
        await self.wake(*KV)
        slept.states["awake"] = await self.state()
        slept.over["late same"] = await late
        client.move_memory = move  # type: ignore[method-assign]
        await self.without_gate()

    async def refused(self, name: str, work: Any) -> None:
        with pytest.raises((EngineError, AssertionError)) as caught:
            await work
        self.slept.causes[name] = str(caught.value)

    async def without_gate(self) -> None:
        """A request passes the gate of a sleeping engine: first with pages that can be read."""
        asked = {
            "input_ids": list(tokens(20, 0)),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
        }
        whole = (await self.world.ask("POST", "/generate", **asked))["output_ids"]
        self._open.touch()
        await self.sleep()
        await self.world.ask("POST", "/continue_generation")
        self.slept.unguarded = (await self.world.ask("POST", "/generate", **asked))["output_ids"]
        self.slept.readable = self.slept.unguarded == whole
        await self.world.ask("POST", "/pause_generation", mode="retract")
        await self.wake("weights")
        await self.write(3)
        await self.wake(*KV)
        self._open.unlink()
        await self.sleep()
        await self.world.ask("POST", "/continue_generation")
        with suppress(aiohttp.ClientError, AssertionError):
            await self.world.ask("POST", "/generate", **asked)
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(self.world.host.watch(), patience(20))
        self.slept.causes["guarded"] = str(caught.value)


def make_world(root: Path, **change: Any) -> World:
    root.mkdir()
    config = EngineConfig(max_total_tokens=16384, answer_timeout_s=patience(120.0))
    return World(root, replace(config, **change.pop("engine", {})), sleeps=True, **change)


@pytest.fixture(scope="module")
def slept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slept]:
    root = tmp_path_factory.mktemp("sleep")
    world = make_world(root / "world")
    try:
        with pytest.MonkeyPatch.context() as patch:
            folders = [str(NO_GUARD), str(NO_GUARD.parents[2]), os.environ.get("PYTHONPATH", "")]
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
            patch.setenv("MOERL_TEST_OPEN", str(root / "open"))
            world.run(world.host.start(VERSIONS[0]), 240.0)
        slept = world.run(Scenario(world, root / "open").run(), 300.0)
        slept.scores = score(slept, root)
        yield slept
    finally:
        world.run(world.host.stop())
        world.loop.close()


def score(slept: Slept, root: Path) -> Scoring:
    from moerl.records.segment_split import split_segments

    scoring = Scoring(slept.world, root)
    for mode in MODES:
        parts = [part for r in slept.over[f"{mode} new"] for part in split_segments(r)]
        versions = sorted({part.versions[0].version for part in parts})
        for version in versions:
            own = [part for part in parts if part.versions[0].version == version]
            scoring.add(f"{mode}@{version}", own, version)
        scoring.add(f"{mode}!", own, versions[0])
    scoring.run()
    return scoring


# --- records --------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_a_sleep_at_unchanged_weights_leaves_no_trace_in_the_records(
    slept: Slept, mode: str
) -> None:
    world = slept.world
    dozed, same = slept.over[f"{mode} kv"], slept.over[f"{mode} same"]
    assert equal(world, slept.whole, dozed)
    assert equal(world, slept.whole, same)
    assert not equal(world, slept.whole, slept.over[f"{mode} new"]), "control: other weights"
    assert {len(r.versions) for r in (*slept.whole, *dozed)} == {1}
    assert {len(r.versions) for r in same} == {2}
    for rollout in slept.whole:
        assert len(np.unique(rollout.token_ids)) > 10


@pytest.mark.parametrize("mode", MODES)
def test_segments_over_a_switch_match_their_own_weights(slept: Slept, mode: str) -> None:
    assert slept.scores is not None
    for rollout in slept.over[f"{mode} new"]:
        steps = [span.version.step for span in rollout.versions]
        assert [b - a for a, b in pairwise(steps)] == [1, 1]
    names = [name for name in slept.scores.jobs if name.startswith(f"{mode}@")]
    assert len(names) == 3
    for name in names:
        gap = np.abs(np.concatenate(list(slept.scores.gaps(name).values())))
        print(f"{name}: max {gap.max():.1e} nats over {len(gap)} tokens")
        assert gap.max() <= MAX_GAP, name
    other = np.abs(np.concatenate(list(slept.scores.gaps(f"{mode}!").values())))
    assert other.max() > CONTROL, "control: weights of another version"


def test_requests_that_come_to_a_sleeping_engine_wait(slept: Slept) -> None:
    assert equal(slept.world, slept.whole, slept.over["late same"])


def test_a_request_that_is_aborted_asleep_returns_its_record(slept: Slept) -> None:
    assert isinstance(slept.cut, Segment), slept.cut
    assert slept.cut.finish == "abort"
    assert 1 < len(slept.cut.output_ids) < SURE.max_new_tokens
    assert slept.cut.routing is not None


# --- states ---------------------------------------------------------------------------------------
def test_every_misuse_is_answered_and_the_server_lives(slept: Slept) -> None:
    """What is there already is answered by the host: of four changes three reach the server."""
    assert slept.memory["awake"] == MemoryState((), False)
    assert slept.memory["second"] == MemoryState(("kv_cache", "weights"), True)
    assert slept.memory["first"].num_bytes > 0
    assert slept.asked == {"sleep": 2, "wake": 2}, "one sleep was of a part that does not exist"
    assert "while the KV cache alone sleeps, here kv_cache, weights" in slept.causes["publish"]
    for name in ("kv", "dirty kv"):
        assert "no verified weights" in slept.causes[name]
    for name in ("release", "resume"):
        assert "host alone" in slept.causes[name]
    assert "no part of an engine's memory is called graphs" in slept.causes["unknown part"]


def test_an_engine_says_what_sleeps_and_whether_its_weights_are_whole(slept: Slept) -> None:
    found = {name: (state.asleep, state.is_dirty) for name, state in slept.states.items()}
    assert found == {
        "asleep": (("kv_cache", "weights"), True),
        "dirty": (("kv_cache",), True),
        "awake": ((), False),
    }
    assert not any(state.cause for state in slept.states.values())


def test_without_the_gate_a_sleeping_engine_ends_and_without_the_guard_it_lies(
    slept: Slept,
) -> None:
    assert slept.readable is False
    assert len(slept.unguarded) == 24
    assert "Segmentation fault" in slept.causes["guarded"], slept.causes["guarded"]


def test_a_sleeping_engine_uses_no_core(slept: Slept) -> None:
    """SGLang's own loop of a paused scheduler does not sleep: it took all that it could get."""
    print(f"a sleeping scheduler used {slept.core:.3f} of a core")
    assert slept.core < 0.15


# --- memory ---------------------------------------------------------------------------------------
LARGE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
SHAPE = ModelShape(
    vocab_size=tiny.VOCAB,
    num_layers=8,
    moe_layers=tuple(range(8)),
    num_experts=32,
    top_k=4,
    eos_token_ids=(tiny.EOS,),
)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_memory_returns_to_the_system_and_does_not_grow(tmp_path: Path, tp: int) -> None:
    """107 M parameters; the size of what is touched is known beforehand."""
    model = tiny.save(tmp_path / "model", 0, 256, **LARGE)
    weights = (model / "model.safetensors").stat().st_size // tp
    assert weights * tp > 4 * 100e6
    kv = 2 * 8 * 4 * 64 * 4 * 4 * 500 // tp  # keys and values, layers, heads, width, fp32, tokens
    engine = {"tp": tp, "max_total_tokens": 32768}
    seen = cycles(make_world(tmp_path / "world", model=model, shape=SHAPE, engine=engine), 6)
    for slept, awake, asleep in zip(seen.slept, seen.awake, seen.asleep, strict=True):
        assert slept.num_bytes >= 0.95 * (weights + kv)
        assert awake - asleep >= 0.9 * slept.num_bytes
    for values in (seen.awake, seen.asleep):  # a leak is in both of the last
        assert min(values[-2:]) <= 1.03 * max(values[1:4]), values


@pytest.mark.full
def test_two_hundred_switches_leave_nothing_behind(tmp_path: Path) -> None:
    seen = cycles(make_world(tmp_path / "world"), 200)
    for values in (seen.awake, seen.asleep):
        assert values[-1] <= values[20] + 10e6


@dataclass
class Seen:
    """Bytes of a scheduler before and after each sleep."""

    awake: list[int] = field(default_factory=list)
    asleep: list[int] = field(default_factory=list)
    slept: list[MemoryState] = field(default_factory=list)


def cycles(world: World, count: int) -> Seen:
    """Generate, sleep as a whole, wake with a later version; `count` times."""
    sleeper, seen, costs = Sleeper(world), Seen(), []
    few = replace(FULL, max_new_tokens=4)

    async def one(number: int) -> None:
        turns = [start(f"{number}.{i}", tokens(500, i), few) for i in range(4)]
        await world.host.generate([turn.request() for turn in turns])
        seen.awake.append(sleeper.rss())
        seen.slept.append(await sleeper.sleep())
        seen.asleep.append(sleeper.rss())
        woken = await sleeper.wake("weights")
        await sleeper.write()
        kv = await sleeper.wake(*KV)
        costs.append((seen.slept[-1].seconds, woken.seconds, kv.seconds))

    try:
        world.run(world.host.start(VERSIONS[0]), 300.0)
        for number in range(count):
            world.run(one(number), 60.0)
    finally:
        world.run(world.host.stop())
        world.loop.close()
    for name, values in (("awake", seen.awake), ("asleep", seen.asleep)):
        print(f"RSS {name} MB:", [value // 10**6 for value in (*values[:5], values[-1])])
    parts = [f"{1e3 * sorted(column)[count // 2]:.0f}" for column in zip(*costs, strict=True)]
    print(f"median ms: sleep {parts[0]}, wake weights {parts[1]}, wake KV {parts[2]}")
    return seen

"""Turns while engines are updated, drained, lost and come back: each token once, no turn lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moerl.config.schema import SupervisionConfig
from moerl.controller.engine_choice import EngineChoice
from moerl.controller.engine_pool import EnginePhase
from moerl.controller.turn_router import TurnRouter
from moerl.core.errors import EngineError, RecordError
from moerl.core.types import Finish, GenerateRequest, PolicyVersion, Prompt, SamplingParams, Segment
from moerl.episodes.open_episode import EpisodeEnded, EpisodeSpec, OpenEpisode, TurnRequest
from tests.helpers.controllers import CONFIG, make
from tests.helpers.state_machines import explore
from tests.helpers.stub_engine import StubEngine

CONFIG_ = replace(CONFIG, supervision=SupervisionConfig(max_restarts=3))
LONGEST = 6  # tokens of a turn


def token(name: str, place: int) -> int:
    """The token of a turn at a place, whoever samples it."""
    return (sum(map(ord, name)) + 7 * place) % 50


@dataclass
class Calls:
    """Requests of one engine, in place of `EngineCalls`; the machine answers them."""

    index: int
    check: Callable[[int, GenerateRequest], None]
    open: dict[str, tuple[GenerateRequest, Any]] = field(default_factory=dict)
    late: list[tuple[GenerateRequest, Any]] = field(default_factory=list)  # withdrawn

    def send(self, requests: Sequence[GenerateRequest], take: Any, on_tokens: Any = None) -> None:
        for request in requests:
            self.check(self.index, request)
            self.open[request.name] = (request, take)

    def cancel(self, names: Sequence[str], late: Any) -> None:
        self.late += [(self.open.pop(name)[0], late) for name in names]


class Turns(RuleBasedStateMachine):
    """Model: of each turn, its prompt; its tokens follow from its name."""

    @initialize(engines=st.sampled_from([1, 2, 2, 3]))
    def begin(self, engines: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="router-"))
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.make(engines))
        self.newest, self.count = 0, 0
        self.episodes: dict[str, OpenEpisode] = {}
        self.turns: dict[str, asyncio.Task[Any]] = {}  # of episodes whose turn is sampled
        self.prompts: dict[str, list[int]] = {}

    async def make(self, engines: int) -> None:
        stubs = [StubEngine(number=i) for i in range(engines)]
        controller, _ = make(self.folder, stubs[0], CONFIG_, more_engines=stubs[1:])
        self.context = controller.context
        choice = EngineChoice(self.context.pool, CONFIG_.rollout, self.context.step_metrics)
        self.router = TurnRouter(self.context, choice)
        self.context.pool.incarnation = 0
        self.context.lineage.restore([PolicyVersion(0, 0)])
        self.states = self.context.pool.engines
        self.calls = [Calls(i, self.check_request) for i in range(engines)]
        for state, calls in zip(self.states.values(), self.calls, strict=True):
            state.calls, state.version = calls, PolicyVersion(0, 0)  # type: ignore[assignment]
        self.running = asyncio.create_task(self.router.run())
        await asyncio.sleep(0)

    def teardown(self) -> None:
        """Whatever happened: engines that are well bring every turn to its end."""
        for index in range(len(self.calls)):
            self.come_back(index)
        for _ in range(200):
            if not any(calls.open for calls in self.calls):
                break
            self.answer(0, LONGEST, fails=False)
        self.act()
        assert not self.turns, "a turn is lost"
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()
        shutil.rmtree(self.folder)

    def act(self, work: Callable[[], object] = lambda: None) -> None:
        """Do this on the loop, and let the loop do all that it can."""

        async def spin() -> None:
            work()
            self.context.tasks.notify()
            for _ in range(8):
                await asyncio.sleep(0)

        self.loop.run_until_complete(spin())
        for name in [name for name, task in self.turns.items() if task.done()]:
            self.ended(name, self.turns.pop(name))

    def check_request(self, index: int, request: GenerateRequest) -> None:
        """It feeds the prompt and every token so far, and asks for the rest."""
        prompt = self.prompts[request.rollout_id]
        episode = self.episodes[request.rollout_id.rpartition(".t")[0]]
        assert self.states[index].version >= episode.newest, "it would go back to older weights"
        sampled = [token(request.rollout_id, i) for i in range(request.num_sampled)]
        assert request.token_ids.tolist() == [*prompt, *sampled], "tokens are lost, or fed twice"
        assert request.sampling.max_new_tokens == LONGEST - request.num_sampled
        assert sum(request.name in calls.open for calls in self.calls) == 0, "it is asked twice"

    def ended(self, name: str, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if error is not None:
            assert isinstance(error, RecordError | EpisodeEnded), error
            del self.episodes[name]
            return
        turn = task.result()
        tokens = turn.sampled.output_ids.tolist()
        assert tokens == [token(turn.name, i) for i in range(len(tokens))]
        steps = [segment.version.step for segment in turn.sampled.segments]
        assert steps == sorted(steps), "a turn went back to older weights"

    # --- turns ------------------------------------------------------------------------------------
    @rule(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        for _ in range(count):
            self.act(self.open)

    def open(self) -> None:
        self.count += 1
        prompt = Prompt(self.count, (1, 2), "", None, {})
        spec = EpisodeSpec(f"{self.count}.0", prompt, SamplingParams(LONGEST))
        self.episodes[spec.name] = OpenEpisode(spec, self.router)
        self.sample(spec.name, TurnRequest(np.array([1, 2], np.int32)))

    def sample(self, name: str, wanted: TurnRequest) -> None:
        episode = self.episodes[name]
        turn = f"{name}.t{len(episode.turns)}"
        self.prompts[turn] = wanted.prompt_ids.tolist()
        self.turns[name] = self.loop.create_task(episode.sample(wanted))

    def idle(self) -> list[str]:
        return sorted(set(self.episodes) - set(self.turns))

    @precondition(lambda self: self.idle())
    @rule(pick=st.integers(0, 9))
    def next_turn(self, pick: int) -> None:
        name = self.idle()[pick % len(self.idle())]
        parent = self.episodes[name].turns[-1]
        ids = np.concatenate([parent.token_ids, np.array([3], np.int32)])
        self.act(lambda: self.sample(name, TurnRequest(ids, parent, len(parent.token_ids))))

    @precondition(lambda self: self.turns)
    @rule(pick=st.integers(0, 9))
    def end_episode(self, pick: int) -> None:
        name = sorted(self.turns)[pick % len(self.turns)]
        self.act(self.episodes[name].end)
        assert name not in self.turns

    # --- replies ----------------------------------------------------------------------------------
    @precondition(lambda self: any(calls.open for calls in self.calls))
    @rule(pick=st.integers(0, 9), count=st.integers(0, LONGEST), fails=st.booleans())
    def answer(self, pick: int, count: int, fails: bool) -> None:
        """So many tokens, or all; an empty one is refused now and then."""
        index = next(i for i, calls in enumerate(self.calls) if calls.open)
        names = sorted(self.calls[index].open)
        request, take = self.calls[index].open.pop(names[pick % len(names)])
        reply: Any = self.reply(index, request, count)
        if fails and not count:
            reply = RecordError("routing_rows", "too few")
        self.act(lambda: take(request.name, reply))

    def reply(self, index: int, request: GenerateRequest, count: int) -> Segment:
        left = request.sampling.max_new_tokens
        count = min(count, left)
        begin = request.num_sampled
        ids = [token(request.rollout_id, begin + i) for i in range(count)]
        finish = Finish.LENGTH if count == left else Finish.ABORT
        version = self.states[index].version
        return Segment(
            request.rollout_id, np.array(ids, np.int32), np.zeros(count, np.float32), version,
            finish, None, None, None, index, 0, 0.0, 0.0,
        )  # fmt: skip

    @precondition(lambda self: any(calls.late for calls in self.calls))
    @rule()
    def late_reply(self) -> None:
        """To a request that was withdrawn: nobody waits for it."""
        index = next(i for i, calls in enumerate(self.calls) if calls.late)
        request, late = self.calls[index].late.pop()
        self.act(lambda: late(self.reply(index, request, 2)))

    # --- engines ----------------------------------------------------------------------------------
    @rule(pick=st.integers(0, 2), count=st.integers(0, 3))
    def update(self, pick: int, count: int) -> None:
        """An engine takes the next version, which interrupts its requests."""
        index = pick % len(self.calls)
        if self.states[index].phase != EnginePhase.UP:
            return
        self.states[index].draining = True
        self.act(lambda: self.interrupt(index, count))
        self.newest = self.context.buffer.next_step = self.newest + 1
        self.states[index].version = PolicyVersion(0, self.newest)
        self.states[index].draining = False
        self.act()

    def interrupt(self, index: int, count: int) -> None:
        for name, (request, take) in sorted(self.calls[index].open.items()):
            del self.calls[index].open[name]
            take(name, self.reply(index, request, count))

    @rule(pick=st.integers(0, 2), count=st.integers(0, 3))
    def lose(self, pick: int, count: int) -> None:
        """An engine dies behind its last replies."""
        index = pick % len(self.calls)
        self.act(lambda: self.interrupt(index, count))
        self.states[index].phase = EnginePhase.LOST
        self.act(lambda: self.fail_all(index))

    def fail_all(self, index: int) -> None:
        for name, (_, take) in sorted(self.calls[index].open.items()):
            del self.calls[index].open[name]
            take(name, EngineError("it was killed"))

    @rule(pick=st.integers(0, 2), count=st.integers(1, 3))
    def lose_the_newest(self, pick: int, count: int) -> None:
        """The only engine with the newest weights dies with turns that it has begun."""
        self.come_back(pick)
        self.update(pick, 0)
        self.start(3)
        self.lose(pick, count)

    @rule(pick=st.integers(0, 2))
    def come_back(self, pick: int) -> None:
        """A new server, or the end of a pause; on the newest weights."""
        index = pick % len(self.calls)
        state = self.states[index]
        if state.phase != EnginePhase.UP or state.leaving:
            state.phase, state.version = EnginePhase.UP, PolicyVersion(0, self.newest)
            state.leaving = False
        self.act()

    @rule(pick=st.integers(0, 2))
    def pause(self, pick: int) -> None:
        """It gets no new requests; those that it has go on."""
        self.states[pick % len(self.calls)].leaving = True
        self.act()

    # --- always -----------------------------------------------------------------------------------
    @invariant()
    def every_turn_is_somewhere(self) -> None:
        asked = [name.rpartition(".t")[0] for calls in self.calls for name in calls.open]
        assert len(asked) == len(set(asked))
        assert {*asked, *self.router.waiting} == set(self.turns), "a turn is lost"
        assert not {*asked} & self.router.waiting, "a turn is asked for and waits"

    @invariant()
    def requests_are_counted(self) -> None:
        for state, calls in zip(self.states.values(), self.calls, strict=True):
            assert state.generating == len(calls.open), "an update would wait for ever"

    @invariant()
    def nothing_waits_beside_an_engine(self) -> None:
        able = [s.version for i, s in self.states.items() if self.context.pool.serves(i)]
        for name in self.router.waiting:
            assert all(version < self.episodes[name].newest for version in able)


def test_any_history() -> None:
    explore(Turns, 50, 25)

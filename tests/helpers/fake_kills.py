"""Runs under the fake clock in which one process is killed in mid-episode, at a moment of a seed.

A controller is killed by cutting it off: its journal is copied at that moment, and nothing that it
does later reaches an engine, the store or the trainer.  Its successor gets the copy.  Engines
sample other tokens in each call, as real ones do, so tokens that are kept have gone on.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moerl.controller.controller import Controller
from moerl.core.errors import EngineError
from moerl.core.ids import episode_of, group_of, life_of, without_life
from moerl.core.messages import CommitUpdate, Message, Plan, Refresh, StepDone, Stop, TakePlan
from moerl.core.serialization import decode_value
from moerl.core.types import Array, EpisodeGroup, GenerateRequest, PolicyVersion, Segment
from moerl.engine.host.reply_parser import SharedPrompts
from moerl.records import BlobStore
from moerl.records.header_check import group_uris
from tests.helpers.controllers import hello, make
from tests.helpers.fake_clock import run_with_fake_clock
from tests.helpers.oracle_agents import Faults, Kills, agents_of, on_one_loop
from tests.helpers.oracle_engine import (
    OracleEngine,
    OraclePrompts,
    OracleScorer,
    World,
    delay_s,
)
from tests.helpers.oracle_runs import ENVIRONMENT, MIXTURE, PROGRAM, SHAPE, Scenario

VICTIMS = ("controller", "host", "program", "worker")
STEPS, JOURNAL_TOKENS, SLICE_TOKENS = 3, 24, 16
LIMIT_S = 60.0  # of the fake clock
_MODES = ("abort_resume", "in_place")
_SOCKETS_S = 0.0005  # real; later bytes only delay a turn
_LOOK_S = 0.0013
Sampled = dict[str, list[int]]  # tokens of each turn, by its name without life and try


def scenario_of(victim: str, seed: int) -> Scenario:
    rollout = {
        "groups_per_step": 2,
        "group_size": 2,
        "max_lag": 100,  # no group is too old, so each that was open is trained
        "buffer_depth": 1,
        "slice_tokens": SLICE_TOKENS,
        "journal_tokens": JOURNAL_TOKENS,
        "in_flight_mode": _MODES[seed % 2],
    }
    tasks = MIXTURE[:3] if victim in ("controller", "host") else ()
    task = {"program": {"agent": PROGRAM}, "worker": ENVIRONMENT}.get(victim, {})
    return Scenario(rollout, tasks=tasks, task=task, steps=STEPS)


# --- the parts of a run ---------------------------------------------------------------------------
class OneLength(World):
    """A turn has the same length in each life."""

    def length(self, key: tuple[str, int]) -> int:
        return super().length((key[0], 0))


class NewTokens(OracleEngine):
    """Samples other tokens in each call, and forgets an earlier controller as a host does."""

    calls = 0
    deletes = True  # what the earlier controller has left

    def _segment(
        self, request: GenerateRequest, key: tuple[str, int], *args: Any, **fields: Any
    ) -> Segment:
        NewTokens.calls += 1
        return super()._segment(request, (key[0], NewTokens.calls), *args, **fields)

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        self.mailbox.clear()
        for task in self._running:
            task.cancel()
        self._stops.clear()
        self._shared = SharedPrompts()
        assert kept is not None
        left = [uri for uri in self.world.store.uris() if uri not in kept and life_of(uri) < life]
        if self.deletes:
            self.world.store.delete_all(left)


class Line:
    """Calls of one controller to an engine; when it is cut, none arrives or is answered."""

    def __init__(self, engine: NewTokens) -> None:
        self.engine, self.is_cut = engine, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            if self.is_cut:
                await asyncio.Event().wait()
            return await asyncio.shield(asyncio.ensure_future(getattr(self.engine, name)(*args)))

        return call


class Store(BlobStore):
    """The store of one controller."""

    is_cut = False

    def delete(self, uri: str) -> None:
        if not self.is_cut:
            super().delete(uri)


@dataclass
class Life:
    """One controller."""

    controller: Controller
    line: Line
    store: Store
    journal: Path
    running: asyncio.Task[None]
    died: asyncio.Event = field(default_factory=asyncio.Event)

    def open_turns(self) -> Sampled:
        """Tokens that the controller has of turns that are not admitted."""
        found: Sampled = {}
        for episode in self.controller.producer.episodes():
            for turn in episode.turns:
                found[without_life(turn.name)] = turn.output_ids.tolist()
            for call in episode.calls:
                found[without_life(call.turn.name)] = call.turn.output_ids.tolist()
        return {name: ids for name, ids in found.items() if ids}

    def named(self) -> set[str]:
        """Blobs that this controller knows."""
        controller = self.controller
        partials = [*controller.producer.episodes(), *controller.scoring_stage.episodes()]
        uris = group_uris(*controller._availability.trainable())
        return uris.union(
            *(one.blob_uris() for one in partials), controller.context.services.journal.turns.uris
        )


def logged_turns(journal: Path) -> Sampled:
    """Tokens of each turn in a journal."""
    found: Sampled = {}
    for segment in _replies(journal):
        ids = found.setdefault(without_life(segment.rollout_id), [])
        ids += [int(one) for piece in segment.pieces for one in piece.output_ids]
    return found


def _replies(journal: Path) -> Iterable[Segment]:
    if not (journal / "turns.sqlite").exists():
        return []
    with contextlib.closing(sqlite3.connect(journal / "turns.sqlite")) as db:
        bodies = db.execute("select body from replies order by id").fetchall()
    return [decode_value(body, Segment) for (body,) in bodies]


# --- a run ----------------------------------------------------------------------------------------
@dataclass
class Story:
    """What a run has shown.

    admitted: groups in the order of their admission, by any controller.  plans: ids by step, for
    each answer to the trainer.  known: tokens that must go on, of the turns that were open at the
    death.  killed: groups of the episodes that were killed.  there, named: blobs at the end.
    """

    victim: str
    admitted: list[EpisodeGroup] = field(default_factory=list)
    plans: list[tuple[int, list[int]]] = field(default_factory=list)
    known: Sampled = field(default_factory=dict)
    heard: Sampled = field(default_factory=dict)  # tokens that the victim had, logged or not
    killed: set[int] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    turns_left: int = 0  # in the journal
    running: int = 0  # programs and environments


class KilledRun:
    """damage: changes the journal that the next controller gets."""

    def __init__(
        self,
        victim: str,
        seed: int,
        folder: Path,
        patch: pytest.MonkeyPatch,
        damage: Callable[[Path], None] | None,
    ) -> None:
        self.victim, self.seed, self._folder, self._patch = victim, seed, folder, patch
        self._damage, self._scenario = damage, scenario_of(victim, seed)
        self._world = OneLength(
            BlobStore(folder / "blobs", "n"), seed, self._scenario.config().rollout.in_flight_mode
        )
        self._engine = NewTokens(self._world)
        self._kills, self._done = Kills(), 0
        self.lives: list[Life] = []
        self._next = asyncio.Event()  # a controller answers
        self.story = Story(victim)

    async def play(self) -> Story:
        on_one_loop(self._patch)
        await self._begin_life(self._folder / "life-0")
        training = asyncio.ensure_future(self._train())
        await self._kill()
        await training
        await self._rest()
        return self.story

    # --- lives ------------------------------------------------------------------------------------
    async def _begin_life(self, folder: Path) -> Life:
        folder.mkdir(parents=True, exist_ok=True)
        config, is_first = self._scenario.config(), not self.lives
        line, store = Line(self._engine), Store(self._folder / "blobs", "n")
        labels = [str(task["label"]) for task in self._scenario.tasks] or [""]
        agents: dict[str, Any] = {}
        if self._scenario.has_agents:
            agents = agents_of(config, Faults(), folder, self._patch, self._kills)
        controller, _ = make(
            folder,
            line,  # type: ignore[arg-type]
            config,
            model=SHAPE,
            blobs=store,
            scorer=OracleScorer(),
            prompts=OraclePrompts(labels),
            agents=agents,
            trainer_alive=not is_first,
            saved_steps=lambda: self._done,
        )
        self._record(controller, store)
        if not is_first:
            await controller.rejoin([])
        running = asyncio.ensure_future(controller.run())
        life = Life(controller, line, store, folder / "journal", running)
        self.lives.append(life)
        self._next.set()
        return life

    def _record(self, controller: Controller, store: Store) -> None:
        journal = controller.context.services.journal
        admit = journal.admitted

        def admitted(group: EpisodeGroup) -> None:
            admit(group)
            if not store.is_cut:
                self.story.admitted.append(group)

        self._patch.setattr(journal, "admitted", admitted)

    # --- deaths -----------------------------------------------------------------------------------
    async def _kill(self) -> None:
        """Wait for a moment of the seed in which there is something to be killed."""
        await asyncio.sleep(delay_s(0.02, 0.12, "kill", self.victim, self.seed))
        life = self.lives[-1]
        while not self._is_due(life):
            assert self._done < STEPS, "the run ended before the moment"
            await asyncio.sleep(_LOOK_S)
        self.story.heard = self.story.known = life.open_turns()
        await getattr(self, f"_kill_{self.victim}")(life)

    def _is_due(self, life: Life) -> bool:
        open_turns = life.open_turns()
        if self.victim == "controller":
            calls = [call for one in life.controller.producer.episodes() for call in one.calls]
            in_turn = {without_life(call.turn.name) for call in calls if call.turn.num_sampled}
            can_damage = self._damage is None or life.controller.context.buffer.num_ready > 0
            return can_damage and bool(in_turn & logged_turns(life.journal).keys())
        if self.victim == "host":
            return self._engine.is_sampling and len(open_turns) > 2
        if self.victim == "program":
            return bool(self._with_turns(open_turns)) and len(open_turns) > 2
        return {group_of(name) % 2 for name in open_turns} == {0, 1} and bool(self._in_worker())

    def _with_turns(self, open_turns: Sampled) -> list[str]:
        """Running programs that have had tokens."""
        begun = {episode_of(name) for name in open_turns}
        return sorted(name for name in self._kills.programs if without_life(name) in begun)

    async def _kill_controller(self, life: Life) -> None:
        life.line.is_cut = life.store.is_cut = True
        folder = self._folder / f"life-{len(self.lives)}"
        shutil.copytree(life.journal, folder / "journal")
        self.story.known = logged_turns(folder / "journal")
        if self._damage is not None:
            self._damage(folder / "journal")
        self._next.clear()
        life.died.set()
        await life.controller.stop()
        await asyncio.gather(life.running, return_exceptions=True)
        await asyncio.sleep(delay_s(0.02, 0.06, "start", self.seed))
        await self._begin_life(folder)

    async def _kill_host(self, life: Life) -> None:
        self._engine.kill()
        life.controller.engine_lost(0)
        await asyncio.sleep(delay_s(0.02, 0.06, "start", self.seed))
        self._engine = NewTokens(self._world)
        life.line = Line(self._engine)
        life.controller.engine_back(0, life.line)  # type: ignore[arg-type]

    async def _kill_program(self, life: Life) -> None:
        running = self._with_turns(life.open_turns())
        name = running[self.seed % len(running)]
        self.story.killed = {group_of(name)}
        self._kills.programs[name].set()

    async def _kill_worker(self, life: Life) -> None:
        names = self._in_worker()
        self.story.killed = set(map(group_of, names))
        for name in names:
            self._kills.environments[name].set()

    def _in_worker(self) -> list[str]:
        """Environments in one of two workers, which have the groups in turn."""
        return [name for name in self._kills.environments if group_of(name) % 2 == self.seed % 2]

    # --- the trainer ------------------------------------------------------------------------------
    async def _ask(self, message: Message) -> Message:
        """As a trainer asks: once more when a controller died before it answered."""
        while True:
            await self._next.wait()
            life = self.lives[-1]
            asking = asyncio.ensure_future(life.controller.handle(message))
            dying = asyncio.ensure_future(life.died.wait())
            await asyncio.wait({asking, dying, life.running}, return_when="FIRST_COMPLETED")
            dying.cancel()
            if not life.died.is_set():
                if life.running.done():
                    life.running.result()
                return await asking
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _publish(self, version: PolicyVersion) -> None:
        with contextlib.suppress(EngineError):  # a dead engine gets a later version
            await self._ask(CommitUpdate(0, version, 60.0))

    async def _train(self) -> None:
        version = PolicyVersion(0, 0)
        await self._ask(hello(version))
        while not isinstance(reply := await self._ask(TakePlan(version.step, 60.0, 0)), Stop):
            if isinstance(reply, Refresh):
                await self._publish(version)
            if not isinstance(reply, Plan):
                continue
            ids = [group.group_id for group in reply.plan.groups]
            self.story.plans.append((version.step, ids))
            await asyncio.sleep(self._scenario.step_s)
            version = PolicyVersion(0, version.step + 1)
            self._done = version.step
            await self._ask(StepDone(version.step - 1, version, {}, ""))
            await self._publish(version)

    async def _rest(self) -> None:
        """Let every episode end, and look at what is left."""
        life = self.lives[-1]
        controller, story = life.controller, self.story
        while [*controller.producer.episodes(), *controller.scoring_stage.episodes()]:
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(1.0)  # for replies that nobody waits for
        story.there, story.named = set(life.store.uris()), life.named()
        story.turns_left = len(list(_replies(life.journal)))
        await controller.stop()
        await life.running
        story.running = len(self._kills.programs) + len(self._kills.environments)


def killed_run(
    victim: str,
    seed: int,
    folder: Path,
    *,
    damage: Callable[[Path], None] | None = None,
) -> Story:
    async def body() -> Story:
        async with asyncio.timeout(LIMIT_S):
            return await KilledRun(victim, seed, folder, patch, damage).play()

    with pytest.MonkeyPatch.context() as patch:
        sockets_s = _SOCKETS_S * scenario_of(victim, seed).has_sockets
        return run_with_fake_clock(body(), patch, sockets_s=sockets_s)


# --- checks ---------------------------------------------------------------------------------------
def check_once(story: Story) -> None:
    """Each group is admitted and trained once, and none is lost but that of a killed program."""
    admitted = Counter(group.group_id for group in story.admitted)
    assert set(admitted.values()) == {1}, f"admitted twice: {admitted}"
    steps = [step for step, _ in story.plans]
    assert steps == list(range(STEPS)), steps
    trained = Counter(one for _, ids in story.plans for one in ids)
    assert set(trained.values()) == {1}, f"trained twice: {trained}"
    assert trained.keys() <= admitted.keys()
    missing = set(range(max(admitted) + 1)) - admitted.keys()
    assert missing == (story.killed if story.victim == "program" else set()), "a group was lost"


def check_text(story: Story) -> None:
    """Tokens of turns that were open at the death are trained where they stood."""
    seen = 0
    for group in story.admitted:
        if group.group_id in story.killed:  # it was played again, or dropped
            continue
        for episode in group.episodes:
            name = without_life(episode.episode_id)
            left_out = {without_life(turn.name) for turn in episode.graph if turn.left_out}
            rows = [turn.rollout.token_ids for turn in episode.turns]
            for turn, ids in story.known.items():
                if episode_of(turn) == name and turn not in left_out:
                    assert any(_has(row, ids) for row in rows), f"{turn} does not go on"
                    seen += 1
    assert seen, "no open turn was seen again"


def _has(row: Array, ids: list[int]) -> bool:
    whole = row.tolist()
    return any(whole[at : at + len(ids)] == ids for at in range(len(whole) - len(ids) + 1))


def check_cost(story: Story) -> None:
    """An episode loses fewer tokens than `rollout.journal_tokens` with its controller."""
    heard, logged = (Counter[str](), Counter[str]())
    for counts, turns in ((heard, story.heard), (logged, story.known)):
        for name, ids in turns.items():
            counts[episode_of(name)] += len(ids)
    assert all(heard[name] - logged[name] < JOURNAL_TOKENS for name in heard), (heard, logged)


def check_nothing_left(story: Story) -> None:
    """No blob, turn, program or environment stays."""
    assert not story.there - story.named, "blobs are left"
    assert not story.named - story.there, "blobs are lost"
    assert (story.turns_left, story.running) == (0, 0)

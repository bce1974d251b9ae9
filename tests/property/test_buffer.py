"""The buffer in any order of events: no token too old, nothing lost, nothing twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moerl.controller.buffer import GroupBuffer
from moerl.core.ids import ranges
from moerl.core.types import (
    Episode,
    EpisodeGroup,
    Finish,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
    VersionSpan,
)
from tests.helpers.state_machines import explore


def group(group_id: int, *steps: int) -> EpisodeGroup:
    """A sibling for each of `steps`, sampled under its weights; its reward is its number."""
    rollout = Rollout(
        rollout_id=f"{group_id}.0",
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([-1.0], np.float32),
        versions=(),
        routing=(),
        sampling_mask=(),
        finish=Finish.STOP,
        sampling=SamplingParams(1),
        engine=0,
    )
    prompt = Prompt(group_id, (1,), "", None, {})
    rollouts = [replace(rollout, versions=(VersionSpan(0, PolicyVersion(0, s)),)) for s in steps]
    siblings = [Episode(f"{i}", (Turn(r),), Score(float(i))) for i, r in enumerate(rollouts)]
    return EpisodeGroup(group_id, prompt, tuple(siblings))


def oldest(group: EpisodeGroup) -> int:
    return group.oldest.step


class Buffer(RuleBasedStateMachine):
    """Model: where each id is, in sets; the next id is the lowest that is nowhere."""

    @initialize(
        batch=st.integers(1, 3),
        max_lag=st.integers(0, 3),
        depth=st.integers(0, 3),
        selection=st.sampled_from(["oldest", "freshest", "strict"]),
        in_flight=st.sampled_from([None, None, 1, 5]),
    )
    def begin(
        self, batch: int, max_lag: int, depth: int, selection: str, in_flight: int | None
    ) -> None:
        self.in_flight = None if selection == "strict" else in_flight  # refused
        self.settings = (batch, max_lag, depth, selection)
        self.batch, self.max_lag, self.depth, self.selection = self.settings
        self.engine = 0  # step of the weights that the engine serves
        self.running: dict[int, int] = {}
        self.ready: dict[int, EpisodeGroup] = {}
        self.plans: dict[int, list[EpisodeGroup]] = {}  # by step, since the first one
        self.foreign: set[int] = set()  # trained before this history
        self.dropped: set[int] = set()
        self.saved = [(0, frozenset[int]())]  # checkpoints: step, consumed
        self.stale = 0
        self.buffer = self.new()

    def new(self) -> GroupBuffer:
        batch, max_lag, depth, selection = self.settings
        return GroupBuffer(batch, max_lag, depth, selection=selection, in_flight=self.in_flight)

    @property
    def step(self) -> int:
        return self.saved[0][0] + len(self.plans)

    @property
    def consumed(self) -> set[int]:
        return {g.group_id for plan in self.plans.values() for g in plan} | self.foreign

    def used(self) -> set[int]:
        return {*self.running, *self.ready, *self.consumed, *self.dropped}

    # --- generation -------------------------------------------------------------------------------
    @precondition(lambda self: self.buffer.capacity(self.engine))
    @rule(count=st.integers(1, 6))
    def start(self, count: int) -> None:
        for _ in range(count):
            is_full = self.in_flight is not None and len(self.running) >= self.in_flight
            if is_full or not self.buffer.capacity(self.engine):
                return
            expected = next(one for one in range(10_000) if one not in self.used())
            assert self.buffer.start() == expected, "an id is lost, or given out twice"
            self.running[expected] = self.engine

    def one(self, pick: int) -> int:
        return sorted(self.running)[pick % len(self.running)]

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 20), siblings=st.integers(1, 3), count=st.integers(1, 4))
    def admit(self, pick: int, siblings: int, count: int) -> None:
        """Groups end; later siblings have newer weights."""
        for _ in range(min(count, len(self.running))):
            group_id = self.one(pick)
            begun = self.running.pop(group_id)
            steps = [min(self.engine, begun + i) for i in range(siblings)]
            self.ready[group_id] = group(group_id, *steps)
            self.buffer.admit(self.ready[group_id])

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 20), is_final=st.booleans())
    def fail(self, pick: int, is_final: bool) -> None:
        group_id = self.one(pick)
        del self.running[group_id]
        if is_final:
            self.dropped.add(group_id)
            self.buffer.discard(group_id)
        else:
            before = self.buffer.new_try()
            self.buffer.abandon(group_id)
            if group_id >= 0:
                assert self.buffer.tries[group_id] > before, "names of its rollouts would repeat"

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 20))
    def carry(self, pick: int) -> None:
        group_id = self.one(pick)
        late = self.buffer.carry(group_id)
        if group_id < 0 or ~group_id in self.used() - self.dropped:
            assert late is None
        else:
            assert late == ~group_id
            self.dropped.discard(late)
            self.running[late] = self.running[group_id]
            assert self.buffer.carry(group_id) is None, "its second try has late siblings, too"

    @precondition(lambda self: self.engine < self.step)
    @rule()
    def publish(self) -> None:
        self.engine += 1

    @rule(steps=st.integers(1, 3))
    def train(self, steps: int) -> None:
        """Steps in which nothing goes wrong: what a checkpoint holds gets long."""
        for _ in range(steps):
            if self.buffer.capacity(self.engine):
                self.start(2 * self.batch)
            if self.running:
                self.admit(0, 2, 2 * self.batch)
            self.plan(damaged=False, parts=False)
            self.save()
            if self.engine < self.step:
                self.publish()

    # --- plans ------------------------------------------------------------------------------------
    @rule(damaged=st.sampled_from([False, False, False, True]), parts=st.booleans())
    def plan(self, damaged: bool, parts: bool) -> None:
        if parts:
            self.keep_parts()
        stale = [g for g in self.ready.values() if self.step - oldest(g) > self.max_lag]
        assert self.buffer.evict_stale() == stale
        self.stale += len(stale)
        for one in stale:
            del self.ready[one.group_id]
        step, expected = self.step, self.chosen()
        assert self.buffer.due() == expected
        taken = self.buffer.pop()
        assert taken == expected
        if taken is None:
            return
        for one in taken:
            assert 0 <= step - oldest(one) <= self.max_lag
            del self.ready[one.group_id]
        assert len(self.buffer.ages_s) == self.batch
        self.plans[step] = taken
        if damaged:
            self.unplan(step, taken)

    def chosen(self) -> list[EpisodeGroup] | None:
        ids = sorted(self.ready)
        if self.selection == "freshest":
            ids.sort(key=lambda one: (-oldest(self.ready[one]), one))
        if self.selection == "strict":
            again = set(range(max([-1, *self.used()]) + 1)) - self.used()
            ids = sorted({*self.ready, *self.running, *again})
        ids = sorted(ids[: self.batch])
        is_due = len(ids) == self.batch and all(one in self.ready for one in ids)
        return [self.ready[one] for one in ids] if is_due else None

    def keep_parts(self) -> None:
        """Stale siblings leave; their rewards stay in the baseline."""
        found = self.buffer.with_stale_siblings()
        for whole, part in found:
            kept = self.young(whole)
            gone = [one.score.reward for one in whole.episodes if one.score and one not in kept]
            assert (list(part.episodes), list(part.peers)) == (kept, [*whole.peers, *gone])
            assert gone
            assert len(kept) >= (2 if part.group_id >= 0 else 1)
            self.buffer.exchange(part)
            self.ready[part.group_id] = part
        for group_id, whole in self.ready.items():  # a baseline needs two, unless it has peers
            enough = len(self.young(whole)) >= (2 if group_id >= 0 else 1)
            assert not enough or self.young(whole) == list(whole.episodes)

    def young(self, whole: EpisodeGroup) -> list[Episode]:
        return [one for one in whole.episodes if self.step - oldest_of(one) <= self.max_lag]

    def unplan(self, step: int, taken: list[EpisodeGroup]) -> None:
        """A record of the last group is damaged."""
        self.buffer.unplan(step, taken)
        assert self.buffer.evict(lambda g: g is taken[-1]) == taken[-1:]
        del self.plans[step]
        self.ready |= {one.group_id: one for one in taken[:-1]}

    # --- restarts ---------------------------------------------------------------------------------
    @rule()
    def save(self) -> None:
        if self.step > self.saved[-1][0]:
            self.saved.append((self.step, frozenset(self.consumed)))

    @rule(back=st.integers(0, 2), keeps=st.booleans())
    def trainer_restarts(self, back: int, keeps: bool) -> None:
        """At a checkpoint, not always the newest; keeps: groups of later plans are there."""
        step, consumed = self.saved[max(0, len(self.saved) - 1 - back)]
        self.saved = [one for one in self.saved if one[0] <= step]
        void = [g for s, plan in self.plans.items() if s >= step for g in plan]
        assert self.buffer.restart(step, ranges(consumed), void if keeps else ()) == []
        self.plans = {s: plan for s, plan in self.plans.items() if s < step}
        if keeps:
            self.ready |= {one.group_id: one for one in void}
        self.engine = min(self.engine, step)
        for one in list(self.ready.values()):  # of weights that are void
            if oldest_step(one) > step:
                del self.ready[one.group_id]
        self.buffer.evict(lambda g: g.group_id not in self.ready)
        self.running = {one: min(begun, step) for one, begun in self.running.items()}

    @rule()
    def controller_restarts(self) -> None:
        """From its journal: what was running is generated again."""
        self.running.clear()
        self.buffer = self.new()
        self.buffer.restore(self.step, self.consumed, self.dropped, self.ready.values())
        self.stale = 0

    @precondition(lambda self: not self.dropped)
    @rule(lost=st.booleans(), back=st.integers(0, 2))
    def journal_is_lost(self, lost: bool, back: int) -> None:
        """Only the trainer's checkpoint knows the ids that are trained.

        lost: the buffer is empty; else it has groups of the checkpoint as ready.
        back: the checkpoint is damaged, and the trainer starts again at an earlier one.
        """
        step, consumed = self.saved[-1]
        self.running.clear()
        ready = [] if lost else [g for s, plan in self.plans.items() if s < step for g in plan]
        self.buffer = self.new()
        self.buffer.restore(0, (), (), ready)
        twice = self.buffer.restart(step, ranges(consumed))
        assert twice == ready, "a trained group would be trained again"
        self.plans = {s: plan for s, plan in self.plans.items() if s < step}
        self.ready, self.stale, self.engine = {}, 0, min(self.engine, step)
        if back:
            self.trainer_restarts(back, keeps=False)
            self.start(3 * self.batch)

    # --- always -----------------------------------------------------------------------------------
    @invariant()
    def sums(self) -> None:
        buffer = self.buffer
        assert buffer.next_step == self.step
        assert [g.group_id for g in buffer.ready()] == sorted(self.ready)
        assert (buffer.num_ready, buffer.num_started) == (len(self.ready), len(self.running))
        assert buffer.live == len(self.ready) + len(self.running)
        assert buffer.dropped_stale == self.stale

    @invariant()
    def each_once(self) -> None:
        trained = [g.group_id for plan in self.plans.values() for g in plan]
        assert len(trained) == len(set(trained)), "a group is trained twice"
        places = [set(self.running), set(self.ready), set(trained), self.dropped]
        assert sum(map(len, places)) == len(set().union(*places)), "a group is in two places"

    @invariant()
    def bounds(self) -> None:
        lag = self.step - self.engine
        limit = (min(self.max_lag, self.depth) - lag + 1) * self.batch
        if self.in_flight is not None:
            limit = self.in_flight + (self.max_lag + 1) * self.batch
            limit = 0 if lag > self.max_lag else limit
        assert self.buffer.capacity(self.engine) == max(0, limit - self.buffer.live)


def oldest_of(episode: Episode) -> int:
    return min(turn.rollout.oldest.step for turn in episode.turns)


def oldest_step(one: EpisodeGroup) -> int:
    return max(map(oldest_of, one.episodes))


def test_any_history() -> None:
    explore(Buffer, 100, 30)


def test_the_age_of_a_ready_group_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands are asked at every change while the trainer waits."""
    looked: list[int] = []
    plain = EpisodeGroup.oldest.fget
    assert plain is not None

    def counted(group: EpisodeGroup) -> PolicyVersion:
        looked.append(group.group_id)
        return plain(group)

    monkeypatch.setattr(EpisodeGroup, "oldest", property(counted))
    buffer = GroupBuffer(8, 2, 2)
    for group_id in range(4):
        assert buffer.start() == group_id
        buffer.admit(group(group_id, 0))
    for _ in range(5):
        assert buffer.evict_stale() == []
    assert sorted(looked) == [0, 1, 2, 3]


def test_an_id_starts_once_after_a_trainer_has_gone_back() -> None:
    """A new controller without a journal; then the trainer's newest checkpoint is damaged."""
    buffer = GroupBuffer(2, 4, 4)
    buffer.restart(3, ranges(range(6)))
    buffer.restart(1, ranges(range(2)))
    assert [buffer.start() for _ in range(6)] == [2, 3, 4, 5, 6, 7]

"""The buffer under any order of completion: no token too old, nothing lost, nothing twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.controller.buffer import GroupBuffer
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


def group(group_id: int, step: int) -> EpisodeGroup:
    rollout = Rollout(
        rollout_id=f"{group_id}.0",
        token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([-1.0], np.float32),
        versions=(VersionSpan(0, PolicyVersion(0, step)),),
        routing=(),
        sampling_mask=(),
        finish=Finish.STOP,
        sampling=SamplingParams(1),
        engine=0,
    )
    prompt = Prompt(group_id, (1,), "", None, {})
    return EpisodeGroup(group_id, prompt, (Episode("0", (Turn(rollout),), Score(0.0)),))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    max_lag=st.integers(0, 4),
    depth=st.integers(0, 4),
    selection=st.sampled_from(["oldest", "freshest", "strict"]),
    in_flight=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 2**32),
)
def test_any_schedule(
    batch: int, max_lag: int, depth: int, selection: str, in_flight: int | None, seed: int
) -> None:
    """A random interleaving of start, finish, fail, plan, unplan and publish for 12 steps."""
    choices = random.Random(seed)
    in_flight = None if selection == "strict" else in_flight  # refused
    buffer = GroupBuffer(batch, max_lag, depth, selection=selection, in_flight=in_flight)
    engine_step, running, trained = 0, {}, []
    for _ in range(4000):
        if buffer.next_step >= 12:
            break
        action = choices.randrange(5)
        is_full = in_flight is not None and len(running) >= in_flight  # the producer's own bound
        if action == 0 and buffer.capacity(engine_step) and not is_full:
            group_id = buffer.start()
            assert group_id not in running
            running[group_id] = engine_step
            if in_flight is not None:
                assert buffer.live <= in_flight + (max_lag + 1) * batch
        elif action == 1 and running:
            group_id = choices.choice(sorted(running))
            buffer.admit(group(group_id, running.pop(group_id)))
        elif action == 2 and running and choices.random() < 0.2:
            group_id = choices.choice(sorted(running))
            running.pop(group_id)
            buffer.abandon(group_id)
        elif action == 3:
            step = buffer.next_step
            buffer.evict_stale()
            taken = buffer.pop()
            if taken is not None and choices.random() < 0.15:  # a record of it is damaged
                buffer.unplan(step, taken)
                assert buffer.evict(lambda g, bad=taken[-1]: g is bad) == taken[-1:]
            elif taken is not None:
                assert len(taken) == batch
                assert all(0 <= step - g.oldest.step <= max_lag for g in taken)
                if depth == 0 and in_flight is None:
                    assert all(step == g.oldest.step for g in taken), "depth 0 is synchronous"
                trained += [g.group_id for g in taken]
                if selection == "strict":
                    assert trained == list(range(len(trained))), "out of prompt order"
        elif action == 4 and engine_step < buffer.next_step:
            engine_step += 1
    assert len(trained) == len(set(trained)), "a group was trained twice"
    assert buffer.next_step == 12, "the schedule starved"
    lost = set(range(max(trained) + 1)) - set(trained)
    known = set(running) | set(buffer._ready) | set(buffer._again)
    assert lost <= known, f"groups {lost - known} are lost"


def test_freshest_takes_the_newest_weights_first() -> None:
    buffer = GroupBuffer(2, 4, 4, selection="freshest")
    for group_id, step in enumerate([0, 1, 0, 2]):
        assert buffer.start() == group_id
        buffer.admit(group(group_id, step))
    assert [g.group_id for g in buffer.pop() or []] == [1, 3]
    assert [g.group_id for g in buffer.pop() or []] == [0, 2]


def test_strict_waits_for_the_next_id_unless_it_is_discarded() -> None:
    buffer = GroupBuffer(1, 4, 4, selection="strict")
    assert [buffer.start(), buffer.start()] == [0, 1]
    buffer.admit(group(1, 0))
    assert buffer.pop() is None
    buffer.discard(0)
    assert [g.group_id for g in buffer.pop() or []] == [1]
    assert buffer.start() == 2, "a discarded group came back"


def test_resume_skips_what_the_checkpoint_consumed() -> None:
    buffer = GroupBuffer(2, 4, 2)
    buffer.restart(3, ((0, 3), (4, 5)))
    assert [buffer.start() for _ in range(3)] == [3, 5, 6]


def test_a_new_controller_starts_what_was_neither_trained_nor_dropped_nor_ready() -> None:
    buffer = GroupBuffer(2, 4, 2)
    buffer.restore(2, consumed={0, 1, 3}, dropped={4}, ready=[group(6, 1)])
    assert [g.group_id for g in buffer.ready()] == [6]
    assert [buffer.start() for _ in range(4)] == [2, 5, 7, 8]


def test_a_stale_group_is_started_again_under_its_own_id() -> None:
    buffer = GroupBuffer(1, 1, 4)
    assert [buffer.start(), buffer.start()] == [0, 1]
    buffer.admit(group(0, 0))
    buffer.admit(group(1, 0))
    buffer.next_step = 2
    assert [g.group_id for g in buffer.evict_stale()] == [0, 1]
    assert (buffer.num_ready, buffer.dropped_stale) == (0, 2)
    assert buffer.start() == 0


def test_the_age_of_a_ready_group_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands are asked at every change while the trainer waits."""
    looked: list[int] = []
    plain = EpisodeGroup.oldest.fget
    assert plain is not None

    def oldest(group: EpisodeGroup) -> PolicyVersion:
        looked.append(group.group_id)
        return plain(group)

    monkeypatch.setattr(EpisodeGroup, "oldest", property(oldest))
    buffer = GroupBuffer(8, 2, 2)
    for group_id in range(4):
        assert buffer.start() == group_id
        buffer.admit(group(group_id, 0))
    for _ in range(5):
        assert buffer.evict_stale() == []
    assert sorted(looked) == [0, 1, 2, 3]
    buffer.next_step = 3
    assert len(buffer.evict_stale()) == 4
    assert buffer.start() == 0, "generated again, under newer weights"
    buffer.admit(group(0, 3))
    assert buffer.evict_stale() == [], "what was known of the old one is forgotten"
    buffer.restart(3, ((0, 1),))
    assert not buffer._oldest
    assert not buffer._admitted

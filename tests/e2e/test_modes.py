"""What a publish does to running requests, on real SGLang: drain, abort_resume, retract, in_place.

Versions are published through real sessions while requests decode.  Every segment of every mode
but in_place must match its own version's weights.  After an update in place no forward pass of a
trainer can: the KV cache holds keys of older weights.  There the oracle is a model of transformers
whose weights are exchanged at the recorded spans, its cache kept; one token off and it no longer
agrees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.core.messages import UpdateDone
from moerl.core.types import PolicyVersion, Rollout, Segment, VersionSpan
from moerl.engine import protocol
from moerl.episodes.turn import TurnInFlight
from moerl.records.blob_ranges import read_logprobs
from moerl.records.segment_split import split_segments
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.replay_scenario import (
    FULL,
    LATE,
    LONG,
    A,
    B,
    C,
    Scoring,
    World,
    row_of,
    start,
    tokens,
)
from tests.helpers.session_publisher import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MAX_GAP, MEAN_GAP = 5e-5, 5e-6  # nats, fp32
CONTROL = 1e-3  # nats: what every wrong assignment exceeds
VERSIONS = [PolicyVersion(0, step) for step in range(16)]
MODES = {
    "drain": "",
    "abort_resume": "",
    "retract": protocol.RETRACT_AUDIT,
    "in_place": protocol.IN_PLACE,
}


@dataclass
class Played:
    """What each mode left behind."""

    world: World
    rollouts: dict[str, list[Rollout]] = field(default_factory=dict)
    closed: dict[str, list[UpdateDone]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    half_prefilled: Rollout | None = None
    held_up: int = 0  # how often the scheduler still had a request that it had answered
    scores: Scoring | None = None


class Stage:
    """Requests that run while versions are published."""

    def __init__(self, world: World) -> None:
        self.world, self.publisher = world, Publisher(world.host, world.folders)
        self.played = Played(world)
        self._next = 0

    async def play(self) -> Played:
        world = self.world
        for mode, how in MODES.items():
            world.host._updates.mode = how
            await self.publish(mode)
            await self.mode(mode)
        await self.prefixes()
        await self.right_after_an_answer()
        await self.between_chunks()
        return self.played

    async def publish(self, mode: str) -> None:
        version = VERSIONS[self._next]
        self._next += 1
        if version == self.world.host._updates.version:
            return
        await self.publisher.stage(version)
        closed = await self.publisher.commit(version)
        self.played.closed.setdefault(mode, []).append(closed)

    async def mode(self, mode: str) -> None:
        sampling = replace(FULL, max_new_tokens=900) if mode == "in_place" else LONG
        if mode == "drain":
            sampling = replace(LONG, max_new_tokens=24)
        turns = [start(f"{mode}.{i}", tokens(20 + 30 * i, i), sampling) for i in range(3)]
        updates = 0 if mode == "drain" else 2
        seen = self.world.prefills()
        running = asyncio.create_task(self.until_cut(turns, updates))
        self.played.closed[mode] = []  # of updates that met requests
        for _ in range(updates):
            await self.world.decode_a_while(running, seen)
            seen = -1 if mode == "in_place" else self.world.prefills()
            await self.publish(mode)
        if updates:
            await self.world.decode_a_while(running, seen)
            await self.cut(running)
        await running
        self.played.rollouts[mode] = [row_of(turn) for turn in turns]

    async def until_cut(self, turns: Sequence[TurnInFlight], updates: int) -> None:
        """Resume what a commit interrupts, as the controller does."""
        await self.world.call(turns)
        for _ in range(updates if not self.world.host._updates.mode else 0):
            await self.world.call(turns)

    async def cut(self, running: asyncio.Task[None]) -> None:
        """End requests that would go on for long: their partial output is a record too."""
        client = self.world.host._client
        assert client is not None
        while not running.done():
            await client.abort_all()
            await asyncio.wait([running], timeout=0.05)

    async def prefixes(self) -> None:
        """The same prompt before and after an update in place, and once more."""
        prompt = tokens(100, seed=100)
        for tag in ("old", "again", "new", "again_new"):
            if tag == "new":
                await self.publish("prefix")
            turn = start(f"prefix.{tag}", prompt, replace(LONG, max_new_tokens=4))
            (segment,) = await self.world.host.generate([turn.request()])
            assert isinstance(segment, Segment), segment
            self.played.cached[tag] = segment.cached_tokens

    async def right_after_an_answer(self) -> None:
        """An update that no request hinders, while SGLang still computes for one it has ended."""
        version, updates = VERSIONS[self._next], self.world.host._updates
        self._next += 1
        await self.publisher.stage(version)
        seen, mode, updates.mode = self.world.prefills(), updates.mode, ""
        running = asyncio.create_task(self.world.call([start("answered", tokens(30, 30), LONG)]))
        await self.world.decode_a_while(running, seen)
        switch = self.world.root / LATE
        switch.touch()
        await self.cut(running)
        await self.publisher.commit(version)
        updates.mode = mode
        self.played.held_up = len(switch.read_text().splitlines())
        switch.unlink()

    async def between_chunks(self) -> None:
        """An update in place that meets a request whose prompt is half prefilled.

        A machine that is busy elsewhere may come too late: there are some versions to try.
        """
        for version in VERSIONS[self._next :]:
            await self.publisher.stage(version)
            turn = start(f"half.{version}", tokens(3000, version.step), FULL)
            seen = self.world.prefills()
            running = asyncio.create_task(self.world.call([turn]))
            while self.world.prefills() < seen + 3:
                await asyncio.sleep(0.005)
            await self.publisher.commit(version)
            await running
            self.played.half_prefilled = row_of(turn)
            if self.played.half_prefilled.versions[0].version == version:
                return


@pytest.fixture(scope="module")
def played(engine_world: World, tmp_path_factory: pytest.TempPathFactory) -> Played:
    world = engine_world.fresh()
    weights = [world.folders[version] for version in (A, B, C)]
    world.folders = {version: weights[version.step % 3] for version in VERSIONS}
    played = world.run(Stage(world).play(), 400.0)
    played.scores = score(played, tmp_path_factory.mktemp("modes"))
    return played


def score(played: Played, root: Path) -> Scoring:
    scoring = Scoring(played.world, root)
    for mode, rollouts in played.rollouts.items():
        parts = [part for rollout in rollouts for part in split_segments(rollout)]
        versions = sorted({part.versions[0].version for part in parts})
        for version in versions:
            own = [part for part in parts if part.versions[0].version == version]
            scoring.add(f"{mode}@{version}", own, version)
            if version == versions[0]:
                other = VERSIONS[version.step - version.step % 3 + (version.step + 1) % 3]
                scoring.add(f"{mode}!", own, other)
    swapped = [r for x in played.rollouts["retract"] for r in rows_of_other_versions(x)]
    for version in sorted({part.versions[0].version for part in swapped})[:2]:
        own = [part for part in swapped if part.versions[0].version == version]
        scoring.add(f"swapped@{version}", own, version)
    scoring.run()
    return scoring


def rows_of_other_versions(rollout: Rollout) -> list[Rollout]:
    """Control: what SGLang returns by itself, and later segments with rows of before."""
    first, *later = split_segments(rollout)
    wrong = [replace(first, routing=rollout.audit_rows[:1])]
    return wrong + [replace(p, routing=rollout.routing[: i + 1]) for i, p in enumerate(later, 1)]


def gaps(played: Played, name: str) -> np.ndarray:
    assert played.scores is not None
    return np.abs(np.concatenate(list(played.scores.gaps(name).values())))


def jobs(played: Played, mode: str) -> list[str]:
    assert played.scores is not None
    return sorted(n for n in played.scores.jobs if n.startswith(mode) and not n.endswith("!"))


def versions_of(rollout: Rollout) -> list[int]:
    return [span.version.step for span in rollout.versions]


def test_requests_ran_through_two_updates(played: Played) -> None:
    """Nothing is lost: each request has one record, with tokens of all versions it met."""
    begins = {"abort_resume": 1, "retract": 4, "in_place": 7}
    for mode, begin in begins.items():
        for rollout in played.rollouts[mode]:
            assert versions_of(rollout) == [begin, begin + 1, begin + 2], mode
    for rollout in played.rollouts["drain"]:
        assert versions_of(rollout) == [0]


@pytest.mark.parametrize("mode", ["drain", "abort_resume", "retract"])
def test_segments_match_their_own_weights(played: Played, mode: str) -> None:
    assert len(jobs(played, mode)) == (1 if mode == "drain" else 3)
    for name in jobs(played, mode):
        assert gaps(played, name).max() <= MAX_GAP, name
        assert gaps(played, name).mean() <= MEAN_GAP, name
    assert gaps(played, f"{mode}!").max() > CONTROL, "control: weights of another version"


def test_rows_of_another_version_fail(played: Played) -> None:
    """Control: retraction overwrites rows; without the repair every segment but the last is off."""
    for name in jobs(played, "swapped"):
        assert gaps(played, name).max() > CONTROL, name


# --- in place -------------------------------------------------------------------------------------
def test_first_segment_of_an_update_in_place_is_exact(played: Played) -> None:
    assert not any(r.versions[0].kept_kv for r in played.rollouts["in_place"])
    (first, *_) = jobs(played, "in_place")
    assert gaps(played, first).max() <= MAX_GAP
    assert gaps(played, first).mean() <= MEAN_GAP
    assert gaps(played, "in_place!").max() > CONTROL, "control: weights of another version"


def test_later_segments_of_an_update_in_place_are_marked_and_measured(played: Played) -> None:
    """No forward pass under one version reproduces them: that is the price, and it is said."""
    assert all(s.kept_kv for r in played.rollouts["in_place"] for s in r.versions[1:])
    for name in jobs(played, "in_place")[1:]:
        gap = gaps(played, name)
        print(f"{name}: max {gap.max():.1e}, mean {gap.mean():.1e} nats over {len(gap)} tokens")
        assert gap.max() > MAX_GAP


@torch.no_grad()
def on_kept_cache(played: Played, rollout: Rollout, spans: Sequence[VersionSpan]) -> np.ndarray:
    """Engine minus transformers log-probability, [S]: one KV cache, weights by `spans`."""
    ids, prompt = torch.from_numpy(rollout.token_ids).long(), rollout.prompt_len
    cache, found, begin = None, [], 0
    ends = [span.first for span in spans[1:]] + [rollout.num_sampled]
    for span, end in zip(spans, ends, strict=True):
        stop = prompt + end - 1  # the last token of a span is fed by the next one
        model = model_of(played.world.folders[span.version])
        out = model(ids[None, begin:stop], past_key_values=cache, use_cache=True)
        cache, begin = out.past_key_values, stop
        found.append(out.logits[0, -(end - span.first) :])
    logits = torch.cat(found).float() / rollout.sampling.temperature
    picked = torch.log_softmax(logits, -1).gather(1, ids[prompt:, None])[:, 0]
    return read_logprobs(played.world.store, rollout) - picked.numpy()


@lru_cache
def model_of(folder: Path) -> torch.nn.Module:
    return tiny.load(folder)


def test_spans_of_an_update_in_place_are_exact(played: Played) -> None:
    """Weights exchanged at the recorded tokens reproduce all; one token off, they do not."""
    worst = {-1: 0.0, 0: 0.0, 1: 0.0}
    for rollout in played.rollouts["in_place"]:
        for shift in worst:
            first, *later = rollout.versions
            spans = (first, *(replace(span, first=span.first + shift) for span in later))
            gap = np.abs(on_kept_cache(played, rollout, spans)).max()
            worst[shift] = max(worst[shift], float(gap))
            assert shift or gap <= MAX_GAP
    print("max |d| with spans shifted by:", {k: f"{v:.1e}" for k, v in worst.items()})
    assert min(worst[-1], worst[1]) > CONTROL, "control: spans that are off by one"


def test_a_half_prefilled_request_says_so(played: Played) -> None:
    """All its tokens come from one version, and part of its cache from another."""
    rollout = played.half_prefilled
    assert rollout is not None
    assert [(span.first, span.kept_kv) for span in rollout.versions] == [(0, True)]
    whole = on_kept_cache(played, rollout, rollout.versions)
    assert np.abs(whole).max() > MAX_GAP, "control: it is not what one version would have sampled"


def test_no_prefix_of_older_weights_is_read(played: Played) -> None:
    cached = played.cached
    assert cached["again"] > 90, "control: the prefix cache works"
    assert cached["new"] == 0
    assert cached["again_new"] > 90


def test_an_update_right_after_an_answer_empties_the_cache(played: Played) -> None:
    """Its commit succeeded, or nothing here would run; control: SGLang was in that state."""
    assert played.held_up > 0


def test_cost_of_an_update(played: Played) -> None:
    """Printed for docs/tuning.md: tokens lost are counted, not timed."""
    for mode, closed in played.closed.items():
        pauses = [f"{c.pause_s * 1e3:.0f} ms ({c.commit_s * 1e3:.1f} copying)" for c in closed]
        print(f"{mode}: pause {pauses}, interrupted {[c.aborted for c in closed]}")
        assert all(c.aborted == (3 if mode == "abort_resume" else 0) for c in closed)

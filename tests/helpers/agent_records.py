"""What agents recorded through the gateway, scored by Megatron-core, and records that are wrong.

Each control changes one thing in a record; the gate that true records pass must reject it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from moerl.agents.prompt_tokens import PromptTokens
from moerl.algorithms.mismatch import LAG_BINS, MismatchSums
from moerl.core.errors import RecordError
from moerl.core.types import GenerateRequest, MaskBlob, PolicyVersion, Rollout, Segment
from moerl.engine import protocol
from moerl.episodes.finished_episode import RecordedTurn
from moerl.records.sampling_mask import encode_rows
from moerl.records.segment_split import split_segments
from tests.helpers.engine_tiny_model import SHAPE
from tests.helpers.replay_scenario import A, B, C, Scoring, World
from tests.helpers.session_publisher import Publisher

MAX_GAP, MEAN_GAP = 5e-5, 5e-6  # nats, fp32


@dataclass
class Tap:
    """The engine, and what it sampled: an account apart from the gateway's."""

    world: World
    sampled: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        replies = await self.world.host.generate(requests)
        for reply in replies:
            self._note(reply)
        return replies

    async def stream(
        self, request: GenerateRequest, heard: Callable[[np.ndarray], None]
    ) -> Segment | RecordError:
        reply = await self.world.host.stream(request, heard)
        self._note(reply)
        return reply

    def _note(self, reply: Segment | RecordError) -> None:
        assert isinstance(reply, Segment), reply
        for piece in reply.pieces:
            self.sampled[reply.rollout_id] += piece.output_ids.tolist()

    async def abort(self, names: Sequence[str]) -> None:
        await self.world.host.abort(names)


@dataclass
class Records:
    """Recorded turns of some episodes, and their scores.

    versions: before and after the update; name: of their jobs in a scoring of several.
    """

    scoring: Scoring
    tokens: PromptTokens
    turns: Sequence[RecordedTurn]
    versions: tuple[PolicyVersion, PolicyVersion] = (A, B)
    name: str = ""

    def add(self, what: str, step: int, parts: Sequence[Rollout], *variants: str) -> None:
        """step: 0 is before the update, 1 is after it."""
        name, version = self.job(what, step), self.versions[step]
        self.scoring.add(name, parts, version, variants or ("both",))

    def job(self, what: str, step: int) -> str:
        return f"{self.name}{what}{step}"

    def gaps(self, what: str, step: int, variant: str = "both") -> dict[str, np.ndarray]:
        return self.scoring.gaps(self.job(what, step), variant)


async def update(world: World, running: asyncio.Future[Any], *, steps: int = 24) -> None:
    """Weights change under `running` requests, as a publish session changes them.

    steps: of decoding, before the update.
    """
    await world.decode_a_while(running, world.prefills(), steps=steps)
    assert not running.done(), "they ended before the update"
    await update_now(world)


async def update_now(world: World) -> None:
    health, server = world.host._health, world.host._client
    assert server is not None
    health.admit.clear()
    while not health.idle.is_set():
        await server.abort_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(health.idle.wait(), 0.05)
    await world.load(B)
    health.admit.set()


async def update_in_place(world: World, publisher: Publisher, wait_s: float) -> None:
    """As `update`, through a publish session: the requests continue on their KV cache.

    The version is staged; wait_s: from the first prefill on.
    """
    world.host._updates.mode = protocol.IN_PLACE
    seen = world.prefills()
    while world.prefills() <= seen:
        await asyncio.sleep(0.02)
    await asyncio.sleep(wait_s)
    await publisher.commit(C)


def score(*all_records: Records) -> None:
    """True records and controls, by the version that sampled them."""
    for records in all_records:
        _add_jobs(records)
    all_records[0].scoring.run()


def _add_jobs(records: Records) -> None:
    parts = [part for turn in records.turns for part in split_segments(turn.rollout)]
    tails = [part for part in parts if part.versions[0].kept_kv]
    if tails:
        records.add("tails", 1, tails)
    later_turns = _later(records)
    for step, version in enumerate(records.versions):
        own = [p for p in parts if p.versions[0].version == version and p not in tails]
        later = [part for part in own if part.rollout_id in later_turns]
        records.add("own", step, own)
        records.add("rows", step, [rows_of_another_turn(records, part) for part in later])
        records.add("masks", step, [masks_of_another_call(records, part) for part in own])
        records.add("text", step, [tokenised_again(records, part) for part in later], "mask")


def _later(records: Records) -> set[str]:
    """First segments of turns that have a parent."""
    later = [turn.rollout for turn in records.turns if turn.before is not None]
    return {f"{rollout.rollout_id}/0" for rollout in later}


def check_scores(records: Records, tails: int = 0) -> None:
    """Every sampled token, scored with the weights that sampled it, with both replays.

    tails: tokens that are not among them, because they were sampled on a kept KV cache.
    """
    found = [np.concatenate(list(records.gaps("own", step).values())) for step in (0, 1)]
    assert sum(map(len, found)) + tails == sum(turn.rollout.num_sampled for turn in records.turns)
    for gap in found:
        print(f"{len(gap)} tokens: max {np.abs(gap).max():.1e}, mean {np.abs(gap).mean():.1e}")
        assert np.abs(gap).max() <= MAX_GAP
        assert np.abs(gap).mean() <= MEAN_GAP


def check_tails(records: Records) -> int:
    """Tokens on a kept KV cache are in bins of their own, which say how far off they are."""
    through = [turn.rollout for turn in records.turns if len(turn.rollout.versions) > 1]
    tokens = 0
    for rollout in through:
        first, tail = rollout.versions
        assert (first.kept_kv, tail.kept_kv) == (False, True)
        assert rollout.joined_from == tail.first
        kept = records.gaps("tails", 1)[f"{rollout.rollout_id}/1"]
        exact = records.gaps("own", 0)[f"{rollout.rollout_id}/0"]
        gap = torch.from_numpy(np.concatenate([exact, kept]))
        behind = torch.arange(len(gap)) >= rollout.joined_from
        sums = MismatchSums.of(gap, gap * 0, gap.long() * 0, joined_N=behind)
        count, peak = (
            dict(zip(LAG_BINS, column.tolist(), strict=True))
            for column in (sums.sums[:, 0], sums.peak.amax(0))
        )
        assert count["lag_0"] == tail.first
        assert count["joined_lag_0"] == len(kept) == rollout.num_sampled - tail.first
        print(f"{rollout.rollout_id}: {len(kept)} on a kept cache, {peak['joined_lag_0']:.1e}")
        assert peak["lag_0"] <= MAX_GAP < peak["joined_lag_0"], "they need a bin of their own"
        tokens += len(kept)
    assert tokens, "the update met running turns"
    return tokens


def check_control(records: Records, control: str, step: int) -> None:
    """Records with one thing wrong fail the gate by far."""
    gaps = records.gaps(control, step, "mask" if control == "text" else "both")
    assert gaps
    assert max(np.abs(gap).max() for gap in gaps.values()) > 100 * MAX_GAP


# --- controls: one thing is wrong with each record ------------------------------------------------
def rows_of_another_turn(records: Records, part: Rollout) -> Rollout:
    """Every row is that of the token as many places before it as this turn is long."""
    store = records.scoring.world.store
    rows = np.concatenate([store.load(blob.ids) for blob in part.routing], 1)
    moved = np.ascontiguousarray(np.roll(rows, part.num_sampled, 1))
    return replace(part, routing=(_routing(records, part, f"{part.rollout_id}.rows", moved),))


def _routing(records: Records, part: Rollout, name: str, rows: np.ndarray) -> Any:
    (ref,) = records.scoring.world.store.seal(name.replace("/", "."), [rows])
    return replace(part.routing[0], ids=ref, row_begin=0, row_end=rows.shape[1])


def masks_of_another_call(records: Records, part: Rollout) -> Rollout:
    """The kept tokens of the position before, and the sampled token, without which none scores."""
    store, sampled = records.scoring.world.store, part.token_ids[part.loss_mask]
    masks = [(store.load(blob.offsets), store.load(blob.ids)) for blob in part.sampling_mask]
    kept = [row for offsets, ids in masks for row in np.split(ids, offsets[1:-1])]
    kept = [
        np.union1d(row, [token]) for row, token in zip([*kept[1:], kept[0]], sampled, strict=True)
    ]
    lengths = np.asarray([len(row) for row in kept])
    csr = encode_rows(lengths, np.concatenate(kept), sampled, vocab_size=SHAPE.vocab_size)
    offsets, ids = store.seal(f"{part.rollout_id}.masks".replace("/", "."), csr)
    return replace(part, sampling_mask=(MaskBlob(offsets, ids, 0, len(kept)),))


def tokenised_again(records: Records, part: Rollout) -> Rollout:
    """The prompt's text, encoded; its length differs, so routes are the trainer's own."""
    tokens = records.tokens
    prompt = tokens.encode(tokens.decode(part.token_ids[: part.prompt_len].tolist()))
    whole = np.concatenate([prompt, part.token_ids[part.prompt_len :]])
    rows = np.zeros((SHAPE.num_layers, len(whole) - 1, SHAPE.top_k), np.uint8)
    rows[..., 1] = 1
    return replace(
        part,
        token_ids=whole,
        loss_mask=np.arange(len(whole)) >= len(prompt),
        routing=(_routing(records, part, f"{part.rollout_id}.text", rows),),
    )

"""Turns of an episode become rows of training: which tokens, rows and versions are in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from moerl.algorithms.advantages import plan_advantages, plan_gae
from moerl.algorithms.aggregation import plan_weights
from moerl.config.schema import AlgorithmConfig
from moerl.core.errors import RecordError
from moerl.core.messages import Plan
from moerl.core.serialization import decode, decode_value, encode, encode_value
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    PolicyVersion,
    Prompt,
    Rollout,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.data.grid import Grid
from moerl.data.packing import pack_microbatch
from moerl.episodes.finished_episode import TurnRows, join, rows_of
from moerl.episodes.turn import SampledTurn
from moerl.records.blob_ranges import read_logprobs, read_mask, read_routes
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import check
from tests.helpers.random_rollouts import LAYERS, SHAPE, TRUNCATED
from tests.helpers.random_turns import Call, random_episode
from tests.helpers.scripted_episode import ScriptedEpisode
from tests.helpers.synthetic import RolloutSpec

V0, V1, V2 = (PolicyVersion(0, step) for step in range(3))
PROMPT = Prompt(0, (1, 2, 3, 4), "", None, {})
SPEC = RolloutSpec(SHAPE, 1, TRUNCATED)
PLAIN = ([Call(3)], [Call(5)], [Call(2)])
# an update inside the second turn, and one between it and the third
UPDATED = ([Call(3)], [Call(2, aborted=True), Call(3, V1)], [Call(2, V2)], [Call(4, V2)])


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, "n")


def episode(
    store: BlobStore, turns: Sequence[Sequence[Call]], name: str = "0.0"
) -> ScriptedEpisode:
    return random_episode(store, name, PROMPT, turns, SPEC, audit=True)


def checked(rows: Sequence[Rollout]) -> Sequence[Rollout]:
    for row in rows:
        check(row, SHAPE)
    return rows


@pytest.fixture
def played(store: BlobStore) -> list[ScriptedEpisode]:
    """Two groups of two episodes with 1, 2 and 3 turns."""
    places = [(number, sibling) for number in range(2) for sibling in range(2)]
    return [episode(store, PLAIN[: 1 + sum(place) % 3], "{}.{}".format(*place)) for place in places]


def plan_of(played: Sequence[ScriptedEpisode], turn_rows: TurnRows) -> BatchPlan:
    episodes = []
    for partial in played:
        rows = partial.rows(turn_rows)
        turns = tuple(Turn(row, (idx - 1,) if idx else ()) for idx, row in enumerate(rows))
        episodes.append(Episode(partial.name, turns, Score(len(episodes) % 3)))
    groups = [EpisodeGroup(i, PROMPT, tuple(episodes[2 * i : 2 * i + 2])) for i in range(2)]
    return plan_batch(0, V0, groups, dp_size=1, max_tokens_per_microbatch=128)


def by_token(plan: BatchPlan, values: Sequence[float | np.ndarray]) -> list[float]:
    """Values of sampled tokens in the order of groups, episodes and turns."""
    parts = {
        (row.group, row.episode, row.turn): np.broadcast_to(value, rollout.num_sampled)
        for row, rollout, value in zip(plan.rows, plan.rollouts(), values, strict=True)
    }
    return np.concatenate([parts[place] for place in sorted(parts)]).tolist()


def test_a_chain_is_one_row_and_its_parts_tile_it(store: BlobStore) -> None:
    played = episode(store, PLAIN)
    (row,) = checked(played.rows("join"))
    assert row.num_tokens == 4 + 3 + 3 + 5 + 3 + 2
    assert np.flatnonzero(np.diff(row.loss_mask)).tolist() == [3, 6, 9, 14, 17]
    assert [(part.row_begin, part.row_end) for part in row.routing] == [(0, 6), (6, 14), (14, 19)]
    assert [(end.end, end.finish) for end in row.ends] == [(n, Finish.STOP) for n in (3, 8, 10)]
    assert row.joined_from == row.num_sampled, "one version"
    said = [token for turn in played.turns for token in turn.output_ids.tolist()]
    assert row.token_ids[row.loss_mask].tolist() == said


def test_a_row_per_turn_has_the_same_records(store: BlobStore) -> None:
    played = episode(store, PLAIN)
    (whole,) = played.rows("join")
    rows = checked(played.rows("separate"))
    assert [row.rollout_id for row in rows] == ["0.0", "0.0.t1", "0.0.t2"]
    assert [row.num_sampled for row in rows] == [3, 5, 2]
    assert np.concatenate([read_logprobs(store, row) for row in rows]).tolist() == (
        read_logprobs(store, whole).tolist()
    )
    routes = read_routes(store, whole.routing, layers=LAYERS)
    for row in rows:
        assert row.token_ids.tolist() == whole.token_ids[: row.num_tokens].tolist()
        own = read_routes(store, row.routing, layers=LAYERS)
        for layer in LAYERS:
            assert own[layer].tolist() == routes[layer][: row.num_tokens - 1].tolist()


def test_join_keeps_the_rows_of_each_pass_and_marks_what_is_behind_an_update(
    store: BlobStore,
) -> None:
    (row,) = checked(episode(store, UPDATED).rows("join"))
    assert [part.version for part in row.routing] == [V0, V0, V1, V2, V2]
    assert [(span.first, span.version) for span in row.versions] == [(0, V0), (5, V1), (8, V2)]
    assert row.joined_from == 5
    group = EpisodeGroup(0, PROMPT, (Episode("0.0", (Turn(row),), Score(1.0)),))
    batch = pack_microbatch(
        plan_batch(2, V2, (group,), dp_size=1, max_tokens_per_microbatch=64), 0, 0, store
    )
    assert batch.joined.tolist() == [False] * 5 + [True] * 9
    assert batch.lag.tolist() == [2] * 5 + [1] * 3 + [0] * 6


@pytest.mark.parametrize("grid", [Grid(), Grid(packed=True), Grid(cp_rank=1, cp_size=2)])
def test_records_are_beside_their_tokens_in_every_layout(
    store: BlobStore, played: list[ScriptedEpisode], grid: Grid
) -> None:
    plan = plan_of(played, "join")
    assert plan.num_microbatches == 1
    batch = pack_microbatch(plan, 0, 0, store, grid=grid)
    rows = batch.rollouts
    said = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    assert batch.sampled.tolist() == said.tolist()
    assert batch.labels.flatten()[batch.sampled_rows].tolist() == said[batch.held].tolist()
    assert batch.old_logprob.tolist() == (
        np.concatenate([read_logprobs(store, row) for row in rows]).tolist()
    )
    kept = []
    for row in rows:
        offsets, ids = read_mask(store, row.sampling_mask)
        kept += [part.tolist() for part in np.split(ids, offsets[1:-1])]
    assert batch.mask_offsets is not None
    assert batch.mask_ids is not None
    found = batch.mask_ids.split(batch.mask_offsets.diff().tolist())
    assert [part.tolist() for part in found] == [kept[token] for token in batch.held.tolist()]
    layer, slots = LAYERS[1], batch.tokens.shape[1]
    routes = batch.routes(LAYERS)[layer].view(slots, len(batch.tokens), -1)
    pieces = batch.pieces(0, slots)
    for idx, row in enumerate(rows):
        want = read_routes(store, row.routing, layers=[layer])[layer]
        for place, slot, begin, count in pieces.of(idx):
            got = routes[slot : slot + count, place]
            assert got.tolist() == want[begin : begin + count].tolist()


def test_split_begins_a_row_where_the_weights_change(store: BlobStore) -> None:
    """Also inside a turn; each row has the rows that its own version prefilled."""
    played = episode(store, UPDATED)
    (whole,) = played.rows("join")
    rows = checked(played.rows("split"))
    assert [row.num_sampled for row in rows] == [5, 3, 6]
    assert [[span.version for span in row.versions] for row in rows] == [[V0], [V1], [V2]]
    for row in rows:
        assert {part.version for part in row.routing} == {row.versions[0].version}
        assert row.joined_from == row.num_sampled
        assert row.token_ids.tolist() == whole.token_ids[: row.num_tokens].tolist()
    # V1: prefix of its call, and its call; V2: prefix of the third turn, two calls
    assert [len(row.routing) for row in rows] == [2, 2, 3]
    assert rows[1].routing[0] == whole.audit_rows[1]
    assert rows[2].routing[0] == whole.audit_rows[2]
    assert [[end.finish for end in row.ends] for row in rows] == [
        [Finish.STOP, Finish.ABORT], [Finish.STOP], [Finish.STOP, Finish.STOP],
    ]  # fmt: skip
    turns = Episode("0.0", tuple(map(Turn, rows))).turn_lengths()
    assert turns == Episode("0.0", (Turn(whole),)).turn_lengths()
    assert [length for length, _ in turns] == [3, 5, 2, 4]
    with pytest.raises(RecordError, match="audit_rows"):  # control
        random_episode(store, "1.0", PROMPT, UPDATED, SPEC).rows("split")


def test_another_distribution_begins_a_row(store: BlobStore) -> None:
    turns = [turn.sampled for turn in episode(store, PLAIN).turns]
    hotter = replace(TRUNCATED, temperature=2.0)
    turns[2] = replace(turns[2], sampling=hotter)
    first, second = checked(rows_of("0.0", turns, "join"))
    assert (first.num_sampled, second.num_sampled) == (8, 2)
    assert (first.sampling, second.sampling) == (TRUNCATED, hotter)
    shorter = replace(TRUNCATED, max_new_tokens=9)  # where a turn ends is no distribution
    turns[2] = replace(turns[2], sampling=shorter)
    assert len(rows_of("0.0", turns, "join")) == 1


def test_a_turn_of_two_branches_is_trained_in_one(store: BlobStore) -> None:
    first, left = (turn.sampled for turn in episode(store, PLAIN[:2]).turns)
    right = episode(store, PLAIN[:2], "0.1").turns[1]
    begin = len(first.prompt_ids) + len(first.output_ids)
    prompt = np.concatenate([first.prompt_ids, first.output_ids, right.sampled.prompt_ids[begin:]])
    branch = [replace(first, trained=False), replace(right.sampled, prompt_ids=prompt)]
    (whole,) = checked(rows_of("0.0", [first, left], "join"))
    (other,) = checked(rows_of("0.0", branch, "join"))
    assert (whole.num_sampled, other.num_sampled) == (8, 5)
    assert other.token_ids[:begin].tolist() == whole.token_ids[:begin].tolist()
    assert not other.loss_mask[: len(prompt)].any()
    assert other.routing[0] == whole.routing[0]
    assert not rows_of("0.0", branch[:1], "join"), "nothing to train"


def test_turns_that_do_not_continue_each_other_are_refused(store: BlobStore) -> None:
    first, second = (turn.sampled for turn in episode(store, PLAIN[:2]).turns)
    other = first.prompt_ids.copy()
    other[1] += 1
    for wrong in (replace(first, prompt_ids=other), replace(first, segments=second.segments)):
        with pytest.raises(RecordError) as refused:
            join("0.0", [wrong, second])
        assert refused.value.reason == "turns"
    assert isinstance(first, SampledTurn)


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum"])
def test_every_token_has_the_weight_and_advantage_of_a_row_per_turn(
    played: list[ScriptedEpisode], aggregation: str
) -> None:
    """A sequence of the aggregation is the episode, and credit crosses the gaps."""
    config = AlgorithmConfig(aggregation=aggregation, overlong_buffer=4, mask_truncated=True)
    joined, apart = (plan_of(played, mode) for mode in ("join", "separate"))
    assert len(joined.rows) < len(apart.rows)
    for function in (plan_weights, plan_advantages):
        values = [by_token(plan, function(config, plan)) for plan in (joined, apart)]
        assert values[0] == values[1]
    critic = AlgorithmConfig(advantage="gae", gae_gamma=0.9, gae_lambda=0.8)
    found = []
    for plan in (joined, apart):
        values = [np.cos(row.token_ids[row.loss_mask].astype(float)) for row in plan.rollouts()]
        found.append([by_token(plan, part) for part in plan_gae(critic, plan, values)])
    assert found[0] == found[1]
    assert len(set(found[0][1])) > 10, "control: returns differ from token to token"


def test_a_plan_travels_with_rows_of_several_turns(played: list[ScriptedEpisode]) -> None:
    for mode in get_args(TurnRows):
        plan = plan_of(played, mode)
        received = decode(encode(Plan(plan)))
        assert isinstance(received, Plan)
        for a, b in zip(plan.rollouts(), received.plan.rollouts(), strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert (a.ends, a.joined_from) == (b.ends, b.joined_from)


def test_records_of_a_row_per_turn_are_still_read(played: list[ScriptedEpisode]) -> None:
    """A journal or kept records from before rows had several turns."""
    rows = played[-1].rows("separate")
    stored = msgspec.msgpack.decode(encode_value(rows))
    for row in stored:
        assert row.pop("turn_ends") == []
    found = decode_value(msgspec.msgpack.encode(stored), list[Rollout])
    assert [row.ends for row in found] == [row.ends for row in rows]
    episode = Episode("0.0", tuple(map(Turn, found)))
    assert [length for length, _ in episode.turn_lengths()] == [3, 5, 2]

"""Log-probabilities sealed beside the routes, and plans that name a prompt once: what readers see.

The door (`header_check`) sees a header only; NaN, a wrong sign and missing bytes behind a reference
are found by whoever reads them, under the reasons that the door uses for inline values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moerl.core.errors import BlobError, ProtocolError, RecordError
from moerl.core.messages import Plan, SamePlan
from moerl.core.serialization import decode, decode_value, encode, encode_value
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    LogprobBlob,
    PlanRow,
    PolicyVersion,
    Prompt,
    Rollout,
    Turn,
)
from moerl.data.packing import ReadOptions, pack_microbatch
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import blob_uris, check
from tests.helpers.random_rollouts import SHAPE, make_rollout

V3 = PolicyVersion(0, 3)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, "n")


def resealed(store: BlobStore, rollout: Rollout, *pieces: list[float]) -> Rollout:
    """The rollout with other sealed log-probabilities, tiled from 0."""
    refs = store.seal(f"other.{len(list(store.root.iterdir()))}", [np.float32(p) for p in pieces])
    firsts = np.cumsum([0, *map(len, pieces)]).tolist()
    parts = tuple(
        LogprobBlob(ref, first, ref.shape[0]) for ref, first in zip(refs, firsts, strict=False)
    )
    return replace(rollout, sealed_logprobs=parts)


def plan_of(*rollouts: Rollout, prompt: tuple[int, ...] = (1,)) -> BatchPlan:
    episodes = tuple(Episode(f"0.{i}", (Turn(r),)) for i, r in enumerate(rollouts))
    rows = tuple(PlanRow(0, i, 0, 0, 0, i) for i in range(len(rollouts)))
    return BatchPlan(3, V3, (EpisodeGroup(0, Prompt(0, prompt, "", None, {}), episodes),), rows, 1)


def test_segments_are_read_in_order(store: BlobStore) -> None:
    rollout = resealed(store, make_rollout(store, "a", 2, 3), [-1.0, -2.0], [-0.5])
    assert read_logprobs(store, rollout).tolist() == [-1.0, -2.0, -0.5]
    inline = replace(rollout, sealed_logprobs=(), logprobs=np.float32([-3, -2, -1]))
    assert read_logprobs(store, inline).tolist() == [-3.0, -2.0, -1.0]
    assert {"blob://n/a.0", "blob://n/other.2"} <= blob_uris(rollout)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([-1.0, np.nan, -1.0], "logprob_finite"),
        ([-1.0, -np.inf, -1.0], "logprob_finite"),
        ([-1.0, 0.25, -1.0], "logprob_sign"),
        ([-1.0, -1.0], "length"),
    ],
    ids=["nan", "infinite", "positive", "short"],
)
def test_wrong_values_are_refused_where_they_are_read(
    store: BlobStore, values: list[float], reason: str
) -> None:
    good = make_rollout(store, "a", 2, 3)
    bad = resealed(store, good, values)
    assert np.isfinite(pack_microbatch(plan_of(good), 0, 0, store).old_logprob).all()
    with pytest.raises(RecordError) as refused:
        pack_microbatch(plan_of(bad), 0, 0, store)
    assert refused.value.reason == reason


def test_what_was_not_read_cannot_be_used(store: BlobStore) -> None:
    bad = resealed(store, make_rollout(store, "a", 2, 3), [np.nan] * 3)
    packed = pack_microbatch(plan_of(bad), 0, 0, store, reads=ReadOptions(logprobs=False))
    assert packed.old_logprob.isnan().all()


def test_bytes_that_are_gone_or_altered_are_an_error(store: BlobStore) -> None:
    rollout = resealed(store, make_rollout(store, "a", 2, 3), [-1.0, -2.0, -3.0])
    path = store.root / rollout.sealed_logprobs[0].values.uri.rpartition("/")[2]
    whole = path.read_bytes()
    path.write_bytes(b"\1" + whole[1:])
    with pytest.raises(BlobError, match="digest"):
        read_logprobs(store, rollout)
    path.unlink()
    with pytest.raises(BlobError, match="is not in"):
        read_logprobs(store, rollout)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda part: (),
        lambda part: (replace(part, first=1),),
        lambda part: (replace(part, num_tokens=2),),
        lambda part: (replace(part, values=replace(part.values, dtype="int32")),),
        lambda part: (part, part),
    ],
    ids=["none", "gap", "count", "dtype", "twice"],
)
def test_the_door_refuses_a_header_that_names_other_tokens(
    store: BlobStore, spoil: Callable[[LogprobBlob], tuple[LogprobBlob, ...]]
) -> None:
    rollout = resealed(store, make_rollout(store, "a", 2, 3), [-1.0, -2.0, -3.0])
    check(rollout, SHAPE)
    spoiled = replace(rollout, sealed_logprobs=spoil(rollout.sealed_logprobs[0]))
    with pytest.raises(RecordError, match="length"):
        check(spoiled, SHAPE)
    with pytest.raises(RecordError, match="length"):
        read_logprobs(store, spoiled)


# --- plans on the wire ----------------------------------------------------------------------------
def talk(store: BlobStore) -> BatchPlan:
    """Two siblings of one prompt, one of them of two turns."""
    one, two = (make_rollout(store, name, 5, 20, seed=9) for name in "ab")
    head, tail = one.token_ids, make_rollout(store, "c", 2, 20, seed=4).token_ids
    later = make_rollout(store, "d", len(head) + 2, 20)
    later = replace(later, token_ids=np.concatenate([head, tail]))
    plan = plan_of(one, two, prompt=tuple(head[:5].tolist()))
    (group,) = plan.groups
    first, *rest = group.episodes
    first = replace(first, turns=(*first.turns, Turn(later, (0,))))
    return replace(plan, groups=(replace(group, episodes=(first, *rest)),))


def rollouts_of(plan: BatchPlan) -> list[Rollout]:
    return [rollout for group in plan.groups for rollout in group.rollouts()]


def test_a_plan_names_what_a_turn_continues_once(store: BlobStore) -> None:
    plan = talk(store)
    data = encode(Plan(plan))
    told = decode(data)
    assert isinstance(told, Plan)
    for mine, theirs in zip(rollouts_of(plan), rollouts_of(told.plan), strict=True):
        assert theirs.token_ids.dtype == np.int32
        assert theirs.token_ids.tolist() == mine.token_ids.tolist()
        assert theirs.loss_mask.dtype == np.bool_
        assert theirs.loss_mask.tolist() == mine.loss_mask.tolist()
    assert len(encode_value(plan)) - len(data) > 4 * (5 + 5 + 25) - 32, "nothing was left out"


@pytest.mark.parametrize("kind", [partial(Plan, plan_of()), SamePlan])
def test_the_plan_of_the_next_step_travels_as_the_plan_does(
    store: BlobStore, kind: Callable[[BatchPlan | None], Plan | SamePlan]
) -> None:
    plan = talk(store)
    data = encode(kind(plan))
    told = decode(data)
    assert isinstance(told, Plan | SamePlan)
    assert told.ahead is not None
    tokens = [row.token_ids.tolist() for row in rollouts_of(told.ahead)]
    assert tokens == [row.token_ids.tolist() for row in rollouts_of(plan)]
    saved = len(encode_value(kind(plan))) - len(data)
    assert saved > 4 * (5 + 5 + 25) - 32, "prefixes travel twice"
    none = decode(encode(kind(None)))
    assert isinstance(none, Plan | SamePlan)
    assert none.ahead is None


def test_tokens_that_continue_nothing_travel_whole(store: BlobStore) -> None:
    plan = plan_of(make_rollout(store, "a", 5, 3), prompt=(49, 48, 47))
    (told,) = rollouts_of(decode(encode(Plan(plan))).plan)
    assert told.token_ids.tolist() == rollouts_of(plan)[0].token_ids.tolist()


def test_a_plan_whose_tokens_do_not_add_up_is_refused(store: BlobStore) -> None:
    plan = talk(store)
    (group,) = plan.groups
    longer = replace(group.prompt, token_ids=(*group.prompt.token_ids, 1))
    data = encode(Plan(plan)).replace(encode_value(group.prompt), encode_value(longer))
    with pytest.raises(ProtocolError, match="row of 25 tokens has 20 and 6 before"):
        decode(data)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 64])
def test_booleans_are_bits(count: int) -> None:
    mask = np.arange(count) % 3 == 0
    data = encode_value(mask)
    assert decode_value(data, np.ndarray).tolist() == mask.tolist()
    assert len(data) <= 12 + count / 8
    if count > 1:
        cut = data[:-2] + data[-1:]
        with pytest.raises(Exception, match=r"bits|truncated"):
            decode_value(cut, np.ndarray)

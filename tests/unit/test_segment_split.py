"""Segments of an interrupted rollout: own tokens, own version, re-prefilled prefix routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.core.errors import RecordError
from moerl.core.types import BatchPlan, PlanRow, PolicyVersion, Rollout, RoutingBlob
from moerl.data.packing import pack_microbatch
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import check
from moerl.records.segment_split import split_segments
from tests.helpers.random_rollouts import EXPERTS, LAYERS, SHAPE, TOP_K, group, make_rollout

VERSIONS = tuple(PolicyVersion(0, step) for step in (1, 2, 4))


def audited(store: BlobStore) -> Rollout:
    """Prompt of 3, 9 sampled in segments of 2, 4 and 3."""
    rollout = make_rollout(store, "a", 3, 9, cuts=(2, 6), versions=VERSIONS)
    rng = np.random.default_rng(5)
    parts = []
    for idx, part in enumerate(rollout.routing[1:]):
        ids = [rng.permutation(EXPERTS)[:TOP_K] for _ in range(len(LAYERS) * part.row_begin)]
        ids = np.array(ids, np.uint8).reshape(len(LAYERS), part.row_begin, TOP_K)
        (ref,) = store.seal(f"audit.{idx}", [ids])
        parts.append(RoutingBlob(ref, 0, part.row_begin, part.version, LAYERS, EXPERTS))
    return replace(rollout, audit_rows=tuple(parts))


def test_segments_are_whole_rollouts_with_their_own_rows(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    rollout = audited(store)
    segments, whole_logprobs = split_segments(rollout), read_logprobs(store, rollout).tolist()
    assert [s.num_sampled for s in segments] == [2, 4, 3]
    assert [s.num_tokens for s in segments] == [5, 9, 12]
    assert np.concatenate([read_logprobs(store, s) for s in segments]).tolist() == whole_logprobs
    for idx, segment in enumerate(segments):
        check(segment, SHAPE)
        assert segment.version_of_tokens() == [VERSIONS[idx]] * segment.num_sampled
        plan = BatchPlan(
            4, VERSIONS[-1], (group(0, [segment], [0.0]),), (PlanRow(0, 0, 0, 0, 0, 0),), 1
        )
        packed = pack_microbatch(plan, 0, 0, store)
        own = store.load(rollout.routing[idx].ids)[1]
        want = own if not idx else np.vstack([store.load(rollout.audit_rows[idx - 1].ids)[1], own])
        assert packed.routes(LAYERS)[LAYERS[1]].tolist() == want.tolist()
        whole = np.vstack([store.load(part.ids)[1] for part in rollout.routing])[: len(want)]
        assert (want == whole).all() == (idx == 0), "control: the trained rows are other rows"


def test_without_audit_rows_there_is_nothing_to_cut(tmp_path: Path) -> None:
    rollout = audited(BlobStore(tmp_path, "n"))
    with pytest.raises(RecordError, match="audit_rows"):
        split_segments(replace(rollout, audit_rows=()))
    with pytest.raises(RecordError, match="audit_rows"):
        split_segments(replace(rollout, audit_rows=rollout.audit_rows[:1]))
    later = replace(rollout.audit_rows[1], version=VERSIONS[1])  # of other weights
    with pytest.raises(RecordError, match="audit_rows"):
        split_segments(replace(rollout, audit_rows=(rollout.audit_rows[0], later)))


def test_a_rollout_that_was_not_interrupted_is_its_own_segment(tmp_path: Path) -> None:
    rollout = make_rollout(BlobStore(tmp_path, "n"), "a", 3, 5)
    (segment,) = split_segments(rollout)
    assert segment.token_ids.tolist() == rollout.token_ids.tolist()
    assert segment.routing == rollout.routing


def test_prompt_rows_stored_apart_belong_to_the_first_segment(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, "n")
    rollout = audited(store)
    first, *rest = rollout.routing
    ids = store.load(first.ids)
    refs = store.seal("apart", [ids[:, :2].copy(), ids[:, 2:].copy()])
    apart = (
        replace(first, ids=refs[0], row_end=2),
        replace(first, ids=refs[1], row_begin=2),
    )
    whole, cut = split_segments(rollout), split_segments(replace(rollout, routing=(*apart, *rest)))
    assert cut[0].routing == apart
    assert cut[0].num_sampled == whole[0].num_sampled
    assert [s.routing for s in cut[1:]] == [s.routing for s in whole[1:]]

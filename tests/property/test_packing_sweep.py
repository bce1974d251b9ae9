"""Any batch, cut any way over ranks and microbatches, gives back every recorded number once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.core.types import PolicyVersion, Rollout
from moerl.data.batching import plan_batch
from moerl.data.grid import Grid
from moerl.data.packing import Microbatch, pack_microbatch
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from tests.helpers.random_rollouts import LAYERS, TOP_K, group, make_rollout

V9 = PolicyVersion(0, 9)


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[int, int, tuple[int, ...]]]:
    """(prompt length, sampled tokens, cuts) of each rollout."""
    result = []
    for _ in range(draw(st.integers(1, 8))):
        sampled = draw(st.integers(1, 12))
        cuts = draw(st.sets(st.integers(1, max(sampled - 1, 1)), max_size=3)) if sampled > 1 else ()
        result.append((draw(st.integers(1, 6)), sampled, tuple(sorted(cuts))))
    return result


def sealed(store: BlobStore, shape: list[tuple[int, int, tuple[int, ...]]]) -> list[Rollout]:
    return [
        make_rollout(
            store, f"r{i}", prompt, sampled, seed=i, cuts=cuts,
            versions=[PolicyVersion(0, step) for step in range(len(cuts) + 1)],
        )
        for i, (prompt, sampled, cuts) in enumerate(shape)
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(1, 3), st.sampled_from([1, 20, 10**6]), st.sampled_from([1, 4]))
def test_every_record_comes_back_once(
    shape: list[tuple[int, int, tuple[int, ...]]], dp_size: int, budget: int, multiple: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder), "n")
        rollouts = sealed(store, shape)
        plan = plan_batch(
            9, V9, [group(0, rollouts, [0.0] * len(rollouts))],
            dp_size=dp_size, max_tokens_per_microbatch=budget,
        )  # fmt: skip
        found: list[str] = []
        for rank in range(dp_size):
            for microbatch in range(plan.num_microbatches):
                packed = pack_microbatch(
                    plan, rank, microbatch, store, grid=Grid(multiple_of=multiple)
                )
                found += [rollout.rollout_id for rollout in packed.rollouts]
                _compare(packed, store)
        assert sorted(found) == sorted(rollout.rollout_id for rollout in rollouts)


def _compare(packed: Microbatch, store: BlobStore) -> None:
    batch, length = packed.tokens.shape
    routes = {layer: ids.view(length, batch, TOP_K) for layer, ids in packed.routes(LAYERS).items()}
    for row, rollout in enumerate(packed.rollouts):
        mine = packed.seq == row
        fed = rollout.num_tokens - 1
        rebuilt = np.append(packed.tokens[row, :fed].numpy(), packed.labels[row, fed - 1])
        assert (rebuilt == rollout.token_ids).all()
        assert not packed.tokens[row, fed:].any()
        assert packed.old_logprob[mine].tolist() == read_logprobs(store, rollout).tolist()
        assert packed.lag[mine].tolist() == [9 - v.step for v in rollout.version_of_tokens()]
        for idx, layer in enumerate(LAYERS):
            want = np.concatenate([store.load(part.ids)[idx] for part in rollout.routing])
            assert (routes[layer][:fed, row].numpy() == want).all()
    for at, token in enumerate(packed.sampled.tolist()):
        begin, end = packed.mask_offsets[at : at + 2].tolist()
        assert packed.mask_ids[begin:end].tolist().count(token) == 1


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.booleans())
def test_ranks_of_a_sequence_hold_every_token_once(
    shape: list[tuple[int, int, tuple[int, ...]]], cp_size: int, tp_size: int, packed: bool
) -> None:
    """Context-parallel ranks and slices: every token, route, sampled token and sampling mask
    once.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder), "n")
        rollouts = sealed(store, shape)
        plan = plan_batch(
            9, V9, [group(0, rollouts, [0.0] * len(rollouts))],
            dp_size=1, max_tokens_per_microbatch=10**6,
        )  # fmt: skip
        seen = {r.rollout_id: np.zeros(r.num_tokens - 1, int) for r in rollouts}
        scored: list[int] = []
        rows_read = bytes_read = 0
        shapes_seen = set()
        for rank in range(cp_size):
            grid = Grid(packed, rank, cp_size, tp_size)
            mine = pack_microbatch(plan, 0, 0, store, grid=grid)
            shapes_seen.add(mine.tokens.shape)
            slots = mine.tokens.shape[1]
            assert slots % tp_size == 0
            for begin in range(0, slots, slots // tp_size):
                span = (begin, begin + slots // tp_size)
                _compare_slice(mine, span, store, seen)
            whole_rows = mine.read.routing_rows
            assert mine.num_fed == mine.num_fed_in((0, slots))
            rows_read += whole_rows
            bytes_read += mine.read.routing
            scored += mine.held.tolist()
            _compare_masks(mine, store)
        assert all((counts == 1).all() for counts in seen.values())
        assert sorted(scored) == list(range(sum(r.num_sampled for r in rollouts)))
        fed = sum(r.num_tokens - 1 for r in rollouts)
        assert (rows_read, bytes_read) == (fed * len(LAYERS), fed * len(LAYERS) * TOP_K)
        assert len(shapes_seen) == 1, "ranks of a group agree on the shape"


def _compare_slice(
    mine: Microbatch, span: tuple[int, int], store: BlobStore, seen: dict[str, np.ndarray]
) -> None:
    """What one tensor-parallel slice holds, found slot by slot from positions and cu_seqlens."""
    batch = len(mine.tokens)
    routes = {
        layer: ids.view(span[1] - span[0], batch, TOP_K)
        for layer, ids in mine.routes(LAYERS, span).items()
    }
    for run in mine.runs:
        for offset in range(run.num):
            slot, position = run.slot + offset, run.begin + offset
            if not span[0] <= slot < span[1] or run.rollout >= len(mine.rollouts):
                continue
            rollout = mine.rollouts[run.rollout]
            assert mine.positions[run.row, slot] == position
            if position >= rollout.num_tokens - 1:
                assert routes[LAYERS[0]][slot - span[0], run.row].tolist() == list(range(TOP_K))
                continue
            assert mine.tokens[run.row, slot] == rollout.token_ids[position]
            assert mine.labels[run.row, slot] == rollout.token_ids[position + 1]
            seen[rollout.rollout_id][position] += 1
            for idx, layer in enumerate(LAYERS):
                want = np.concatenate([store.load(part.ids)[idx] for part in rollout.routing])
                assert routes[layer][slot - span[0], run.row].tolist() == want[position].tolist()


def _compare_masks(mine: Microbatch, store: BlobStore) -> None:
    kept = [
        ids
        for rollout in mine.rollouts
        for blob in rollout.sampling_mask
        for ids in np.split(store.load(blob.ids), store.load(blob.offsets)[1:-1])
    ]
    labels = mine.labels.view(-1)
    for at, token in enumerate(mine.held.tolist()):
        begin, end = mine.mask_offsets[at : at + 2].tolist()
        assert mine.mask_ids[begin:end].tolist() == kept[token].tolist()
        assert labels[mine.sampled_rows[at]] == mine.sampled[token]

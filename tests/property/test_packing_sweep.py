"""Any batch, cut any way over ranks and microbatches, gives back every recorded number once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.blob.store import BlobStore
from moerl.data.batching import plan_batch
from moerl.data.packing import Grid, Microbatch, pack_microbatch
from moerl.types import PolicyVersion, Rollout
from tests.data.plans import LAYERS, TOP_K, group, make_rollout

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
        assert packed.old_logprob[mine].tolist() == rollout.logprobs.tolist()
        assert packed.lag[mine].tolist() == [9 - v.step for v in rollout.version_of_tokens()]
        for idx, layer in enumerate(LAYERS):
            want = np.concatenate([store.load(part.ids)[idx] for part in rollout.routing])
            assert (routes[layer][:fed, row].numpy() == want).all()
    for at, token in enumerate(packed.sampled.tolist()):
        begin, end = packed.mask_offsets[at : at + 2].tolist()
        assert packed.mask_ids[begin:end].tolist().count(token) == 1

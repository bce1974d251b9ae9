"""Packing keeps every record beside its token: a fake trainer whose logits are a known function.

The oracle for alignment is outside the code under test: `expected_entries` walks the rollouts one
token at a time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.algorithms.head_logprob import Head, SamplingMask, kept_logprobs
from moerl.core.errors import BlobError, RecordError
from moerl.core.types import BatchPlan, PlanRow, PolicyVersion, Rollout, SamplingParams
from moerl.data.batching import plan_batch
from moerl.data.grid import Grid
from moerl.data.packing import LossInputs, ReadOptions, pack_microbatch, version_lag
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from tests.helpers.random_rollouts import LAYERS, TOP_K, TRUNCATED, VOCAB, group, make_rollout

V5 = PolicyVersion(0, 5)
SAME = Head(torch.eye(VOCAB, dtype=torch.float64), VOCAB)  # its logits are its input


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, "n")


def one_microbatch(rollouts: list[Rollout], version: PolicyVersion = V5) -> BatchPlan:
    """All rollouts in the given order in microbatch 0 of rank 0; rank 1 has none."""
    rows = tuple(PlanRow(0, i, 0, 0, 0, i) for i in range(len(rollouts)))
    return BatchPlan(5, version, (group(0, rollouts, [0.0] * len(rollouts)),), rows, 1)


def three(store: BlobStore) -> list[Rollout]:
    old, new = PolicyVersion(0, 3), PolicyVersion(0, 5)
    return [
        make_rollout(store, "a", 3, 4, seed=1, cuts=(2,), versions=(old, new)),
        make_rollout(store, "b", 1, 9, seed=2),
        make_rollout(store, "c", 5, 1, seed=3),
    ]


def test_the_example_of_the_alignment_law(store: BlobStore) -> None:
    short = make_rollout(store, "a", 2, 2)
    short = replace(short, token_ids=np.array([5, 9, 7, 2], np.int32))
    longer = make_rollout(store, "b", 2, 3)
    packed = pack_microbatch(
        one_microbatch([short, longer]), 0, 0, store, reads=ReadOptions(mask=False)
    )
    assert packed.tokens[0].tolist() == [5, 9, 7, 0]
    assert packed.labels[0].tolist() == [9, 7, 2, 0]
    assert packed.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert packed.sampled_rows.tolist() == [1, 2, 5, 6, 7]
    assert packed.sampled.tolist()[:2] == [7, 2]


def test_every_number_stays_beside_its_token(store: BlobStore) -> None:
    rollouts = three(store)
    advantages, weights = [0.5, -1.0, 2.0], [0.1, 0.2, 0.3]
    packed = pack_microbatch(
        one_microbatch(rollouts), 0, 0, store, loss=LossInputs(advantages, weights)
    )
    at = 0
    for row, rollout in enumerate(rollouts):
        logprobs = read_logprobs(store, rollout)
        versions = rollout.version_of_tokens()
        masks = [
            ids
            for blob in rollout.sampling_mask
            for ids in np.split(store.load(blob.ids), store.load(blob.offsets)[1:-1])
        ]
        for produced, token in enumerate(np.flatnonzero(rollout.loss_mask)):
            assert packed.sampled_rows[at] == row * packed.tokens.shape[1] + token - 1
            assert packed.sampled[at] == rollout.token_ids[token]
            assert packed.labels.view(-1)[packed.sampled_rows[at]] == rollout.token_ids[token]
            assert packed.tokens.view(-1)[packed.sampled_rows[at]] == rollout.token_ids[token - 1]
            assert packed.old_logprob[at] == logprobs[produced]
            assert packed.lag[at] == 5 - versions[produced].step
            assert packed.temperature[at] == np.float32(0.7)
            assert packed.advantage[at] == np.float32(advantages[row])
            assert packed.weight[at] == np.float32(weights[row])
            assert packed.seq[at] == row
            begin, end = packed.mask_offsets[at : at + 2].tolist()
            assert packed.mask_ids[begin:end].tolist() == masks[produced].tolist()
            at += 1
    assert at == len(packed.sampled) == len(packed.mask_offsets) - 1
    assert packed.num_fed == sum(r.num_tokens - 1 for r in rollouts)


def test_routes_are_sequence_major_and_padding_is_valid(store: BlobStore) -> None:
    rollouts = three(store)
    packed = pack_microbatch(one_microbatch(rollouts), 0, 0, store, grid=Grid(multiple_of=4))
    batch, length = packed.tokens.shape
    assert length == 12
    for layer, flat in packed.routes(LAYERS).items():
        assert flat.shape == (length * batch, TOP_K)
        assert flat.dtype == torch.uint8, "narrow until a router needs them"
        for b, rollout in enumerate(rollouts):
            want = np.concatenate(
                [store.load(part.ids)[LAYERS.index(layer)] for part in rollout.routing]
            )
            for s in range(length):
                expected = want[s].tolist() if s < rollout.num_tokens - 1 else [0, 1]
                assert flat[s * batch + b].tolist() == expected


def test_a_stage_reads_its_own_layers_only(store: BlobStore) -> None:
    rollouts = three(store)
    rows = sum(r.num_tokens - 1 for r in rollouts)
    packed = pack_microbatch(one_microbatch(rollouts), 0, 0, store)
    whole = packed.routes(LAYERS)
    assert (packed.read.routing, packed.read.routing_rows) == (3 * rows * TOP_K, 3 * rows)
    stage = pack_microbatch(one_microbatch(rollouts), 0, 0, store)
    assert stage.read.routing == 0, "nothing is read before it is asked for"
    (layer,) = stage.routes([2]).items()
    assert stage.read.routing == rows * TOP_K
    assert layer[0] == 2
    assert torch.equal(layer[1], whole[2])
    kept = sum(blob.ids.num_bytes for r in rollouts for blob in r.sampling_mask)
    assert stage.read.mask == kept + sum(8 * (r.num_sampled + 1) for r in rollouts)


def test_a_rank_without_rows_gets_one_row_of_padding(store: BlobStore) -> None:
    packed = pack_microbatch(one_microbatch(three(store)), 1, 0, store, grid=Grid(multiple_of=2))
    assert packed.tokens.shape == (1, 2)
    assert len(packed.sampled) == len(packed.old_logprob) == len(packed.lag) == packed.num_fed == 0
    assert packed.routes([0, 2])[0].tolist() == [[0, 1], [0, 1]]
    assert packed.read.routing == packed.read.mask == 0


def test_kept_logprob_of_a_known_policy_through_the_packer(store: BlobStore) -> None:
    """Logits that depend on the fed-in token and its position; scored token by token outside."""
    torch.manual_seed(0)
    table = torch.randn(VOCAB, 20, VOCAB, dtype=torch.float64)
    rollouts = three(store)
    packed = pack_microbatch(one_microbatch(rollouts), 0, 0, store)
    logits = table[packed.tokens, packed.positions]

    def score(rows: torch.Tensor) -> torch.Tensor:
        return kept_logprobs(
            logits.flatten(0, 1)[rows], SAME, packed.sampled,
            SamplingMask(packed.mask_offsets, packed.mask_ids), temperature_S=packed.temperature,
        )[0]  # fmt: skip

    want = []
    for rollout in rollouts:
        masks = [
            ids
            for blob in rollout.sampling_mask
            for ids in np.split(store.load(blob.ids), store.load(blob.offsets)[1:-1])
        ]
        for kept, t in zip(masks, np.flatnonzero(rollout.loss_mask), strict=True):
            row = table[rollout.token_ids[t - 1], t - 1] / np.float32(0.7).item()
            want.append((row[rollout.token_ids[t]] - row[kept.tolist()].logsumexp(0)).item())
    torch.testing.assert_close(score(packed.sampled_rows), torch.tensor(want).double())
    shifted = score(packed.sampled_rows.roll(1))
    assert (shifted - torch.tensor(want)).abs().max() > 0.5, "control: a shift by one is seen"


def test_rows_of_tasks_with_other_sampling_share_a_microbatch(store: BlobStore) -> None:
    """Each token is scored at the temperature of its own row, over its own mask."""
    torch.manual_seed(0)
    table = torch.randn(VOCAB, 20, VOCAB, dtype=torch.float64)
    settings = ((0.7, 0.9, 8), (1.0, 1.0, 4), (1.3, 0.95, -1))
    rollouts = [
        replace(row, sampling=replace(row.sampling, temperature=t, top_p=p, top_k=k))
        for row, (t, p, k) in zip(three(store), settings, strict=True)
    ]
    packed = pack_microbatch(one_microbatch(rollouts), 0, 0, store)
    logits = table[packed.tokens, packed.positions]

    def score(temperature: torch.Tensor) -> torch.Tensor:
        return kept_logprobs(
            logits.flatten(0, 1)[packed.sampled_rows], SAME, packed.sampled,
            SamplingMask(packed.mask_offsets, packed.mask_ids), temperature_S=temperature,
        )[0]  # fmt: skip

    want = []
    for rollout in rollouts:
        masks = [
            ids
            for blob in rollout.sampling_mask
            for ids in np.split(store.load(blob.ids), store.load(blob.offsets)[1:-1])
        ]
        tau = np.float32(rollout.sampling.temperature).item()
        for kept, t in zip(masks, np.flatnonzero(rollout.loss_mask), strict=True):
            row = table[rollout.token_ids[t - 1], t - 1] / tau
            want.append((row[rollout.token_ids[t]] - row[kept.tolist()].logsumexp(0)).item())
    exact = torch.tensor(want).double()
    torch.testing.assert_close(score(packed.temperature), exact)
    one = score(torch.full_like(packed.temperature, settings[0][0]))
    assert (one - exact).abs().max() > 0.05, "control: the temperature of the first task for all"


def test_full_sampling_has_no_mask_and_a_mixture_is_refused(store: BlobStore) -> None:
    free = make_rollout(store, "free", 2, 3, sampling=SamplingParams(max_new_tokens=3))
    assert pack_microbatch(one_microbatch([free]), 0, 0, store).mask_offsets is None
    with pytest.raises(RecordError, match="mixes truncated and full"):
        pack_microbatch(one_microbatch([free, *three(store)]), 0, 0, store)


def test_a_mask_that_is_not_asked_for_is_not_read(store: BlobStore) -> None:
    packed = pack_microbatch(
        one_microbatch(three(store)), 0, 0, store, reads=ReadOptions(mask=False)
    )
    assert (packed.mask_offsets, packed.mask_ids, packed.read.mask) == (None, None, 0)


def test_missing_and_damaged_bytes_are_refused(store: BlobStore) -> None:
    rollouts = three(store)
    plan = one_microbatch(rollouts)
    path = store.root / "b.0"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))
    packed = pack_microbatch(plan, 0, 0, store)
    with pytest.raises(BlobError, match="digest"):
        packed.routes(LAYERS)
    with pytest.raises(BlobError, match="digest"):
        packed.routes([0])
    path.unlink()
    with pytest.raises(BlobError, match=r"b\.0 is not in"):
        packed.routes([0])
    with pytest.raises(BlobError, match=r"b\.0 is not in"):
        pack_microbatch(plan, 0, 0, store)


def test_rows_that_do_not_tile_the_sequence_are_refused(store: BlobStore) -> None:
    a = three(store)[0]
    first, second = a.routing
    wrong = {
        "seam row missing": (first, replace(second, row_begin=second.row_begin + 1)),
        "segment twice": (first, second, second),
        "last segment missing": (first,),
        "out of order": (second, first),
        "none": (),
    }
    for name, parts in wrong.items():
        plan = one_microbatch([replace(a, routing=parts), make_rollout(store, name[:4], 2, 2)])
        with pytest.raises(RecordError, match="routing_rows"):
            pack_microbatch(plan, 0, 0, store).routes(LAYERS)
    with pytest.raises(RecordError, match="routing_layers"):
        pack_microbatch(one_microbatch([a]), 0, 0, store).routes([0, 1])
    masks = replace(a, sampling_mask=a.sampling_mask[:1])
    with pytest.raises(RecordError, match="2 mask rows for 4 sampled tokens"):
        pack_microbatch(one_microbatch([masks]), 0, 0, store)


def test_lag_counts_versions_and_refuses_the_future(store: BlobStore) -> None:
    assert version_lag(V5, PolicyVersion(0, 2)) == 3
    assert version_lag(PolicyVersion(1, 40), PolicyVersion(0, 50)) == 10
    with pytest.raises(RecordError, match="version_future"):
        version_lag(PolicyVersion(0, 2), V5)
    with pytest.raises(RecordError, match=r"sampled by 0\.5, trained at 0\.4"):
        pack_microbatch(one_microbatch(three(store), PolicyVersion(0, 4)), 0, 0, store)


def test_scoring_only_needs_no_advantage(store: BlobStore) -> None:
    packed = pack_microbatch(one_microbatch(three(store)), 0, 0, store)
    assert not packed.advantage.any()
    assert not packed.weight.any()


def test_a_real_plan_is_packed_whole(store: BlobStore) -> None:
    rollouts = [make_rollout(store, f"{i}", 1 + i % 3, 1 + i, seed=i) for i in range(9)]
    plan = plan_batch(
        5, V5, [group(0, rollouts, [0.0] * 9)], dp_size=2, max_tokens_per_microbatch=16
    )
    assert plan.num_microbatches > 1
    assert TRUNCATED.truncates
    seen = []
    for rank in range(2):
        for microbatch in range(plan.num_microbatches):
            packed = pack_microbatch(plan, rank, microbatch, store)
            assert packed.tokens.numel() <= 16
            seen += packed.old_logprob.tolist()
    assert sorted(seen) == sorted(x for r in rollouts for x in read_logprobs(store, r).tolist())

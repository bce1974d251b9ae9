"""Rows that share leading tokens: which do, where they lie, who sees whom, both attentions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex

from moerl.config import load_config, resolve
from moerl.config.tiny_config import tiny_config
from moerl.core.errors import ConfigError
from moerl.core.types import PolicyVersion, Rollout
from moerl.data.batching import plan_batch
from moerl.data.grid import Grid
from moerl.data.packing import Microbatch, pack_microbatch, rollout_at, rows_in
from moerl.data.shared_prefix import check_shared, count_apart, shared_tokens
from moerl.layout import ModelSpec, model_spec
from moerl.planning.dry_run import describe
from moerl.records.blob_store import BlobStore
from moerl.trainer.model.shared_attention import SharedAttention, attend_blocks, block_mask
from tests.helpers.random_rollouts import LAYERS, group, make_rollout
from tests.helpers.synthetic import share_prompt_rows

V9 = PolicyVersion(0, 9)
SHARES = Grid(packed=True, shares=True)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, "n")


def siblings(store: BlobStore, prompt: int, sampled: Sequence[int], seed: int = 0) -> list[Rollout]:
    """Rows of one prompt, whose routes are stored once."""
    rows = [
        make_rollout(store, f"{seed}.{idx}", prompt, num, seed=100 * seed + idx)
        for idx, num in enumerate(sampled)
    ]
    rows = [
        replace(row, token_ids=np.append(rows[0].token_ids[:prompt], row.token_ids[prompt:]))
        for row in rows
    ]
    return share_prompt_rows(store, rows, prompt)


def packed(store: BlobStore, rows: Sequence[Rollout], grid: Grid = SHARES) -> Microbatch:
    plan = plan_batch(
        9, V9, [group(0, list(rows), [0.0] * len(rows))],
        dp_size=1, max_tokens_per_microbatch=10**6, packed=True, share=grid.shares,
    )  # fmt: skip
    return pack_microbatch(plan, 0, 0, store, grid=grid)


def path_slots(batch: Microbatch) -> list[list[int]]:
    """Slots of all positions of each rollout."""
    slots: list[list[int]] = [[] for _ in batch.rollouts]
    for run in batch.every:
        if run.rollout < len(slots):
            slots[run.rollout] += range(run.slot, run.slot + run.num)
    return slots


def seen(batch: Microbatch) -> np.ndarray:
    """[S, S] bool: query, key."""
    assert batch.seen_until is not None
    at = np.arange(len(batch.seen_until))
    return (at[None] <= at[:, None]) & (at[:, None] < batch.seen_until.numpy()[None])


# --- what is shared ------------------------------------------------------------------------------
def test_a_row_sees_its_own_path_and_nothing_else(store: BlobStore) -> None:
    rows = siblings(store, 6, (4, 1, 5)) + siblings(store, 3, (2, 2), seed=1)
    batch = packed(store, rows)
    assert batch.tokens.shape == (1, 6 + 3 + 0 + 4 + 3 + 1 + 1)
    assert batch.num_shared == 6 * 2 + 3
    sees, paths = seen(batch), path_slots(batch)
    for rollout, path in zip(batch.rollouts, paths, strict=True):
        assert batch.tokens[0, path].tolist() == rollout.token_ids[:-1].tolist()
        assert batch.positions[0, path].tolist() == list(range(rollout.num_tokens - 1))
        for place, slot in enumerate(path):
            assert np.flatnonzero(sees[slot]).tolist() == path[: place + 1]


def test_a_prompt_produces_the_first_token_of_each_sibling(store: BlobStore) -> None:
    batch = packed(store, siblings(store, 6, (4, 1, 5)))
    assert (batch.sampled_rows == 5).sum() == 3, "position 5 ends the prompt"
    at = 0
    for rollout, path in zip(batch.rollouts, path_slots(batch), strict=True):
        produced = np.flatnonzero(rollout.loss_mask)
        mine = slice(at, at + len(produced))
        assert batch.sampled_rows[mine].tolist() == [path[token - 1] for token in produced]
        assert batch.sampled[mine].tolist() == rollout.token_ids[produced].tolist()
        at += len(produced)
    assert at == len(batch.sampled)


def test_records_of_sampled_tokens_are_those_of_rows_of_their_own(store: BlobStore) -> None:
    rows = siblings(store, 6, (4, 1, 5))
    shared, apart = packed(store, rows), packed(store, rows, Grid(packed=True))
    order = [row.rollout_id for row in shared.rollouts]
    for idx, rollout in enumerate(apart.rollouts):
        a, b = apart.seq == idx, shared.seq == order.index(rollout.rollout_id)
        for name in ("sampled", "old_logprob", "temperature", "lag"):
            assert torch.equal(getattr(apart, name)[a], getattr(shared, name)[b]), name
    assert shared.read.mask == apart.read.mask


def test_shared_slots_replay_the_prompt_and_count_for_each_sibling(store: BlobStore) -> None:
    rows = siblings(store, 6, (4, 1, 5))
    shared, apart = packed(store, rows), packed(store, rows, Grid(packed=True))
    layers = list(LAYERS)
    own, plain = shared.routes(layers), apart.routes(layers)
    of_row = {row.rollout_id: run.slot for row, run in zip(apart.rollouts, apart.runs)}  # noqa: B905
    for rollout, path in zip(shared.rollouts, path_slots(shared), strict=True):
        begin = of_row[rollout.rollout_id]
        for layer in layers:
            assert torch.equal(own[layer][path], plain[layer][begin : begin + len(path)])
    for layer in layers:
        assert shared.read.experts[layer].tolist() == apart.read.experts[layer].tolist()
    assert shared.read.routing_rows < apart.read.routing_rows


def test_other_routes_or_tokens_stay_apart(store: BlobStore) -> None:
    one, two, three = siblings(store, 6, (4, 3, 5))
    (own,) = share_prompt_rows(store, [make_rollout(store, "x", 6, 3, seed=77)])
    other = replace(own, token_ids=np.append(two.token_ids[:6], own.token_ids[6:]))
    assert shared_tokens(one, two) == 6
    assert shared_tokens(one, other) == 0, "its prompt was routed otherwise"
    assert count_apart(group(0, [one, other, two, three], [0.0] * 4)) == 1
    assert count_apart(group(0, [one, two, three], [0.0] * 3)) == 0
    changed = two.token_ids.copy()
    changed[4] += 1
    assert shared_tokens(one, replace(two, token_ids=changed)) == 4
    dense = [replace(row, routing=()) for row in (one, two)]
    assert shared_tokens(*dense) >= 6, "without routes tokens decide"


# --- the plan ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cap", "dp"), [(10**6, 1), (30, 1), (30, 2), (10**6, 4), (1, 2)])
def test_every_row_is_planned_once_within_the_bound(store: BlobStore, cap: int, dp: int) -> None:
    many = [siblings(store, 8, (4, 1, 5, 7, 3), seed=seed) for seed in range(3)]
    groups = [group(idx, rows, [0.0] * len(rows)) for idx, rows in enumerate(many)]
    plan = plan_batch(
        9, V9, groups, dp_size=dp, max_tokens_per_microbatch=cap, packed=True, share=True
    )
    assert sorted((row.group, row.episode) for row in plan.rows) == [
        (number, idx) for number in range(3) for idx in range(5)
    ]
    used = set()
    for rank in range(dp):
        for microbatch in range(plan.num_microbatches):
            rows = [rollout_at(plan, idx) for idx in rows_in(plan, rank, microbatch)]
            batch = pack_microbatch(plan, rank, microbatch, store, grid=SHARES)
            assert batch.tokens.shape[1] <= max(cap, 1) or len(rows) == 1
            used |= {rank} if rows else set()
    assert used == set(range(dp)), "no rank waits for the others"


# --- attention -----------------------------------------------------------------------------------
def attention() -> SharedAttention:
    module = SharedAttention.__new__(SharedAttention)
    torch.nn.Module.__init__(module)
    module.scale, module.cp_group = None, None
    return module


def inputs(slots: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    shapes = ((slots, 1, 4, 16), (slots, 1, 2, 16), (slots, 1, 2, 16))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def of_own_rows(batch: Microbatch, q: Any, k: Any, v: Any) -> torch.Tensor:
    """Each row attends by itself; a shared slot has the result of the first row that holds it."""
    out = torch.zeros(q.shape)
    done: set[int] = set()
    for path in path_slots(batch):
        every = [x[path].permute(1, 2, 0, 3) for x in (q, k, v)]
        own = torch.nn.functional.scaled_dot_product_attention(
            *every, is_causal=True, enable_gqa=True
        ).permute(2, 0, 1, 3)
        fresh = [idx for idx, slot in enumerate(path) if slot not in done]
        out = out.index_put(
            (torch.tensor([path[idx] for idx in fresh], dtype=torch.long),), own[fresh]
        )
        done |= set(path)
    return out.flatten(2)


def with_gradients(attend: Any, slots: int) -> list[torch.Tensor]:
    tensors = inputs(slots)
    out = attend(*tensors)
    (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    return [out.detach(), *(t.grad for t in tensors if t.grad is not None)]


def test_both_forms_are_attention_of_rows_of_their_own(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # it has a backward, uncompiled
    batch = packed(store, siblings(store, 150, (40, 1, 130)) + siblings(store, 3, (2, 9), seed=1))
    until = batch.seen_until
    assert until is not None
    slots = len(until)
    want = with_gradients(lambda *x: of_own_rows(batch, *x), slots)
    forms = {
        "cpu": with_gradients(lambda *x: attention()(*x, until), slots),
        "gpu": with_gradients(lambda *x: attend_blocks(*x, until, None).flatten(2), slots),
    }
    wrong = with_gradients(
        lambda *x: attend_blocks(*x, torch.full_like(until, slots), None).flatten(2), slots
    )
    for name, found in forms.items():
        for a, b in zip(found, want, strict=True):
            assert float((a - b).norm() / b.norm()) < 1e-6, name
    assert float((wrong[0] - want[0]).norm() / want[0].norm()) > 0.1, "control: siblings are seen"


def test_a_gpu_computes_the_blocks_in_which_something_is_seen(store: BlobStore) -> None:
    rows = siblings(store, 300, (40, 200, 130)) + siblings(store, 3, (2, 9), seed=1)
    batch = packed(store, rows)
    assert batch.seen_until is not None
    sees, mask = seen(batch), block_mask(batch.seen_until)
    count = -(-len(sees) // 128)
    padded = np.zeros((128 * count, 128 * count), bool)
    padded[: len(sees), : len(sees)] = sees
    blocks = padded.reshape(count, 128, count, 128)
    some, whole = blocks.any((1, 3)), blocks.all((1, 3))
    assert (mask.to_dense()[0, 0].numpy().astype(bool) == some).all()
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.sum() == whole.sum() > 0
    assert not some.all(), "control: some blocks are skipped"


# --- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"kv_lora": 8}, "latent"),
        ({"index_topk": 4}, "sparse"),
        ({"linear_layers": (0,)}, "delta net"),
        ({"sinks": True}, "sinks"),
        ({"nope_layers": (1,)}, "without a rotary"),
    ],
)
def test_other_kinds_of_attention_are_refused(
    spec: ModelSpec, fields: dict[str, Any], kind: str
) -> None:
    check_shared(spec)
    with pytest.raises(ConfigError, match=f"trainer.share_prompts = True .*{kind}.*use false"):
        check_shared(replace(spec, **fields))


def test_a_dry_run_refuses_the_model() -> None:
    config = resolve(load_config("gpt-oss-120b", ["trainer.share_prompts=true"]))
    with pytest.raises(ConfigError, match=r"trainer.share_prompts = True .*attention sinks"):
        describe(config, ["gpt-oss-120b"])


@pytest.fixture
def spec() -> ModelSpec:
    config = resolve(load_config("quickstart", []))
    return model_spec(tiny_config(config.model.tiny, vocab_size=128))

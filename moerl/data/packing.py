"""From planned rollouts to the tensors of one microbatch: the one place that shifts tokens.

The alignment law (docs/alignment.md) in code: `tokens = token_ids[:-1]` are fed in, `labels =
token_ids[1:]` are produced, and the logits that produced sampled token t are those of position t-1.
Routing rows (indexed by fed-in token) therefore line up with `tokens`, mask rows (indexed by
produced token) with `sampled_rows`.  No other file shifts anything.

Rows are padded on the right: attention is causal, so no real token sees padding, and padding
routes to experts 0..K-1 and is never read.  Routes are read from the blobs on demand, for the
layers a pipeline stage owns and for nothing else.

Legend: B rows, S fed-in positions of the longest row, N sampled tokens, K experts per token.
Example: prompt [5, 9], sampled [7, 2] with a longer neighbour (S = 4): tokens [5, 9, 7, 0],
labels [9, 7, 2, 0], sampled_rows [1, 2], three routing rows and one row of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moerl.blob.store import BlobStore
from moerl.codec.routing import check_ids
from moerl.codec.sampling_mask import concat
from moerl.errors import RecordError
from moerl.types import Array, BatchPlan, PolicyVersion, Rollout, RoutingBlob


@dataclass(slots=True)
class BytesRead:
    """What a microbatch took from the blobs so far (proves that a rank reads only its share)."""

    mask: int = 0
    routing: int = 0
    routing_rows: int = 0  # (token, layer) pairs


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One data-parallel rank's share of one microbatch, on the CPU."""

    tokens: Tensor  # [B, S] i64, padded with 0
    labels: Tensor  # [B, S] i64, padded with 0
    positions: Tensor  # [B, S] i64
    sampled_rows: Tensor  # [N] i64 into the flattened [B, S], rising
    sampled: Tensor  # [N] i64, the sampled tokens = labels at sampled_rows
    old_logprob: Tensor  # [N] f32, the engine's
    advantage: Tensor  # [N] f32
    weight: Tensor  # [N] f32, global aggregation weight
    lag: Tensor  # [N] i64, versions
    temperature: Tensor  # [N] f32
    seq: Tensor  # [N] i64, row 0..B-1 of each token
    mask_offsets: Tensor | None  # [N + 1] i64; None when sampling did not truncate or not asked
    mask_ids: Tensor | None  # [nnz] i64
    num_fed: int  # fed-in tokens without padding
    num_experts_per_token: int  # K; 0 for a dense model
    rollouts: tuple[Rollout, ...]  # [B], or empty for a microbatch of padding only
    store: BlobStore
    read: BytesRead

    def routes(self, layers: Sequence[int]) -> dict[int, Tensor]:
        """Recorded expert ids per layer: {global 0-based layer: [S * B, K] i64, sequence-major}.

        Reads the blobs at each call.  Digests are verified when all recorded layers are asked for;
        a slice cannot be, there every id is checked instead.
        Raises RecordError `routing_rows`, `routing_layers`, `routing_range`; BlobError.
        """
        num_rows, length = self.tokens.shape
        k = self.num_experts_per_token
        if not k:
            raise RecordError("routing_rows", "no routing was recorded for this microbatch")
        joined = np.empty((len(layers), length, num_rows, k), np.int64)
        joined[:] = np.arange(k)
        for row, rollout in enumerate(self.rollouts):
            for part in _tiles(rollout):
                ids = self._read_ids(part, layers)
                joined[:, part.row_begin : part.row_end, row] = ids
        flat = torch.from_numpy(joined).view(len(layers), length * num_rows, k)
        return {layer: flat[idx] for idx, layer in enumerate(layers)}

    def _read_ids(self, part: RoutingBlob, layers: Sequence[int]) -> Array:
        missing = set(layers) - set(part.layers)
        if missing or part.ids.shape[-1] != self.num_experts_per_token:
            raise RecordError(
                "routing_layers",
                f"{part.ids.uri} holds layers {part.layers} x {part.ids.shape[-1]} experts; "
                f"want layers {tuple(layers)} x {self.num_experts_per_token}",
            )
        whole = tuple(layers) == part.layers
        data = self.store.load(part.ids) if whole else self.store.view(part.ids)
        ids = data if whole else data[[part.layers.index(layer) for layer in layers]]
        self.read.routing += ids.nbytes
        self.read.routing_rows += ids.shape[0] * ids.shape[1]
        if not whole:
            check_ids(ids, part.num_experts)
        elif ids.size and int(ids.max()) >= part.num_experts:
            raise RecordError("routing_range", f"{part.ids.uri}: id {int(ids.max())} of an expert")
        return ids


def pack_microbatch(
    plan: BatchPlan,
    dp_rank: int,
    microbatch: int,
    store: BlobStore,
    *,
    advantages: Sequence[float | Array] | None = None,
    weights: Sequence[float | Array] | None = None,
    read_mask: bool = True,
    multiple_of: int = 1,
) -> Microbatch:
    """Tensors of the rows that one data-parallel rank trains in one microbatch.

    advantages, weights: for each row of `plan.rows` (`moerl.algorithms`) one number, or one per
    sampled token; None = zeros, for scoring only.
    multiple_of: S is padded up to it (sequence and context parallelism).
    A rank without rows gets one row of padding and no sampled token.
    Raises RecordError (`mask_presence`, `mask_rows`, `version_future`) and BlobError.
    """
    chosen = sorted(
        (row.row, idx)
        for idx, row in enumerate(plan.rows)
        if row.dp_rank == dp_rank and row.microbatch == microbatch
    )
    order = [idx for _, idx in chosen]
    rollouts = [_rollout(plan, idx) for idx in order]
    length = max((rollout.num_tokens - 1 for rollout in rollouts), default=1)
    length = -(-length // multiple_of) * multiple_of
    tokens = np.zeros((max(len(rollouts), 1), length), np.int64)
    labels = np.zeros_like(tokens)
    for row, rollout in enumerate(rollouts):
        fed = rollout.num_tokens - 1
        tokens[row, :fed] = rollout.token_ids[:-1]
        labels[row, :fed] = rollout.token_ids[1:]
    sampled_rows = [
        row * length + np.flatnonzero(rollout.loss_mask) - 1 for row, rollout in enumerate(rollouts)
    ]
    counts = [rollout.num_sampled for rollout in rollouts]
    flat_rows = torch.from_numpy(_join(sampled_rows, np.int64))
    read = BytesRead()
    mask = _read_mask(rollouts, store, read) if read_mask else None
    return Microbatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.arange(length).expand(len(tokens), length).contiguous(),
        sampled_rows=flat_rows,
        sampled=torch.from_numpy(labels).view(-1)[flat_rows],
        old_logprob=torch.from_numpy(_join([r.logprobs for r in rollouts], np.float32)),
        advantage=_spread(order, counts, advantages),
        weight=_spread(order, counts, weights),
        lag=torch.from_numpy(_join([_lags(r, plan.version) for r in rollouts], np.int64)),
        temperature=torch.from_numpy(
            np.repeat(np.array([r.sampling.temperature for r in rollouts], np.float32), counts)
        ),
        seq=torch.from_numpy(np.repeat(np.arange(len(rollouts)), counts)),
        mask_offsets=None if mask is None else torch.from_numpy(mask[0]),
        mask_ids=None if mask is None else torch.from_numpy(mask[1].astype(np.int64)),
        num_fed=sum(rollout.num_tokens - 1 for rollout in rollouts),
        num_experts_per_token=_top_k(plan),
        rollouts=tuple(rollouts),
        store=store,
        read=read,
    )


def version_lag(trained: PolicyVersion, sampled: PolicyVersion) -> int:
    """Optimizer steps between the weights a token was sampled with and those it trains.

    After a restart the engine's older incarnation may be ahead by number; the distance counts.
    Raises RecordError `version_future` for a version that does not exist yet.
    """
    if sampled > trained:
        raise RecordError("version_future", f"sampled by {sampled}, trained at {trained}")
    return abs(trained.step - sampled.step)


def _rollout(plan: BatchPlan, idx: int) -> Rollout:
    row = plan.rows[idx]
    return plan.groups[row.group].episodes[row.episode].turns[row.turn].rollout


def _join(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype)


def _spread(
    order: Sequence[int], counts: Sequence[int], values: Sequence[float | Array] | None
) -> Tensor:
    per_row = [np.asarray(0.0 if values is None else values[idx]) for idx in order]
    parts = [np.broadcast_to(v, count) for v, count in zip(per_row, counts, strict=True)]
    return torch.from_numpy(_join(parts, np.float32))


def _lags(rollout: Rollout, trained: PolicyVersion) -> Array:
    return np.array([version_lag(trained, version) for version in rollout.version_of_tokens()])


def _top_k(plan: BatchPlan) -> int:
    """Experts per token, from any header of the plan: a rank of padding only has none itself."""
    for group in plan.groups:
        for rollout in group.rollouts():
            if rollout.routing:
                return rollout.routing[0].ids.shape[-1]
    return 0


def _tiles(rollout: Rollout) -> tuple[RoutingBlob, ...]:
    """The rollout's routing parts, proven to cover rows 0..T-2 once each."""
    at = 0
    for part in rollout.routing:
        if part.row_begin != at or part.ids.shape[1] != part.row_end - part.row_begin:
            break
        at = part.row_end
    if at != rollout.num_tokens - 1 or at != sum(part.ids.shape[1] for part in rollout.routing):
        raise RecordError(
            "routing_rows",
            f"{rollout.rollout_id}: routing covers rows 0..{at} of {rollout.num_tokens - 1}",
        )
    return rollout.routing


def _read_mask(
    rollouts: Sequence[Rollout], store: BlobStore, read: BytesRead
) -> tuple[Array, Array] | None:
    """CSR of all sampled tokens in packing order, or None when no rollout was truncated."""
    truncated = [rollout.sampling.truncates for rollout in rollouts]
    if not any(truncated):
        return None
    if not all(truncated):
        raise RecordError("mask_presence", "a microbatch mixes truncated and full sampling")
    parts = []
    for rollout in rollouts:
        have = 0
        for blob in rollout.sampling_mask:
            offsets, ids = store.load(blob.offsets), store.load(blob.ids)
            read.mask += offsets.nbytes + ids.nbytes
            if blob.first != have or len(offsets) != blob.num_tokens + 1 or offsets[-1] != len(ids):
                raise RecordError("mask_rows", f"{rollout.rollout_id}: mask rows at {blob.first}")
            have += blob.num_tokens
            parts.append((offsets, ids))
        if have != rollout.num_sampled:
            raise RecordError(
                "mask_rows",
                f"{rollout.rollout_id}: {have} mask rows for {rollout.num_sampled} sampled tokens",
            )
    return concat(parts)

"""Packs planned rollouts into the tensors of one microbatch; the only file that shifts tokens.

The alignment rule (docs/alignment.md) in code: `tokens = token_ids[:-1]` are fed in, `labels =
token_ids[1:]` are produced, and the logits at position t-1 produce sampled token t.  Routing rows
(indexed by fed-in token) therefore match `tokens`, and mask rows (indexed by produced token) match
`sampled_rows`.

A rank's share of a microbatch is a list of runs (`moerl.data.grid`), which places its tokens,
labels, routes and masks.

Routes are read from the blobs on demand, only for the layers of a pipeline stage and the positions
of this rank's runs, and stay u8 or u16.  Padding is routed to experts 0..K-1, and its results are
not read.

Legend: B rows, S slots, N sampled tokens of the data-parallel rank, M of them on this rank (all N
without context parallelism), K experts per token.
Example: prompt [5, 9], sampled [7, 2] next to a longer row (S = 4): tokens [5, 9, 7, 0], labels
[9, 7, 2, 0], sampled_rows [1, 2], three routing rows and one row of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moerl.core.errors import RecordError
from moerl.core.types import Array, BatchPlan, PolicyVersion, Rollout
from moerl.data.grid import Grid, Run, Span
from moerl.records import blob_ranges
from moerl.records.blob_store import RecordReads
from moerl.records.indexer import num_bytes
from moerl.records.sampling_mask import concat


@dataclass(slots=True)
class BytesRead:
    """Bytes and rows that one microbatch reads from the blobs: a rank reads only its share."""

    mask: int = 0
    routing: int = 0
    routing_rows: int = 0  # (token, layer) pairs
    indexer: int = 0
    indexer_rows: int = 0  # (token, layer) pairs, in forward and recompute
    experts: dict[int, Array] = field(default_factory=dict)  # layer -> uses of each expert

    def count_experts(self, layer: int, ids: Array) -> None:
        """Count how often each expert is named.  ids: [rows, K], without padding."""
        before = self.experts.get(layer, np.zeros(0, np.int64))
        self.experts[layer] = np.bincount(ids.reshape(-1), minlength=len(before))
        self.experts[layer][: len(before)] += before


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One rank's share of one microbatch, on the CPU."""

    tokens: Tensor  # [B, S] i64, padded with 0
    labels: Tensor  # [B, S] i64, padded with 0
    positions: Tensor  # [B, S] i64, position in the rollout
    cu_seqlens: Tensor | None  # [rollouts + 1] i32 over all cp ranks, padding included; packed only
    sampled_rows: Tensor  # [M] i64 into the flattened [B, S]
    held: Tensor  # [M] i64 into 0..N-1, rising: the sampled tokens whose logits this rank has
    sampled: Tensor  # [N] i64, the sampled tokens
    old_logprob: Tensor  # [N] f32, the engine's log-probabilities; NaN when not read
    advantage: Tensor  # [N] f32
    weight: Tensor  # [N] f32, global aggregation weight
    lag: Tensor  # [N] i64, versions
    joined: Tensor  # [N] bool: the token follows a change of weights in its row
    temperature: Tensor  # [N] f32
    seq: Tensor  # [N] i64, index into rollouts of each token
    mask_offsets: Tensor | None  # [M + 1] i64; None without truncated sampling or when not read
    mask_ids: Tensor | None  # [nnz] i32
    num_fed: int  # fed-in tokens on this rank, without padding
    num_experts_per_token: int  # K; 0 for a dense model
    rollouts: tuple[Rollout, ...]  # in row order; empty for a microbatch of padding
    runs: tuple[Run, ...]
    route_dtype: str  # uint8 or uint16
    store: RecordReads
    read: BytesRead
    ahead: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """Routes that were read and checked before their pass, by model chunk and layer."""

    def routes(self, layers: Sequence[int], span: Span | None = None) -> dict[int, Tensor]:
        """Recorded expert ids by layer: {global 0-based layer: [slots * B, K], slot-major}.

        span: the slots to read (sequence parallelism); None = all slots.  Each call reads and
        verifies the blob chunks that hold these layers and tokens.
        Raises RecordError (`routing_rows`, `routing_layers`) and BlobError.
        """
        if not layers:
            return {}
        num_rows, k = len(self.tokens), self.num_experts_per_token
        first, last = (0, self.tokens.shape[1]) if span is None else span
        if not k:
            raise RecordError("routing_rows", "no routing was recorded for this microbatch")
        joined = np.empty((len(layers), last - first, num_rows, k), self.route_dtype)
        joined[:] = np.arange(k)
        for idx, rollout in enumerate(self.rollouts):
            _check_tiles(rollout, k)
            pieces = list(self.pieces(idx, first, last))
            if not pieces:
                continue
            positions = [(begin, begin + count) for _, _, begin, count in pieces]
            found = blob_ranges.read_routes(
                self.store, rollout.routing, layers=layers, rows=positions
            )
            for number, layer in enumerate(layers):
                at = 0
                for row, slot, _, count in pieces:
                    joined[number, slot - first : slot - first + count, row] = found[layer][
                        at : at + count
                    ]
                    at += count
                self.read.routing += found[layer].nbytes
                self.read.routing_rows += at
                self.read.count_experts(layer, found[layer])
        flat = torch.from_numpy(joined).view(len(layers), (last - first) * num_rows, k)
        return {layer: flat[idx] for idx, layer in enumerate(layers)}

    def attended(self, layer: int) -> Tensor:
        """Positions that one layer's sparse attention read: [B, S, K] i32 key numbers, -1 = none.

        A key number is a position in the rollout; in a packed row it counts from the row's start,
        over all context-parallel ranks.  Padding reads itself.  Each call reads and verifies the
        blobs.
        Raises RecordError (`indexer_rows`, `indexer_layers`) and BlobError.
        """
        rows, slots = self.tokens.shape
        fed = [rollout.num_tokens - 1 for rollout in self.rollouts]
        top_k = max((part.top_k for r in self.rollouts for part in r.indexer), default=1)
        found = np.full((rows, slots, max([1, *(min(top_k, num) for num in fed)])), -1, np.int32)
        starts = np.zeros(1 + max(run.rollout for run in self.runs), np.int32)
        if self.cu_seqlens is not None:
            starts = self.cu_seqlens.numpy()
        for run in self.runs:
            own = starts[run.rollout] + np.arange(run.begin, run.begin + run.num)
            found[run.row, run.slot : run.slot + run.num, 0] = own
        for idx, rollout in enumerate(self.rollouts):
            _check_indexer_tiles(rollout)
            places = list(self.pieces(idx, 0, slots))
            chosen = blob_ranges.read_indexer(
                self.store,
                rollout.indexer,
                layer=layer,
                rows=[(begin, begin + count) for _, _, begin, count in places],
            )
            for (row, slot, begin, count), keys in zip(places, chosen, strict=True):
                keys[keys >= 0] += starts[idx]
                found[row, slot : slot + count, : keys.shape[1]] = keys
                self.read.indexer_rows += count
                self.read.indexer += num_bytes(begin, begin + count, top_k)
        return torch.from_numpy(found)

    def num_fed_in(self, span: Span) -> int:
        """Number of fed-in tokens, without padding, in these slots of this rank."""
        return sum(
            count for idx in range(len(self.rollouts)) for *_, count in self.pieces(idx, *span)
        )

    def pieces(self, rollout: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """(row, slot, first position, count) of the rollout's fed-in tokens in these slots."""
        fed = self.rollouts[rollout].num_tokens - 1
        each = len(self.runs) // (self.runs[-1].rollout + 1)  # runs per rollout, contiguous
        for run in self.runs[rollout * each : (rollout + 1) * each]:
            low, high = max(run.slot, first), min(run.slot + run.num, last)
            begin = run.begin + low - run.slot
            count = min(high - low, fed - begin)
            if count > 0:
                yield run.row, low, begin, count


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Inputs of the loss by row of `plan.rows`: one number, or one number per sampled token."""

    advantages: Sequence[float | Array]  # for a critic, its targets
    weights: Sequence[float | Array]  # weights in the sum over all tokens of the batch


def pack_microbatch(
    plan: BatchPlan,
    dp_rank: int,
    microbatch: int,
    store: RecordReads,
    *,
    loss: LossInputs | None = None,
    read_mask: bool = True,
    read_logprobs: bool = True,
    grid: Grid = Grid(),
) -> Microbatch:
    """Tensors of the rows that one data-parallel rank trains in one microbatch.

    loss: None = zeros, for scoring passes.  read_logprobs: False leaves old_logprob NaN, for passes
    that do not read it.  A rank without rows, or a microbatch beyond `plan.num_microbatches`, gets
    padding and no sampled token.
    Raises RecordError (`mask_presence`, `mask_rows`, `version_future`, `length`, `logprob_finite`,
    `logprob_sign`) and BlobError.
    """
    order = rows_in(plan, dp_rank, microbatch)
    rollouts = [rollout_at(plan, idx) for idx in order]
    fed = [rollout.num_tokens - 1 for rollout in rollouts]
    runs, lengths = grid.place(fed)
    tokens, labels, positions = _lay_out(rollouts, runs, grid.shape(fed))
    held, sampled_rows, intervals = _find_sampled(rollouts, runs, tokens.shape[1])
    counts = [rollout.num_sampled for rollout in rollouts]
    read = BytesRead()
    mask = _read_mask(rollouts, intervals, store, read) if read_mask else None
    top_k, route_dtype = _route_kind(plan)
    temperatures = np.array([r.sampling.temperature for r in rollouts], np.float32)
    return Microbatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=_cu_seqlens(lengths) if grid.packed else None,
        sampled_rows=torch.from_numpy(sampled_rows),
        held=torch.from_numpy(held),
        sampled=_tensor([r.token_ids[r.loss_mask] for r in rollouts], np.int64),
        old_logprob=_old_logprobs(rollouts, store if read_logprobs else None),
        advantage=_spread(order, counts, loss.advantages if loss else None),
        weight=_spread(order, counts, loss.weights if loss else None),
        lag=_tensor([_lags(r, plan.version) for r in rollouts], np.int64),
        joined=_tensor([np.arange(r.num_sampled) >= r.joined_from for r in rollouts], np.bool_),
        temperature=torch.from_numpy(np.repeat(temperatures, counts)),
        seq=torch.from_numpy(np.repeat(np.arange(len(rollouts)), counts)),
        mask_offsets=None if mask is None else torch.from_numpy(mask[0]),
        mask_ids=None if mask is None else torch.from_numpy(mask[1]),
        num_fed=_num_fed(runs, fed),
        num_experts_per_token=top_k,
        rollouts=tuple(rollouts),
        runs=tuple(runs),
        route_dtype=route_dtype,
        store=store,
        read=read,
    )


def fed_tokens(plan: BatchPlan, dp_rank: int, microbatch: int) -> list[int]:
    """Fed-in tokens of each rollout of a microbatch, from the plan alone."""
    return [rollout_at(plan, idx).num_tokens - 1 for idx in rows_in(plan, dp_rank, microbatch)]


def by_row(plan: BatchPlan, dp_rank: int, values: Mapping[int, Tensor]) -> dict[int, Array]:
    """Regroup values of sampled tokens from microbatches ([N] each, on the CPU) to plan rows.

    Returns {index into plan.rows: [sampled tokens of the row]}.
    """
    result: dict[int, Array] = {}
    for microbatch, value_N in values.items():
        rows = rows_in(plan, dp_rank, microbatch)
        counts = [rollout_at(plan, idx).num_sampled for idx in rows]
        parts = value_N.detach().split(counts) if rows else ()
        result |= {idx: part.numpy() for idx, part in zip(rows, parts, strict=True)}
    return result


def by_microbatch(
    plan: BatchPlan, dp_rank: int, values: Sequence[Array], num_microbatches: int
) -> dict[int, Tensor]:
    """Inverse of `by_row`: values by row of the plan, regrouped to [N] f32 per microbatch."""
    return {
        microbatch: _tensor([values[idx] for idx in rows_in(plan, dp_rank, microbatch)], np.float32)
        for microbatch in range(num_microbatches)
    }


def rows_in(plan: BatchPlan, dp_rank: int, microbatch: int) -> list[int]:
    """Indices into plan.rows of one microbatch, in row order, which its sampled tokens follow."""
    chosen = sorted(
        (row.row, idx)
        for idx, row in enumerate(plan.rows)
        if row.dp_rank == dp_rank and row.microbatch == microbatch
    )
    return [idx for _, idx in chosen]


def _lay_out(
    rollouts: Sequence[Rollout], runs: Sequence[Run], shape: tuple[int, int]
) -> tuple[Array, Array, Array]:
    """Tokens, labels and positions, [B, S] i64 each."""
    tokens, labels, positions = (np.zeros(shape, np.int64) for _ in range(3))
    for run in runs:
        slots = slice(run.slot, run.slot + run.num)
        positions[run.row, slots] = np.arange(run.begin, run.begin + run.num)
        if run.rollout < len(rollouts):
            ids = rollouts[run.rollout].token_ids[run.begin : run.begin + run.num + 1]
            slots = slice(run.slot, run.slot + max(len(ids) - 1, 0))
            tokens[run.row, slots] = ids[:-1]
            labels[run.row, slots] = ids[1:]
    return tokens, labels, positions


def _find_sampled(
    rollouts: Sequence[Rollout], runs: Sequence[Run], length: int
) -> tuple[Array, Array, list[list[blob_ranges.Interval]]]:
    """Sampled tokens of this rank: indices into 0..N-1, slots, and intervals by rollout."""
    firsts = np.cumsum([0, *(rollout.num_sampled for rollout in rollouts)])
    produced_at = [np.flatnonzero(rollout.loss_mask) - 1 for rollout in rollouts]
    held, slots = [], []
    intervals: list[list[blob_ranges.Interval]] = [[] for _ in rollouts]
    for run in runs:
        if run.rollout >= len(rollouts):
            continue
        positions = produced_at[run.rollout]
        low, high = np.searchsorted(positions, [run.begin, run.begin + run.num]).tolist()
        if low < high:
            held.append(firsts[run.rollout] + np.arange(low, high))
            slots.append(run.row * length + run.slot + positions[low:high] - run.begin)
            intervals[run.rollout].append((low, high))
    return _join(held, np.int64), _join(slots, np.int64), intervals


def version_lag(trained: PolicyVersion, sampled: PolicyVersion) -> int:
    """Optimizer steps between the weights that sampled a token and the weights that train on it.

    After a restart the engine's older incarnation may have a higher step number, so the lag is the
    absolute difference.  Raises RecordError `version_future` for a version that does not exist yet.
    """
    if sampled > trained:
        raise RecordError("version_future", f"sampled by {sampled}, trained at {trained}")
    return abs(trained.step - sampled.step)


def rollout_at(plan: BatchPlan, idx: int) -> Rollout:
    """The rollout that row `idx` of a plan trains."""
    row = plan.rows[idx]
    return plan.groups[row.group].episodes[row.episode].turns[row.turn].rollout


def _join(arrays: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype)


def _tensor(arrays: Sequence[Array], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(_join(arrays, dtype))


def _spread(
    order: Sequence[int], counts: Sequence[int], values: Sequence[float | Array] | None
) -> Tensor:
    per_row = [np.asarray(0.0 if values is None else values[idx]) for idx in order]
    parts = [np.broadcast_to(v, count) for v, count in zip(per_row, counts, strict=True)]
    return _tensor(parts, np.float32)


def _old_logprobs(rollouts: Sequence[Rollout], store: RecordReads | None) -> Tensor:
    """The engine's log-probabilities, [N] f32; NaN without a store."""
    if store is None:
        num = sum(rollout.num_sampled for rollout in rollouts)
        return torch.full((num,), torch.nan, dtype=torch.float32)
    return _tensor([blob_ranges.read_logprobs(store, rollout) for rollout in rollouts], np.float32)


def _cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def _num_fed(runs: Sequence[Run], fed: Sequence[int]) -> int:
    """Fed-in tokens of these runs, without padding."""
    real = (run for run in runs if run.rollout < len(fed))
    return sum(max(0, min(run.num, fed[run.rollout] - run.begin)) for run in real)


def _lags(rollout: Rollout, trained: PolicyVersion) -> Array:
    return np.array([version_lag(trained, version) for version in rollout.version_of_tokens()])


def _route_kind(plan: BatchPlan) -> tuple[int, str]:
    """(K, dtype) of the plan's routes.  Any header will do: a rank may hold only padding."""
    for group in plan.groups:
        for rollout in group.rollouts():
            if rollout.routing:
                ids = rollout.routing[0].ids
                return ids.shape[-1], ids.dtype
    return 0, "uint8"


def _check_tiles(rollout: Rollout, top_k: int) -> None:
    """Raise RecordError if routing does not cover rows 0..T-2 exactly once, or K differs."""
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
    other = [part.ids.shape[-1] for part in rollout.routing if part.ids.shape[-1] != top_k]
    if other:
        raise RecordError(
            "routing_layers",
            f"{rollout.rollout_id}: {other[0]} experts per token, the batch has {top_k}",
        )


def _check_indexer_tiles(rollout: Rollout) -> None:
    """Raise RecordError if the positions do not cover rows 0..T-2 exactly once."""
    begins = [part.row_begin for part in rollout.indexer]
    ends = [part.row_end for part in rollout.indexer]
    if [*begins, rollout.num_tokens - 1] != [0, *ends]:
        raise RecordError(
            "indexer_rows",
            f"{rollout.rollout_id}: positions cover rows {list(zip(begins, ends, strict=True))}; "
            f"they must cover 0..{rollout.num_tokens - 1}",
        )


def _read_mask(
    rollouts: Sequence[Rollout],
    intervals: Sequence[Sequence[blob_ranges.Interval]],
    store: RecordReads,
    read: BytesRead,
) -> tuple[Array, Array] | None:
    """(offsets, ids) of this rank's sampling mask, or None when no rollout was truncated.

    intervals: the sampled tokens (0..S-1) to read, by rollout.  Raises RecordError.
    """
    truncated = [rollout.sampling.truncates for rollout in rollouts]
    if not any(truncated):
        return None
    if not all(truncated):
        raise RecordError("mask_presence", "a microbatch mixes truncated and full sampling")
    parts = []
    for rollout, tokens in zip(rollouts, intervals, strict=True):
        have = sum(blob.num_tokens for blob in rollout.sampling_mask)
        if have != rollout.num_sampled or any(b.first for b in rollout.sampling_mask[:1]):
            raise RecordError(
                "mask_rows",
                f"{rollout.rollout_id}: {have} mask rows for {rollout.num_sampled} sampled tokens",
            )
        if not tokens:
            continue
        offsets, ids = blob_ranges.read_mask(store, rollout.sampling_mask, tokens=tokens)
        read.mask += offsets.nbytes + ids.nbytes
        parts.append((offsets, ids))
    return concat(parts)

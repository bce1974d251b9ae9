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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from moerl.core.errors import RecordError
from moerl.core.types import Array, BatchPlan, MaskBlob, PolicyVersion, Rollout
from moerl.data.grid import Grid, Run, Span
from moerl.data.shared_prefix import place_shared, shared_in_order
from moerl.records import blob_ranges
from moerl.records.blob_store import RecordReads
from moerl.records.indexer import num_bytes

T = TypeVar("T")


@dataclass(slots=True)
class BytesRead:
    """Bytes and rows that one microbatch reads from the blobs: a rank reads only its share."""

    mask: int = 0
    routing: int = 0
    routing_rows: int = 0  # (token, layer) pairs
    support: int = 0  # the engine's log-probabilities, and their ids where no mask has them
    indexer: int = 0
    indexer_rows: int = 0  # (token, layer) pairs, in forward and recompute
    experts: dict[int, Array] = field(default_factory=dict)  # layer -> uses of each expert

    def count_experts(self, layer: int, ids: Array) -> None:
        """Count how often each expert is named.  ids: [rows, K], without padding."""
        before = self.experts.get(layer, np.zeros(0, np.int64))
        self.experts[layer] = np.bincount(ids.reshape(-1), minlength=len(before))
        self.experts[layer][: len(before)] += before


class EngineSupport(NamedTuple):
    """Entries of the vocabulary with the engine's log-probabilities, CSR over M tokens."""

    offsets: Tensor  # [M + 1] i64
    ids: Tensor  # [nnz] i32
    logprobs: Tensor  # [nnz] f16


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One rank's share of one microbatch, on the CPU."""

    tokens: Tensor  # [B, S] i64, padded with 0
    labels: Tensor  # [B, S] i64, padded with 0
    positions: Tensor  # [B, S] i64, position in the rollout
    cu_seqlens: Tensor | None  # [rollouts + 1] i32 over all cp ranks, padding included; packed only
    seen_until: Tensor | None  # [S] i32, in place of cu_seqlens where rows share tokens
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
    every: tuple[Run, ...]  # of all positions of each rollout: runs, and what it shares with others
    num_shared: int  # fed-in tokens that are forwarded in the slots of another rollout
    route_dtype: str  # uint8 or uint16
    store: RecordReads
    read: BytesRead
    support: EngineSupport | None = None  # of the mask's entries, or the likeliest; when read
    early: dict[tuple[tuple[int, ...], Span], Array] = field(default_factory=dict)
    """Routes that were read with the other records, [L, n, K] by layers and slots."""
    ahead: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """Routes that were checked before their pass, by model chunk and layer."""

    def routes(self, layers: Sequence[int], span: Span | None = None) -> dict[int, Tensor]:
        """Recorded expert ids by layer: {global 0-based layer: [slots * B, K], slot-major}.

        span: the slots to read (sequence parallelism); None = all slots.  Each call reads and
        verifies the blob chunks that hold these layers and tokens, unless `pack_microbatch` did.
        Raises RecordError (`routing_rows`, `routing_layers`) and BlobError.
        """
        if not layers:
            return {}
        num_rows, k = len(self.tokens), self.num_experts_per_token
        first, last = (0, self.tokens.shape[1]) if span is None else span
        _check_routed(k)
        grid = np.empty((len(layers), last - first, num_rows, k), self.route_dtype)
        grid[:] = np.arange(k)
        pieces = self.pieces(first, last)
        if pieces.num_rows:
            found = self.early.pop((tuple(layers), (first, last)), None)
            if found is None:
                reads = _route_reads(self.rollouts, pieces, layers, k)
                found = reads.decode(self.store.read_records(reads.reads))
            row, slot = pieces.places()
            grid[:, slot - first, row] = found
            self.read.routing += found.nbytes
            self.read.routing_rows += len(layers) * pieces.num_rows
            if self.num_shared:  # each rollout counts all of its tokens
                row, slot = self.uses(first, last).places()
                found = grid[:, slot - first, row]
            for layer, ids in zip(layers, found, strict=True):
                self.read.count_experts(layer, ids)
        flat = torch.from_numpy(grid).view(len(layers), (last - first) * num_rows, k)
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
        every = self.pieces(0, slots)
        for idx, rollout in enumerate(self.rollouts):
            _check_indexer_tiles(rollout)
            places = every.of(idx)
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
        return self.pieces(*span).num_rows

    def pieces(self, first: int, last: int) -> Pieces:
        """The fed-in tokens in these slots of this rank, each once."""
        return Pieces.between(self.runs, [r.num_tokens - 1 for r in self.rollouts], first, last)

    def uses(self, first: int, last: int) -> Pieces:
        """The positions of each rollout in these slots: a shared token is in several pieces."""
        return Pieces.between(self.every, [r.num_tokens - 1 for r in self.rollouts], first, last)


class Pieces(NamedTuple):
    """Consecutive fed-in tokens of rollouts in consecutive slots of a grid row: i64 arrays [P].

    In the order of the rollouts.
    """

    rollout: Array
    row: Array
    slot: Array
    begin: Array  # first position in the rollout
    num: Array  # tokens

    @classmethod
    def between(cls, runs: Sequence[Run], fed: Sequence[int], first: int, last: int) -> Pieces:
        """The parts of runs in these slots, without padding.  fed: fed-in tokens by rollout."""
        rollout, row, slot, begin, num = np.array(runs, np.int64).reshape(-1, 5).T
        real = rollout < len(fed)
        rollout, row, slot, begin, num = (one[real] for one in (rollout, row, slot, begin, num))
        low = np.maximum(slot, first)
        begin = begin + low - slot
        ends = np.minimum(slot + num, last)
        count = np.minimum(ends - low, np.array(fed, np.int64)[rollout] - begin)
        some = count > 0
        return cls(*(one[some] for one in (rollout, row, low, begin, count)))

    @property
    def num_rows(self) -> int:
        """Tokens of all pieces."""
        return int(self.num.sum())

    def of(self, rollout: int) -> list[tuple[int, int, int, int]]:
        """(row, slot, begin, count) of one rollout's pieces."""
        mine = self.rollout == rollout
        columns = (self.row, self.slot, self.begin, self.num)
        return list(zip(*(one[mine].tolist() for one in columns), strict=True))

    def wanted(self, blobs: Sequence[T]) -> list[tuple[T, list[blob_ranges.Interval]]]:
        """The blobs of each rollout with pieces, and its positions."""
        found: dict[int, list[blob_ranges.Interval]] = {}
        ends = self.begin + self.num
        for rollout, begin, end in zip(
            self.rollout.tolist(), self.begin.tolist(), ends.tolist(), strict=True
        ):
            found.setdefault(rollout, []).append((begin, end))
        return [(blobs[rollout], rows) for rollout, rows in found.items()]

    def places(self) -> tuple[Array, Array]:
        """Row and slot of each token of all pieces."""
        within = _within(self.num)
        return np.repeat(self.row, self.num), np.repeat(self.slot, self.num) + within

    def positions(self) -> Array:
        """Position in its rollout of each token of all pieces."""
        positions: Array = np.repeat(self.begin, self.num) + _within(self.num)
        return positions


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Inputs of the loss by row of `plan.rows`: one number, or one number per sampled token."""

    advantages: Sequence[float | Array]  # for a critic, its targets
    weights: Sequence[float | Array]  # weights in the sum over all tokens of the batch


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The records that `pack_microbatch` reads from the blobs."""

    mask: bool = True  # sampling masks
    logprobs: bool = True  # False leaves old_logprob NaN
    support: bool = False  # the engine's log-probabilities of the mask's, or the likeliest, entries
    layers: Sequence[int] = ()  # their routes, for the next call of `Microbatch.routes`
    share: tuple[int, int] = (0, 1)  # number of this rank's run of slots, and number of such runs


def pack_microbatch(
    plan: BatchPlan,
    dp_rank: int,
    microbatch: int,
    store: RecordReads,
    *,
    loss: LossInputs | None = None,
    reads: ReadOptions = ReadOptions(),
    grid: Grid = Grid(),
) -> Microbatch:
    """Tensors of the rows that one data-parallel rank trains in one microbatch.

    loss: None = zeros, for scoring passes.  A rank without rows, or a microbatch beyond
    `plan.num_microbatches`, gets padding and no sampled token.
    Raises RecordError (`mask_presence`, `mask_rows`, `version_future`, `length`, `logprob_finite`,
    `logprob_sign`) and BlobError.
    """
    order = rows_in(plan, dp_rank, microbatch)
    placed = _Placed.of([rollout_at(plan, idx) for idx in order], grid)
    held = _find_sampled(placed)
    top_k, route_dtype = _route_kind(plan)
    return Microbatch(
        **_slot_tensors(placed),
        **_token_tensors(placed.rollouts, held, plan.version),
        **_read_records(store, placed, held, top_k, reads),
        advantage=_spread(order, held.counts, loss.advantages if loss else None),
        weight=_spread(order, held.counts, loss.weights if loss else None),
        num_fed=placed.pieces.num_rows,
        num_experts_per_token=top_k,
        rollouts=tuple(placed.rollouts),
        runs=tuple(placed.runs),
        every=tuple(placed.every),
        num_shared=placed.num_shared,
        route_dtype=route_dtype,
        store=store,
    )


def placed_tokens(plan: BatchPlan, dp_rank: int, microbatch: int, *, shares: bool) -> list[int]:
    """Fed-in tokens that each rollout of a microbatch has in the grid, from the plan alone."""
    rollouts = [rollout_at(plan, idx) for idx in rows_in(plan, dp_rank, microbatch)]
    shared = shared_in_order(rollouts) if shares else [0] * len(rollouts)
    return [row.num_tokens - 1 - num for row, num in zip(rollouts, shared, strict=True)]


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


class _Placed(NamedTuple):
    """The rollouts of a microbatch in this rank's slots."""

    rollouts: Sequence[Rollout]
    shape: tuple[int, int]  # (B, S)
    runs: Sequence[Run]
    every: Sequence[Run]
    pieces: Pieces
    cu_seqlens: Tensor | None
    seen_until: Tensor | None
    num_shared: int

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], grid: Grid) -> _Placed:
        fed = [rollout.num_tokens - 1 for rollout in rollouts]
        shared = shared_in_order(rollouts) if grid.shares else [0] * len(rollouts)
        own = [num - part for num, part in zip(fed, shared, strict=True)]
        runs, lengths = grid.place(own)
        shape, every, cu_seqlens, seen = grid.shape(own), runs, None, None
        if grid.shares:
            runs, every, seen_until = place_shared(runs, shared, shape[1])
            seen = torch.from_numpy(seen_until)
        elif grid.packed:
            cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
        pieces = Pieces.between(runs, fed, 0, shape[1])
        return cls(rollouts, shape, runs, every, pieces, cu_seqlens, seen, sum(shared))

    def between(self, runs: Sequence[Run], first: int, last: int) -> Pieces:
        """The parts of `runs` in these slots, without padding."""
        return Pieces.between(runs, [r.num_tokens - 1 for r in self.rollouts], first, last)


def _slot_tensors(placed: _Placed) -> dict[str, Any]:
    """Fields of `Microbatch` by slot: tokens, labels and positions, [B, S] i64 each."""
    rollouts, pieces = placed.rollouts, placed.pieces
    tokens, labels, positions = (np.zeros(placed.shape, np.int64) for _ in range(3))
    _, row, slot, begin, num = np.array(placed.runs, np.int64).reshape(-1, 5).T
    within = _within(num)
    positions[np.repeat(row, num), np.repeat(slot, num) + within] = np.repeat(begin, num) + within
    ids = _join([rollout.token_ids for rollout in rollouts], np.int64)
    at = _starts([rollout.num_tokens for rollout in rollouts])[pieces.rollout] + pieces.begin
    fed = np.repeat(at, pieces.num) + _within(pieces.num)
    places = pieces.places()
    tokens[places], labels[places] = ids[fed], ids[fed + 1]
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "positions": torch.from_numpy(positions),
        "cu_seqlens": placed.cu_seqlens,
        "seen_until": placed.seen_until,
    }


def _token_tensors(
    rollouts: Sequence[Rollout], held: _Sampled, trained: PolicyVersion
) -> dict[str, Any]:
    """Fields of `Microbatch` by sampled token that the headers hold."""
    counts = held.counts
    joined = np.repeat([rollout.joined_from for rollout in rollouts], counts)
    temperatures = np.array([r.sampling.temperature for r in rollouts], np.float32)
    ids = _join([rollout.token_ids for rollout in rollouts], np.int64)
    return {
        "sampled_rows": torch.from_numpy(held.slots),
        "held": torch.from_numpy(held.tokens),
        "sampled": torch.from_numpy(ids[held.is_sampled]),
        "lag": torch.from_numpy(_lags(rollouts, counts, trained)),
        "joined": torch.from_numpy(_within(counts) >= joined),
        "temperature": torch.from_numpy(np.repeat(temperatures, counts)),
        "seq": torch.from_numpy(np.repeat(np.arange(len(rollouts)), counts)),
    }


def _read_records(
    store: RecordReads, placed: _Placed, held: _Sampled, top_k: int, options: ReadOptions
) -> dict[str, Any]:
    """Fields of `Microbatch` that one read of the blobs gives."""
    rollouts, read = placed.rollouts, BytesRead()
    truncated = (options.mask or options.support) and _are_truncated(rollouts)
    has_mask = options.mask and truncated
    masks = _masks(rollouts, held, truncated=truncated) if has_mask or options.support else []
    sampled = blob_ranges.SampledReads(
        masks, rollouts if options.logprobs else (), support=options.support
    )
    key, routes = _early_routes(placed, top_k, options)
    data = store.read_records([*sampled.reads, *(routes.reads if routes else ())])
    end = len(data) - (routes.num_bytes if routes else 0)
    records = sampled.decode(data[:end], store)
    csr_bytes = records.ids.nbytes + 8 * (len(records.offsets) - 1 + len(masks)) if masks else 0
    if has_mask:
        read.mask += csr_bytes
    read.support += records.support.nbytes + (0 if has_mask else csr_bytes)
    offsets, ids = torch.from_numpy(records.offsets), torch.from_numpy(records.ids)
    support = EngineSupport(offsets, ids, torch.from_numpy(records.support))
    no_logprobs = torch.full((int(held.counts.sum()),), torch.nan, dtype=torch.float32)
    return {
        "old_logprob": torch.from_numpy(records.logprobs) if options.logprobs else no_logprobs,
        "mask_offsets": offsets if has_mask else None,
        "mask_ids": ids if has_mask else None,
        "support": support if options.support else None,
        "read": read,
        "early": {} if routes is None else {key: routes.decode(data[end:])},
    }


def _early_routes(
    placed: _Placed, top_k: int, options: ReadOptions
) -> tuple[tuple[tuple[int, ...], Span], blob_ranges.RouteReads | None]:
    """The routes that are read with the other records, and their key in `Microbatch.early`."""
    index, num = options.share
    width = placed.shape[1] // num
    span = (width * index, width * (index + 1))
    mine = placed.between(placed.runs, *span)
    is_read = options.layers and mine.num_rows
    routes = _route_reads(placed.rollouts, mine, options.layers, top_k) if is_read else None
    return (tuple(options.layers), span), routes


class _Sampled(NamedTuple):
    """Sampled tokens of some rollouts, and this rank's share of them."""

    is_sampled: Array  # [T] bool, the tokens of all rollouts, one behind the other
    counts: Array  # [rollouts] i64
    tokens: Array  # [M] i64 into 0..N-1
    slots: Array  # [M] i64 into the flattened grid
    intervals: list[list[blob_ranges.Interval]]  # for each rollout: of its sampled tokens, held


def _find_sampled(placed: _Placed) -> _Sampled:
    rollouts, length = placed.rollouts, placed.shape[1]
    is_sampled = _join([rollout.loss_mask for rollout in rollouts], np.bool_)
    pieces = placed.between(placed.every, 0, length)
    lengths = np.array([rollout.num_tokens for rollout in rollouts], np.int64)
    starts = _starts(lengths)
    before = np.concatenate([[0], np.cumsum(is_sampled)])  # sampled tokens before each token
    firsts = before[starts]
    counts = before[starts + lengths] - firsts
    # the logits of a position produce the token behind it
    produced = starts[pieces.rollout] + pieces.begin + 1
    low, high = before[produced], before[produced + pieces.num]
    at = np.repeat(produced, pieces.num) + _within(pieces.num)
    row, slot = pieces.places()
    intervals: list[list[blob_ranges.Interval]] = [[] for _ in rollouts]
    own = firsts[pieces.rollout]
    for rollout, begin, end in zip(
        pieces.rollout.tolist(), (low - own).tolist(), (high - own).tolist(), strict=True
    ):
        if begin == end:
            continue
        known = intervals[rollout]
        if known and known[-1][1] == begin:  # they go on in other slots
            begin = known.pop()[0]
        known.append((begin, end))
    mine = is_sampled[at]
    slots = (row * length + slot)[mine]
    return _Sampled(is_sampled, counts, before[at][mine], slots, intervals)


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


def _starts(counts: Sequence[int] | Array) -> Array:
    """First place of each of several runs of items, one behind the other."""
    sizes = np.array(counts, np.int64)
    return np.cumsum(sizes) - sizes


def _within(counts: Array) -> Array:
    """0..count-1 for each count: [2, 3] -> 0 1 0 1 2."""
    within: Array = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return within


def _spread(order: Sequence[int], counts: Array, values: Sequence[float | Array] | None) -> Tensor:
    """[N] f32: the value of each row for all its tokens, or its own array."""
    rows = [0.0 if values is None else values[idx] for idx in order]
    if any(isinstance(value, np.ndarray) for value in rows):
        each = [np.broadcast_to(v, num) for v, num in zip(rows, counts, strict=True)]
        return _tensor(each, np.float32)
    return torch.from_numpy(np.repeat(np.array(rows, np.float64), counts).astype(np.float32))


def _lags(rollouts: Sequence[Rollout], counts: Array, trained: PolicyVersion) -> Array:
    """[N] i64."""
    lags, nums = [], []
    for rollout, count in zip(rollouts, counts.tolist(), strict=True):
        spans = rollout.versions
        ends = [span.first for span in spans[1:]] + [count]
        lags += [version_lag(trained, span.version) for span in spans]
        nums += [end - span.first for span, end in zip(spans, ends, strict=True)]
    return np.repeat(np.array(lags, np.int64), np.array(nums, np.int64))


def _route_kind(plan: BatchPlan) -> tuple[int, str]:
    """(K, dtype) of the plan's routes.  Any header will do: a rank may hold only padding."""
    for group in plan.groups:
        for rollout in group.rollouts():
            if rollout.routing:
                ids = rollout.routing[0].ids
                return ids.shape[-1], ids.dtype
    return 0, "uint8"


def _check_cover(rollout: Rollout, top_k: int) -> None:
    """Raise RecordError if routing does not reach from row 0 to T-2, or K differs.

    `blob_ranges.RouteReads` refuses parts that do not follow each other.
    """
    parts = rollout.routing
    begin, end = (parts[0].row_begin, parts[-1].row_end) if parts else (0, 0)
    if begin or end != rollout.num_tokens - 1:
        raise RecordError(
            "routing_rows",
            f"{rollout.rollout_id}: routing covers rows {begin}..{end} of {rollout.num_tokens - 1}",
        )
    for part in parts:
        if part.ids.shape[-1] != top_k:
            raise RecordError(
                "routing_layers",
                f"{rollout.rollout_id}: {part.ids.shape[-1]} experts per token, the batch has "
                f"{top_k}",
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


def _check_routed(top_k: int) -> None:
    if not top_k:
        raise RecordError("routing_rows", "no routing was recorded for this microbatch")


def _route_reads(
    rollouts: Sequence[Rollout], pieces: Pieces, layers: Sequence[int], top_k: int
) -> blob_ranges.RouteReads:
    _check_routed(top_k)
    for rollout in rollouts:
        _check_cover(rollout, top_k)
    return blob_ranges.RouteReads(pieces.wanted([r.routing for r in rollouts]), layers)


def _masks(
    rollouts: Sequence[Rollout], held: _Sampled, *, truncated: bool
) -> list[tuple[Sequence[MaskBlob], list[blob_ranges.Interval]]]:
    """Masks of this rank's sampled tokens; without truncation the engine's likeliest entries."""
    masks: list[tuple[Sequence[MaskBlob], list[blob_ranges.Interval]]] = []
    for rollout, count, tokens in zip(rollouts, held.counts.tolist(), held.intervals, strict=True):
        blobs = rollout.sampling_mask if truncated else rollout.top_logprobs
        have = sum([blob.num_tokens for blob in blobs])
        if have != count or (blobs and blobs[0].first):
            raise RecordError(
                "mask_rows",
                f"{rollout.rollout_id}: {have} mask rows for {count} sampled tokens",
            )
        if tokens:
            masks.append((blobs, tokens))
    return masks


def _are_truncated(rollouts: Sequence[Rollout]) -> bool:
    """Whether all rollouts have sampling masks.  Raises RecordError when some have."""
    truncated = [rollout.sampling.truncates for rollout in rollouts]
    if any(truncated) and not all(truncated):
        raise RecordError("mask_presence", "a microbatch mixes truncated and full sampling")
    return any(truncated)

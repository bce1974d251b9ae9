"""The plan of a head: a flat list of rows that keep few entries, blocks of the other rows.

The host, which has the record, checks it and cuts it; owners, orders and bounds of sums are
computed where the head is.  `moerl.algorithms.head_logprob` says why, and has the shapes' legend.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moerl.algorithms.device_copies import upload
from moerl.core.errors import RecordError

_BLOCK = 1 << 24  # logits of a block: 64 MiB in fp32
_ROWS = 1 << 15  # rows of a block, at most
_COPIED = 1 << 25  # numbers of the weight that are copied for a piece: 64 MiB in bf16
_PIECE = 1 << 15  # kept entries of a piece, at most
_PIECE_CPU = 1024  # there products with rows that keep other entries cost more than copies do
_ALIGNED = 16  # rows of a piece are multiples: fast products of a GPU, few shapes for oneDNN
_FEW = 256  # rows that keep at most 1 / 256 of the vocabulary have no block


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Entries of the vocabulary of each sampled token, as CSR: its sampling mask or a support."""

    offsets: Tensor  # [S + 1] i64, rising from 0 to nnz
    ids: Tensor  # [nnz] i64 or i32, global vocabulary ids, ascending in a row


@dataclass(frozen=True, slots=True, eq=False)
class HeadFactors:
    """An adapter of the head, which its weight already contains: a way for gradients alone."""

    a: Tensor  # [R, H]
    b: Tensor  # [V, R], padding excluded
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output layer's entries on this rank."""

    weight: Tensor  # [V, H], padding included
    vocab_size: int  # of the model, padding excluded
    start: int = 0  # global id of the first entry
    group: ProcessGroup | None = None  # the tensor-parallel ranks; None: this rank has all entries
    adapter: HeadFactors | None = None
    fp32: bool = False  # multiply bf16 hidden states and weight in fp32

    def operand_dtype(self, hidden: Tensor) -> torch.dtype:
        """Dtype in which hidden states and weight are multiplied."""
        return compute_dtype(hidden) if self.fp32 else hidden.dtype

    @property
    def width(self) -> int:
        """Entries of this rank without padding."""
        return min(max(self.vocab_size - self.start, 0), len(self.weight))


# --- rows, blocks, pieces -------------------------------------------------------------------------
class LogitBlock(NamedTuple):
    rows: Tensor  # [N] i64, sampled tokens
    columns: Tensor  # [N] i64, where each row's own token is in the block; -1: in no column
    places: Tensor  # [Z] i64, kept entries in the flattened block
    entries: slice  # of the vocabulary
    support: Tensor | None  # [Z] i64, numbers of these entries in the support; None: not wanted
    is_masked: bool  # entries that are not kept are absent


class HeadPlan(NamedTuple):
    """Rows that keep few entries, blocks of the others; on the host until `_score` uploads it."""

    few: Kept | None
    blocks: list[LogitBlock]
    support: Tensor | None = None  # [S] i64, entries of the support of each row; None: not wanted


def row_blocks(num_rows: int, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Numbers of rows, as many at a time as a block has."""
    parts: tuple[Tensor, ...] = torch.arange(num_rows, device=device).split(_ROWS)
    return parts


def full_blocks(kept: Kept, head: Head) -> list[LogitBlock]:
    """Every row with every entry of this shard."""
    return [
        block._replace(is_masked=False)
        for rows in row_blocks(len(kept.sampled))
        for block in kept.runs(rows, vocab_runs(head, len(rows)))
    ]


def many_blocks(many: Kept, head: Head) -> list[LogitBlock]:
    """Rows that keep many entries, with every entry of this shard."""
    rows = many.lengths.nonzero()[:, 0]
    return [
        block
        for some in (rows.split(_ROWS) if len(rows) else ())
        for block in many.runs(some, vocab_runs(head, len(some)))
    ]


class Kept(NamedTuple):
    """Kept entries of this shard, in the order of their rows."""

    lengths: Tensor  # [S] i64
    ids: Tensor  # [Z] i32 or i64, local, ascending in a row
    numbers: Tensor | None  # [Z] i64, among the entries of all shards; None: the same
    sampled: Tensor  # [S] i64, local; others' tokens lie outside

    @classmethod
    def make(cls, head: Head, sampled: Tensor, lengths: Tensor, ids: Tensor) -> Kept:
        """Take the entries of this shard.  lengths: of all rows; ids: of all rows, global."""
        every = cls(lengths, ids - head.start if head.start else ids, None, sampled - head.start)
        return every.where((every.ids >= 0) & (every.ids < head.width))

    def by_size(self, head: Head) -> tuple[Kept, Kept]:
        """Rows that keep few entries of this shard, and rows that keep many; others are empty."""
        is_many = self.lengths * _FEW > head.width
        if not bool(is_many.any()):
            return self, self._replace(lengths=self.lengths * 0, ids=self.ids[:0], numbers=None)
        of_many = torch.repeat_interleave(is_many, self.lengths)
        return self.where(~of_many), self.where(of_many)

    def where(self, keep: Tensor) -> Kept:
        """Some of the entries."""
        if bool(keep.all()):
            return self
        ends = torch.nn.functional.pad(keep.cumsum(0), (1, 0))[self.lengths.cumsum(0)]
        at = keep.nonzero()[:, 0]
        numbers = at if self.numbers is None else self.numbers[at]
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        return self._replace(lengths=lengths, ids=self.ids[at], numbers=numbers)

    def pieces(self, most: int) -> list[KeptPiece]:
        """All entries in turn: `most` at a time, and no more logits than in a block."""
        ends, num_rows, found, begin = self.lengths.cumsum(0).tolist(), len(self.lengths), [], 0
        while begin < len(self.ids):
            piece = _piece(ends, num_rows, begin, min(begin + most, len(self.ids)))
            found.append(piece)
            begin = piece.entries.stop
        return found

    def runs(self, rows: Tensor, parts: list[slice]) -> list[LogitBlock]:
        """Blocks of rows with runs of equal length of the vocabulary."""
        if not parts:
            return []
        owner, ids, numbers = self._select(rows)
        number = ids // (parts[0].stop - parts[0].start)
        order = number.argsort(stable=True)
        lengths = torch.bincount(number, minlength=len(parts)).tolist()
        pieces = (one[order].split(lengths) for one in (owner, ids, numbers))
        return [
            LogitBlock(
                rows,
                _columns(self.sampled[rows], part),
                of * (part.stop - part.start) + kept - part.start,
                part,
                which,
                True,
            )
            for part, of, kept, which in zip(parts, *pieces, strict=True)
        ]

    def _select(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries of some rows: the number of its row among them, its id, its own number."""
        where = torch.full((len(self.sampled),), -1)
        where[rows] = torch.arange(len(rows))
        number = torch.repeat_interleave(where, self.lengths)
        at = (number >= 0).nonzero()[:, 0]
        numbers = at if self.numbers is None else self.numbers[at]
        return number[at], self.ids[at].long(), numbers


class KeptPiece(NamedTuple):
    entries: slice  # of the list
    rows: slice  # all that have an entry here, and others


def _piece(ends: list[int], num_rows: int, begin: int, end: int) -> KeptPiece:
    """A piece that ends there or before.  ends: of the entries of each row, rising."""
    first = bisect_right(ends, begin)
    num = -(-(bisect_right(ends, end - 1) + 1 - first) // _ALIGNED) * _ALIGNED
    if end - begin > 1 and (end - begin) * num > _BLOCK:
        return _piece(ends, num_rows, begin, (begin + end) // 2)
    first = max(min(first, num_rows - num), 0)
    return KeptPiece(slice(begin, end), slice(first, min(first + num, num_rows)))


def vocab_runs(head: Head, num_rows: int) -> list[slice]:
    """Runs of the vocabulary; a cast part of the weight is no larger than a block of logits."""
    if not num_rows:
        return []
    size = max(1, _BLOCK // (max(num_rows, head.weight.shape[1]) if head.fp32 else num_rows))
    return [slice(begin, min(begin + size, head.width)) for begin in range(0, head.width, size)]


def _columns(local: Tensor, part: slice) -> Tensor:
    """Where tokens are in a run of the vocabulary; -1: outside of it."""
    inside = (local >= part.start) & (local < part.stop)
    return torch.where(inside, local - part.start, -1)


def upload_blocks(blocks: list[LogitBlock], device: torch.device) -> list[LogitBlock]:
    """All of them in one copy."""
    parts = [t for block in blocks for t in block if isinstance(t, Tensor)]
    if device.type == "cpu" or not parts:
        return blocks
    moved = iter(upload(torch.cat(parts), device).split([len(part) for part in parts]))
    return [
        LogitBlock._make(next(moved) if isinstance(t, Tensor) else t for t in block)
        for block in blocks
    ]


class KeptList(NamedTuple):
    """The flat list of kept entries, on the device of the head."""

    lengths: Tensor  # [S] i64
    ids: Tensor  # [Z] i64, local
    owner: Tensor  # [Z] i64, rising
    is_own: Tensor  # [Z] bool, the sampled token of its row
    support: Tensor | None  # [Z] i64, numbers in the support; None: the same, or not wanted
    pieces: list[KeptPiece]

    @classmethod
    def make(cls, few: Kept, like_VH: Tensor) -> KeptList:
        device, parts = like_VH.device, [few.lengths, few.sampled, few.ids]
        parts += [] if few.numbers is None else [few.numbers]
        moved = upload(torch.cat([part.to(few.ids.dtype) for part in parts]), device).long()
        lengths, sampled, ids, *numbers = moved.split([len(part) for part in parts])
        owner = torch.repeat_interleave(lengths, output_size=len(ids))
        most = _PIECE_CPU if device.type == "cpu" else _COPIED // like_VH.shape[1]
        pieces = few.pieces(max(min(most, _PIECE), 1))
        support = numbers[0] if numbers else None
        return cls(lengths, ids, owner, ids == sampled[owner], support, pieces)

    def logits(self, hidden: Tensor, head: Head, tau_S: Tensor) -> Tensor:
        """[Z] / temperature in the dtype of tau_S."""
        z_Z, dtype = tau_S.new_empty(len(self.ids)), head.operand_dtype(hidden)
        for entries, rows in self.pieces:
            w_UH, x_NH = head.weight[self.ids[entries]].to(dtype), hidden[rows].to(dtype)
            own = self.owner[entries, None] - rows.start
            z_Z[entries] = (w_UH @ x_NH.T).gather(1, own)[:, 0]
        return z_Z.div_(tau_S[self.owner])

    def of_support(self, values_Z: Tensor) -> Tensor:
        """The values of these entries, of those of the support."""
        return values_Z if self.support is None else values_Z[self.support]


def compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


# --- the record -----------------------------------------------------------------------------------
def check_mask(sampled: Tensor, offsets: Tensor, ids: Tensor) -> None:
    if len(offsets) != len(sampled) + 1:
        raise RecordError(
            "mask_rows", f"{len(offsets) - 1} mask rows for {len(sampled)} sampled tokens"
        )
    if not bool((offsets[0] == 0) & (offsets[-1] == len(ids)) & (offsets.diff() >= 0).all()):
        raise RecordError("mask_rows", f"mask offsets do not rise from 0 to {len(ids)}")
    follows = ids[1:] > ids[:-1]
    starts = offsets[1:-1]
    follows[starts[(starts > 0) & (starts < len(ids))] - 1] = True  # of another row
    if not bool(follows.all()):
        row = int(torch.searchsorted(offsets, int(follows.int().argmin()), right=True)) - 1
        raise RecordError("mask_duplicate", f"mask row {row} is not ascending and unique")
    is_own = ids == torch.repeat_interleave(sampled.to(ids.dtype), offsets.diff())
    if int(is_own.sum()) != len(sampled):  # a row keeps its token at most once
        has_own = torch.zeros(len(sampled), dtype=torch.bool)
        has_own[torch.repeat_interleave(offsets.diff())[is_own]] = True
        row = int(has_own.int().argmin())
        raise RecordError("mask_sampled", f"mask row {row} does not keep its own token")

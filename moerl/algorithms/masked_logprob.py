"""Log-probability of sampled tokens under the distribution that they were sampled from.

Keep Sampling Mask: the engine recorded which vocabulary entries its truncation kept; the trainer
scores `z_a / tau - logsumexp over the sampling mask of z_j / tau`, never a set derived again from
its own logits.  The sampling mask is CSR (one row per sampled token), the vocabulary may be sharded
over a tensor-parallel group, and a shard may keep nothing of a row.

Each function is one explicit autograd.Function, so the saved tensors are explicit: the masked one
saves O(kept entries), the full one its input logits and two numbers per row.
Rejected: a dense [T, V] mask (-inf minus -inf gives NaN gradients), autograd through gathers.
The two-step reduction over vocabulary shards (a maximum, then sums of exponentials) is that of
Megatron's vocabulary-parallel cross entropy; as there, every rank of the group gets the whole
result and returns the gradient of its own shard only.

The computation on a rank's own kept entries has two implementations: torch (`_TorchPart`, any
device and dtype, the reference) and compiled (`_BuiltPart`, csrc/masked_logprob.h, less memory and
time).  Both share the reductions between ranks.

Legend: R logit rows, V vocabulary entries of this shard (padding included), S sampled tokens,
Z kept entries of this shard.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, ReduceOp

from moerl.algorithms.device_copies import upload
from moerl.errors import ConfigError, RecordError
from moerl.kernels.library import describe, library
from moerl.kernels.masked_logprob_call import DTYPES, REFUSALS, KeptCall, run

_CHUNK_ELEMENTS = 1 << 22  # full vocabulary: 16 MiB of fp32 temporaries at a time

Implementation = Literal["auto", "torch", "built"]


class Scores(NamedTuple):
    """[S] each, fp32 (fp64 for fp64 logits), natural log, equal on all ranks of a tp group.

    Only the log-probability is differentiable.
    """

    logprob: Tensor
    entropy: Tensor  # of the distribution the log-probability belongs to
    full_entropy: Tensor | None  # over the whole vocabulary, when asked for


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """The recorded sampling mask of each sampled token, as CSR."""

    offsets: Tensor  # [S + 1] i64, rising from 0 to nnz
    ids: Tensor  # [nnz] i64 or i32, global vocabulary ids, ascending in a row


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The vocabulary entries of this rank's logits."""

    start: int = 0  # global id of the first one
    group: ProcessGroup | None = None  # the tensor-parallel ranks; None: this rank has all entries


def kept_logprobs(
    logits_RV: Tensor,
    sampled_S: Tensor,
    mask: SamplingMask,
    *,
    temperature_S: Tensor,
    shard: VocabShard = VocabShard(),
    rows_S: Tensor | None = None,
    full_entropy_of: int | None = None,
    implementation: Implementation = "auto",
) -> Scores:
    """Log-probability and entropy of each sampled token over its recorded sampling mask.

    logits_RV: [..., V] bf16, fp32 or fp64, this rank's entries of the vocabulary.
    sampled_S: [S] i64 global ids.  temperature_S: [S].  rows_S: [S] i64, the (flattened) logit row
    of each token; None = row i.  rows_S and the mask may lie on the host, which then checks them
    without waiting for the device.  full_entropy_of: the vocabulary size without padding, to have
    the entropy over it as well (a pass over all logits, in chunks).
    implementation: `auto` takes the compiled one when it is built and no logits row has two tokens.
    Raises RecordError `mask_rows`, `mask_sampled` (also an empty row) or `mask_duplicate`;
    ConfigError when `built` is asked for and cannot be.
    """
    logits, rows = _flat_rows(logits_RV, sampled_S, rows_S)
    _check_rows(mask, len(sampled_S))
    lib = _choose(implementation, logits, rows, mask.ids)
    rows, offsets, ids = (upload(t, logits.device) for t in (rows, mask.offsets, mask.ids))
    kept = _KeptSets(sampled_S, offsets, ids, shard.start)
    logprob_S, entropy_S = _KeptLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, rows, kept, temperature_S, shard.group, lib
    )
    full = None
    if full_entropy_of is not None:
        full = _full_entropy(logits.detach(), rows, temperature_S, shard, full_entropy_of)
    return Scores(logprob_S, entropy_S, full)


def full_logprobs(
    logits_RV: Tensor,
    sampled_S: Tensor,
    *,
    temperature_S: Tensor,
    vocab_size: int,
    shard: VocabShard = VocabShard(),
    rows_S: Tensor | None = None,
) -> Scores:
    """The same over the whole vocabulary, padding entries (global id >= vocab_size) excluded.

    Shapes, result and differentiability as in `kept_logprobs`.  Rows are taken in chunks, so no
    fp32 copy of the logits exists at any time.  Raises RecordError `token_range`.
    """
    logits, rows = _flat_rows(logits_RV, sampled_S, rows_S)
    rows = upload(rows, logits.device)
    if len(sampled_S) and bool(((sampled_S < 0) | (sampled_S >= vocab_size)).any()):
        raise RecordError("token_range", f"a sampled token lies outside 0..{vocab_size - 1}")
    logprob_S, entropy_S = _FullLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, rows, sampled_S, temperature_S, shard, vocab_size
    )
    return Scores(logprob_S, entropy_S, entropy_S)


@dataclass(frozen=True, slots=True)
class _KeptSets:
    sampled: Tensor  # [S] i64
    offsets: Tensor  # [S + 1] i64
    ids: Tensor  # [nnz], global
    vocab_start: int


class _KeptLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        kept: _KeptSets,
        temperature: Tensor,
        group: ProcessGroup | None,
        lib: ctypes.CDLL | None,
    ) -> tuple[Tensor, Tensor]:
        tau_S = temperature.to(_compute_dtype(logits))
        part = (
            _TorchPart(logits, rows, kept, tau_S)
            if lib is None
            else _BuiltPart(logits, rows, kept, tau_S, lib)
        )
        top_S = part.top()
        _all_reduce(top_S, ReduceOp.MAX, group)
        sums = part.sums(top_S)
        _all_reduce(sums, ReduceOp.SUM, group)
        total_S, weighted_S, picked_S = sums
        log_total_S = total_S.log()

        entropy_S = log_total_S - weighted_S / total_S
        ctx.save_for_backward(*part.saved(total_S), tau_S)
        ctx.part, ctx.lib, ctx.vocab_start = type(part), lib, kept.vocab_start
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.mark_non_differentiable(entropy_S)
        return picked_S - log_total_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, tau_S = ctx.saved_tensors
        scale_S = grads[0].to(tau_S.dtype) / tau_S
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=tau_S.device)
        ctx.part.spread(ctx, saved, scale_S, grad)
        return grad, None, None, None, None, None


class _TorchPart:
    """This rank's kept entries in torch: the reference.  Rows may repeat."""

    def __init__(self, logits: Tensor, rows: Tensor, kept: _KeptSets, tau_S: Tensor) -> None:
        sampled, ids, width = kept.sampled, kept.ids, logits.shape[-1]
        owner = torch.repeat_interleave(kept.offsets.diff(), output_size=len(ids))
        _check_membership(ids == sampled[owner], owner, len(sampled))
        _check_order(ids, owner)
        mine = (ids >= kept.vocab_start) & (ids < kept.vocab_start + width)
        self.owner_Z, ids_Z = owner[mine], ids[mine]
        self.flat_Z = rows[self.owner_Z] * width + (ids_Z - kept.vocab_start)
        self.hit_Z = ids_Z == sampled[self.owner_Z]
        self.z_Z = logits.view(-1)[self.flat_Z].to(tau_S.dtype) / tau_S[self.owner_Z]
        self.lengths = torch.zeros_like(sampled)
        self.lengths.index_add_(0, self.owner_Z, torch.ones_like(self.owner_Z))

    def top(self) -> Tensor:
        return _segment(self.z_Z, self.lengths, "max", float("-inf"))

    def sums(self, top_S: Tensor) -> Tensor:
        self.z_Z -= top_S[self.owner_Z]
        self.e_Z = self.z_Z.exp()
        return torch.stack(
            [
                _segment(self.e_Z, self.lengths, "sum", 0.0),
                _segment(self.e_Z * self.z_Z, self.lengths, "sum", 0.0),
                _segment(self.z_Z * self.hit_Z, self.lengths, "sum", 0.0),
            ]
        )

    def saved(self, total_S: Tensor) -> tuple[Tensor, ...]:
        return self.flat_Z, self.owner_Z, self.hit_Z, self.e_Z / total_S[self.owner_Z]

    @staticmethod
    def spread(_ctx: Any, saved: list[Tensor], scale_S: Tensor, grad: Tensor) -> None:
        flat_Z, owner_Z, hit_Z, p_Z = saved
        grad_Z = scale_S[owner_Z] * (hit_Z.to(p_Z.dtype) - p_Z)
        grad.view(-1).index_add_(0, flat_Z, grad_Z.to(grad.dtype))


class _BuiltPart:
    """The compiled implementation.  Beyond the record it keeps one number per kept entry."""

    def __init__(
        self, logits: Tensor, rows: Tensor, kept: _KeptSets, tau_S: Tensor, lib: ctypes.CDLL
    ) -> None:
        self.lib, self.rows = lib, rows.contiguous()
        self.sampled, self.offsets = kept.sampled.contiguous(), kept.offsets.contiguous()
        self.ids, self.kept = kept.ids.contiguous(), tau_S.new_empty(len(kept.ids))
        self.top_S = torch.empty_like(tau_S)
        status = torch.empty(len(tau_S), dtype=torch.int32, device=tau_S.device)
        self.call = _call(self.saved(tau_S), logits, kept.vocab_start)
        self.call.logits, self.call.top = logits.data_ptr(), self.top_S.data_ptr()
        self.call.temperature, self.call.status = tau_S.data_ptr(), status.data_ptr()
        _on_device(lib, "gather", self.call, logits)
        if bool(status.any()):
            row = int(status.ne(0).long().argmax())
            raise RecordError(
                REFUSALS[int(status[row])],
                f"mask row {row} is not ascending and unique with its own token in it once",
            )

    def top(self) -> Tensor:
        return self.top_S

    def sums(self, top_S: Tensor) -> Tensor:
        sums = top_S.new_empty(3, len(top_S))
        self.call.top, self.call.sums = top_S.data_ptr(), sums.data_ptr()
        _on_device(self.lib, "sums", self.call, top_S)
        return sums

    def saved(self, total_S: Tensor) -> tuple[Tensor, ...]:
        return self.rows, self.sampled, self.offsets, self.ids, self.kept, total_S

    @staticmethod
    def spread(ctx: Any, saved: list[Tensor], scale_S: Tensor, grad: Tensor) -> None:
        total_S = saved[-1].contiguous()
        call = _call((*saved[:-1], total_S), grad, ctx.vocab_start)
        call.gradient, call.scale = grad.data_ptr(), scale_S.data_ptr()
        call.sums = total_S.data_ptr()
        _on_device(ctx.lib, "spread", call, grad)


def _call(saved: tuple[Tensor, ...], matrix: Tensor, vocab_start: int) -> KeptCall:
    """Arguments of every pass.  matrix: logits or gradient, [R, V]."""
    rows, sampled, offsets, ids, kept, per_row = saved
    assert kept.dtype == per_row.dtype == _compute_dtype(matrix), f"{kept.dtype} numbers"
    assert matrix.is_contiguous(), "a logits row is one run of memory"
    assert rows.dtype == sampled.dtype == offsets.dtype == torch.int64, "row numbers are i64"
    return KeptCall(
        dtype=DTYPES[_name(matrix.dtype)],
        id_bytes=ids.element_size(),
        num_rows=len(rows),
        width=matrix.shape[-1],
        vocab_start=vocab_start,
        rows=rows.data_ptr(),
        sampled=sampled.data_ptr(),
        offsets=offsets.data_ptr(),
        ids=ids.data_ptr(),
        kept=kept.data_ptr(),
    )


def _on_device(lib: ctypes.CDLL, name: str, call: KeptCall, like: Tensor) -> None:
    """Run a pass on the device of `like`, in the order of torch's current stream."""
    if like.is_cuda:
        call.place = like.device.index
        call.stream = torch.cuda.current_stream(like.device).cuda_stream
    else:
        call.place = torch.get_num_threads()
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
        run(lib, name, call)


def _choose(
    implementation: Implementation, logits: Tensor, rows: Tensor, ids: Tensor
) -> ctypes.CDLL | None:
    """The library to use, None = torch."""
    device = logits.device.type
    if implementation == "torch" or device not in ("cpu", "cuda"):
        return None
    lib = library(device)
    fits = _name(logits.dtype) in DTYPES and ids.dtype in (torch.int32, torch.int64)
    if lib is not None and fits and _distinct(rows, len(logits)):
        return lib
    if implementation == "built":
        why = f"logits {logits.dtype}, ids {ids.dtype}, {describe(device)}"
        raise ConfigError("implementation", "built", f"it needs rows that do not repeat; {why}")
    return None


def _distinct(rows: Tensor, num_rows: int) -> bool:
    """Whether each token has its own logits row: two threads must not add to one gradient."""
    if not len(rows):
        return True
    ordered = rows.sort().values
    return bool((ordered.diff() > 0).all() & (ordered[0] >= 0) & (ordered[-1] < num_rows))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _FullLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        sampled: Tensor,
        temperature: Tensor,
        shard: VocabShard,
        vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        width = _own_width(logits, shard, vocab_size)
        tau_S = temperature.to(_compute_dtype(logits))
        local_S = sampled - shard.start
        mine_S = (local_S >= 0) & (local_S < width)
        top_S, sums = _full_sums(logits, rows, tau_S, local_S, width, shard.group)
        total_S, weighted_S, picked_S = sums
        log_total_S = total_S.log()

        entropy_S = log_total_S - weighted_S / total_S
        ctx.save_for_backward(logits, rows, local_S, mine_S, tau_S, top_S + log_total_S)
        ctx.width = width
        ctx.mark_non_differentiable(entropy_S)
        return picked_S - log_total_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, local_S, mine_S, tau_S, log_z_S = ctx.saved_tensors
        width = ctx.width
        grad = torch.zeros_like(logits)
        scale_S = grads[0].to(tau_S.dtype) / tau_S
        if width:
            for part in _chunks(len(rows), width):
                p = (_scaled(logits, rows, tau_S, part, width) - log_z_S[part, None]).exp_().neg_()
                pick = local_S[part].clamp(0, width - 1)[:, None]
                p.scatter_add_(1, pick, mine_S[part, None].to(p.dtype))
                p *= scale_S[part, None]
                grad[:, :width].index_add_(0, rows[part], p.to(grad.dtype))
        return grad, None, None, None, None, None


def _full_entropy(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    shard: VocabShard,
    vocab_size: int,
) -> Tensor:
    tau_S = temperature.to(_compute_dtype(logits))
    nowhere = torch.full_like(rows, -1)
    width = _own_width(logits, shard, vocab_size)
    total_S, weighted_S, _ = _full_sums(logits, rows, tau_S, nowhere, width, shard.group)[1]
    entropy_S: Tensor = total_S.log() - weighted_S / total_S
    return entropy_S


def _full_sums(
    logits: Tensor,
    rows: Tensor,
    tau_S: Tensor,
    local_S: Tensor,
    width: int,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Over the whole vocabulary: maximum z [S]; sums [3, S] of e, e * log e, log e of the sampled.

    local_S: the sampled token as an entry of this shard; anything outside it picks nothing.
    """
    top_S = torch.full_like(tau_S, float("-inf"))
    if width:
        for part in _chunks(len(rows), width):
            top_S[part] = _scaled(logits, rows, tau_S, part, width).amax(-1)
    _all_reduce(top_S, ReduceOp.MAX, group)
    sums = tau_S.new_zeros(3, len(rows))
    mine_S = (local_S >= 0) & (local_S < width)
    for part in _chunks(len(rows), width):
        z = _scaled(logits, rows, tau_S, part, width) - top_S[part, None]
        if width:
            pick = local_S[part].clamp(0, width - 1)[:, None]
            sums[2, part] = z.gather(1, pick)[:, 0] * mine_S[part]
        e = z.exp()
        sums[0, part] = e.sum(-1)
        sums[1, part] = z.mul_(e).sum(-1)
    _all_reduce(sums, ReduceOp.SUM, group)
    return top_S, sums


def _own_width(logits: Tensor, shard: VocabShard, vocab_size: int) -> int:
    """Entries of this shard without padding."""
    return min(max(vocab_size - shard.start, 0), logits.shape[-1])


def _flat_rows(logits: Tensor, sampled: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    flat = logits.reshape(-1, logits.shape[-1]).contiguous()
    if rows is None:
        assert len(flat) == len(sampled), f"{len(flat)} logit rows for {len(sampled)} tokens"
        rows = torch.arange(len(sampled), device=flat.device)
    return flat, rows


def _check_rows(mask: SamplingMask, num_sampled: int) -> None:
    offsets, num = mask.offsets, len(mask.ids)
    if len(offsets) != num_sampled + 1:
        raise RecordError(
            "mask_rows", f"{len(offsets) - 1} mask rows for {num_sampled} sampled tokens"
        )
    if not bool((offsets[0] == 0) & (offsets[-1] == num) & (offsets.diff() >= 0).all()):
        raise RecordError("mask_rows", f"mask offsets do not rise from 0 to {num}")


def _check_membership(hit: Tensor, owner: Tensor, num_rows: int) -> None:
    found = torch.zeros(num_rows, dtype=torch.int64, device=hit.device)
    found.index_add_(0, owner, hit.long())
    if not bool((found == 1).all()):
        row = int((found != 1).long().argmax())
        raise RecordError(
            "mask_sampled", f"mask row {row} keeps its own token {int(found[row])} times, want once"
        )


def _check_order(ids: Tensor, owner: Tensor) -> None:
    wrong = (ids[1:] <= ids[:-1]) & (owner[1:] == owner[:-1])
    if bool(wrong.any()):
        row = int(owner[int(wrong.long().argmax())])
        raise RecordError("mask_duplicate", f"mask row {row} is not ascending and unique")


def _segment(values: Tensor, lengths: Tensor, reduce: str, empty: float) -> Tensor:
    """Reduce consecutive runs: unlike index_add on CUDA, the order of additions is fixed."""
    return torch.segment_reduce(values, reduce, lengths=lengths, initial=empty, unsafe=True)


def _scaled(logits: Tensor, rows: Tensor, tau: Tensor, part: slice, width: int) -> Tensor:
    return logits[rows[part], :width].to(tau.dtype) / tau[part, None]


def _chunks(num_rows: int, width: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(width, 1))
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _all_reduce(values: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op, group=group)

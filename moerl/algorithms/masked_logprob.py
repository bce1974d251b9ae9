"""Log-probability of sampled tokens under the distribution they were really sampled from.

Keep Sampling Mask: the engine recorded which vocabulary entries its truncation kept; the trainer
scores `z_a / tau - logsumexp over the kept set of z_j / tau`, never a set derived again from its
own logits.  The kept set is CSR (one row per sampled token), the vocabulary may be sharded over a
tensor-parallel group, and a shard may keep nothing of a row.

Each function is one explicit autograd.Function, so that what is saved is what is stated: the
masked one keeps O(kept entries), the full one the logits it was given and two numbers per row.
Rejected: a dense [T, V] mask (T x V bytes, and -inf minus -inf reaches the gradient as NaN even
when masked later), and autograd through gathers (it keeps every intermediate).  The two-step
reduction over vocabulary shards (a maximum, then sums of exponentials) is that of Megatron's
vocabulary-parallel cross entropy; as there, every rank of the group gets the whole result and each
returns the gradient of its own shard only.

Legend: R logit rows, V vocabulary entries of this shard (padding included), S sampled tokens,
Z kept entries of this shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, ReduceOp

from moerl.errors import RecordError

_CHUNK_ELEMENTS = 1 << 22  # full vocabulary: 16 MiB of fp32 temporaries at a time


def kept_logprobs(
    logits_RV: Tensor,
    sampled_S: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    temperature_S: Tensor,
    vocab_start: int,
    rows_S: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each sampled token over its recorded kept set.

    logits_RV: [..., V] bf16, fp32 or fp64, this rank's entries vocab_start .. vocab_start + V.
    sampled_S: [S] i64 global ids.  offsets [S + 1] i64, ids [nnz] i64: the kept sets, global ids.
    temperature_S: [S].  rows_S: [S] i64, the (flattened) logit row of each token; None = row i.
    Returns ([S], [S]) in fp32 (fp64 for fp64 logits), natural log, equal on all ranks of tp_group.
    The log-probability is differentiable, the entropy is not.
    Raises RecordError `mask_rows` or `mask_sampled`.
    """
    logits, rows = _flat_rows(logits_RV, sampled_S, rows_S)
    if len(offsets) != len(sampled_S) + 1:
        raise RecordError(
            "mask_rows", f"{len(offsets) - 1} mask rows for {len(sampled_S)} sampled tokens"
        )
    return _KeptLogprobs.apply(
        logits, rows, sampled_S, offsets, ids, temperature_S, vocab_start, tp_group
    )


def full_logprobs(
    logits_RV: Tensor,
    sampled_S: Tensor,
    *,
    temperature_S: Tensor,
    vocab_start: int,
    vocab_size: int,
    rows_S: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """The same over the whole vocabulary, padding entries (global id >= vocab_size) excluded.

    Shapes, result and differentiability as in `kept_logprobs`.  Rows are taken in chunks, so no
    fp32 copy of the logits exists at any time.  Raises RecordError `token_range`.
    """
    logits, rows = _flat_rows(logits_RV, sampled_S, rows_S)
    if len(sampled_S) and bool(((sampled_S < 0) | (sampled_S >= vocab_size)).any()):
        raise RecordError("token_range", f"a sampled token lies outside 0..{vocab_size - 1}")
    return _FullLogprobs.apply(
        logits, rows, sampled_S, temperature_S, vocab_start, vocab_size, tp_group
    )


class _KeptLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        sampled: Tensor,
        offsets: Tensor,
        ids: Tensor,
        temperature: Tensor,
        vocab_start: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        num_rows, width = len(sampled), logits.shape[-1]
        owner = torch.repeat_interleave(offsets.diff(), output_size=len(ids))
        _check_membership(ids == sampled[owner], owner, num_rows)
        mine = (ids >= vocab_start) & (ids < vocab_start + width)
        owner_Z, ids_Z = owner[mine], ids[mine]
        flat_Z = rows[owner_Z] * width + (ids_Z - vocab_start)
        hit_Z = ids_Z == sampled[owner_Z]
        tau_S = temperature.to(_compute_dtype(logits))
        z_Z = logits.view(-1)[flat_Z].to(tau_S.dtype) / tau_S[owner_Z]
        lengths = torch.zeros_like(sampled).index_add_(0, owner_Z, torch.ones_like(owner_Z))

        top_S = _segment(z_Z, lengths, "max", float("-inf"))
        _all_reduce(top_S, ReduceOp.MAX, group)
        z_Z -= top_S[owner_Z]
        e_Z = z_Z.exp()
        sums = torch.stack(
            [
                _segment(e_Z, lengths, "sum", 0.0),
                _segment(e_Z * z_Z, lengths, "sum", 0.0),
                _segment(z_Z * hit_Z, lengths, "sum", 0.0),
            ]
        )
        _all_reduce(sums, ReduceOp.SUM, group)
        total_S, weighted_S, picked_S = sums
        log_total_S = total_S.log()

        entropy_S = log_total_S - weighted_S / total_S
        ctx.save_for_backward(flat_Z, owner_Z, hit_Z, e_Z / total_S[owner_Z], tau_S)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.mark_non_differentiable(entropy_S)
        return picked_S - log_total_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat_Z, owner_Z, hit_Z, p_Z, tau_S = ctx.saved_tensors
        scale_S = grads[0].to(tau_S.dtype) / tau_S
        grad_Z = scale_S[owner_Z] * (hit_Z.to(p_Z.dtype) - p_Z)
        grad = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad_Z.device)
        grad.view(-1).index_add_(0, flat_Z, grad_Z.to(grad.dtype))
        return grad, None, None, None, None, None, None, None


class _FullLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        sampled: Tensor,
        temperature: Tensor,
        vocab_start: int,
        vocab_size: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        width = min(max(vocab_size - vocab_start, 0), logits.shape[-1])
        tau_S = temperature.to(_compute_dtype(logits))
        top_S = torch.full_like(tau_S, float("-inf"))
        if width:
            for part in _chunks(len(rows), width):
                top_S[part] = _scaled(logits, rows, tau_S, part, width).amax(-1)
        _all_reduce(top_S, ReduceOp.MAX, group)

        sums = tau_S.new_zeros(3, len(rows))
        local_S = sampled - vocab_start
        mine_S = (local_S >= 0) & (local_S < width)
        for part in _chunks(len(rows), width):
            z = _scaled(logits, rows, tau_S, part, width) - top_S[part, None]
            e = z.exp()
            sums[0, part] = e.sum(-1)
            sums[1, part] = (e * z).sum(-1)
            if width:
                pick = local_S[part].clamp(0, width - 1)[:, None]
                sums[2, part] = z.gather(1, pick)[:, 0] * mine_S[part]
        _all_reduce(sums, ReduceOp.SUM, group)
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
        return grad, None, None, None, None, None, None


def _flat_rows(logits: Tensor, sampled: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    flat = logits.reshape(-1, logits.shape[-1])
    if rows is None:
        assert len(flat) == len(sampled), f"{len(flat)} logit rows for {len(sampled)} tokens"
        rows = torch.arange(len(sampled), device=flat.device)
    return flat, rows


def _check_membership(hit: Tensor, owner: Tensor, num_rows: int) -> None:
    found = torch.zeros(num_rows, dtype=torch.int64, device=hit.device)
    found.index_add_(0, owner, hit.long())
    if not bool((found == 1).all()):
        row = int((found != 1).long().argmax())
        raise RecordError(
            "mask_sampled", f"mask row {row} keeps its own token {int(found[row])} times, want once"
        )


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

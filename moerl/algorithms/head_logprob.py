"""Log-probabilities of sampled tokens from their hidden states; logits exist block by block only.

The output layer and the log-softmax are one autograd.Function over blocks of logits, [rows,
entries of the vocabulary].  Forward keeps sums per row; backward computes each block again and adds
its part of the gradients, so neither logits nor their gradient exist as [tokens, vocabulary].

Keep Sampling Mask: the engine recorded which vocabulary entries its truncation kept; the trainer
scores `z_a / tau - logsumexp over the sampling mask of z_j / tau`, never a set derived again from
its own logits.  Rows that keep few entries have no block: their logits are a flat list, one number
per kept entry, as the mask is.  Rows that keep more go through runs of the vocabulary, as rows
without a mask do: a matrix product costs less than the copy of so many rows of the weight.

The flat list is computed some entries at a time.  Their rows of the weight are copied and
multiplied with all rows of the piece: on a GPU the product of 16,384 entries with their 256 rows
takes less time than the copy, and no kernel of torch has dot products alone with sums in fp32.  In
backward the gradients are weighted sums of rows: of the weight for each token, of the hidden states
for each entry of the vocabulary, in the order of the entries, so that sums have a fixed order.

Support: the log-probabilities of some entries of each row, kept or not, come out as well,
differentiable, so that sums over them (`moerl.algorithms.support_losses`) have exact gradients.  Of
the logits these alone are held: one number per entry.

The vocabulary may be sharded over a tensor-parallel group, and a shard may keep nothing of a row.
Each rank sums its own entries, then the sums are joined (a maximum, then sums of exponentials, as
in Megatron's vocabulary-parallel cross entropy).  Every rank gets the whole result and returns the
gradient through its own entries only.

With `Head.fp32` operands in bf16 are cast block by block, and products, sums and gradients are in
fp32 until the gradients of hidden states and weight take their own dtype.

Nothing here waits for the device.  The host, which has the record, checks it and cuts the list by
the rows' numbers of entries; owners, orders and bounds of sums are computed where the list is.
Runs are planned on the host, since the number of kept entries of a run depends on their ids.
Rejected: a dense [S, V] mask; blocks of rows with the union of their entries (sorting the unions
takes the host longer than the GPU's work); torch's gradient of `per_sample_weights` for the dot
products (it rounds each product to bf16).
The recomputation in backward follows Cut Cross-Entropy, Wijmans et al., arXiv 2411.09009.

Legend: S sampled tokens, H hidden, V vocabulary entries of this shard, R rank of an adapter; of a
block: N rows, U entries of the vocabulary; Z kept entries, or entries of the support.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, ReduceOp

from moerl.algorithms.device_copies import upload
from moerl.algorithms.head_plan import (
    Head,
    HeadFactors,
    HeadPlan,
    Kept,
    KeptList,
    KeptPiece,
    LogitBlock,
    SamplingMask,
    check_mask,
    compute_dtype,
    full_blocks,
    many_blocks,
    row_blocks,
    upload_blocks,
    vocab_runs,
)
from moerl.core.errors import RecordError

__all__ = [
    "Head",
    "HeadFactors",
    "SamplingMask",
    "Scores",
    "full_logprobs",
    "kept_logprobs",
    "sum_of_rows",
    "top_logprobs",
]

_ABSENT = -1e30  # a logit outside of the mask; finite, so that its products are zeros


class Scores(NamedTuple):
    """[S] each, fp32 (fp64 for fp64 hidden states), natural log, equal on all ranks of a tp group.

    Only the log-probabilities are differentiable.
    """

    logprob: Tensor
    entropy: Tensor  # of the distribution the log-probability belongs to
    full_entropy: Tensor | None  # over the whole vocabulary, when asked for
    support: Tensor | None = None  # [Z] log-probabilities in the order of its ids, when asked for


def kept_logprobs(
    hidden_SH: Tensor,
    head: Head,
    sampled_S: Tensor,
    mask: SamplingMask,
    *,
    temperature_S: Tensor,
    full_entropy: bool = False,
    support: bool = False,
) -> Scores:
    """Log-probability and entropy of each sampled token over its recorded sampling mask.

    hidden_SH: bf16, fp32 or fp64, the input of the output layer that produced each token.
    sampled_S: i64 global ids.  sampled_S and the mask belong on the host.  full_entropy: also the
    entropy over the vocabulary, one more pass through the whole head.  support: also the
    log-probabilities of all kept entries.
    Raises RecordError `mask_rows`, `mask_sampled` (also an empty row) or `mask_duplicate`.
    """
    sampled, offsets, ids = sampled_S.cpu().long(), mask.offsets.cpu().long(), mask.ids.cpu()
    check_mask(sampled, offsets, ids)
    lengths = offsets.diff()
    few, many = Kept.make(head, sampled, lengths, ids).by_size(head)
    plan = HeadPlan(few, many_blocks(many, head), lengths if support else None)
    scores = _score(hidden_SH, head, temperature_S, plan)
    if not full_entropy:
        return scores
    with torch.no_grad():
        nowhere = Kept.make(head, torch.full_like(sampled, -1), lengths * 0, ids[:0])
        every = _score(hidden_SH, head, temperature_S, HeadPlan(None, full_blocks(nowhere, head)))
    return scores._replace(full_entropy=every.entropy)


def full_logprobs(
    hidden_SH: Tensor,
    head: Head,
    sampled_S: Tensor,
    *,
    temperature_S: Tensor,
    support: SamplingMask | None = None,
) -> Scores:
    """The same over the whole vocabulary, padding entries (global id >= vocab_size) excluded.

    support: entries, on the host, whose log-probabilities are wanted, too; distinct in a row, in
    any order.
    Raises RecordError `token_range`.
    """
    sampled = sampled_S.cpu()
    if bool(((sampled < 0) | (sampled >= head.vocab_size)).any()):
        raise RecordError("token_range", f"a sampled token lies outside 0..{head.vocab_size - 1}")
    lengths, ids = torch.zeros_like(sampled), sampled[:0]
    if support is not None:
        lengths, ids = support.offsets.cpu().diff(), support.ids.cpu().long()
    blocks = full_blocks(Kept.make(head, sampled, lengths, ids), head)
    plan = HeadPlan(None, blocks, None if support is None else lengths)
    scores = _score(hidden_SH, head, temperature_S, plan)
    return scores._replace(full_entropy=scores.entropy)


@torch.no_grad()
def top_logprobs(
    hidden_SH: Tensor, head: Head, k: int, *, temperature_S: Tensor
) -> tuple[Tensor, Tensor]:
    """The k likeliest entries of each row over the vocabulary: ids [S, k] i64 and log-probabilities
    [S, k], likeliest first, equal on all ranks of a tp group.
    """
    assert 0 < k <= head.vocab_size, f"{k} of {head.vocab_size} vocabulary entries"
    num, device = len(hidden_SH), hidden_SH.device
    tau_S = temperature_S.to(compute_dtype(hidden_SH))
    sums = _RowSums(tau_S, 0)
    best = torch.full((num, k), _ABSENT, dtype=tau_S.dtype, device=device)
    ids = torch.zeros((num, k), dtype=torch.long, device=device)
    for rows in row_blocks(num, device):
        for part in vocab_runs(head, len(rows)):
            block = LogitBlock(rows, torch.full_like(rows, -1), rows[:0], part, rows[:0], False)
            z_NU = _logits(hidden_SH, head, tau_S, block)
            top, columns = z_NU.topk(min(k, z_NU.shape[1]), dim=1)
            merged = torch.cat([best[rows], top], 1).topk(k, dim=1)
            best[rows] = merged.values
            found = torch.cat([ids[rows], columns + (head.start + part.start)], 1)
            ids[rows] = found.gather(1, merged.indices)
            sums.add(block, z_NU)
    log_z_S, _ = sums.join(head.group)
    if head.group is not None and dist.get_world_size(head.group) > 1:
        parts = [torch.empty_like(best) for _ in range(dist.get_world_size(head.group))]
        places = [torch.empty_like(ids) for _ in parts]
        dist.all_gather(parts, best, group=head.group)
        dist.all_gather(places, ids, group=head.group)
        merged = torch.cat(parts, 1).topk(k, dim=1)
        best, ids = merged.values, torch.cat(places, 1).gather(1, merged.indices)
    return ids, (best.double() - log_z_S[:, None]).to(tau_S.dtype)


def sum_of_rows(values_Z: Tensor, lengths_S: Tensor) -> Tensor:
    """[S]: sums over the entries of each row, in a fixed order; differentiable."""
    sums: Tensor = torch.segment_reduce(values_Z, "sum", lengths=lengths_S, unsafe=True)
    return sums


# --- the head -------------------------------------------------------------------------------------
def _score(hidden: Tensor, head: Head, temperature: Tensor, plan: HeadPlan) -> Scores:
    """Score rows."""
    wanted, blocks, kept = plan.support, plan.blocks, None
    if wanted is None:
        blocks = [block._replace(support=None) for block in blocks]
    if plan.few is not None:
        few = plan.few if wanted is not None else plan.few._replace(numbers=None)
        kept = KeptList.make(few, head.weight)
    blocks = upload_blocks(blocks, hidden.device)
    lengths_S = None if wanted is None else upload(wanted, hidden.device)
    num = 0 if wanted is None else int(wanted.sum())
    low = b = None
    if head.adapter is not None and torch.is_grad_enabled():
        dtype = head.operand_dtype(hidden)
        low = torch.nn.functional.linear(hidden.detach().to(dtype), head.adapter.a.to(dtype))
        b = head.adapter.b
    logprob_S, entropy_S, support_Z = _Score.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, low, b, temperature, lengths_S, num, head, kept, blocks
    )
    return Scores(logprob_S, entropy_S, None, None if wanted is None else support_Z)


class _Score(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        b: Tensor | None,
        temperature: Tensor,
        lengths_S: Tensor | None,
        num: int,
        head: Head,
        kept: KeptList | None,
        blocks: list[LogitBlock],
    ) -> tuple[Tensor, Tensor, Tensor]:
        tau_S = temperature.to(compute_dtype(hidden))
        sums, z_Z = _RowSums(tau_S, num), None
        if kept is not None:
            z_Z = kept.logits(hidden, head, tau_S)
            sums.start(kept, z_Z)
        for block in blocks:
            sums.add(block, _logits(hidden, head, tau_S, block))
        log_z_S, entropy_S = sums.join(head.group)
        ctx.save_for_backward(hidden, low, tau_S, log_z_S.to(tau_S.dtype), lengths_S, z_Z)
        ctx.head, ctx.kept, ctx.blocks = head, kept, blocks
        entropy_S = entropy_S.to(tau_S.dtype)
        ctx.mark_non_differentiable(entropy_S)
        support_Z = sums.support
        if lengths_S is not None:
            support_Z = support_Z - log_z_S.repeat_interleave(lengths_S, output_size=num)
        return (sums.picked - log_z_S).to(tau_S.dtype), entropy_S, support_Z.to(tau_S.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, low, tau_S, log_z_S, lengths_S, z_Z = ctx.saved_tensors
        head: Head = ctx.head
        wants_hidden, wants_weight, wants_low, wants_b = ctx.needs_input_grad[:4]
        product = _Product(hidden, head.weight, tau_S.dtype, sides=(wants_hidden, wants_weight))
        products = [product]
        if head.adapter is not None and low is not None:
            scaled = head.adapter.scale * low
            products.append(
                _Product(scaled, head.adapter.b, tau_S.dtype, sides=(wants_low, wants_b))
            )
        of = _Gradients.make(grads, tau_S, log_z_S, lengths_S)
        dtype = head.operand_dtype(hidden)
        if ctx.kept is not None:
            grad_Z = of.kept(ctx.kept, z_Z).to(dtype)
            for one in products:
                one.add_kept(ctx.kept, grad_Z)
        for block in ctx.blocks:
            grad_NU = of.block(block, _logits(hidden, head, tau_S, block)).to(dtype)
            for one in products:
                one.add(block, grad_NU)
        d_low = d_b = None
        if head.adapter is not None and low is not None:
            d_low, d_b = products[1].gradients()
            d_low = None if d_low is None else (d_low * head.adapter.scale).to(low.dtype)
        return *product.gradients(), d_low, d_b, *(None,) * 6


class _Gradients(NamedTuple):
    """Gradients of logits, from those of the scores over their temperatures."""

    log_z_S: Tensor
    scale_S: Tensor  # of log-probabilities of the sampled tokens
    scale_Z: Tensor  # of log-probabilities of the support
    sum_S: Tensor | None  # of scale_Z by row; None: no support

    @classmethod
    def make(
        cls, grads: tuple[Tensor, ...], tau_S: Tensor, log_z_S: Tensor, lengths_S: Tensor | None
    ) -> _Gradients:
        """grads: of the outputs of `_Score`."""
        scale_S, scale_Z, sum_S = grads[0].to(tau_S.dtype) / tau_S, grads[2].to(tau_S.dtype), None
        if lengths_S is not None:
            scale_Z = scale_Z / tau_S.repeat_interleave(lengths_S, output_size=len(scale_Z))
            sum_S = sum_of_rows(scale_Z, lengths_S)
        return cls(log_z_S, scale_S, scale_Z, sum_S)

    def kept(self, kept: KeptList, z_Z: Tensor) -> Tensor:
        """[Z], of the flat list."""
        grad_Z = (z_Z - self.log_z_S[kept.owner]).exp_().neg_()
        of_support = None
        if self.sum_S is not None:
            of_support = grad_Z * self.sum_S[kept.owner] + kept.of_support(self.scale_Z)
        grad_Z = grad_Z.add_(kept.is_own).mul_(self.scale_S[kept.owner])
        return grad_Z if of_support is None else grad_Z + of_support

    def block(self, block: LogitBlock, z_NU: Tensor) -> Tensor:
        """[N, U], of a block of logits, which is then used up."""
        grad = z_NU.sub_(self.log_z_S[block.rows, None]).exp_().neg_()
        of_support = None
        if block.support is not None and self.sum_S is not None:
            of_support = grad * self.sum_S[block.rows, None]
            of_support.view(-1).index_add_(0, block.places, self.scale_Z[block.support])
        own = (block.columns >= 0).to(grad.dtype)[:, None]
        grad.scatter_add_(1, block.columns.clamp(min=0)[:, None], own)
        grad = grad.mul_(self.scale_S[block.rows, None])
        return grad if of_support is None else grad + of_support


def _logits(hidden: Tensor, head: Head, tau_S: Tensor, block: LogitBlock) -> Tensor:
    """[N, U] / temperature in the dtype of tau_S; _ABSENT outside of the mask."""
    dtype = head.operand_dtype(hidden)
    z_NU = hidden[block.rows].to(dtype) @ head.weight[block.entries].to(dtype).T
    z_NU = z_NU.to(tau_S.dtype).div_(tau_S[block.rows, None])
    if not block.is_masked:
        return z_NU
    absent = torch.ones(z_NU.numel(), dtype=torch.bool, device=z_NU.device)
    absent.index_fill_(0, block.places, False)
    return z_NU.masked_fill_(absent.view_as(z_NU), _ABSENT)


class _RowSums:
    """Over the entries seen so far, by row, in fp64: a row may lie in many blocks."""

    def __init__(self, like_S: Tensor, num_support: int) -> None:
        self.top = torch.full_like(like_S, _ABSENT, dtype=torch.float64)  # maximum z
        self.total = torch.zeros_like(self.top)  # sum of exp(z - top)
        self.weighted = torch.zeros_like(self.top)  # sum of exp(z - top) * (z - top)
        self.picked = torch.zeros_like(self.top)  # z of the sampled token
        self.support = self.top.new_zeros(num_support)  # z of the entries of the support

    def start(self, kept: KeptList, z_Z: Tensor) -> None:
        """Begin with the flat list."""
        z_Z, lengths = z_Z.double(), kept.lengths
        if len(self.support):
            places = slice(None) if kept.support is None else kept.support
            self.support[places] = z_Z
        self.top = torch.segment_reduce(z_Z, "max", lengths=lengths, initial=_ABSENT, unsafe=True)
        self.picked = sum_of_rows(torch.where(kept.is_own, z_Z, 0), lengths)
        shifted = z_Z - self.top[kept.owner]
        e_Z = shifted.exp()
        self.total = sum_of_rows(e_Z, lengths)
        self.weighted = sum_of_rows(shifted.mul_(e_Z), lengths)

    def add(self, block: LogitBlock, z_NU: Tensor) -> None:
        """Add a block of logits, which is then used up."""
        rows, columns = block.rows, block.columns
        own = z_NU.gather(1, columns.clamp(min=0)[:, None])[:, 0]
        self.picked[rows] += torch.where(columns >= 0, own, 0).double()
        if block.support is not None and len(self.support):
            self.support[block.support] = z_NU.view(-1)[block.places].double()
        top = z_NU.amax(-1)
        e_NU = z_NU.sub_(top[:, None]).exp()
        total, weighted = e_NU.sum(-1).double(), z_NU.mul_(e_NU).sum(-1).double()
        before, top = self.top[rows], top.double()
        after = torch.maximum(before, top)
        parts = (
            _about(after, before, self.total[rows], self.weighted[rows]),
            _about(after, top, total, weighted),
        )
        self.top[rows] = after
        self.total[rows], self.weighted[rows] = (a + b for a, b in zip(*parts, strict=True))

    def join(self, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Over all shards: log of the sum of exp(z), and the entropy."""
        if group is not None and dist.get_world_size(group) > 1:
            top = self.top.clone()
            dist.all_reduce(top, ReduceOp.MAX, group=group)
            own = _about(top, self.top, self.total, self.weighted)
            sums = torch.stack([*own, self.picked])
            dist.all_reduce(sums, group=group)
            if len(self.support):
                dist.all_reduce(self.support, group=group)
            self.top = top
            self.total, self.weighted, self.picked = sums
        log_total = self.total.log()
        return self.top + log_total, log_total - self.weighted / self.total


def _about(after: Tensor, top: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """Sums about one maximum as sums about a larger one."""
    shift = top - after
    scale = shift.exp()
    return total * scale, (weighted + total * shift) * scale


class _Product:
    """Gradients of `x @ w.T` from blocks of the gradient of the result.

    The weight's gradient goes into Megatron's gradient buffer if it exists, as its own layers do
    with `gradient_accumulation_fusion`.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, sum_dtype: torch.dtype, *, sides: tuple[bool, bool]
    ) -> None:
        """Allocate the sums.  sides: whether the gradients of x and of w are wanted."""
        self._x, self._weight = x, weight
        self._in_buffer = hasattr(weight, "grad_added_to_main_grad")
        self._d_x = torch.zeros_like(x, dtype=sum_dtype) if sides[0] else None
        self._d_w: Tensor | None = None
        if sides[1]:
            buffer = getattr(weight, "main_grad", None) if self._in_buffer else None
            self._d_w = torch.zeros_like(weight, dtype=sum_dtype) if buffer is None else buffer

    def add(self, block: LogitBlock, grad_NU: Tensor) -> None:
        """From a block of logits."""
        rows, entries = block.rows, block.entries
        if self._d_x is not None:
            w_UH = self._weight[entries].to(grad_NU.dtype)
            self._d_x.index_add_(0, rows, (grad_NU @ w_UH).to(self._d_x.dtype))
        if self._d_w is not None:
            part_UH = grad_NU.T @ self._x[rows].to(grad_NU.dtype)
            self._d_w[entries] += part_UH.to(self._d_w.dtype)

    def add_kept(self, kept: KeptList, grad_Z: Tensor) -> None:
        """From the flat list."""
        if self._d_x is not None:
            self._add_to_rows(kept, grad_Z, self._d_x)
        if self._d_w is not None:
            self._add_to_entries(kept, grad_Z, self._d_w)

    def _add_to_rows(self, kept: KeptList, grad_Z: Tensor, d_x: Tensor) -> None:
        weight, pieces = self._weight, kept.pieces
        is_cast = weight.dtype != grad_Z.dtype
        if not is_cast and pieces:  # the sums read the weight itself: no piece is copied
            pieces = [KeptPiece(slice(0, len(grad_Z)), slice(0, len(d_x)))]
        for entries, rows in pieces:
            ids = kept.ids[entries]
            every = torch.arange(len(ids), device=ids.device)
            table, ids = (weight[ids].to(grad_Z.dtype), every) if is_cast else (weight, ids)
            numbers = torch.arange(rows.start, rows.stop, device=ids.device)
            begins = torch.searchsorted(kept.owner[entries], numbers)
            d_x[rows] += _sums(table, ids, begins, grad_Z[entries])

    def _add_to_entries(self, kept: KeptList, grad_Z: Tensor, d_w: Tensor) -> None:
        """In the order of the entries.  The sum of equal ones stands at the last; others are 0."""
        ids, order = kept.ids.sort(stable=True)
        rows, grad_Z, x = kept.owner[order], grad_Z[order], self._x.to(grad_Z.dtype)
        for entries, _ in kept.pieces:
            some = ids[entries]
            begins = torch.searchsorted(some, some)
            part_UH = _sums(x, rows[entries], begins, grad_Z[entries])
            d_w.index_add_(0, some, part_UH.to(d_w.dtype))

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Of x and of w, in their dtypes; of w a placeholder when the buffer has it already."""
        d_x = None if self._d_x is None else self._d_x.to(self._x.dtype)
        if self._d_w is None or not self._in_buffer:
            return d_x, None if self._d_w is None else self._d_w.to(self._weight.dtype)
        setattr(self._weight, "grad_added_to_main_grad", True)  # noqa: B010
        # an embedding's gradient is added to it where the two are one weight
        tied = getattr(self._weight, "zero_out_wgrad", False)
        return d_x, torch.zeros_like(self._weight) if tied else torch.empty_like(self._weight)


def _sums(table_TH: Tensor, ids_Z: Tensor, begins_B: Tensor, scale_Z: Tensor) -> Tensor:
    """[B, H]: weighted sums of rows of a table, of entries from each begin to the next one.

    One kernel; sums in bf16 are in fp32 until they are complete.
    """
    sums: Tensor = torch.nn.functional.embedding_bag(
        ids_Z, table_TH, begins_B, mode="sum", per_sample_weights=scale_Z
    )
    return sums

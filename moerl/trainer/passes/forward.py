"""One microbatch through a model chunk: replayed routes in, log-probabilities out.

With context parallelism a rank has the logits of a part of the positions.  The log-probabilities
of all sampled tokens of the data-parallel rank are joined before the loss, so every loss, also one
over whole sequences, is written as for one rank.

Legend: B rows, S slots, V vocabulary entries of this rank, N sampled tokens of the data-parallel
rank, M of them on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd import Function

from moerl.algorithms.device_copies import upload
from moerl.algorithms.masked_logprob import (
    SamplingMask,
    Scores,
    VocabShard,
    full_logprobs,
    kept_logprobs,
)
from moerl.data.grid import Grid, Span
from moerl.data.packing import Microbatch
from moerl.trainer.model.gpt import Chunk, Model
from moerl.trainer.model.layer_calls import Mode
from moerl.trainer.model.parallel import Parallel


def grid_of(parallel: Parallel, *, packed: bool, shape: tuple[int, int] = (1, 1)) -> Grid:
    """Microbatch grid of this rank.  shape: lower bound of rows and slots."""
    return Grid(packed, parallel.cp_rank, parallel.cp_size, parallel.tp_size, *shape)


def routed_slots(batch: Microbatch, parallel: Parallel) -> Span:
    """Slots whose tokens this rank's routers see: a run of them under sequence parallelism."""
    count, rest = divmod(batch.tokens.shape[1], parallel.tp_size)
    assert not rest, f"{batch.tokens.shape[1]} slots do not divide by tp {parallel.tp_size}"
    return count * parallel.tp_rank, count * (parallel.tp_rank + 1)


def load_routes(
    model: Model, batch: Microbatch, microbatch: int, parallel: Parallel, chunk: int = 0
) -> None:
    """Read the recorded routes of one chunk's layers and this rank's tokens for its routers."""
    assert model.replay is not None, "the model was built without replay"
    layers = model.replay.chunks[chunk]
    model.replay.load(microbatch, batch.routes(layers, routed_slots(batch, parallel)), chunk)
    load_positions(model, batch, microbatch, chunk)


def load_positions(model: Model, batch: Microbatch, microbatch: int, chunk: int = 0) -> None:
    """Register the recorded positions of one chunk's sparse attention, of all slots of this rank.

    Sequence parallelism does not cut them: a rank attends for all slots, with its own heads.
    """
    if model.indexers is not None:
        model.indexers.load(microbatch, batch.attended, batch.num_fed, chunk)


def local_rows(routes: Mapping[int, Tensor], parallel: Parallel) -> dict[int, Tensor]:
    """Rows of this tensor-parallel rank: with sequence parallelism it routes a run of positions.

    routes: {layer: [S * B, K]} slot-major, so a run of slots is a run of rows.
    """
    local = {}
    for layer, rows in routes.items():
        count, rest = divmod(len(rows), parallel.tp_size)
        assert not rest, f"{len(rows)} rows do not divide by tp {parallel.tp_size}"
        begin = count * parallel.tp_rank
        local[layer] = rows[begin : begin + count]
    return local


def run_chunk(
    model: Model,
    chunk: Chunk,
    module: torch.nn.Module,
    batch: Microbatch,
    microbatch: int,
    mode: Mode,
) -> Tensor:
    """Forward pass of one model chunk: [B, S, V] logits from the last, hidden states otherwise.

    module: `chunk.module` or what wraps it.  Causal attention keeps right padding unseen, so no
    mask is passed.  Logits are in the model's precision, vocabulary padding included.
    """
    device = next(module.parameters()).device
    inputs = (upload(batch.tokens, device), upload(batch.positions, device), None)
    extra: dict[str, Any] = {"packed_seq_params": _packed(batch, device)}
    if chunk.has_loss:
        extra |= model.call_args
    if model.replay is None:
        assert mode is Mode.OFF, f"mode {mode} needs a model built with replay"
        output: Tensor = module(*inputs, **extra)
        return output
    with ExitStack() as served:
        served.enter_context(model.replay.forward(microbatch, mode, chunk.index))
        if model.indexers is not None:
            kind = model.indexers.mode(mode, microbatch, chunk.index)
            served.enter_context(model.indexers.forward(microbatch, kind, chunk.index))
        output = module(*inputs, **extra)
    if mode is Mode.REPLAY:
        model.replay.bind(output, microbatch, chunk.index)
        if model.indexers is not None:
            model.indexers.bind(output, microbatch, chunk.index)
    return output


def logits(
    model: Model, module: torch.nn.Module, batch: Microbatch, microbatch: int, mode: Mode
) -> Tensor:
    """Forward pass of a model that is one chunk.  Returns [B, S, V]."""
    assert len(model.chunks) == 1, f"this rank holds {len(model.chunks)} model chunks"
    return run_chunk(model, model.chunks[0], module, batch, microbatch, mode)


def _packed(batch: Microbatch, device: torch.device) -> PackedSeqParams | None:
    if batch.cu_seqlens is None:
        return None
    # the rotary table must be as long as the longest rollout, not as the row: megatron-core takes
    # a table of the row's length for one of positions counted over the whole row
    longest = int(batch.cu_seqlens.diff().max())
    ends = upload(batch.cu_seqlens, device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def sampled_logprobs(
    model: Model,
    logits_BSV: Tensor,
    batch: Microbatch,
    parallel: Parallel,
    *,
    full_entropy: bool = False,
) -> Scores:
    """Log-probability and entropy of each sampled token, [N] fp32 each, equal on all tp, cp ranks.

    Over the recorded sampling mask when the microbatch carries one, over the vocabulary otherwise.
    full_entropy: compute also the entropy over the vocabulary (with sampling masks, one more pass
    over all logits).
    """
    device = logits_BSV.device
    sampled = upload(batch.sampled[batch.held], device)
    temperature = upload(batch.temperature[batch.held], device)
    shard = VocabShard(model.vocab_start, parallel.tp)
    if batch.mask_offsets is None or batch.mask_ids is None or not len(batch.held):
        scores = full_logprobs(
            logits_BSV,
            sampled,
            temperature_S=temperature,
            vocab_size=model.spec.vocab_size,
            shard=shard,
            rows_S=batch.sampled_rows,
        )
    else:
        scores = kept_logprobs(
            logits_BSV,
            sampled,
            SamplingMask(batch.mask_offsets, batch.mask_ids),
            temperature_S=temperature,
            shard=shard,
            rows_S=batch.sampled_rows,
            full_entropy_of=model.spec.vocab_size if full_entropy else None,
        )
    if not full_entropy:  # all ranks join the same number of parts
        scores = scores._replace(full_entropy=None)
    full = scores.full_entropy
    return Scores(
        join(scores.logprob, batch, parallel),
        join(scores.entropy, batch, parallel),
        None if full is None else join(full, batch, parallel),
    )


def join(values_M: Tensor, batch: Microbatch, parallel: Parallel) -> Tensor:
    """[N], from the values of the tokens that this context-parallel rank holds."""
    if parallel.cp_size == 1:
        return values_M
    held = upload(batch.held, values_M.device)
    values_N: Tensor = _Join.apply(values_M, held, len(batch.sampled), parallel.cp)  # type: ignore[no-untyped-call]
    return values_N


class _Join(Function):
    """Values of the tokens each context-parallel rank holds -> values of all of them.

    Every rank computes the same loss from the result, so its gradient is already the full one.
    """

    @staticmethod
    def forward(
        ctx: Any, values_M: Tensor, held_M: Tensor, num: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(held_M)
        values_N = values_M.new_zeros(num)
        values_N[held_M] = values_M
        dist.all_reduce(values_N, group=group)
        return values_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.saved_tensors[0]], None, None, None

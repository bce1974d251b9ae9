"""One microbatch through a model chunk: replayed routes in, log-probabilities out.

The last chunk of a policy returns hidden states of sampled tokens, and the head works on those
alone (`moerl.algorithms.head_logprob`): no logits of tokens that are not trained.

With context parallelism a rank has a part of the positions.  The log-probabilities
of all sampled tokens of the data-parallel rank are joined before the loss, so every loss, also one
over whole sequences, is written as for one rank.

Legend: B rows, S slots, H hidden, N sampled tokens of the data-parallel rank, M of them on this
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd import Function

from moerl.algorithms.device_copies import upload
from moerl.algorithms.head_logprob import SamplingMask, Scores, full_logprobs, kept_logprobs
from moerl.config.schema import TrainerConfig
from moerl.data.grid import Grid, Span
from moerl.data.packing import Microbatch
from moerl.trainer.model.gpt import Chunk, Model
from moerl.trainer.model.packed_rows import PackedRows
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode
from moerl.trainer.model.shared_attention import rotary_at


def grid_of(parallel: Parallel, trainer: TrainerConfig, shape: tuple[int, int] = (1, 1)) -> Grid:
    """Microbatch grid of this rank.  shape: lower bound of rows and slots."""
    place = (parallel.cp_rank, parallel.cp_size, parallel.tp_size)
    return Grid(trainer.packing, *place, *shape, shares=trainer.share_prompts)


def routed_slots(batch: Microbatch, parallel: Parallel) -> Span:
    """Slots whose tokens this rank's routers see: a run of them under sequence parallelism."""
    count, rest = divmod(batch.tokens.shape[1], parallel.tp_size)
    assert not rest, f"{batch.tokens.shape[1]} slots do not divide by tp {parallel.tp_size}"
    return count * parallel.tp_rank, count * (parallel.tp_rank + 1)


def read_routes(model: Model, batch: Microbatch, microbatch: int, parallel: Parallel) -> None:
    """Read and check the routes of all chunks for `load_routes`.  Raises as `RouteReplay.load`."""
    assert model.replay is not None, "the model was built without replay"
    every = batch.routes(model.replay.layers, routed_slots(batch, parallel))
    for chunk, layers in enumerate(model.replay.chunks):
        routes = {layer: every[layer] for layer in layers}
        model.replay.check(microbatch, routes, chunk)
        batch.ahead[chunk] = routes


def load_routes(
    model: Model, batch: Microbatch, microbatch: int, parallel: Parallel, chunk: int = 0
) -> None:
    """Give one chunk's routers the recorded routes of this rank's tokens."""
    assert model.replay is not None, "the model was built without replay"
    if (routes := batch.ahead.pop(chunk, None)) is not None:
        model.replay.load(microbatch, routes, chunk, checked=True)
    else:
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
    """Forward pass of one model chunk: its hidden states, or the output of its output layer.

    module: `chunk.module` or its wrapper.  Causal attention keeps right padding unseen, so a mask
    is passed for shared tokens alone.
    """
    device = next(module.parameters()).device
    positions, seen_until = upload(batch.positions, device), None
    extra: dict[str, Any] = {"packed_seq_params": _packed(batch, device)}
    if chunk.has_loss:
        extra |= model.call_args
    with ExitStack() as served:
        if batch.seen_until is not None:  # `shared_attention` takes it as the attention mask
            seen_until = upload(batch.seen_until, device)
            served.enter_context(rotary_at(chunk.gpt.rotary_pos_emb, positions[0]))
        inputs = (upload(batch.tokens, device), positions, seen_until)
        if model.replay is None:
            assert mode is Mode.OFF, f"mode {mode} needs a model built with replay"
            output: Tensor = module(*inputs, **extra)
            return output
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


def run_to_head(
    model: Model,
    chunk: Chunk,
    module: torch.nn.Module,
    batch: Microbatch,
    microbatch: int,
    mode: Mode,
) -> Tensor:
    """`run_chunk` of a policy: the last chunk returns [1, M, H], the input of its head."""
    if not chunk.has_loss:
        return run_chunk(model, chunk, module, batch, microbatch, mode)
    rows = upload(batch.sampled_rows, next(module.parameters()).device)
    with _without_logits(chunk.gpt.output_layer, rows):
        return run_chunk(model, chunk, module, batch, microbatch, mode)


def hidden_states(
    model: Model, module: torch.nn.Module, batch: Microbatch, microbatch: int, mode: Mode
) -> Tensor:
    """`run_to_head` of a model that is one chunk."""
    assert len(model.chunks) == 1, f"this rank holds {len(model.chunks)} model chunks"
    return run_to_head(model, model.chunks[0], module, batch, microbatch, mode)


@contextmanager
def _without_logits(output_layer: ColumnParallelLinear, rows_M: Tensor) -> Iterator[None]:
    """Inside, an output layer returns its input at some positions.

    It is called as before, because hooks of that call fetch its weight (`overlap_param_gather`).
    """
    vars(output_layer)["forward"] = partial(_input_rows, output_layer, rows_M)
    try:
        yield
    finally:
        del vars(output_layer)["forward"]


def _input_rows(
    output_layer: ColumnParallelLinear, rows_M: Tensor, hidden_SBH: Tensor, **_unused: Any
) -> tuple[Tensor, None]:
    """[M, 1, H] at positions of the flattened [B, S]; the second result is the layer's bias.

    Backward joins the gradients of all vocabulary shards, as the layer's own does.
    """
    if output_layer.sequence_parallel:
        hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=output_layer.tp_group)
    else:
        hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=output_layer.tp_group)
    slots, rows = hidden_SBH.shape[:2]
    places_M = rows_M % slots * rows + rows_M // slots
    return hidden_SBH.flatten(0, 1).index_select(0, places_M)[:, None], None


def _packed(batch: Microbatch, device: torch.device) -> PackedRows | None:
    if batch.cu_seqlens is None:
        return None
    # the rotary table must be as long as the longest rollout, not as the row: megatron-core takes
    # a table of the row's length for one of positions counted over the whole row
    longest = int(batch.cu_seqlens.diff().max())
    ends = upload(batch.cu_seqlens, device)
    return PackedRows(
        host_ends=batch.cu_seqlens,
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
    hidden_1MH: Tensor,
    batch: Microbatch,
    parallel: Parallel,
    *,
    full_entropy: bool = False,
    support: SamplingMask | None = None,
) -> Scores:
    """Log-probability and entropy of each sampled token, [N] fp32 each, equal on all tp, cp ranks.

    Over the recorded sampling mask when the microbatch carries one, over the vocabulary otherwise.
    hidden_1MH: from `run_to_head`.  full_entropy: compute also the entropy over the
    vocabulary (with sampling masks, one more pass through the head).  support: entries of the M
    tokens whose log-probabilities are wanted, too, on this rank; with a sampling mask, its entries.
    """
    hidden_MH, head = hidden_1MH[0], model.head(parallel.tp)
    sampled = batch.sampled[batch.held]
    temperature = upload(batch.temperature[batch.held], hidden_MH.device)
    if batch.mask_offsets is None or batch.mask_ids is None or not len(batch.held):
        scores = full_logprobs(hidden_MH, head, sampled, temperature_S=temperature, support=support)
    else:
        mask = SamplingMask(batch.mask_offsets, batch.mask_ids)
        scores = kept_logprobs(
            hidden_MH,
            head,
            sampled,
            mask,
            temperature_S=temperature,
            full_entropy=full_entropy,
            support=support is not None,
        )
    if not full_entropy:  # all ranks join the same number of parts
        scores = scores._replace(full_entropy=None)
    full = scores.full_entropy
    return Scores(
        gather_context_parallel(scores.logprob, batch, parallel),
        gather_context_parallel(scores.entropy, batch, parallel),
        None if full is None else gather_context_parallel(full, batch, parallel),
        scores.support,
    )


def gather_context_parallel(values_M: Tensor, batch: Microbatch, parallel: Parallel) -> Tensor:
    """[N], from the values of the tokens that this context-parallel rank holds."""
    if parallel.cp_size == 1:
        return values_M
    held = upload(batch.held, values_M.device)
    values_N: Tensor = GatherContextParallel.apply(values_M, held, len(batch.sampled), parallel.cp)  # type: ignore[no-untyped-call]
    return values_N


class GatherContextParallel(Function):
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

"""One microbatch through the model: replayed routes in, log-probabilities of sampled tokens out.

Legend: B rows, S positions, V vocabulary entries of this rank, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moerl.algorithms.masked_logprob import full_logprobs, kept_logprobs
from moerl.data.packing import Microbatch
from moerl.trainer.model import Model
from moerl.trainer.parallel import Parallel
from moerl.trainer.replay import Mode


def load_routes(model: Model, batch: Microbatch, microbatch: int, parallel: Parallel) -> None:
    """Read the recorded routes of this rank's layers and tokens and give them to the routers."""
    assert model.replay is not None, "the model was built without replay"
    routes = batch.routes(model.replay.layers)
    model.replay.load(microbatch, local_rows(routes, parallel))


def local_rows(routes: Mapping[int, Tensor], parallel: Parallel) -> dict[int, Tensor]:
    """Rows of this tensor-parallel rank: with sequence parallelism it routes a run of positions.

    routes: {layer: [S * B, K]} sequence-major, so a run of positions is a run of rows.
    """
    local = {}
    for layer, rows in routes.items():
        count, rest = divmod(len(rows), parallel.tp_size)
        assert not rest, f"{len(rows)} rows do not divide by tp {parallel.tp_size}"
        begin = count * parallel.tp_rank
        local[layer] = rows[begin : begin + count].to(parallel.device)
    return local


def logits(
    model: Model, module: torch.nn.Module, batch: Microbatch, microbatch: int, mode: Mode
) -> Tensor:
    """Forward pass.  Returns [B, S, V] in the model's precision, vocabulary padding included.

    module: `model.module` or what wraps it.  Causal attention keeps right padding unseen, so no
    mask is passed.
    """
    device = next(module.parameters()).device
    inputs = (batch.tokens.to(device), batch.positions.to(device), None)
    if model.replay is None:
        assert mode is Mode.OFF, f"mode {mode} needs a model built with replay"
        return module(*inputs, **model.call_args)
    with model.replay.forward(microbatch, mode):
        return module(*inputs, **model.call_args)


def sampled_logprobs(
    model: Model, logits_BSV: Tensor, batch: Microbatch, parallel: Parallel
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each sampled token, both [N] fp32, equal on all tp ranks.

    Over the recorded kept set when the microbatch carries one, over the vocabulary otherwise.
    """
    device = logits_BSV.device
    rows, sampled = batch.sampled_rows.to(device), batch.sampled.to(device)
    temperature = batch.temperature.to(device)
    if batch.mask_offsets is None or batch.mask_ids is None:
        return full_logprobs(
            logits_BSV,
            sampled,
            temperature_S=temperature,
            vocab_start=model.vocab_start,
            vocab_size=model.spec.vocab_size,
            rows_S=rows,
            tp_group=parallel.tp,
        )[:2]
    return kept_logprobs(
        logits_BSV,
        sampled,
        batch.mask_offsets.to(device),
        batch.mask_ids.to(device),
        temperature_S=temperature,
        vocab_start=model.vocab_start,
        rows_S=rows,
        tp_group=parallel.tp,
    )[:2]

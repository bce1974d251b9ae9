"""Values of a model with a value head, at the positions that produce its sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moerl.algorithms.device_copies import upload
from moerl.data.packing import Microbatch
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.model.gpt import Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode
from moerl.trainer.passes import forward
from moerl.trainer.passes.schedule import (
    Batches,
    LossOf,
    ScheduledPass,
    next_pass,
    no_tokens,
    run_pass,
    scoring,
)

Loss = Callable[[ScheduledPass, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def load_values(model: Model, source: HfFolder) -> None:
    """Fill a model with a value head; a folder without one leaves the head at zero."""
    tiles, tensors = model.tiles, model.tensors
    if not source.spec.values:
        tiles = {name: local for name, local in tiles.items() if "output_layer." not in name}
    load_hf({name: tensors[name] for name in tiles}, tiles, source)


def values_at(model: Model, batches: Batches) -> dict[int, Tensor]:
    """[N] fp32 by microbatch, without gradient, on the last stage; empty on the others."""
    found: dict[int, Tensor] = {}

    def keep(
        scheduled: ScheduledPass, output_BS1: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value_N = values_of_output(scheduled.batch, output_BS1, batches.parallel)
        found[scheduled.microbatch] = value_N
        return value_N.sum(), no_tokens(value_N.device), {}

    modules = [chunk.module for chunk in model.chunks]
    with scoring(model):
        run_pass(model, modules, batches, partial(value_step, model, keep), forward_only=True)
    return found


def values_of_output(batch: Microbatch, output_BS1: Tensor, parallel: Parallel) -> Tensor:
    """[N] fp32 of all sampled tokens of the data-parallel rank, from this rank's positions."""
    value_M = output_BS1.flatten()[upload(batch.sampled_rows, output_BS1.device)].float()
    return forward.gather_context_parallel(value_M, batch, parallel)


def value_step(
    model: Model, loss: Loss, scheduled_passes: Iterator[ScheduledPass], module: torch.nn.Module
) -> tuple[Tensor, LossOf]:
    """A forward step of Megatron's schedules.  loss: of the head's output [B, S, 1]."""
    scheduled = next_pass(scheduled_passes)
    output = forward.run_chunk(
        model, scheduled.chunk, module, scheduled.batch, scheduled.microbatch, Mode.OFF
    )
    return output, partial(loss, scheduled)

"""One pass of a model over the microbatches of a plan, by Megatron's own schedules.

Training, the forward passes without gradient (proximal policy, reference, teacher, probe) and the
critic all use it, so all of them support pipeline stages, interleaving and context parallelism.

A microbatch and a model chunk travel together as a `ScheduledPass`, so routes never depend on the
order in which a schedule calls; the schedule's own microbatch number is compared with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.algorithms.device_copies import upload
from moerl.config.schema import Config, TrainerConfig
from moerl.core.errors import TrainerError
from moerl.core.types import Array, BatchPlan
from moerl.data.packing import (
    LossInputs,
    Microbatch,
    ReadOptions,
    by_microbatch,
    pack_microbatch,
    placed_tokens,
)
from moerl.records.blob_store import RecordReads
from moerl.trainer.model.gpt import Chunk, Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode
from moerl.trainer.model.transformer import equal_shapes
from moerl.trainer.passes import forward

_NAMED = 4  # rollouts that a sentence names

T = TypeVar("T")
LossOf = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]  # loss of a chunk's output
ForwardStep = Callable[[Iterator["ScheduledPass"], Any], tuple[Tensor, LossOf]]


@dataclass(frozen=True, slots=True)
class LoadRoutes:
    """Brings routes to the routers; called with a microbatch and its number."""

    load: Callable[[Microbatch, int, Chunk], None]  # before each pass of a chunk
    read: Callable[[Microbatch, int], None] = lambda batch, number: None
    """In the thread that packs, so on records alone: what `load` would read."""
    layers: Sequence[int] = ()  # whose routes `read` wants


class ScheduledPass(NamedTuple):
    """One forward pass of one model chunk."""

    chunk: Chunk
    microbatch: int
    batch: Microbatch


class Batches:
    """Microbatches of one plan on this rank, packed when a pass needs them.

    pack_s: seconds for which passes waited for packed microbatches and loaded their routes.
    """

    def __init__(
        self,
        plan: BatchPlan,
        config: Config,
        parallel: Parallel,
        store: RecordReads,
        *,
        loss: LossInputs | None = None,
        with_masks: bool = True,
        only: int | None = None,
    ) -> None:
        """Pack nothing yet.

        loss: None = for scoring only.  with_masks: read sampling masks, where the last stage
        needs them.  only: this microbatch alone, as number 0.
        """
        self.plan, self.parallel = plan, parallel
        self._config, self._store = config, store
        self._read_mask = with_masks and config.replay.sampling_mask and parallel.is_last_stage
        trains = loss is not None and parallel.is_last_stage
        self._read_support = trains and config.algorithm.centering
        self._loss = loss
        self.pack_s = 0.0
        self.begun = -1  # number of the microbatch that a pass took last
        self._numbers = list(range(plan.num_microbatches)) if only is None else [only]
        if parallel.sizes.vpp > 1:  # the interleaved schedule needs whole rounds:
            rest = -len(self._numbers) % parallel.sizes.pp  # pad with numbers beyond the plan's
            self._numbers += range(plan.num_microbatches, plan.num_microbatches + rest)
        self.num_microbatches = len(self._numbers)
        self.shape = step_shape(plan, config.trainer, parallel)

    def pack(self, microbatch: int, layers: Sequence[int] = ()) -> Microbatch:
        """Pack a microbatch; routes of `layers` are read together with the other records."""
        return pack_microbatch(
            self.plan,
            self.parallel.dp_rank,
            self._numbers[microbatch],
            self._store,
            loss=self._loss,
            reads=ReadOptions(
                mask=self._read_mask,
                logprobs=self.parallel.is_last_stage,
                support=self._read_support,
                layers=layers,
                share=(self.parallel.tp_rank, self.parallel.tp_size),
            ),
            grid=forward.grid_of(self.parallel, self._config.trainer, self.shape),
        )

    def where(self) -> str:
        """The microbatch that a pass took last and its rollouts, in words."""
        if self.begun < 0:
            return ""
        words = places_of(self.plan, [(self.parallel.dp_rank, self._numbers[self.begun])])[1]
        # with pipeline stages, the backward pass is at an earlier microbatch
        return f"at the latest {words}" if self.parallel.sizes.pp > 1 else words

    def by_microbatch(self, values: Sequence[Array]) -> dict[int, Tensor]:
        """[N] fp32 as `score` gives them, from values by row of the plan."""
        if not self.parallel.is_last_stage:
            return {}
        found = by_microbatch(self.plan, self.parallel.dp_rank, values, self.num_microbatches)
        return {number: upload(value, self.parallel.device) for number, value in found.items()}


def step_shape(plan: BatchPlan, trainer: TrainerConfig, parallel: Parallel) -> tuple[int, int]:
    """Rows and slots that hold every microbatch of all data-parallel ranks if shapes must be equal.

    Otherwise (1, 1), no lower bound.
    """
    if not equal_shapes(trainer):
        return 1, 1
    grid = forward.grid_of(parallel, trainer)
    shapes = [
        grid.shape(placed_tokens(plan, dp_rank, index, shares=grid.shares))
        for dp_rank in range(parallel.dp_size)
        for index in range(plan.num_microbatches)
    ]
    return max(rows for rows, _ in shapes), max(length for _, length in shapes)


def run_pass(
    model: Model,
    modules: Sequence[torch.nn.Module],
    batches: Batches,
    step: ForwardStep,
    *,
    load: LoadRoutes | None = None,
    forward_only: bool = False,
) -> None:
    """All microbatches through all chunks; afterwards no routes are loaded.

    modules: the module to call for each chunk, itself or its wrapper.  load: called before each
    pass of a chunk; None = nothing is replayed.
    Raises RecordError when a loaded row was not used exactly once.
    """
    rows, length = batches.shape
    with _named(batches), ThreadPoolExecutor(1, "pack") as thread:
        packed = PackedAhead(batches, thread, load)
        scheduled_passes = [_scheduled_passes(model, chunk, packed, load) for chunk in model.chunks]
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=scheduled_passes if len(scheduled_passes) > 1 else scheduled_passes[0],
            model=list(modules),
            num_microbatches=batches.num_microbatches,
            # shape of hidden states between stages; unused where shapes are exchanged
            seq_length=length * batches.parallel.cp_size,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
    if model.replay is not None:
        model.replay.finish_step()
    if model.indexers is not None:
        model.indexers.finish_step()


@contextmanager
def _named(batches: Batches) -> Iterator[None]:
    """Adds microbatch and rollouts to an error."""
    try:
        yield
    except Exception as error:
        if words := batches.where():
            error.add_note(words)
        raise


def places_of(plan: BatchPlan, places: Sequence[tuple[int, int]]) -> tuple[list[str], str]:
    """(ids of the rollouts at these places, the places and ids in words; "" for none).

    places: (data-parallel rank, microbatch).
    """
    rows = zip(plan.rows, plan.rollouts(), strict=True)
    ids = [r.rollout_id for row, r in rows if (row.dp_rank, row.microbatch) in places]
    if not places:
        return ids, ""
    parts = [f"microbatch {number} of data-parallel rank {rank}" for rank, number in places]
    return ids, f"in {_few(parts)} (rollouts {_few(ids)})"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class PackedAhead:
    """Microbatches in the order of the plan: one is packed while its predecessor is computed.

    Records are read and checked in the thread, so that only the first microbatch of a pass waits
    for them.  One ahead: a microbatch holds routes and masks of all its rows.
    """

    def __init__(self, batches: Batches, thread: Executor, load: LoadRoutes | None) -> None:
        self.batches, self._thread, self._load = batches, thread, load
        self._packed: dict[int, Future[Microbatch]] = {}
        self._begun = 0

    def take(self, index: int, *, last: bool) -> Microbatch:
        """Wait for microbatch `index`.  last: the final use.  Raises the error of packing."""
        self._begin(index)
        packed = (self._packed.pop if last else self._packed.__getitem__)(index)
        batch = packed.result()
        self._begin(index + 1)
        return batch

    def _begin(self, index: int) -> None:
        if index == self._begun < self.batches.num_microbatches:
            self._packed[index] = self._thread.submit(self._pack, index)
            self._begun += 1

    def _pack(self, index: int) -> Microbatch:
        if self._load is None:
            return self.batches.pack(index)
        batch = self.batches.pack(index, self._load.layers)
        self._load.read(batch, index)
        return batch


def _scheduled_passes(
    model: Model, chunk: Chunk, packed: PackedAhead, load: LoadRoutes | None
) -> Iterator[ScheduledPass]:
    """A microbatch is kept until the last chunk has run."""
    for index in range(packed.batches.num_microbatches):
        begin = time.perf_counter()
        packed.batches.begun = index
        batch = packed.take(index, last=chunk is model.chunks[-1])
        if load is not None:
            load.load(batch, index, chunk)
        packed.batches.pack_s += time.perf_counter() - begin
        yield ScheduledPass(chunk, index, batch)


def next_pass(scheduled_passes: Iterator[ScheduledPass]) -> ScheduledPass:
    """The next pass.  Raises TrainerError when the schedule is at another microbatch."""
    scheduled = next(scheduled_passes)
    for layer in scheduled.chunk.gpt.decoder.layers:  # the schedule's own number
        if layer.current_microbatch not in (None, scheduled.microbatch):
            raise TrainerError(
                f"the schedule runs microbatch {layer.current_microbatch}, "
                f"{scheduled.microbatch} was fed"
            )
    return scheduled


def no_tokens(device: torch.device) -> Tensor:
    """The token count that Megatron's schedule asks a loss for, and that is not used."""
    return torch.zeros((), dtype=torch.int, device=device)


@contextmanager
def scoring(model: Model) -> Iterator[None]:
    """No gradients and no dropout."""
    modules = [chunk.module for chunk in model.chunks]
    were_training = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in zip(modules, were_training, strict=True):
            module.train(was_training)


def score(
    model: Model,
    batches: Batches,
    mode: Mode,
    *,
    load: LoadRoutes | None = None,
    after: Callable[[ScheduledPass], None] | None = None,
) -> dict[int, Tensor]:
    """A forward pass without gradient: log-probabilities of the sampled tokens, by microbatch.

    after: called after each pass of a chunk.  Returns [N] fp32 each, equal on all tensor and
    context parallel ranks of the last stage; empty on the other stages.
    """

    def logprob(hidden: Tensor, batch: Microbatch) -> Tensor:
        return forward.sampled_logprobs(model, hidden, batch, batches.parallel).logprob

    return values_of(logprob, model, batches, mode, load=load, after=after)


def values_of(
    value: Callable[[Tensor, Microbatch], T],
    model: Model,
    batches: Batches,
    mode: Mode,
    *,
    load: LoadRoutes | None = None,
    after: Callable[[ScheduledPass], None] | None = None,
) -> dict[int, T]:
    """As `score`, of another value.  value: of a microbatch and the input [1, M, H] of its head."""
    found: dict[int, T] = {}

    def keep(scheduled: ScheduledPass, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        found[scheduled.microbatch] = value(hidden, scheduled.batch)
        return hidden.new_zeros(()), no_tokens(hidden.device), {}

    def step(
        scheduled_passes: Iterator[ScheduledPass], module: torch.nn.Module
    ) -> tuple[Tensor, LossOf]:
        scheduled = next_pass(scheduled_passes)
        output = forward.run_to_head(
            model, scheduled.chunk, module, scheduled.batch, scheduled.microbatch, mode
        )
        if after is not None:
            after(scheduled)
        return output, partial(keep, scheduled)

    modules = [chunk.module for chunk in model.chunks]
    with scoring(model):
        run_pass(model, modules, batches, step, load=load, forward_only=True)
    return found

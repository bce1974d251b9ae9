"""Forward passes without gradient over a batch, before its first optimizer step.

The weights a batch starts from are the proximal policy of decoupled PPO (arXiv 2110.00641).  With
one optimizer step they are the weights of every forward, and no further pass is needed.  With more,
or for values that need the whole batch first, each minibatch goes through the model once before any
is trained: with the routes, sampling masks and microbatches of its training pass, so that in the
first optimizer step theta / prox is exactly 1.

`replay.routing: R2` takes the live routes of this pass for the training passes, as published under
that name (arXiv 2512.01374; the older "routing replay" of GSPO, 2507.18071): routes of the proximal
policy, per (minibatch, microbatch, chunk, layer), where `R3` (2510.11370) takes the engine's.

The store of routes is empty after each pass, so passes never see each other's routes.
Rejected: a copy of the weights for the later passes (another model in memory for the same numbers).

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.corrections import m2_bound
from moerl.algorithms.device_copies import Download, to_host, upload
from moerl.config.algorithms import exact_distillation, needed, teachers_of, weight_for
from moerl.config.schema import AlgorithmConfig, Config
from moerl.core.types import Array, BatchPlan
from moerl.data.batching import Minibatch
from moerl.data.packing import Microbatch, by_microbatch, by_row, rollout_at
from moerl.distributed.object_collectives import all_gather_values
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import RecordReads
from moerl.trainer.model.gpt import Chunk, Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Key, Mode, RouteReplay, RouterTopK
from moerl.trainer.passes import forward
from moerl.trainer.passes.over_support import TeacherSupport, of_tasks
from moerl.trainer.passes.schedule import Batches, LoadRoutes, ScheduledPass, score

Routes = dict[Key, Tensor]  # [rows of this rank, K] u8 or u16


@dataclass(slots=True)
class ReferenceLogprobs:
    """Results for one minibatch before its optimizer step; log-probabilities on the last stage."""

    logprobs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """proximal, reference, teachers (if needed) -> microbatch -> [N] fp32."""
    routes: Routes | None = None  # R2: routes that the training pass replays
    m2_bound: float = math.inf
    supports: dict[str, dict[int, TeacherSupport]] = field(default_factory=dict)
    """Teachers of exact distillation -> microbatch."""
    weights: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """Of these teachers -> microbatch -> [N] by the task of the token, on the host."""

    def mix(self, algorithm: AlgorithmConfig, batches: Batches) -> None:
        """Weigh the teachers by the tasks of the rows, once all have scored: the sum of their
        weighted log-probabilities is `teacher`, the sum of the weights `teacher_weight`.
        """
        teachers = teachers_of(algorithm)
        if not teachers or not batches.parallel.is_last_stage:
            return
        plan, rollouts = batches.plan, batches.plan.rollouts()
        for teacher in teachers:
            each = [weight_for(teacher, plan.groups[row.group].prompt.task) for row in plan.rows]
            rows = [
                np.full(rollout.num_sampled, weight, np.float32)
                for rollout, weight in zip(rollouts, each, strict=True)
            ]
            count, rank = batches.num_microbatches, batches.parallel.dp_rank
            self.weights[teacher.name] = by_microbatch(plan, rank, rows, count)
        if exact_distillation(algorithm):
            return
        device = batches.parallel.device
        parts = [
            (self.logprobs.pop(name), {n: upload(w, device) for n, w in weights.items()})
            for name, weights in self.weights.items()
        ]
        numbers = range(batches.num_microbatches)
        self.logprobs["teacher"] = {
            n: torch.stack([w[n] * t[n] for t, w in parts]).sum(0) for n in numbers
        }
        self.logprobs["teacher_weight"] = {
            n: torch.stack([w[n] for _, w in parts]).sum(0) for n in numbers
        }

    def support(self, microbatch: int, held: Tensor) -> TeacherSupport | None:
        """Of exact distillation.  held: the rank's tokens, `Microbatch.held`."""
        every = [found[microbatch] for found in self.supports.values()]
        weights = [self.weights[name][microbatch] for name in self.supports]
        return of_tasks(every, weights, held) if every else None

    def tokens(self, microbatch: int) -> dict[str, Tensor]:
        """The fields of `moerl.algorithms.tokens.Tokens` that are known for a microbatch."""
        return {role: found[microbatch] for role, found in self.logprobs.items()}


def is_needed(config: Config) -> bool:
    """Whether the batch needs a forward pass of the policy before its first optimizer step."""
    several = config.trainer.minibatches > 1
    return several or config.replay.routing == "R2" or "proximal_pass" in needed(config.algorithm)


def proximal_pass(model: Model, config: Config, batches: Batches) -> ReferenceLogprobs:
    """Log-probabilities of one minibatch under the current weights, and with R2 its routes."""
    if model.replay is None:
        return ReferenceLogprobs({"proximal": score(model, batches, Mode.OFF)})
    if config.replay.routing != "R2":
        load = recorded_routes(model, batches.parallel)
        return ReferenceLogprobs({"proximal": score(model, batches, Mode.REPLAY, load=load)})
    replay, taken = model.replay, list[_Taken]()

    def keep(turn: ScheduledPass) -> None:
        if live := replay.take_live(turn.microbatch, turn.chunk.index):
            taken.append(_Taken.of(live, _id_dtype(replay)))

    found = score(model, batches, Mode.RECORD, after=keep)
    for last in taken[-1:]:  # copies end in order: one wait for the whole pass
        last.ids.wait()
    routes = {key: ids for one in taken for key, ids in one.by_key()}
    return ReferenceLogprobs({"proximal": found}, routes)


def recorded_routes(model: Model, parallel: Parallel) -> LoadRoutes:
    """Loads the engine's recorded routes (R3)."""

    def load(batch: Microbatch, microbatch: int, chunk: Chunk) -> None:
        forward.load_routes(model, batch, microbatch, parallel, chunk.index)

    def read(batch: Microbatch, microbatch: int) -> None:
        forward.read_routes(model, batch, microbatch, parallel)

    assert model.replay is not None, "the model was built without replay"
    return LoadRoutes(load, read, model.replay.layers)


def recorded_positions(model: Model) -> LoadRoutes:
    """Loads the engine's recorded positions of sparse attention alone, if the model has any."""

    def load(batch: Microbatch, microbatch: int, chunk: Chunk) -> None:
        forward.load_positions(model, batch, microbatch, chunk.index)

    return LoadRoutes(load)


def own_routes(model: Model, parallel: Parallel, routes: Routes) -> LoadRoutes:
    """Loads the routes of the proximal pass (R2); each row once."""
    replay = model.replay
    assert replay is not None, "R2 needs a model built with replay"

    def load(batch: Microbatch, microbatch: int, chunk: Chunk) -> None:
        layers = replay.chunks[chunk.index]
        found = {layer: routes.pop(Key(microbatch, chunk.index, layer)) for layer in layers}
        replay.load(microbatch, found, chunk.index)
        rows = len(layers) * batch.num_fed_in(forward.routed_slots(batch, parallel))
        batch.read.routing_rows += rows
        batch.read.routing += rows * replay.top_k * _id_dtype(replay).itemsize

    return LoadRoutes(load)


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """Routes of one forward call, on their way to the host in one copy."""

    keys: tuple[Key, ...]
    ids: Download  # [layers, rows, top_k]

    @classmethod
    def of(cls, live: Mapping[Key, RouterTopK], dtype: torch.dtype) -> _Taken:
        every = torch.stack([choice.ids for choice in live.values()])
        return cls(tuple(live), Download(every.to(dtype)))

    def by_key(self) -> Iterator[tuple[Key, Tensor]]:
        """Each layer's; rubbish before the copy was waited for."""
        return zip(self.keys, self.ids.get(), strict=True)


def _id_dtype(replay: RouteReplay) -> torch.dtype:
    return torch.uint8 if replay.num_experts <= 256 else torch.uint16


def bound_second_moment(
    minibatches: Sequence[Minibatch],
    references: Sequence[ReferenceLogprobs],
    limit: float,
    parallel: Parallel,
    store: RecordReads,
) -> None:
    """M2PO: set one bound for the whole batch, over all minibatches and data-parallel ranks."""
    if not parallel.is_last_stage:
        return
    gaps = [
        values - read_logprobs(store, rollout_at(part.plan, row))
        for part, scored in zip(minibatches, references, strict=True)
        for row, values in _by_row(part.plan, scored, "proximal", parallel).items()
    ]
    mine = np.concatenate([*gaps, np.zeros(0, np.float32)])
    every = all_gather_values(mine, Array, parallel.dp_gloo)
    bound = float(m2_bound(torch.from_numpy(np.concatenate(every)), limit))
    for scored in references:
        scored.m2_bound = bound


def over_reference(
    minibatches: Sequence[Minibatch], references: Sequence[ReferenceLogprobs], parallel: Parallel
) -> list[Array]:
    """Proximal - reference of each sampled token, [S] f64 by row of the batch, on all ranks."""
    mine: dict[int, Array] = {}
    for part, scored in zip(minibatches, references, strict=True):
        if parallel.is_last_stage:
            reference = _by_row(part.plan, scored, "reference", parallel)
            for row, values in _by_row(part.plan, scored, "proximal", parallel).items():
                mine[part.rows[row]] = values.astype(np.float64) - reference[row]
    every = all_gather_values(mine, dict[int, Array], parallel.control)
    joined = {row: values for part in every for row, values in part.items()}
    return [joined[row] for row in range(len(joined))]


def _by_row(
    plan: BatchPlan, reference: ReferenceLogprobs, role: str, parallel: Parallel
) -> dict[int, np.ndarray]:
    return by_row(plan, parallel.dp_rank, to_host(reference.logprobs[role]))

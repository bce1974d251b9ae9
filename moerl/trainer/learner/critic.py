"""The critic of PPO: a model like the policy with one number per token instead of logits.

It starts as a copy of the policy's weights under a head of zeros, so its first values are 0 and the
first advantages are the whitened rewards.  It has its own routers (always live), its own optimizer
with the policy's settings and `algorithm.critic_lr`, and the policy's ranks and layout: the head is
where the policy has its logits, on the last stage.

Each step it values the sampled tokens of the plan (no gradient); every rank then computes the
advantages of the whole plan (`moerl.algorithms.advantages.plan_gae`); after the policy's optimizer
steps the critic takes as many steps towards the returns, on the same minibatches.  Values are not
clipped.

The value of the state that PRODUCES token t is at the position of token t-1, like its logits.

Legend: B rows, S positions, H hidden, N sampled tokens of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from moerl.algorithms.advantages import plan_gae
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.device_copies import to_host, upload
from moerl.algorithms.loss import value_loss
from moerl.config.schema import Config
from moerl.core.types import Array, BatchPlan
from moerl.data.batching import Minibatch
from moerl.data.packing import LossInputs, Microbatch, by_row
from moerl.distributed.object_collectives import all_gather_values
from moerl.records.blob_store import RecordReads
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.learner.optimizer import (
    connect,
    gather_parameters,
    make_optimizer,
    make_schedule,
    take_step,
)
from moerl.trainer.model.gpt import build, wrap
from moerl.trainer.model.layer_calls import Mode
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.passes import forward
from moerl.trainer.passes.router_losses import without_router_losses
from moerl.trainer.passes.schedule import (
    Batches,
    LossOf,
    ScheduledPass,
    next_pass,
    no_tokens,
    run_pass,
    scoring,
)


class ValueHead(torch.nn.Module):
    """Replaces GPTModel's output layer: [S, B, H] -> [S, B, 1] fp32.

    Under sequence parallelism a tensor-parallel rank has the hidden states of a run of positions.
    It computes their values, which are gathered: one number per position instead of H.  All of
    these ranks then compute one loss, so the backward pass takes a rank's own positions out of it,
    and Megatron sums the head's gradient over them (`sequence_parallel` of a parameter).
    """

    def __init__(self, hidden: int, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden))
        setattr(self.weight, "sequence_parallel", sequence_parallel)  # noqa: B010
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden_SBH: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """Called with the output layer's arguments; the second result is its bias."""
        value_SB1 = torch.nn.functional.linear(hidden_SBH.float(), self.weight.float())
        if self.sequence_parallel:
            value_SB1 = gather_from_sequence_parallel_region(
                value_SB1, tensor_parallel_output_grad=False
            )
        return value_SB1, None


@dataclass(slots=True)
class _Sums:
    """Sums of one rank: tokens, weighted loss, first and second moments of return and error."""

    values: Tensor  # on the device until they are joined

    def add(self, loss: Tensor, value_N: Tensor, return_N: Tensor) -> None:
        target, error = return_N.double(), (return_N - value_N.detach()).double()
        tokens = torch.full((), float(len(target)), dtype=torch.float64, device=target.device)
        parts = [tokens, loss.detach(), value_N.detach().sum()]
        parts += [target.sum(), target.square().sum(), error.sum(), error.square().sum()]
        self.values += torch.stack([part.double() for part in parts])

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Metrics of the joined sums.

        num_steps: optimizer steps in the sums, each with its own denominator.
        """
        n, loss, value, r, rr, e, ee = self.values.tolist()
        if not n:
            return {}
        metrics = {
            "loss/value": loss / num_steps,
            "critic/value_mean": value / n,
            "critic/return_mean": r / n,
        }
        spread = rr / n - (r / n) ** 2
        if spread > 0:
            metrics["critic/explained_frac"] = 1.0 - (ee / n - (e / n) ** 2) / spread
        return metrics


class Critic:
    """One rank's part of the critic."""

    def __init__(self, config: Config, parallel: Parallel, store: RecordReads) -> None:
        """Raises ConfigError, LayoutError as the policy's model does."""
        self.config, self.parallel, self.store = config, parallel, store
        source = HfFolder(config.model.path)
        trainer = without_router_losses(config.trainer)
        self.model = build(source.spec, trainer, parallel, with_replay=False)
        load_hf(self.model.tensors, self.model.tiles, source)
        for chunk in self.model.chunks:
            chunk.gpt.share_embeddings_and_output_weights = False  # the head is not the embedding
            if chunk.has_loss:
                head = ValueHead(source.spec.hidden, sequence_parallel=parallel.tp_size > 1)
                # dtype of the other parameters: megatron-core 0.16.1 cannot save bf16 with fp32
                chunk.gpt.output_layer = head.to(parallel.device, self.model.config.params_dtype)
        settings = config.trainer.optimizer
        rate = config.algorithm.critic_lr
        settings = replace(settings, lr=rate, min_lr=min(settings.min_lr, rate))
        self.ddp: list[DistributedDataParallel] = wrap(
            self.model, config.trainer, parallel.platform
        )
        self.optimizer = make_optimizer(self.ddp, replace(config.trainer, optimizer=settings))
        self.schedule = make_schedule(self.optimizer, settings, config.run.steps)
        connect(self.model, self.ddp, self.optimizer)
        self._returns: list[Array] = []

    def advantages(self, plan: BatchPlan, drift: Sequence[Array] | None = None) -> list[Array]:
        """Advantage of each sampled token, by row of the plan, the same on all ranks.

        drift: with a KL inside the reward, proximal - reference by row.
        """
        algorithm = self.config.algorithm
        advantages, self._returns = plan_gae(algorithm, plan, self.values(plan), drift)
        return advantages

    def values(self, plan: BatchPlan) -> list[Array]:
        """Value at each sampled token, by row of the plan, on all ranks; collective."""
        found: dict[int, Tensor] = {}
        batches = self._batches(plan)

        def keep(
            scheduled: ScheduledPass, output_BS1: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value_N = self._values_of(scheduled.batch, output_BS1)
            found[scheduled.microbatch] = value_N
            return value_N.sum(), no_tokens(value_N.device), {}

        modules = [chunk.module for chunk in self.model.chunks]
        with scoring(self.model):
            step = partial(self._forward_step, keep)
            run_pass(self.model, modules, batches, step, forward_only=True)
        mine = by_row(plan, self.parallel.dp_rank, to_host(found)) if self._counts else {}
        every = all_gather_values(mine, dict[int, Array], self.parallel.control)
        joined = {idx: value for part in every for idx, value in part.items()}
        return [joined[idx] for idx in range(len(plan.rows))]

    def update(self, minibatches: Sequence[Minibatch]) -> dict[str, float]:
        """Take one optimizer step per part towards the returns of the last `advantages`; metrics.

        Raises TrainerError when a gradient is not finite.
        """
        begin, norms = time.perf_counter(), []
        self.schedule.step(1)
        sums = _Sums(torch.zeros(7, dtype=torch.float64, device=self.parallel.device))
        for part in minibatches:
            for ddp in self.ddp:
                ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            weights = plan_weights(self.config.algorithm, part.plan)
            batches = self._batches(part.plan, LossInputs(part.of(self._returns), weights))
            run_pass(
                self.model,
                self.ddp,
                batches,
                partial(self._forward_step, partial(self._loss, sums)),
            )
            norms += take_step(self.optimizer, f"step {part.plan.step}: the critic")
        gather_parameters(self.ddp)
        sums.values = sums.values.cpu()
        dist.all_reduce(sums.values, group=self.parallel.control)
        metrics = sums.metrics(len(minibatches))
        if norms:
            metrics["critic/grad_norm"] = max(norms)
        return metrics | {"perf/critic_s": time.perf_counter() - begin}

    def _batches(self, plan: BatchPlan, loss: LossInputs | None = None) -> Batches:
        """Batches with returns in the field where a policy has advantages."""
        return Batches(plan, self.config, self.parallel, self.store, loss=loss, with_masks=False)

    @property
    def _counts(self) -> bool:
        """True on the first of the ranks that have the same values: last stage, tp, cp."""
        p = self.parallel
        return p.is_last_stage and p.tp_rank == 0 and p.cp_rank == 0

    def _values_of(self, batch: Microbatch, output_BS1: Tensor) -> Tensor:
        """[N] fp32 of all sampled tokens of the data-parallel rank, from this rank's positions."""
        value_M = output_BS1.flatten()[upload(batch.sampled_rows, output_BS1.device)].float()
        return forward.gather_context_parallel(value_M, batch, self.parallel)

    def _forward_step(
        self,
        loss: Callable[[ScheduledPass, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]],
        scheduled_passes: Iterator[ScheduledPass],
        module: torch.nn.Module,
    ) -> tuple[Tensor, LossOf]:
        scheduled = next_pass(scheduled_passes)
        output = forward.run_chunk(
            self.model, scheduled.chunk, module, scheduled.batch, scheduled.microbatch, Mode.OFF
        )
        return output, partial(loss, scheduled)

    def _loss(
        self, sums: _Sums, scheduled: ScheduledPass, output_BS1: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        batch, device = scheduled.batch, output_BS1.device
        value_N = self._values_of(batch, output_BS1)
        return_N = upload(batch.advantage, device)
        loss = (upload(batch.weight, device) * value_loss(value_N, return_N)).sum()
        if self._counts:
            sums.add(loss, value_N, return_N)
        return loss, no_tokens(device), {}

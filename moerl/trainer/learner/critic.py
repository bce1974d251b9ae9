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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from moerl.algorithms.advantages import plan_gae
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.device_copies import to_host, upload
from moerl.algorithms.loss import value_loss
from moerl.config.schema import Config
from moerl.core.types import Array, BatchPlan
from moerl.data.batching import Minibatch
from moerl.data.packing import LossInputs, by_row
from moerl.distributed.object_collectives import all_gather_values
from moerl.records.blob_store import RecordReads
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.learner.bad_steps import BadSteps
from moerl.trainer.learner.optimizer import (
    NotFiniteError,
    connect,
    gather_parameters,
    make_optimizer,
    make_schedule,
    take_step,
)
from moerl.trainer.model.gpt import build, wrap
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.value_head import with_value_head
from moerl.trainer.passes.router_losses import without_router_losses
from moerl.trainer.passes.schedule import Batches, ScheduledPass, no_tokens, run_pass
from moerl.trainer.passes.values import load_values, value_step, values_at, values_of_output


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
        """Metrics of the joined sums.  num_steps: optimizer steps, each with a denominator."""
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

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        store: RecordReads,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] = value_loss,
        bias: bool = False,
        lr: float | None = None,
    ) -> None:
        """Raises ConfigError, LayoutError as the policy's model does.

        loss: [N], of values and returns.  bias: of the head.  lr: in place of
        `algorithm.critic_lr`.
        """
        self._value_loss = loss
        self.bad = BadSteps(config.trainer.skip_bad_steps, parallel)  # a learner shares its own
        self.config, self.parallel, self.store = config, parallel, store
        source = HfFolder(config.model.path)
        trainer = without_router_losses(config.trainer)
        spec = with_value_head(source.spec, bias=bias)
        self.model = build(spec, trainer, parallel, with_replay=False)
        load_values(self.model, source)
        settings = config.trainer.optimizer
        rate = config.algorithm.critic_lr if lr is None else lr
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
        found = values_at(self.model, self._batches(plan))
        mine = by_row(plan, self.parallel.dp_rank, to_host(found)) if self._counts else {}
        every = all_gather_values(mine, dict[int, Array], self.parallel.control)
        joined = {idx: value for part in every for idx, value in part.items()}
        return [joined[idx] for idx in range(len(plan.rows))]

    def fit(self, plan: BatchPlan, targets: list[Array]) -> dict[str, float]:
        """One optimizer step towards these values of the sampled tokens, by row of the plan."""
        self._returns = targets
        return self.update([Minibatch.whole(plan)]) | self.bad.end()

    def update(self, minibatches: Sequence[Minibatch]) -> dict[str, float]:
        """Take one optimizer step per part towards the returns of the last `advantages`; metrics.

        Raises NonRetryableError as `BadSteps.skip` does.
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
                partial(value_step, self.model, partial(self._loss, sums)),
            )
            try:
                norms += take_step(self.optimizer, self.bad.agree)
            except NotFiniteError as error:
                self.bad.skip(part.plan, f"the critic: {error}", ())
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

    def _loss(
        self, sums: _Sums, scheduled: ScheduledPass, output_BS1: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        batch, device = scheduled.batch, output_BS1.device
        value_N = values_of_output(batch, output_BS1, self.parallel)
        return_N = upload(batch.advantage, device)
        loss = (upload(batch.weight, device) * self._value_loss(value_N, return_N)).sum()
        if self._counts:
            sums.add(loss, value_N, return_N)
        return loss, no_tokens(device), {}

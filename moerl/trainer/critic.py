"""The critic of PPO: a model like the policy with one number per token instead of logits.

It starts as a copy of the policy's weights under a head of zeros, so its first values are 0 and the
first advantages are the whitened rewards.  It has routers of its own (always live), an optimizer of
its own with the policy's settings and `algorithm.critic_lr`, and the policy's ranks.

Each step it values the sampled tokens of the plan (no gradient), the advantages follow for the
whole plan on every rank (`moerl.algorithms.advantages.plan_gae`), and after the policy's optimizer
steps it learns the returns in as many of its own, on the same minibatches.  Values are not clipped.

The value of the state that PRODUCES token t stands at the position of token t-1, the row its
logits stand at.

Legend: B rows, S positions, H hidden, N sampled tokens of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from moerl.algorithms.advantages import plan_gae
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.critic import value_loss
from moerl.blob.store import BlobStore
from moerl.config.schema import Config
from moerl.data.minibatches import Minibatch
from moerl.data.packing import Microbatch, by_row
from moerl.trainer import forward
from moerl.trainer.hf_folder import HfFolder, load_hf
from moerl.trainer.model import build, wrap
from moerl.trainer.optimizer import finalize_as_sums, make_optimizer, make_schedule
from moerl.trainer.parallel import Parallel
from moerl.trainer.replay import Mode
from moerl.trainer.router_losses import without_router_losses
from moerl.trainer.schedule import Batches, LossOf, Turn, run_pass, scoring, take
from moerl.types import Array, BatchPlan

_NO_TOKENS = torch.tensor(0, dtype=torch.int)  # gradients are not divided by a count


class ValueHead(torch.nn.Module):
    """Stands where GPTModel has its output layer: [S, B, H] -> [S, B, 1] fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden))
        self.sequence_parallel = False

    def forward(self, hidden_SBH: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """Called with the output layer's own arguments; the second result is its bias."""
        return torch.nn.functional.linear(hidden_SBH.float(), self.weight.float()), None


@dataclass(slots=True)
class _Sums:
    """Of one rank: tokens, weighted loss, and first and second moments of return and error."""

    values: Tensor

    def add(self, loss: Tensor, value_N: Tensor, return_N: Tensor) -> None:
        target, error = return_N.double(), (return_N - value_N.detach()).double()
        parts = [torch.tensor(float(len(target))), loss.detach().double(), value_N.detach().sum()]
        parts += [target.sum(), target.square().sum(), error.sum(), error.square().sum()]
        self.values += torch.stack([part.double().cpu() for part in parts])

    def metrics(self, num_steps: int) -> dict[str, float]:
        """num_steps: optimizer steps in the sums, each with a denominator of its own."""
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

    def __init__(self, config: Config, parallel: Parallel, store: BlobStore) -> None:
        """Raises ConfigError, LayoutError as the policy's own model does."""
        self.config, self.parallel, self.store = config, parallel, store
        source = HfFolder(config.model.path)
        trainer = without_router_losses(config.trainer)
        self.model = build(source.spec, trainer, parallel, with_replay=False)
        load_hf(self.model.tensors, self.model.tiles, source)
        gpt = self.model.gpt
        gpt.output_layer = ValueHead(source.spec.hidden).to(parallel.device)
        gpt.share_embeddings_and_output_weights = False  # the head is not the embedding
        settings = config.trainer.optimizer
        rate = config.algorithm.critic_lr
        settings = replace(settings, lr=rate, min_lr=min(settings.min_lr, rate))
        self.ddp: list[DistributedDataParallel] = wrap(
            self.model, distributed_optimizer=settings.distributed
        )
        self.optimizer = make_optimizer(self.ddp, settings, config.trainer.dtype)
        self.schedule = make_schedule(self.optimizer, settings, config.run.steps)
        self.model.config.finalize_model_grads_func = finalize_as_sums
        self.model.config.grad_scale_func = self.optimizer.scale_loss
        self._returns: list[Array] = []

    def advantages(self, plan: BatchPlan) -> list[Array]:
        """Advantage of each sampled token, by row of the plan, the same on all ranks."""
        advantages, self._returns = plan_gae(self.config.algorithm, plan, self.values(plan))
        return advantages

    def values(self, plan: BatchPlan) -> list[Array]:
        """Value at each sampled token, by row of the plan; collective over data-parallel ranks."""
        found: dict[int, Tensor] = {}
        batches = self._batches(plan)

        def step(turns: Iterator[Turn], module: torch.nn.Module) -> tuple[Tensor, LossOf]:
            turn = take(turns)
            found[turn.microbatch] = self._value(turn.batch, module)
            return found[turn.microbatch], lambda value_N: (value_N.sum(), _NO_TOKENS, {})

        with scoring(self.model):
            run_pass(self.model, [self.model.module], batches, step, forward_only=True)
        every: list[dict[int, Array]] = [{} for _ in range(self.parallel.dp_size)]
        mine = by_row(plan, self.parallel.dp_rank, found)
        dist.all_gather_object(every, mine, group=self.parallel.dp_gloo)
        joined = {idx: value for part in every for idx, value in part.items()}
        return [joined[idx] for idx in range(len(plan.rows))]

    def update(self, parts: Sequence[Minibatch]) -> dict[str, float]:
        """An optimizer step for each part towards the returns of the last `advantages`; metrics."""
        begin, norms = time.perf_counter(), []
        self.schedule.step(1)
        sums = _Sums(torch.zeros(7, dtype=torch.float64))
        for part in parts:
            for ddp in self.ddp:
                ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = self._batches(
                part.plan, part.of(self._returns), plan_weights(self.config.algorithm, part.plan)
            )
            run_pass(self.model, self.ddp, batches, partial(self._forward_step, sums))
            _, grad_norm, _ = self.optimizer.step()
            norms += [] if grad_norm is None else [float(grad_norm)]
        dist.all_reduce(sums.values, group=self.parallel.dp_gloo)
        metrics = sums.metrics(len(parts))
        if norms:
            metrics["critic/grad_norm"] = max(norms)
        return metrics | {"perf/critic_s": time.perf_counter() - begin}

    def _batches(
        self,
        plan: BatchPlan,
        returns: Sequence[Array] | None = None,
        weights: Sequence[float] | None = None,
    ) -> Batches:
        """Returns stand where a policy has its advantages."""
        return Batches(
            plan,
            self.config,
            self.parallel,
            self.store,
            advantages=returns,
            weights=weights,
            with_masks=False,
        )

    def _value(self, batch: Microbatch, module: torch.nn.Module) -> Tensor:
        """[N] fp32."""
        output_BS1 = forward.logits(self.model, module, batch, 0, Mode.OFF)
        return output_BS1.flatten()[batch.sampled_rows.to(output_BS1.device)].float()

    def _forward_step(
        self, sums: _Sums, turns: Iterator[Turn], ddp: DistributedDataParallel
    ) -> tuple[Tensor, LossOf]:
        batch = take(turns).batch
        return self._value(batch, ddp), partial(self._loss, batch, sums)

    def _loss(
        self, batch: Microbatch, sums: _Sums, value_N: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        device = value_N.device
        return_N = batch.advantage.to(device)
        token = value_loss(value_N, value_N, return_N, 0.0)
        loss = (batch.weight.to(device) * token.loss).sum()
        sums.add(loss, value_N, return_N)
        return loss, _NO_TOKENS.to(device), {}

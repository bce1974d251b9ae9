"""The critic of PPO: a model like the policy with one number per token instead of logits.

It starts as a copy of the policy's weights under a head of zeros, so its first values are 0 and the
first advantages are the whitened rewards.  It has routers of its own (always live), an optimizer of
its own with the policy's settings and `algorithm.critic_lr`, and the policy's ranks.

Each step it values the sampled tokens of the plan (no gradient), the advantages follow for the
whole plan on every rank (`moerl.algorithms.advantages.plan_gae`), and after the policy's backward
it learns the returns.  One step per batch: the values a clip would be around are those of the same
weights, so there is no clip here.

The value of the state that PRODUCES token t stands at the position of token t-1, the row its
logits stand at.

Legend: B rows, S positions, H hidden, N sampled tokens of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.algorithms.advantages import plan_gae
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.critic import value_loss
from moerl.blob.store import BlobStore
from moerl.config.schema import Config
from moerl.data.packing import Microbatch, pack_microbatch
from moerl.trainer import forward
from moerl.trainer.hf_folder import HfFolder, load_hf
from moerl.trainer.model import build, wrap
from moerl.trainer.parallel import Parallel
from moerl.trainer.replay import Mode
from moerl.trainer.step import finalize_as_sums, make_optimizer, make_schedule, step_shape
from moerl.types import Array, BatchPlan


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

    def metrics(self) -> dict[str, float]:
        n, loss, value, r, rr, e, ee = self.values.tolist()
        if not n:
            return {}
        metrics = {"loss/value": loss, "critic/value_mean": value / n, "critic/return_mean": r / n}
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
        self.model = build(source.spec, config.trainer, parallel, with_replay=False)
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

    @torch.no_grad()
    def values(self, plan: BatchPlan) -> list[Array]:
        """Value at each sampled token, by row of the plan; collective over data-parallel ranks."""
        mine: dict[int, Array] = {}
        for index in range(plan.num_microbatches):
            batch = self._pack(plan, index)
            value_N = self._value(batch, self.model.module).cpu()
            rows = sorted(
                (row.row, idx)
                for idx, row in enumerate(plan.rows)
                if (row.dp_rank, row.microbatch) == (self.parallel.dp_rank, index)
            )
            for position, (_, idx) in enumerate(rows):
                mine[idx] = value_N[batch.seq == position].numpy()
        every: list[dict[int, Array]] = [{} for _ in range(self.parallel.dp_size)]
        dist.all_gather_object(every, mine, group=self.parallel.dp_gloo)
        joined = {idx: value for part in every for idx, value in part.items()}
        return [joined[idx] for idx in range(len(plan.rows))]

    def update(self, plan: BatchPlan) -> dict[str, float]:
        """One optimizer step towards the returns of the last `advantages`; metrics of it."""
        begin = time.perf_counter()
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = _Sums(torch.zeros(7, dtype=torch.float64))
        get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, sums),
            data_iterator=self._batches(plan),
            model=self.ddp,
            num_microbatches=plan.num_microbatches,
            seq_length=1,  # unused without pipeline stages
            micro_batch_size=1,
            forward_only=False,
        )
        dist.all_reduce(sums.values, group=self.parallel.dp_gloo)
        self.schedule.step(1)
        _, grad_norm, _ = self.optimizer.step()
        metrics = sums.metrics()
        if grad_norm is not None:
            metrics["critic/grad_norm"] = float(grad_norm)
        return metrics | {"perf/critic_s": time.perf_counter() - begin}

    def _batches(self, plan: BatchPlan) -> Iterator[Microbatch]:
        weights = plan_weights(self.config.algorithm, plan)
        for index in range(plan.num_microbatches):
            yield self._pack(plan, index, weights)

    def _pack(self, plan: BatchPlan, index: int, weights: list[float] | None = None) -> Microbatch:
        """With weights, `advantage` holds the returns."""
        return pack_microbatch(
            plan,
            self.parallel.dp_rank,
            index,
            self.store,
            advantages=None if weights is None else self._returns,
            weights=weights,
            read_mask=False,
            grid=forward.grid_of(
                self.parallel,
                packed=self.config.trainer.packing,
                shape=step_shape(plan, self.config.trainer, self.parallel),
            ),
        )

    def _value(self, batch: Microbatch, module: torch.nn.Module) -> Tensor:
        """[N] fp32."""
        output_BS1 = forward.logits(self.model, module, batch, 0, Mode.OFF)
        return output_BS1.flatten()[batch.sampled_rows.to(output_BS1.device)].float()

    def _forward_step(
        self, sums: _Sums, batches: Iterator[Microbatch], ddp: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        batch = next(batches)
        return self._value(batch, ddp), partial(self._loss, batch, sums)

    def _loss(
        self, batch: Microbatch, sums: _Sums, value_N: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        device = value_N.device
        return_N = batch.advantage.to(device)
        token = value_loss(value_N, value_N, return_N, 0.0)
        loss = (batch.weight.to(device) * token.loss).sum()
        sums.add(loss, value_N, return_N)
        return loss, torch.tensor(0, dtype=torch.int, device=device), {}

"""One optimizer step from one plan: pack, replayed forward and backward, update, metrics.

The loss of a step is the plain sum of weight x token loss over all ranks and microbatches, with
weights that depend on the plan alone.  Megatron's schedule would divide by a token count; its
finaliser is called without one, so gradients stay sums and the split cannot change them.

There is one optimizer step per batch, so the weights at the first forward are the weights of every
forward: the mismatch between trainer and engine costs no extra pass.

Pipeline stages run Megatron's own schedules.  A microbatch and a model chunk travel together as a
`_Turn`, so routes never depend on the order in which a schedule calls; the number that the schedule
itself keeps is compared.  Masks and losses belong to the last stage, routes to the stage that owns
the layer; what ranks count is summed over the whole gang, each token and each row once.

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed import finalize_model_grads as megatron_finalize
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from moerl.algorithms.advantages import advantage_metrics, plan_advantages
from moerl.algorithms.aggregation import plan_weights
from moerl.algorithms.loss import SUM_NAMES, loss_metrics, policy_loss
from moerl.algorithms.mismatch import MismatchSums
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.blob.store import BlobStore
from moerl.config.schema import Config, OptimizerConfig, TrainerConfig
from moerl.data.packing import Microbatch, fed_tokens, pack_microbatch
from moerl.errors import TrainerError
from moerl.trainer import forward, probe
from moerl.trainer.frozen_policy import FrozenPolicy
from moerl.trainer.model import Chunk, Model, equal_shapes, wrap
from moerl.trainer.parallel import Parallel
from moerl.trainer.replay import Mode
from moerl.types import Array, BatchPlan

if TYPE_CHECKING:
    from moerl.trainer.critic import Critic

_COUNTS = (
    "fed",  # fed-in tokens without padding
    "forwarded",  # with padding
    "fed_rows",  # fed-in tokens that this rank routes x its MoE layers
    "replayed_rows",  # recorded (token, layer) rows that routers consumed
    "routing_bytes",
    "sampled",
    "sampled_truncated",  # sampled under a truncating recipe
    "masked",  # sampled tokens with a recorded kept set
    "kept",  # entries of all kept sets
    "kept_singleton",
    "mask_bytes",
    "entropy",
)


@dataclass(slots=True)
class StepSums:
    """What one rank adds up over the microbatches of a step; joined over the gang once.

    Ranks that compute the same (tensor parallel peers, or context parallel ones after the join of
    log-probabilities) leave it to the first of them.
    """

    loss: Tensor = field(default_factory=lambda: torch.zeros(len(SUM_NAMES), dtype=torch.float64))
    mismatch: MismatchSums = field(default_factory=MismatchSums.zero)
    exact: MismatchSums = field(default_factory=MismatchSums.zero)  # see moerl.trainer.probe
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0.0))
    kept_max: float = 0.0

    def join(self, group: dist.ProcessGroup) -> StepSums:
        """Sums over the ranks of a gloo group."""
        packed = torch.cat([self.loss, torch.tensor(list(self.counts.values())).double()])
        dist.all_reduce(packed, group=group)
        peak = torch.tensor(self.kept_max, dtype=torch.float64)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        counts = dict(zip(self.counts, packed[len(SUM_NAMES) :].tolist(), strict=True))
        return StepSums(
            packed[: len(SUM_NAMES)],
            self.mismatch.all_reduce(group),
            self.exact.all_reduce(group),
            counts,
            float(peak),
        )


class Learner:
    """Model, optimizer and schedule of one rank; `step` trains one plan."""

    def __init__(
        self,
        model: Model,
        parallel: Parallel,
        config: Config,
        store: BlobStore,
        critic: Critic | None = None,
    ) -> None:
        """critic: gives the advantages and is trained with the policy (`moerl.trainer.critic`)."""
        self.critic = critic
        self.model, self.parallel, self.config, self.store = model, parallel, config, store
        optimizer = config.trainer.optimizer
        self.ddp: list[DistributedDataParallel] = wrap(
            model, distributed_optimizer=optimizer.distributed
        )
        self.optimizer: MegatronOptimizer = make_optimizer(
            self.ddp, optimizer, config.trainer.dtype
        )
        self.schedule = make_schedule(self.optimizer, optimizer, config.run.steps)
        algorithm = config.algorithm
        self.reference = self.teacher = None
        if algorithm.kl != "off":
            self.reference = self._frozen("reference", algorithm.reference or config.model.path)
        if algorithm.distill_coef:
            self.teacher = self._frozen("teacher", algorithm.teacher)
        model.config.finalize_model_grads_func = finalize_as_sums
        model.config.grad_scale_func = self.optimizer.scale_loss

    def _frozen(self, role: str, path: str) -> FrozenPolicy:
        vocab_size = self.model.spec.vocab_size
        return FrozenPolicy(
            f"algorithm.{role}", path, vocab_size, self.config.trainer, self.parallel
        )

    def step(self, plan: BatchPlan) -> dict[str, float]:
        """Train one plan; returns the metrics of the step, equal on all ranks.

        Raises RecordError for a record that breaks replay, TrainerError when the loss or the
        gradient is not finite (the weights are then not to be used).
        """
        begin = time.perf_counter()
        advantages = self._advantages(plan)
        sums = StepSums()
        pack_s = self._accumulate(plan, advantages, sums)
        joined = sums.join(self.parallel.control)
        metrics = loss_metrics(self.config.algorithm, joined.loss)
        if not math.isfinite(metrics.get("loss/total", 0.0)):
            raise TrainerError(f"step {plan.step}: the loss is {metrics['loss/total']}")
        computed = time.perf_counter()
        self.schedule.step(1)  # before the update: the first one has the first warm-up rate
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is not None:
            if not math.isfinite(grad_norm):
                raise TrainerError(f"step {plan.step}: the gradient norm is {grad_norm}")
            metrics["loss/grad_norm"] = float(grad_norm)
        end = time.perf_counter()
        metrics |= joined.mismatch.metrics() | _describe(joined, self.model.replay is not None)
        if self.model.replay is not None:
            metrics |= probe.exact_metrics(joined.exact, self.config)
        metrics |= advantage_metrics(advantages)
        if self.critic is not None:
            metrics |= self.critic.update(plan)
        metrics |= {
            "loss/lr": float(self.optimizer.param_groups[0]["lr"]),
            "perf/step_s": end - begin,
            "perf/pack_s": pack_s,
            "perf/forward_backward_s": computed - begin - pack_s,
            "perf/optimizer_s": end - computed,
            "perf/train_tokens_per_s": joined.counts["fed"] / (end - begin),
        }
        return metrics

    def _advantages(self, plan: BatchPlan) -> Sequence[float | Array]:
        if self.critic is not None:
            return self.critic.advantages(plan)
        return plan_advantages(self.config.algorithm, plan)

    def gradients(self, plan: BatchPlan) -> StepSums:
        """Accumulate the gradients of a plan and do not update; returns the joined sums."""
        sums = StepSums()
        self._accumulate(plan, plan_advantages(self.config.algorithm, plan), sums)
        return sums.join(self.parallel.control)

    def _accumulate(
        self, plan: BatchPlan, advantages: Sequence[float | Array], sums: StepSums
    ) -> float:
        """Forward and backward of all microbatches of this rank; returns seconds spent packing."""
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = _Batches(self, plan, advantages)
        iterators = [batches.turns(chunk) for chunk in self.model.chunks]
        rows, length = batches.step_shape
        get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, sums),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.ddp,
            num_microbatches=batches.num_microbatches,
            # of hidden states between stages; unused where their shapes are sent along
            seq_length=length * self.parallel.cp_size,
            micro_batch_size=rows,
            forward_only=False,
        )
        if self.model.replay is not None:
            self.model.replay.finish_step()
        return batches.pack_s

    def _forward_step(
        self, sums: StepSums, turns: Iterator[_Turn], ddp: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        chunk, index, batch = next(turns)
        for layer in chunk.gpt.decoder.layers:  # the schedule's own number
            if layer.current_microbatch not in (None, index):
                raise TrainerError(
                    f"the schedule runs microbatch {layer.current_microbatch}, {index} was fed"
                )
        mode = Mode.OFF if self.model.replay is None else Mode.REPLAY
        others = {
            role: policy.logprobs(batch)
            for role, policy in (("reference", self.reference), ("teacher", self.teacher))
            if policy is not None
        }
        output = forward.run_chunk(self.model, chunk, ddp, batch, index, mode)
        self._count_routes(sums, batch, chunk)
        return output, partial(self._loss, batch, others, sums)

    def _loss(
        self, batch: Microbatch, others: dict[str, Tensor], sums: StepSums, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprob_N, entropy_N = forward.sampled_logprobs(self.model, logits, batch, self.parallel)
        device = logprob_N.device
        engine_N = batch.old_logprob.to(device)
        tokens = Tokens(
            logprob_N,
            engine_N,
            batch.advantage.to(device),
            Sequences(batch.seq.to(device), max(len(batch.rollouts), 1)),
            batch.lag.to(device),
            entropy=entropy_N,
            **others,
        )
        result = policy_loss(self.config.algorithm, tokens, batch.weight.to(device))
        if self.parallel.tp_rank == 0:
            _count_held(sums, batch)
            if self.parallel.cp_rank == 0:
                sums.loss += result.sums
                sums.mismatch += MismatchSums.of(logprob_N, engine_N, batch.lag, tokens.sequences)
                sums.exact += probe.exact_sums(batch, logprob_N)
                _count_sampled(sums, batch, float(entropy_N.sum()))
        return result.loss, torch.tensor(0, dtype=torch.int, device=device), {}

    def _count_routes(self, sums: StepSums, batch: Microbatch, chunk: Chunk) -> None:
        if self.model.replay is not None:
            routed = batch.num_fed_in(forward.routed_slots(batch, self.parallel))
            sums.counts["fed_rows"] += routed * len(self.model.replay.chunks[chunk.index])
        if chunk.index == len(self.model.chunks) - 1:  # what all chunks have read
            sums.counts["replayed_rows"] += batch.read.routing_rows
            sums.counts["routing_bytes"] += batch.read.routing


class _Turn(NamedTuple):
    """One forward pass of one model chunk."""

    chunk: Chunk
    microbatch: int
    batch: Microbatch


class _Batches:
    """Microbatches of this rank, packed when its first chunk needs them, kept until its last did.

    The routes of a turn are given to the routers when the turn is taken.
    """

    def __init__(
        self, learner: Learner, plan: BatchPlan, advantages: Sequence[float | Array]
    ) -> None:
        self._learner, self._plan, self._advantages = learner, plan, advantages
        self._weights = plan_weights(learner.config.algorithm, plan)
        self._packed: dict[int, Microbatch] = {}
        self.pack_s = 0.0
        self.num_microbatches = plan.num_microbatches
        sizes = learner.parallel.sizes
        if sizes.vpp > 1:  # the interleaved schedule wants whole rounds: the rest is padding
            self.num_microbatches += -plan.num_microbatches % sizes.pp
        self.step_shape = step_shape(plan, learner.config.trainer, learner.parallel)

    def turns(self, chunk: Chunk) -> Iterator[_Turn]:
        learner = self._learner
        for index in range(self.num_microbatches):
            begin = time.perf_counter()
            batch = self._packed.pop(index, None) or self._pack(index)
            if chunk is not learner.model.chunks[-1]:
                self._packed[index] = batch
            if learner.model.replay is not None:
                forward.load_routes(learner.model, batch, index, learner.parallel, chunk.index)
            self.pack_s += time.perf_counter() - begin
            yield _Turn(chunk, index, batch)

    def _pack(self, index: int) -> Microbatch:
        learner = self._learner
        return pack_microbatch(
            self._plan,
            learner.parallel.dp_rank,
            index,
            learner.store,
            advantages=self._advantages,
            weights=self._weights,
            read_mask=learner.config.replay.sampling_mask and learner.parallel.is_last_stage,
            grid=forward.grid_of(
                learner.parallel, packed=learner.config.trainer.packing, shape=self.step_shape
            ),
        )


def step_shape(plan: BatchPlan, trainer: TrainerConfig, parallel: Parallel) -> tuple[int, int]:
    """Rows and slots that hold any microbatch of any data-parallel rank, where all must be equal;
    otherwise (1, 1), no lower bound."""
    if not equal_shapes(trainer):
        return 1, 1
    grid = forward.grid_of(parallel, packed=trainer.packing)
    shapes = [
        grid.shape(fed_tokens(plan, dp_rank, index))
        for dp_rank in range(parallel.dp_size)
        for index in range(plan.num_microbatches)
    ]
    return max(rows for rows, _ in shapes), max(length for _, length in shapes)


def finalize_as_sums(model: list[Any], _num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's finaliser without the token count it would divide the gradients by."""
    megatron_finalize(model, None, **kwargs)


def make_optimizer(
    ddp: list[DistributedDataParallel], settings: OptimizerConfig, dtype: str
) -> MegatronOptimizer:
    half = dtype == "bf16"
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        use_distributed_optimizer=settings.distributed,
    )
    return get_megatron_optimizer(config, ddp)


def make_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, run_steps: int
) -> OptimizerParamScheduler:
    decay_steps = settings.decay_steps or run_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def _count_held(sums: StepSums, batch: Microbatch) -> None:
    """What context-parallel ranks hold a part of."""
    counts = sums.counts
    counts["fed"] += batch.num_fed
    counts["forwarded"] += batch.tokens.numel()
    if batch.mask_offsets is not None:
        sizes = batch.mask_offsets.diff()
        counts["masked"] += len(sizes)
        counts["kept"] += float(sizes.sum())
        counts["kept_singleton"] += float((sizes == 1).sum())
        counts["mask_bytes"] += batch.read.mask
        if len(sizes):
            sums.kept_max = max(sums.kept_max, float(sizes.max()))


def _count_sampled(sums: StepSums, batch: Microbatch, entropy: float) -> None:
    """What context-parallel ranks hold alike."""
    sums.counts["sampled"] += len(batch.sampled)
    sums.counts["entropy"] += entropy
    sums.counts["sampled_truncated"] += sum(
        rollout.num_sampled for rollout in batch.rollouts if rollout.sampling.truncates
    )


def _describe(sums: StepSums, replayed: bool) -> dict[str, float]:
    """Coverage and payload metrics; what could not be computed is absent."""
    counts = sums.counts
    metrics = {"perf/padding_frac": 1.0 - counts["fed"] / counts["forwarded"]}
    if counts["sampled"]:
        metrics["loss/entropy"] = counts["entropy"] / counts["sampled"]
    if replayed and counts["fed_rows"]:
        metrics["routing/replay_cover_frac"] = counts["replayed_rows"] / counts["fed_rows"]
        metrics["routing/fallback_rows"] = counts["fed_rows"] - counts["replayed_rows"]
        metrics["routing/bytes_per_token"] = counts["routing_bytes"] / counts["fed"]
    if counts["sampled_truncated"]:
        metrics["keep/cover_frac"] = counts["masked"] / counts["sampled_truncated"]
    if counts["masked"]:
        metrics["keep/size_mean"] = counts["kept"] / counts["masked"]
        metrics["keep/size_max"] = sums.kept_max
        metrics["keep/singleton_frac"] = counts["kept_singleton"] / counts["masked"]
        metrics["keep/bytes_per_token"] = counts["mask_bytes"] / counts["masked"]
    return metrics

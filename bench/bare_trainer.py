"""The trainer part of bench/bare.py: one batch through bare Megatron-core and through our step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from one_rank import one_rank
from torch import Tensor

from moerl.config.schema import Config
from moerl.core.types import BatchPlan, Episode, EpisodeGroup, PolicyVersion, Score, Turn
from moerl.data.batching import plan_batch
from moerl.data.packing import Microbatch
from moerl.episodes.turn import sampling_params
from moerl.launch.run_context import RunContext
from moerl.records import BlobStore
from tests.helpers.synthetic import RolloutSpec, random_rollout

BARE, OURS = "bare", "moerl"
ARMS = (BARE, OURS)
KEPT_MEAN = 8  # entries of a sampling mask

Seconds = dict[str, list[tuple[float, float]]]  # by arm: (wall, CPU) of each step


def measure(plan: RunContext, rounds: int) -> tuple[Seconds, BatchPlan]:
    """Seconds of the steps of both arms, without the first two, which fill allocators and Adam."""
    store = plan.blobs()
    batch = make_batch(plan, store)
    steps = make_steps(plan, store, batch)
    found: Seconds = {name: [] for name in ARMS}
    for number in range(rounds + 2):
        taken = {name: _timed(steps[name]) for name in (ARMS if number % 2 else ARMS[::-1])}
        shown = ", ".join(f"{name} {taken[name][0]:.3f}" for name in ARMS)
        print(f"trainer {max(0, number - 1):2d}/{rounds}, seconds: {shown}", flush=True)
        if number > 1:
            for name, seconds in taken.items():
                found[name].append(seconds)
    return found, batch


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    begin, cpu_s = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin, time.process_time() - cpu_s


def make_batch(plan: RunContext, store: BlobStore) -> BatchPlan:
    """A step's batch: the recipe's prompts, random answers, records sealed in the store."""
    rollout, shape, prompts = plan.config.rollout, plan.model_shape(), plan.prompts()
    sampling = sampling_params(plan.config.sampling, shape)
    spec = RolloutSpec(shape, sampling.max_new_tokens, sampling, kept_mean=KEPT_MEAN)
    rng = np.random.default_rng(0)
    groups = []
    for index in range(rollout.groups_per_step):
        prompt = prompts.prompt(index)
        ids = np.asarray(prompt.token_ids, np.int32)
        rows = [
            random_rollout(store, rng, f"{index}.{sibling}", ids, spec)
            for sibling in range(rollout.group_size)
        ]
        episodes = (
            Episode(row.rollout_id, (Turn(row),), Score(float(number % 2)))
            for number, row in enumerate(rows)
        )
        groups.append(EpisodeGroup(index, prompt, tuple(episodes)))
    return plan_batch(
        0,
        PolicyVersion(0, 0),
        groups,
        dp_size=1,
        max_tokens_per_microbatch=plan.config.trainer.max_tokens_per_microbatch,
        packed=plan.config.trainer.packing,
    )


def make_steps(
    plan: RunContext, store: BlobStore, batch: BatchPlan
) -> dict[str, Callable[[], None]]:
    """A step of each arm, from equal weights."""
    config, spec = plan.config, plan.spec()
    torch.set_num_threads(config.trainer.cpu_threads)
    ranks = one_rank(config.trainer.transformer_impl)
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.gpt import build
    from moerl.trainer.passes.schedule import Batches

    models = [build(spec, config.trainer, ranks, with_replay=replays) for replays in (True, False)]
    for model in models:
        load_hf(model.tensors, model.tiles, HfFolder(plan.model_path))
    learner = Learner(models[0], ranks, config, store)
    batches = Batches(batch, config, ranks, store)
    bare = BareTrainer(models[1], ranks.platform, config)
    fixed = [batches.pack(number) for number in range(batches.num_microbatches)]
    return {BARE: partial(bare.step, fixed), OURS: lambda: _discard(learner.step(batch))}


def _discard(_metrics: object) -> None:
    return None


class BareTrainer:
    """What a training step of Megatron-core does, and no more."""

    def __init__(self, model: Any, platform: Any, config: Config) -> None:
        from megatron.core.distributed import finalize_model_grads

        from moerl.trainer.learner.optimizer import make_optimizer, make_schedule
        from moerl.trainer.model.gpt import wrap

        settings = config.trainer
        (self.ddp,) = wrap(model, settings, platform)
        self.optimizer = make_optimizer([self.ddp], settings)
        self.schedule = make_schedule(self.optimizer, settings.optimizer, config.run.steps)
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = self.optimizer.scale_loss

    def step(self, microbatches: Sequence[Microbatch]) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        rows, slots = microbatches[0].tokens.shape
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(microbatches),
            model=[self.ddp],
            num_microbatches=len(microbatches),
            seq_length=slots,
            micro_batch_size=rows,
            forward_only=False,
        )
        self.optimizer.step()
        self.schedule.step(1)

    def _forward(
        self, microbatches: Iterator[Microbatch], ddp: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        batch = next(microbatches)
        losses = ddp(batch.tokens, batch.positions, None, labels=batch.labels)
        return losses, partial(_masked_sum, batch)


def _masked_sum(batch: Microbatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron divides it by the count, as its pretraining does."""
    mask = torch.zeros(losses.numel())
    mask[batch.sampled_rows] = 1.0
    total = (losses.float().reshape(-1) * mask).sum()
    count = torch.tensor(len(batch.sampled_rows), dtype=torch.int)
    return total, count, {"loss": total.detach()}

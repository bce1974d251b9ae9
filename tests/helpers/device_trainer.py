"""A trainer on one device, without files of a model: a Qwen3-MoE of any size, random records.

Layers are megatron-core's local ones, so that torch and megatron-core are enough.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from moerl.config.schema import Config, OptimizerConfig, ParallelConfig, ReplayConfig, TrainerConfig
from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    ModelShape,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.layout import LayerSpec, ModelSpec
from moerl.planning.memory import TrainerMemory, Training, trainer_memory
from moerl.records.blob_store import BlobStore
from tests.helpers.patience import patience
from tests.helpers.synthetic import RolloutSpec, random_rollout

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.parallel import Parallel

_RATE = 3e-6  # as in training of real models: most bf16 weights stay as they are in one step
NONE = ReplayConfig(routing="off", sampling_mask=False, probe=0)
BOTH = ReplayConfig(probe=0)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model and its batch; tokens are those fed in, of one rollout."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_width: int
    vocab: int
    tokens: int
    rollouts: int
    per_microbatch: int

    def spec(self) -> ModelSpec:
        return ModelSpec(
            family="qwen3_moe",
            vocab_size=self.vocab,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=max(1, self.heads // 4),
            head_dim=self.head_dim,
            experts=self.experts,
            experts_per_token=self.top_k,
            moe_ffn=self.expert_width,
            moe_layers=tuple(range(self.layers)),
            tied=False,
            norm_topk_prob=True,
            rms_eps=1e-6,
            rope_theta=1e6,
            max_positions=max(128, self.tokens + 1),
            dtype="bfloat16",
        )

    def flops(self) -> float:
        """Of forward and backward for one token: 6 per parameter that it meets, and attention."""
        wide = self.heads * self.head_dim
        own = self.hidden * (2 * wide + 2 * max(1, self.heads // 4) * self.head_dim)
        experts = 3 * self.top_k * self.hidden * self.expert_width + self.hidden * self.experts
        attention = 6 * wide * self.tokens  # half of the positions on average, twice a product
        met = self.layers * (own + experts) + self.hidden * self.vocab
        return 6.0 * met + self.layers * attention


# 1.8e9 parameters, of which a token meets 0.5e9; the vocabulary of Qwen3
LARGE = Size(1536, 16, 16, 96, 32, 4, 512, 151_936, 2048, 16, 4096)
TINY = Size(32, 2, 4, 16, 8, 2, 24, 67, 12, 6, 40)


@functools.cache
def ranks(layers: LayerSpec, where: str = "cuda") -> Parallel:
    """This process as the only rank; Megatron's groups are made once, so layers are of one kind."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    from moerl.trainer.model import platform

    place = platform.prepare(where, impl="local" if layers == "local" else "auto")
    import torch.distributed as dist

    from moerl.trainer.model import parallel

    vars(parallel)["rank_store"] = lambda _timeout: dist.HashStore()  # the only rank
    return parallel.start(ParallelConfig(), place, timeout_s=patience(60))


def make_learner(
    size: Size,
    folder: Path,
    replayed: ReplayConfig = BOTH,
    *,
    dtype: Literal["bf16", "fp32"] = "bf16",
    layers: LayerSpec = "local",
    where: str = "cuda",
    grouped: bool = True,
) -> Learner:
    """Random weights; sums and moments are fp32.  grouped: False = experts one by one."""
    parallel = ranks(layers, where)
    if not grouped:
        place = replace(parallel.platform, grouped=False)
        parallel = replace(parallel, platform=place)
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model import gpt

    trainer = TrainerConfig(dtype=dtype, optimizer=OptimizerConfig(lr=_RATE, min_lr=_RATE))
    trainer = replace(trainer, max_tokens_per_microbatch=size.per_microbatch)
    torch.manual_seed(0)
    model = gpt.build(size.spec(), trainer, parallel, with_replay=replayed.routing != "off")
    config = Config(trainer=trainer, replay=replayed)
    return Learner(model, parallel, config, BlobStore(folder / "blobs", "n0"))


def gradients_of(learner: Learner, plan: BatchPlan) -> dict[str, torch.Tensor]:
    """By name of the parameter, on the host."""
    learner.gradients(plan)
    named = learner.model.gpt.named_parameters()
    return {name: parameter.main_grad.float().cpu().clone() for name, parameter in named}


def differs_by(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Largest difference over all tensors, of the largest number of each."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - want).abs().max() / want.abs().max().clamp(min=1e-9))
        for name, want in other.items()
    )


def make_plan(size: Size, learner: Learner) -> BatchPlan:
    """Two groups of equally long rollouts with random routes and sampling masks."""
    rng = np.random.default_rng(0)
    layers = tuple(range(size.layers))
    # tokens of a small part of a large vocabulary: making masks of all of it takes minutes
    shape = ModelShape(min(size.vocab, 2048), size.layers, layers, size.experts, size.top_k)
    sampling = SamplingParams(size.tokens, temperature=0.9, top_p=0.95, top_k=64)
    num_prompt = max(2, size.tokens // 4)
    spec = RolloutSpec(shape, size.tokens + 1 - num_prompt, sampling)
    groups = []
    for group in range(2):
        prompt = rng.integers(0, shape.vocab_size, num_prompt).astype(np.int32)
        episodes = tuple(
            Episode(
                f"{group}.{index}",
                (Turn(random_rollout(learner.store, rng, f"{group}.{index}", prompt, spec)),),
                Score(float(index % 2)),
            )
            for index in range(size.rollouts // 2)
        )
        asked = Prompt(group, tuple(prompt.tolist()), "", None, {})
        groups.append(EpisodeGroup(group, asked, episodes))
    return plan_batch(
        0, PolicyVersion(0, 0), groups, dp_size=1, max_tokens_per_microbatch=size.per_microbatch
    )


def planned(size: Size) -> TrainerMemory:
    """What a dry run says of this rank."""
    training = Training(dtype="bf16", tokens=size.per_microbatch, distributed_optimizer=False)
    training = replace(training, layers="local")
    (rank,) = trainer_memory(size.spec(), ParallelConfig(), training)
    return rank


def seconds_of(learner: Learner, plan: BatchPlan, steps: int) -> tuple[float, dict[str, float]]:
    """Mean of some steps, and the metrics of the last one."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = learner.step(plan)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps, metrics

"""Material for the trainer tests: a tiny random Qwen3-MoE folder and records that fit it.

Records are synthetic: random tokens, random valid routes, random sampling masks.  Everything is
made from a seed, so each process of a trainer can make the same plan by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    ModelShape,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Turn,
)
from moerl.data.batching import plan_batch
from moerl.records.blob_store import BlobStore
from tests.helpers.patience import patience
from tests.helpers.synthetic import RolloutSpec, random_rollout

VOCAB, LAYERS, EXPERTS, TOP_K = 67, 4, 8, 2
SHAPE = ModelShape(VOCAB, LAYERS, tuple(range(LAYERS)), EXPERTS, TOP_K)
UNUSED_EXPERT = 5  # named by no route of a plan that asks for it
ROOT = Path(__file__).resolve().parents[2]
# Settings of trainer.ddp under which these models have several buckets, with padding at their ends
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}


def make_model(folder: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """A random Qwen3-MoE that transformers wrote."""
    import torch

    from moerl.engine import torchvision_fix

    torchvision_fix.arm()  # transformers imports torchvision
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.copy_(1 + 0.1 * torch.randn_like(param))
            else:
                param.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def make_plan(
    store: BlobStore,
    *,
    seed: int = 0,
    step: int = 0,
    groups: int = 2,
    siblings: int = 4,
    dp_size: int = 1,
    max_tokens: int = 64,
    unused_expert: int | None = None,
    length: int = 0,
) -> BatchPlan:
    """A plan of random records.  unused_expert: an expert that no route names.  length: fed-in
    tokens of every rollout; 0 = of each its own."""
    rng = np.random.default_rng([seed, step])
    made = tuple(
        _group(store, rng, 1000 * step + index, siblings, step, unused_expert, length)
        for index in range(groups)
    )
    return plan_batch(
        step,
        PolicyVersion(0, step),
        made,
        dp_size=dp_size,
        max_tokens_per_microbatch=max_tokens,
    )


def replan(plan: BatchPlan, dp_size: int, max_tokens: int = 64) -> BatchPlan:
    """The same records over another number of data-parallel ranks."""
    return plan_batch(
        plan.step, plan.version, plan.groups, dp_size=dp_size, max_tokens_per_microbatch=max_tokens
    )


def _group(
    store: BlobStore,
    rng: np.random.Generator,
    group_id: int,
    siblings: int,
    step: int,
    unused_expert: int | None,
    length: int,
) -> EpisodeGroup:
    prompt = rng.integers(0, VOCAB, int(rng.integers(2, 6))).astype(np.int32)
    episodes = []
    for sibling in range(siblings):
        name = f"{group_id}.{sibling}.s{rng.integers(1 << 30)}"
        spec = RolloutSpec(
            SHAPE,
            length + 1 - len(prompt) if length else int(rng.integers(3, 12)),
            SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.95, top_k=8),
            versions=(PolicyVersion(0, step),),
            unused_expert=unused_expert,
        )
        rollout = random_rollout(store, rng, name, prompt, spec)
        score = Score(float(rng.integers(0, 2)))
        episodes.append(Episode(f"{group_id}.{sibling}", (Turn(rollout),), score))
    return EpisodeGroup(
        group_id, Prompt(group_id, tuple(prompt.tolist()), "", None, {}), tuple(episodes)
    )


def without_mask(plan: BatchPlan) -> BatchPlan:
    """The same records as if sampling had not truncated (control: masks dropped)."""

    def strip(rollout: Rollout) -> Rollout:
        free = SamplingParams(max_new_tokens=16, temperature=rollout.sampling.temperature)
        return replace(rollout, sampling=free, sampling_mask=())

    return with_rollouts(plan, strip)


def with_rollouts(plan: BatchPlan, change: Callable[[Rollout], Rollout]) -> BatchPlan:
    """The plan with every rollout changed."""
    groups = tuple(
        replace(
            group,
            episodes=tuple(
                replace(
                    episode,
                    turns=tuple(
                        replace(turn, rollout=change(turn.rollout)) for turn in episode.turns
                    ),
                )
                for episode in group.episodes
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def torchrun(ranks: int, args: list[str], *, timeout_s: float = 120.0) -> str:
    """Run `python ARGS` on `ranks` processes; returns the output, raises with it on failure."""
    command = [sys.executable, "-m", "moerl.distributed.torchrun", "--nproc-per-node", str(ranks)]
    command += args
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(timeout_s),
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output

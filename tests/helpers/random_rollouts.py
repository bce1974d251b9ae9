"""Random rollouts of one tiny shape, and groups of them: what batching and packing tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.algorithms.advantages import plan_advantages
from moerl.config.schema import AlgorithmConfig
from moerl.core.types import (
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
from tests.helpers.synthetic import RolloutSpec, random_rollout

LAYERS, EXPERTS, TOP_K, VOCAB = (0, 2, 3), 8, 2, 50
SHAPE = ModelShape(VOCAB, 4, LAYERS, EXPERTS, TOP_K)
TRUNCATED = SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=16)


def make_rollout(
    store: BlobStore,
    name: str,
    prompt_len: int,
    num_sampled: int,
    *,
    seed: int = 0,
    sampling: SamplingParams = TRUNCATED,
    cuts: Sequence[int] = (),
    versions: Sequence[PolicyVersion] = (PolicyVersion(0, 3),),
) -> Rollout:
    """A rollout of random tokens; `cuts` (numbers of sampled tokens) split it into segments.

    Segment i was sampled by versions[i].  Routing and mask blobs are sealed per segment.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, prompt_len).astype(np.int32)
    spec = RolloutSpec(SHAPE, num_sampled, sampling, cuts, versions)
    return random_rollout(store, rng, name, prompt, spec)


def group(index: int, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> EpisodeGroup:
    """Single-turn episodes with these rewards."""
    episodes = tuple(
        Episode(f"{index}.{i}", (Turn(rollout),), Score(reward))
        for i, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True))
    )
    return EpisodeGroup(index, Prompt(index, (1,), "", None, {}), episodes)


def advantages(name: str, *groups: EpisodeGroup) -> list[float]:
    """Advantages of single-turn episodes, by group and sibling."""
    version = PolicyVersion(0, 0)
    plan = plan_batch(0, version, groups, dp_size=1, max_tokens_per_microbatch=1000)
    found = plan_advantages(AlgorithmConfig(advantage=name), plan)
    place = {(row.group, row.episode): i for i, row in enumerate(plan.rows)}
    return [float(found[place[key]]) for key in sorted(place)]

"""Random rollouts of one tiny shape, and groups of them: what batching and packing tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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

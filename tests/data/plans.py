"""Rollouts with known bytes, sealed in a real blob store: what batching and packing tests share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from moerl.blob.store import BlobStore
from moerl.types import (
    Array,
    Episode,
    EpisodeGroup,
    Finish,
    MaskBlob,
    PolicyVersion,
    Prompt,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Score,
    Turn,
    VersionSpan,
)

LAYERS, EXPERTS, TOP_K, VOCAB = (0, 2, 3), 8, 2, 50
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
    total = prompt_len + num_sampled
    tokens = rng.integers(0, VOCAB, total).astype(np.int32)
    edges = [0, *cuts, num_sampled]
    routing, masks, spans = [], [], []
    for idx, (first, end) in enumerate(itertools.pairwise(edges)):
        begin = prompt_len + first - 1 if first else 0
        rows = prompt_len + end - 1 - begin
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(len(LAYERS) * rows)])
        ids = ids.reshape(len(LAYERS), rows, TOP_K).astype(np.uint8)
        offsets, kept = _mask(rng, tokens[prompt_len + first : prompt_len + end])
        refs = store.seal(f"{name}.{idx}", [ids, offsets, kept])
        routing.append(RoutingBlob(refs[0], begin, begin + rows, versions[idx], LAYERS, EXPERTS))
        masks.append(MaskBlob(refs[1], refs[2], first, end - first))
        spans.append(VersionSpan(first, versions[idx]))
    return Rollout(
        rollout_id=name,
        token_ids=tokens,
        loss_mask=np.arange(total) >= prompt_len,
        logprobs=-rng.random(num_sampled).astype(np.float32),
        versions=tuple(spans),
        routing=tuple(routing),
        sampling_mask=tuple(masks) if sampling.truncates else (),
        finish=Finish.LENGTH,
        sampling=sampling,
        engine=0,
    )


def _mask(rng: np.random.Generator, sampled: Array) -> tuple[Array, Array]:
    rows = [
        np.unique(np.append(rng.integers(0, VOCAB, rng.integers(0, 5)), token)) for token in sampled
    ]
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)
    return offsets, np.concatenate(rows).astype(np.int32)


def group(index: int, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> EpisodeGroup:
    """Single-turn episodes with these rewards."""
    episodes = tuple(
        Episode(f"{index}.{i}", (Turn(rollout),), Score(reward))
        for i, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True))
    )
    return EpisodeGroup(index, Prompt(index, (1,), "", None, {}), episodes)

"""Rollouts of random content with valid records, sealed in a real blob store.

For tests and benchmarks that need records but no engine: random tokens, routes of distinct experts,
kept sets that hold their sampled token.  Equal seeds give equal rollouts in every process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from moerl.blob.store import BlobStore
from moerl.types import (
    Array,
    Finish,
    LogprobBlob,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    Rollout,
    RoutingBlob,
    SamplingParams,
    VersionSpan,
)


def random_rollout(
    store: BlobStore,
    rng: np.random.Generator,
    name: str,
    shape: ModelShape,
    prompt: Array,
    num_sampled: int,
    *,
    sampling: SamplingParams,
    cuts: Sequence[int] = (),
    versions: Sequence[PolicyVersion] = (PolicyVersion(0, 0),),
    kept_mean: float = 3.0,
    unused_expert: int | None = None,
) -> Rollout:
    """One rollout of `prompt` [P] int32 and `num_sampled` random tokens.

    cuts: numbers of sampled tokens at which a new segment begins; segment i is of versions[i].
    kept_mean: mean size of a kept set, geometric and at most sampling.top_k; none are recorded
    where sampling does not truncate.  unused_expert: an expert that no route names.
    """
    output = rng.integers(0, shape.vocab_size, num_sampled).astype(np.int32)
    routing, masks, spans = [], [], []
    for idx, (first, end) in enumerate(itertools.pairwise((0, *cuts, num_sampled))):
        begin = len(prompt) + first - 1 if first else 0
        rows = len(prompt) + end - 1 - begin
        arrays = [_routes(rng, shape, rows, unused_expert)]
        if sampling.truncates:
            arrays += _kept(rng, shape, output[first:end], kept_mean, sampling.top_k)
        refs = store.seal(f"{name}.{idx}", arrays)
        routing.append(
            RoutingBlob(
                ids=refs[0],
                row_begin=begin,
                row_end=begin + rows,
                version=versions[idx],
                layers=shape.moe_layers,
                num_experts=shape.num_experts,
            )
        )
        if sampling.truncates:
            masks.append(MaskBlob(refs[1], refs[2], first, end - first))
        spans.append(VersionSpan(first, versions[idx]))
    logprobs = (-3 * rng.random(num_sampled)).astype(np.float32)
    pieces = np.split(logprobs, cuts)
    firsts = (0, *cuts)
    return Rollout(
        rollout_id=name,
        token_ids=np.concatenate([prompt, output]),
        loss_mask=np.arange(len(prompt) + num_sampled) >= len(prompt),
        logprobs=np.zeros(0, np.float32),
        sealed_logprobs=tuple(
            LogprobBlob(ref, first, len(piece))
            for ref, first, piece in zip(
                store.seal(f"{name}.logprobs", pieces), firsts, pieces, strict=True
            )
        ),
        versions=tuple(spans),
        routing=tuple(routing),
        sampling_mask=tuple(masks),
        finish=Finish.LENGTH,
        sampling=sampling,
        engine=0,
    )


def _routes(rng: np.random.Generator, shape: ModelShape, rows: int, unused: int | None) -> Array:
    """uint8 [moe layers, rows, top-k], distinct in each row; for at most 256 experts."""
    scores = rng.random((len(shape.moe_layers), rows, shape.num_experts))
    if unused is not None:
        scores[..., unused] = 2.0  # never among the smallest
    return scores.argsort(axis=-1)[..., : shape.top_k].astype(np.uint8)


def _kept(
    rng: np.random.Generator, shape: ModelShape, sampled: Array, mean: float, top_k: int
) -> list[Array]:
    """Offsets and ids of one kept set per sampled token."""
    largest = min(top_k, shape.vocab_size) - 1 if top_k > 0 else shape.vocab_size - 1
    sizes = np.minimum(rng.geometric(1 / mean, len(sampled)) - 1, largest)
    rows = [
        np.union1d(rng.choice(shape.vocab_size, size, replace=False), [token])
        for size, token in zip(sizes, sampled, strict=True)
    ]
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)
    return [offsets, np.concatenate(rows).astype(np.int32)]

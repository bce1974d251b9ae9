"""Rollouts of random content with valid records, sealed in a real blob store.

For tests and benchmarks that need records but no engine: random tokens, routes of distinct experts,
sampling masks that hold their sampled token.  Equal seeds give equal rollouts in every process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    LogprobBlob,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Segment,
    VersionSpan,
)
from moerl.records.blob_store import BlobStore


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Properties of a random rollout after its prompt."""

    shape: ModelShape
    num_sampled: int
    sampling: SamplingParams  # sampling masks are recorded if it truncates
    cuts: Sequence[int] = ()  # numbers of sampled tokens at which a new segment begins
    versions: Sequence[PolicyVersion] = (PolicyVersion(0, 0),)  # of each segment
    kept_mean: float = 3.0  # mean size of a sampling mask, geometric and at most sampling.top_k
    unused_expert: int | None = None  # expert that no route names


def random_rollout(
    store: BlobStore, rng: np.random.Generator, name: str, prompt: Array, spec: RolloutSpec
) -> Rollout:
    """One rollout of `prompt` [P] int32 and of random tokens."""
    shape, num_prompt = spec.shape, len(prompt)
    output = rng.integers(0, shape.vocab_size, spec.num_sampled).astype(np.int32)
    routing, masks, spans = [], [], []
    for idx, (first, end) in enumerate(itertools.pairwise((0, *spec.cuts, spec.num_sampled))):
        version = spec.versions[idx]
        rows = (num_prompt + first - 1 if first else 0, num_prompt + end - 1)
        arrays = [_routes(rng, spec, rows[1] - rows[0])]
        if spec.sampling.truncates:
            arrays += _kept(rng, spec, output[first:end])
        refs = store.seal(f"{name}.{idx}", arrays)
        routing.append(RoutingBlob(refs[0], *rows, version, shape.moe_layers, shape.num_experts))
        if spec.sampling.truncates:
            masks.append(MaskBlob(refs[1], refs[2], first, end - first))
        spans.append(VersionSpan(first, version))
    return Rollout(
        rollout_id=name,
        token_ids=np.concatenate([prompt, output]),
        loss_mask=np.arange(num_prompt + spec.num_sampled) >= num_prompt,
        logprobs=np.zeros(0, np.float32),
        sealed_logprobs=_logprobs(store, rng, name, spec),
        versions=tuple(spans),
        routing=tuple(routing),
        sampling_mask=tuple(masks),
        finish=Finish.LENGTH,
        sampling=spec.sampling,
        engine=0,
    )


def share_prompt_rows(store: BlobStore, rollouts: Sequence[Rollout], num: int = 0) -> list[Rollout]:
    """The rollouts with the first one's routes of `num` tokens, stored once.

    Of one prompt and one segment each.  num: 0 = all of the prompt but its last, as an engine host.
    """
    first, found = rollouts[0], []
    num = num or first.prompt_len - 1
    (ref,) = store.seal(f"{first.rollout_id}.p", [_rows(store.load(first.routing[0].ids), 0, num)])
    prompt = replace(first.routing[0], ids=ref, row_end=num)
    for rollout in rollouts:
        (part,) = rollout.routing
        rest = ()
        if part.row_end > num:
            own = _rows(store.load(part.ids), num, part.row_end)
            (ref,) = store.seal(f"{rollout.rollout_id}.o", [own])
            rest = (replace(part, ids=ref, row_begin=num),)
        found.append(replace(rollout, routing=(prompt, *rest)))
    return found


def _rows(ids: Array, begin: int, end: int) -> Array:
    return np.ascontiguousarray(ids[:, begin:end])


def random_reply(
    store: BlobStore,
    rng: np.random.Generator,
    request: GenerateRequest,
    spec: RolloutSpec,
    finish: Finish = Finish.STOP,
) -> Segment:
    """An engine's answer to `request`: random tokens of the first version, with its new rows."""
    shape, version, num_new = spec.shape, spec.versions[0], spec.num_sampled
    output = rng.integers(0, shape.vocab_size, num_new).astype(np.int32)
    begin, end = request.rows_from, request.num_tokens + num_new - 1
    arrays = [_routes(rng, spec, end - begin), (-3 * rng.random(num_new)).astype(np.float32)]
    arrays += [_routes(rng, spec, begin)] if request.audit and begin else []
    arrays += _kept(rng, spec, output) if spec.sampling.truncates else []
    refs = iter(store.seal(request.name, arrays))
    layers, experts = shape.moe_layers, shape.num_experts
    routing = RoutingBlob(next(refs), begin, end, version, layers, experts)
    logprobs, audit, mask = LogprobBlob(next(refs), 0, num_new), None, None
    if request.audit and begin:
        audit = RoutingBlob(next(refs), 0, begin, version, layers, experts)
    if spec.sampling.truncates:
        mask = MaskBlob(next(refs), next(refs), 0, num_new)
    return Segment(
        rollout_id=request.rollout_id,
        output_ids=output,
        logprobs=np.zeros(0, np.float32),
        version=version,
        finish=finish,
        routing=routing,
        sampling_mask=mask,
        audit_rows=audit,
        engine=0,
        cached_tokens=0,
        start_s=0.0,
        end_s=0.0,
        sealed_logprobs=logprobs,
    )


def _logprobs(
    store: BlobStore, rng: np.random.Generator, name: str, spec: RolloutSpec
) -> tuple[LogprobBlob, ...]:
    """Sealed by segment."""
    values = (-3 * rng.random(spec.num_sampled)).astype(np.float32)
    pieces = np.split(values, spec.cuts)
    refs = store.seal(f"{name}.logprobs", pieces)
    return tuple(
        LogprobBlob(ref, first, len(piece))
        for ref, first, piece in zip(refs, (0, *spec.cuts), pieces, strict=True)
    )


def _routes(rng: np.random.Generator, spec: RolloutSpec, rows: int) -> Array:
    """uint8 [moe layers, rows, top-k], distinct in each row; for at most 256 experts."""
    shape = spec.shape
    scores = rng.random((len(shape.moe_layers), rows, shape.num_experts))
    if spec.unused_expert is not None:
        scores[..., spec.unused_expert] = 2.0  # never among the smallest
    return scores.argsort(axis=-1)[..., : shape.top_k].astype(np.uint8)


def _kept(rng: np.random.Generator, spec: RolloutSpec, sampled: Array) -> list[Array]:
    """Offsets and ids of one sampling mask per sampled token."""
    vocab_size, top_k = spec.shape.vocab_size, spec.sampling.top_k
    largest = min(top_k, vocab_size) - 1 if top_k > 0 else vocab_size - 1
    sizes = np.minimum(rng.geometric(1 / spec.kept_mean, len(sampled)) - 1, largest)
    rows = [
        np.union1d(rng.choice(vocab_size, size, replace=False), [token])
        for size, token in zip(sizes, sampled, strict=True)
    ]
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)
    return [offsets, np.concatenate(rows).astype(np.int32)]

"""Records of the replay matrix: random rollouts whose routes and sampling masks stay at hand.

Equal on every rank (everything comes from one seed).  Routes are random valid choices, also across
the groups of a grouped router, so a forward that fell back to live routing could not pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    IndexerBlob,
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
from moerl.data.batching import plan_batch
from moerl.layout.spec import ModelSpec
from moerl.records.blob_store import BlobStore
from moerl.records.indexer import encode

V0 = PolicyVersion(0, 0)
GROUPS, SIBLINGS, PROMPTS, OUTPUTS = 2, 4, (3, 7), (4, 12)
MAX_TOKENS = 24  # of a microbatch: several of them on each data-parallel rank
Routes = dict[tuple[int, int], dict[int, np.ndarray]]  # (group, episode) -> layer -> [T - 1, K]


@dataclass
class Records:
    groups: tuple[EpisodeGroup, ...]
    routes: Routes
    top_k: int
    num_fed: int
    num_sampled: int
    num_kept: int
    sum_kept_ids: int
    positions: Routes  # of sparse attention, [T - 1, index_topk], -1 = none

    def plan(self, dp_size: int) -> BatchPlan:
        return plan_batch(0, V0, self.groups, dp_size=dp_size, max_tokens_per_microbatch=MAX_TOKENS)


def make_records(store: BlobStore, spec: ModelSpec, *, seed: int = 0, longest: int = 0) -> Records:
    """longest: fed-in tokens of one more rollout, which its group scores against a short one."""
    rng = np.random.default_rng(seed)
    records = Records((), {}, spec.experts_per_token, 0, 0, 0, 0, {})
    groups = []
    for group in range(GROUPS):
        prompt = rng.integers(0, spec.vocab_size, int(rng.integers(*PROMPTS))).astype(np.int32)
        episodes = []
        for sibling in range(SIBLINGS):
            num_sampled = int(rng.integers(*OUTPUTS))
            if longest and (group, sibling) == (0, 0):
                num_sampled = longest + 1 - len(prompt)
            rollout = _rollout(store, rng, spec, prompt, num_sampled, (group, sibling), records)
            score = Score(float(sibling % 2))
            episodes.append(Episode(rollout.rollout_id, (Turn(rollout),), score))
        text = Prompt(group, tuple(prompt.tolist()), "", None, {})
        groups.append(EpisodeGroup(group, text, tuple(episodes)))
    records.groups = tuple(groups)
    return records


def _rollout(
    store: BlobStore,
    rng: np.random.Generator,
    spec: ModelSpec,
    prompt: np.ndarray,
    num_sampled: int,
    place: tuple[int, int],
    records: Records,
) -> Rollout:
    output = rng.integers(0, spec.vocab_size, num_sampled).astype(np.int32)
    tokens = np.concatenate([prompt, output])
    rows, sampled = len(tokens) - 1, len(output)
    ids = np.stack(
        [
            [rng.permutation(spec.experts)[: spec.experts_per_token] for _ in range(rows)]
            for _ in spec.moe_layers
        ]
    ).astype(np.uint8)
    records.routes[place] = dict(zip(spec.moe_layers, ids, strict=True))
    kept = [
        np.union1d(rng.choice(spec.vocab_size, int(rng.integers(1, 12)), replace=False), [token])
        for token in output
    ]
    offsets = np.cumsum([0, *(len(row) for row in kept)]).astype(np.int64)
    name = f"g{place[0]}.e{place[1]}"
    half = rows // 2  # two segments: reads cross a seam
    refs = store.seal(
        name,
        [
            np.ascontiguousarray(ids[:, :half]),
            np.ascontiguousarray(ids[:, half:]),
            offsets,
            np.concatenate(kept).astype(np.int32),
        ],
    )
    records.num_fed += rows
    records.num_sampled += sampled
    records.num_kept += int(offsets[-1])
    records.sum_kept_ids += int(np.concatenate(kept).sum())
    parts = ((refs[0], 0, half), (refs[1], half, rows))
    if spec.index_topk:
        chosen = _choose(rng, spec, rows)
        records.positions[place] = dict(zip(spec.index_layers, chosen, strict=True))
    return Rollout(
        rollout_id=name,
        token_ids=tokens,
        loss_mask=np.arange(len(tokens)) >= len(prompt),
        logprobs=(-rng.random(sampled) * 3).astype(np.float32),
        versions=(VersionSpan(0, V0),),
        routing=tuple(
            RoutingBlob(ref, begin, end, V0, spec.moe_layers, spec.experts)
            for ref, begin, end in parts
        ),
        sampling_mask=(MaskBlob(refs[2], refs[3], 0, sampled),),
        finish=Finish.LENGTH,
        sampling=SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.95, top_k=16),
        engine=0,
        indexer=seal_positions(store, name, records.positions[place], half)
        if spec.index_topk
        else (),
    )


def _choose(rng: np.random.Generator, spec: ModelSpec, rows: int) -> np.ndarray:
    """[L, rows, K] random positions up to each row's own, -1 where there are fewer."""
    chosen = np.full((spec.layers, rows, spec.index_topk), -1, np.int32)
    for layer in range(spec.layers):
        for at in range(rows):
            some = rng.permutation(at + 1)[: spec.index_topk]
            chosen[layer, at, : len(some)] = some
    return chosen


def seal_positions(
    store: BlobStore, name: str, positions: dict[int, np.ndarray], half: int
) -> tuple[IndexerBlob, ...]:
    """Two segments, as for routes."""
    rows = np.stack(list(positions.values()), 1)
    cuts = ((0, half), (half, len(rows)))
    refs = store.seal(f"{name}.indexer", [encode(rows[a:b], a) for a, b in cuts])
    layers, top_k = tuple(positions), rows.shape[2]
    return tuple(
        IndexerBlob(ref, begin, end, V0, layers, top_k)
        for ref, (begin, end) in zip(refs, cuts, strict=True)
    )

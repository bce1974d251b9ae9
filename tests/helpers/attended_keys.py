"""Keys that sparse attention read in a pass of the replay matrix, compared with the record.

Written again from megatron's layout, as the oracle of executed experts is: keys of a padded row are
positions, keys of a packed row count over all context-parallel ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant import dsa

from moerl.core.types import BatchPlan
from moerl.data.packing import Microbatch
from moerl.trainer.learner.step import Learner
from moerl.trainer.model.gpt import Model
from moerl.trainer.passes import forward
from tests.helpers.replay_matrix_records import Records

Calls = dict[int, list[torch.Tensor]]  # by layer, each [B, S, K]


@dataclass
class Attended:
    forward: Calls = field(default_factory=lambda: defaultdict(list))
    recompute: Calls = field(default_factory=lambda: defaultdict(list))


@contextmanager
def watching_attention(learner: Learner, *, moved: bool = False) -> Iterator[Attended]:
    """Notes the keys that the attention function itself is given.

    moved: a control, each token reads what the record says of the token before it.
    """
    seen, running, run, load = Attended(), [-1], dsa._run_sparse_attention, forward.load_positions
    indexers = learner.model.indexers
    assert indexers is not None

    def enter(layer: int) -> Any:
        def hook(*_: Any) -> None:
            running[0] = layer

        return hook

    def attend(**given: Any) -> torch.Tensor:
        first = indexers._pass is not None
        (seen.forward if first else seen.recompute)[running[0]].append(given["topk_indices"])
        output: torch.Tensor = run(**given)
        return output

    def load_moved(model: Model, batch: Microbatch, microbatch: int, chunk: int = 0) -> None:
        def read(layer: int) -> torch.Tensor:
            return batch.attended(layer).roll(1, 1)

        assert model.indexers is not None
        model.indexers.load(microbatch, read, batch.num_fed, chunk)

    handles = [
        layer.self_attention.core_attention.register_forward_pre_hook(enter(layer.layer_number - 1))
        for chunk in learner.model.chunks
        for layer in chunk.gpt.decoder.layers
    ]
    dsa._run_sparse_attention = attend
    forward.load_positions = load_moved if moved else load
    try:
        yield seen
    finally:
        dsa._run_sparse_attention, forward.load_positions = run, load
        for handle in handles:
            handle.remove()


def compare_attended(
    seen: Attended, learner: Learner, records: Records, plan: BatchPlan
) -> dict[str, int]:
    """Calls of attention on this rank, and those whose keys are the record's, padding included."""
    result: dict[str, int] = defaultdict(int)
    for kind in ("forward", "recompute"):
        for layer, calls in getattr(seen, kind).items():
            for microbatch, used in enumerate(calls):
                want = expected_keys(records, plan, microbatch, layer, used, learner)
                result[f"{kind}_right"] += int(sets(used) == want)
                result[f"{kind}_calls"] += 1
    return result


def sets(keys: torch.Tensor) -> list[list[set[int]]]:
    return [[set(row) - {-1} for row in rows] for rows in keys.tolist()]


def expected_keys(
    records: Records,
    plan: BatchPlan,
    microbatch: int,
    layer: int,
    used: torch.Tensor,
    learner: Learner,
) -> list[list[set[int]]]:
    """[B][S] sets of keys."""
    ranks = learner.parallel
    cp, (rows, slots) = ranks.cp_size, used.shape[:2]
    chosen = sorted(
        (row.row, row.group, row.episode)
        for row in plan.rows
        if row.dp_rank == ranks.dp_rank and row.microbatch == microbatch
    )
    recorded = [records.positions[g, e][layer].tolist() for _, g, e in chosen]

    def whole(rollout: list[list[int]], length: int, start: int) -> list[set[int]]:
        real = [{start + key for key in row if key >= 0} for row in rollout]
        return real + [{start + at} for at in range(len(real), length)]

    def mine(row: list[set[int]]) -> list[set[int]]:
        if cp == 1:
            return row
        size = len(row) // (2 * cp)
        pieces = [row[i * size : (i + 1) * size] for i in range(2 * cp)]
        return pieces[ranks.cp_rank] + pieces[2 * cp - 1 - ranks.cp_rank]

    if not learner.config.trainer.packing:
        recorded += [[]] * (rows - len(recorded))
        return [mine(whole(rollout, slots * cp, 0)) for rollout in recorded]
    unit, start, joined = 2 * cp if cp > 1 else 1, 0, []
    for rollout in recorded:
        length = -(-len(rollout) // unit) * unit
        joined += mine(whole(rollout, length, start))
        start += length
    return [joined + mine(whole([], slots * cp - start, start))]

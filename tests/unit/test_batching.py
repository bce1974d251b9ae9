"""Plans: every turn once, budgets kept, ranks alike."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from moerl.core.types import (
    BatchPlan,
    Episode,
    EpisodeGroup,
    Finish,
    PolicyVersion,
    Prompt,
    Rollout,
    SamplingParams,
    Turn,
    VersionSpan,
)
from moerl.data.batching import plan_batch, row_cost

V0 = PolicyVersion(0, 0)


def rollout(num_tokens: int) -> Rollout:
    mask = np.zeros(num_tokens, bool)
    mask[-1] = True
    return Rollout(
        "", np.zeros(num_tokens, np.int32), mask, np.zeros(1, np.float32), (VersionSpan(0, V0),),
        (), (), Finish.STOP, SamplingParams(1), 0,
    )  # fmt: skip


def groups(lengths: list[list[list[int]]]) -> list[EpisodeGroup]:
    """lengths[group][episode][turn]: tokens."""
    return [
        EpisodeGroup(
            g,
            Prompt(g, (1,), "", None, {}),
            tuple(
                Episode(f"{g}.{e}", tuple(Turn(rollout(n)) for n in turns))
                for e, turns in enumerate(episodes)
            ),
        )
        for g, episodes in enumerate(lengths)
    ]


def costs(plan: BatchPlan) -> dict[tuple[int, int], list[int]]:
    """Fed-in lengths of each (microbatch, rank)."""
    cells: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in plan.rows:
        turn = plan.groups[row.group].episodes[row.episode].turns[row.turn]
        cells[row.microbatch, row.dp_rank].append(turn.rollout.num_tokens - 1)
    return cells


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [1, 64, 300, 10**9])
@pytest.mark.parametrize("packed", [False, True])
def test_every_turn_once_within_budget_and_deterministic(
    dp_size: int, budget: int, packed: bool
) -> None:
    rng = np.random.default_rng(dp_size * 1000 + budget % 997)
    shape = [
        [[int(n) for n in rng.integers(2, 90, rng.integers(1, 3))] for _ in range(4)]
        for _ in range(5)
    ]
    plan = plan_batch(
        7, V0, groups(shape), dp_size=dp_size, max_tokens_per_microbatch=budget, packed=packed
    )
    want = {(g, e, t) for g in range(5) for e in range(4) for t in range(len(shape[g][e]))}
    got = [(row.group, row.episode, row.turn) for row in plan.rows]
    assert (len(got), set(got)) == (len(want), want)
    for lengths in costs(plan).values():
        cost = sum(lengths) if packed else len(lengths) * max(lengths)
        assert len(lengths) == 1 or cost <= budget
    places = [(row.microbatch, row.dp_rank, row.row) for row in plan.rows]
    assert len(set(places)) == len(places)
    assert {row.microbatch for row in plan.rows} == set(range(plan.num_microbatches))
    assert all(0 <= row.dp_rank < dp_size for row in plan.rows)
    for cell, lengths in costs(plan).items():
        rows = sorted(p[2] for p in places if p[:2] == cell)
        assert rows == list(range(len(lengths)))
    again = plan_batch(
        7, V0, groups(shape), dp_size=dp_size, max_tokens_per_microbatch=budget, packed=packed
    )
    assert again.rows == plan.rows


def test_equal_lengths_are_dealt_evenly() -> None:
    plan = plan_batch(0, V0, groups([[[10]] * 8] * 4), dp_size=2, max_tokens_per_microbatch=10**6)
    assert plan.num_microbatches == 1
    assert {cell: len(rows) for cell, rows in costs(plan).items()} == {(0, 0): 16, (0, 1): 16}


def test_like_lengths_share_a_microbatch() -> None:
    lengths = [[[n] for n in (3, 100, 3, 100, 3, 100, 3, 100)]]
    plan = plan_batch(0, V0, groups(lengths), dp_size=2, max_tokens_per_microbatch=400)
    padded = sum(len(rows) * max(rows) for rows in costs(plan).values())
    assert padded <= 4 * 99 + 4 * 2 + 99
    naive = 2 * 4 * 99  # cut in order of arrival
    assert padded < naive * 0.7, "control: without sorting, half of the tokens are padding"


def test_ranks_get_like_totals() -> None:
    rng = np.random.default_rng(0)
    lengths = [[[int(n)] for n in rng.integers(2, 400, 256)]]
    plan = plan_batch(0, V0, groups(lengths), dp_size=4, max_tokens_per_microbatch=4096)
    totals = [
        sum(len(rows) * max(rows) for (_, rank), rows in costs(plan).items() if rank == want)
        for want in range(4)
    ]
    assert max(totals) <= 1.1 * sum(totals) / 4


def test_a_long_turn_gets_a_microbatch_of_its_own() -> None:
    plan = plan_batch(
        0, V0, groups([[[500], [4], [4], [4]]]), dp_size=1, max_tokens_per_microbatch=20
    )
    assert sorted(sorted(rows) for rows in costs(plan).values()) == [[3, 3, 3], [499]]


def test_fewer_turns_than_ranks_leaves_ranks_empty() -> None:
    plan = plan_batch(0, V0, groups([[[5]]]), dp_size=4, max_tokens_per_microbatch=20)
    assert (len(plan.rows), plan.num_microbatches) == (1, 1)


PAIR = 3e-4  # attention costs as much as the weights at 6,700 tokens


def _waiting(plan: BatchPlan, dp_size: int) -> float:
    """Time of the slowest ranks of all microbatches, over the mean of the ranks."""
    cells = {cell: sum(row_cost(n, PAIR) for n in rows) for cell, rows in costs(plan).items()}
    slowest = sum(
        max(cells.get((microbatch, rank), 0) for rank in range(dp_size))
        for microbatch in range(plan.num_microbatches)
    )
    return slowest * dp_size / sum(cells.values())


@pytest.mark.parametrize(("dp_size", "below", "control"), [(2, 1.01, 1.05), (8, 1.05, 1.2)])
def test_ranks_wait_little_for_long_rows(dp_size: int, below: float, control: float) -> None:
    """A heavy tail of lengths; control: bins of equal tokens wait for those with long rows."""
    cap = 2**15
    lengths = np.random.default_rng(1).lognormal(8.3, 1.2, 512).astype(int).clip(2, 32_000)
    shape = groups([[[int(n)] for n in lengths]])
    by_cost, by_tokens = (
        plan_batch(
            0, V0, shape, dp_size=dp_size, max_tokens_per_microbatch=cap, packed=True, pair=pair
        )
        for pair in (PAIR, 0.0)
    )
    assert _waiting(by_cost, dp_size) < below
    assert _waiting(by_tokens, dp_size) > control
    least = -(-int((lengths - 1).sum()) // (cap * dp_size))
    assert by_cost.num_microbatches == least


def test_long_rows_share_bins_with_short_ones() -> None:
    lengths = [[[n] for n in (1001, 1001, *[101] * 20)]]
    plan = plan_batch(
        0, V0, groups(lengths), dp_size=2, max_tokens_per_microbatch=2500, packed=True, pair=PAIR
    )
    assert {cell: sorted(rows)[-1] for cell, rows in costs(plan).items()} == {
        (0, 0): 1000, (0, 1): 1000,
    }  # fmt: skip
    assert {len(rows) for rows in costs(plan).values()} == {11}


def test_packing_needs_no_more_microbatches_than_padding() -> None:
    lengths = [[[n] for n in (3, 90, 40, 61, 5, 77, 12, 33)]]
    counts = [
        plan_batch(
            0, V0, groups(lengths), dp_size=1, max_tokens_per_microbatch=100, packed=packed
        ).num_microbatches
        for packed in (False, True)
    ]
    assert counts[1] < counts[0]

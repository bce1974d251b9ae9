"""Two gloo processes hold half of the vocabulary each; the result is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moerl.algorithms.masked_logprob import SamplingMask, VocabShard, full_logprobs, kept_logprobs
from moerl.algorithms.mismatch import MismatchSums

S, V, WORLD = 9, 12, 2


def _case() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(S, V, dtype=torch.float64, generator=generator)
    keep = torch.rand(S, V, generator=generator) < 0.3
    sampled = torch.randint(0, V, (S,), generator=generator)
    keep[:3, : V // 2] = False  # rank 0 keeps nothing of these rows
    sampled[:3] = V - 1
    keep[torch.arange(S), sampled] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return logits, sampled, offsets, keep.nonzero()[:, 1]


def _score(shard: torch.Tensor, start: int, group: dist.ProcessGroup | None) -> dict:
    _, sampled, offsets, ids = _case()
    tau, result = torch.full((S,), 0.8, dtype=torch.float64), {}
    common = {"temperature_S": tau, "shard": VocabShard(start, group)}
    for name, scored in (
        ("kept", lambda z: kept_logprobs(z, sampled, SamplingMask(offsets, ids), **common)),
        ("full", lambda z: full_logprobs(z, sampled, vocab_size=V, **common)),
    ):
        z = shard.clone().requires_grad_()
        lp, entropy, _ = scored(z)
        lp.square().sum().backward()
        result[name] = (lp.detach(), entropy, z.grad)
    return result


def _rank(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    group = dist.new_group(range(WORLD))
    width = V // WORLD
    shard = _case()[0][:, rank * width : (rank + 1) * width]
    result = _score(shard, rank * width, group)
    d = torch.arange(4.0) * (rank + 1) * 0.1
    sums = MismatchSums.of(-d, torch.zeros(4), torch.tensor([0, 1, 3, 9])).all_reduce(group)
    torch.save((result, sums.metrics()), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> list[tuple[dict, dict]]:
    """What each of two processes computed: scores of its shard, joined mismatch metrics."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_rank, (free_port(), folder), nprocs=WORLD, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_two_vocabulary_shards_over_gloo(ranks: list[tuple[dict, dict]]) -> None:
    want = _score(_case()[0], 0, None)
    for name in ("kept", "full"):
        for result, _ in ranks:
            torch.testing.assert_close(result[name][0], want[name][0], rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(result[name][1], want[name][1], rtol=1e-12, atol=1e-12)
        grad = torch.cat([result[name][2] for result, _ in ranks], 1)
        torch.testing.assert_close(grad, want[name][2], rtol=1e-13, atol=1e-14)


def test_mismatch_sums_of_two_ranks_are_those_of_their_tokens(
    ranks: list[tuple[dict, dict]],
) -> None:
    d = torch.cat([torch.arange(4.0) * 0.1, torch.arange(4.0) * 0.2])
    want = MismatchSums.of(-d, torch.zeros(8), torch.tensor([0, 1, 3, 9] * 2)).metrics()
    for _, got in ranks:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert abs(got[name] - value) < 1e-12, name


def test_control_a_shard_without_its_group_is_wrong() -> None:
    want = _score(_case()[0], 0, None)["full"][0]
    half = _score(_case()[0][:, V // 2 :], V // 2, None)["full"][0]
    assert float((half - want).abs().max()) > 0.1

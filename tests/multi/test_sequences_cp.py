"""Two gloo processes hold parts of the same sequences; the loss is that of one process.

What context parallelism does to flat tokens: each rank has some tokens of every sequence, possibly
none of one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from moerl.algorithms.loss import policy_loss
from moerl.algorithms.mismatch import MismatchSums
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.schema import AlgorithmConfig

WORLD = 2
OF = torch.tensor([0] * 5 + [1] * 2 + [2] * 4)
MINE = [torch.tensor([0, 1, 4, 7, 10]), torch.tensor([2, 3, 5, 6, 8, 9])]  # 1 lies on rank 1 alone
MASKS = ["mis_geometric", "mis_sequence", "opsm"]
CONFIGS = {
    name: AlgorithmConfig(
        objective=name,
        corrections=MASKS,
        off_policy_delta=0.02,
        mis_sequence_low=0.3,
        mis_sequence_high=3.0,
        mis_geometric_low=0.8,
        mis_geometric_high=1.25,
        clip_low=1.0,
        clip_high=1e9,
    )
    for name in ("gspo", "gspo_token", "gmpo", "topr", "kimi", "ppo_clip")
}


def _result(rows: Tensor, group: dist.ProcessGroup | None) -> dict[str, tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(1)
    lp, engine, advantage = (torch.randn(len(OF), generator=g).double() for _ in range(3))
    lp, advantage = -lp.abs() - 0.1, advantage[OF * 3]
    engine = lp + 0.2 * engine
    found = {}
    for name, config in CONFIGS.items():
        leaf = lp[rows].clone().requires_grad_()
        sequences = Sequences(OF[rows], 3, group)
        tokens = Tokens(leaf, engine[rows], advantage[rows], sequences, torch.zeros_like(OF[rows]))
        loss = policy_loss(config, tokens, torch.full((len(rows),), 0.1).double())
        loss.loss.backward()
        sums = MismatchSums.of(lp[rows], engine[rows], tokens.lag, sequences)
        found[name] = (loss.loss.detach(), loss.sums, leaf.grad, sums.seq_sums)
    return found


def _rank(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    torch.save(_result(MINE[rank], dist.new_group(range(WORLD))), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_rank, (free_port(), folder), nprocs=WORLD, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sequence_cut_over_two_ranks_is_one_sequence(name: str, ranks: list[dict]) -> None:
    loss, sums, gradient, seq_sums = _result(torch.arange(len(OF)), None)[name]
    joined = torch.zeros_like(gradient)
    for rank, rows in enumerate(MINE):
        joined[rows] = ranks[rank][name][2]
    torch.testing.assert_close(sum(r[name][0] for r in ranks), loss)
    torch.testing.assert_close(joined, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(r[name][1] for r in ranks), sums)
    torch.testing.assert_close(sum(r[name][3] for r in ranks), seq_sums)


def test_control_without_the_group_the_parts_differ() -> None:
    whole = _result(torch.arange(len(OF)), None)
    part = _result(MINE[0], None)
    for name in ("gspo", "gmpo", "topr", "kimi"):
        assert (part[name][2] - whole[name][2][MINE[0]]).abs().max() > 1e-4, name

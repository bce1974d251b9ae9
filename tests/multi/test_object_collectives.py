"""Values between real ranks: each arrives with its type, and a pickle is refused, not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rank_server import run_ranks

PROGRAM = """
import os, pickle, sys
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from moerl.distributed.object_collectives import all_gather_values, broadcast_value, gather_values
from moerl.distributed.token_store import rank_store
from moerl.core.types import Array

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=rank_store(timedelta(seconds=60)), rank=rank, world_size=3)
everyone, two = dist.group.WORLD, dist.new_group([1, 2])

class Planted:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}",)

if sys.argv[2] == "values":
    mine = {row: np.full(row, rank + 0.5) for row in range(rank * 2)}  # of different sizes
    for found in (all_gather_values(mine, dict[int, Array], everyone),
                  gather_values(mine, dict[int, Array], everyone)):
        assert [len(part) for part in found] in ([0, 2, 4], [])
        for source, part in enumerate(found):
            for row, values in part.items():
                assert values.dtype == np.float64 and (values == source + 0.5).all()
    assert (gather_values(rank, int, everyone) == []) == (rank > 0)
    assert broadcast_value((rank, "first") if rank == 0 else None, tuple[int, str],
                           everyone) == (0, "first")
    assert broadcast_value(b"" if rank == 0 else None, bytes, everyone) == b""
    if rank:  # of a group, not of the job
        assert broadcast_value(rank, int, two) == 1
        assert all_gather_values(str(rank), str, two) == ["1", "2"]
else:
    data = pickle.dumps(Planted())
    if rank == 0:
        size = torch.tensor([len(data)])
        bytes_ = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(size, 0)
        dist.broadcast(bytes_, 0)
    else:
        try:
            broadcast_value(None, str, everyone)
            raise SystemExit("it was read")
        except msgspec.MsgspecError:
            pass
    if sys.argv[2] == "control" and rank == 1:
        pickle.loads(data)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_values_arrive_with_their_types(program: Path) -> None:
    run_ranks(3, [str(program), "none", "values"])


@pytest.mark.parametrize("how", ["pickle", "control"])
def test_a_pickle_is_not_run(program: Path, tmp_path: Path, how: str) -> None:
    run_ranks(3, [str(program), str(tmp_path / "ran"), how])
    assert (tmp_path / "ran").exists() == (how == "control")

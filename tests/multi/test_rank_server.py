"""Forked ranks (tests/helpers/rank_server.py) meet, fail loudly, and do not hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rank_server import run_ranks

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from moerl.distributed.token_store import rank_store

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=rank_store(timedelta(seconds=60)), rank=rank, world_size=size)
total = torch.ones(1)
dist.all_reduce(total)
print("ranks", int(total), sys.argv[1])
if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    sys.exit("rank 1 has a reason")
if sys.argv[1] == "raise":
    raise OSError("in both")
if sys.argv[1] == "hang":
    time.sleep(3600)
dist.destroy_process_group()
"""

SEVERAL_TRAINERS = """
import os
import torch.distributed as dist
from moerl.config.schema import ParallelConfig
from moerl.trainer.model import parallel, platform
from tests.helpers.patience import patience
from tests.helpers.rank_server import meet_apart

me = int(os.environ["LOCAL_RANK"])
for number, members in enumerate(([0, 1], [1], [1, 0])):
    if me in members:
        os.environ |= {"RANK": str(members.index(me)), "WORLD_SIZE": str(len(members))}
        meet_apart(number)
        sizes = ParallelConfig(dp=len(members))
        ranks = parallel.start(sizes, platform.prepare("cpu"), timeout_s=patience(60))
        dist.barrier()
        print("trainer", number, "has rank", ranks.rank)
        parallel.stop()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_ranks_meet_again_and_again(program: str) -> None:
    for count in (2, 1, 2):
        assert run_ranks(count, [program, "well"]).count(f"ranks {count} well") == count


def test_ranks_live_through_several_trainers(tmp_path: Path) -> None:
    program = tmp_path / "several.py"
    program.write_text(SEVERAL_TRAINERS)
    output = run_ranks(2, [str(program)])
    assert sorted(line for line in output.splitlines() if line.startswith("trainer ")) == [
        f"trainer {number} has rank {rank}"
        for number, rank in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
    ]


@pytest.mark.parametrize(
    ("what", "says"),
    [("fail", "rank 1 has a reason"), ("raise", "OSError: in both"), ("hang", "codes .-9, -9")],
)
def test_failures_are_reported(program: str, what: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        run_ranks(2, [program, what], timeout_s=20.0 if what != "hang" else 3.0)

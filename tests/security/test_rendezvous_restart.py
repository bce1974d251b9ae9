"""Real torchrun agents of two nodes over the store behind a token: what dies is started again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.patience import Patience

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 200.0
# One rank: meets the other, says so, then dies once or stays until it may end.
RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from moerl.distributed.token_store import rank_store

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
store = rank_store(timedelta(seconds=100))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
with (folder / f"met-{rank}").open("a") as file:
    file.write(f"{int(total)} {os.environ['TORCHELASTIC_RESTART_COUNT']};")
if sys.argv[2] == "dies" and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
while not (folder / "end").exists():
    time.sleep(0.1)
"""


class Nodes:
    """A job of two nodes on this machine."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how
        (folder / "rank.py").write_text(RANK)
        self.agents = [self.agent(0), self.agent(1)]

    def agent(self, slot: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "moerl.distributed.torchrun", "--nnodes", "2"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "x"]
        command += ["--rdzv-endpoint", str(self.folder / "store.json")]
        command += ["--rdzv-conf", f"slot={slot},join_timeout=100"]
        with (self.folder / f"agent-{slot}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, str(self.folder / "rank.py"), str(self.folder), self.how],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def met(self, rank: int) -> list[str]:
        """World size and restarts at each start of the rank."""
        path = self.folder / f"met-{rank}"
        return path.read_text().split(";")[:-1] if path.exists() else []

    def wait_until_met(self, times: int) -> None:
        limit = Patience(WAIT_S)
        while min(len(self.met(0)), len(self.met(1))) < times:
            assert not limit.over(), (self.folder / "agent-1.log").read_text()[-3000:]
            time.sleep(0.1)

    def finish(self) -> list[int]:
        (self.folder / "end").touch()
        return [agent.wait(WAIT_S) for agent in self.agents]

    def kill(self, slot: int) -> None:
        """The whole node: the agent and its rank."""
        agent = psutil.Process(self.agents[slot].pid)
        for process in (agent, *agent.children(recursive=True)):
            process.kill()
        self.agents[slot].wait()


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(tmp_path, request.param)
    yield made
    for slot, agent in enumerate(made.agents):
        if agent.poll() is None:
            made.kill(slot)


@pytest.mark.parametrize("nodes", ["dies"], indirect=True)
def test_both_nodes_start_their_ranks_again_after_one_died(nodes: Nodes) -> None:
    nodes.wait_until_met(2)
    assert nodes.finish() == [0, 0]
    assert nodes.met(1) == ["2 0", "2 1"]
    assert nodes.met(0) in (["2 0", "2 0"], ["2 0", "2 1"]), "it may have seen the other rank's end"


@pytest.mark.parametrize("nodes", ["stays"], indirect=True)
def test_a_lost_first_node_comes_back(nodes: Nodes) -> None:
    """The store was its agent's: the other node finds the new one, and its ranks meet there."""
    nodes.wait_until_met(1)
    nodes.kill(0)
    nodes.agents[0] = nodes.agent(0)
    nodes.wait_until_met(2)
    assert nodes.finish() == [0, 0]
    assert not (nodes.folder / "store.json").exists()

"""One engine over two hosts: records, publishes, the death of a server and of a follower.

Hosts are network namespaces (`tests/helpers/network_hosts`); Ray, SGLang, Megatron and the scripts
are real.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.cluster_runs import ClusterRun, cluster_run
from tests.helpers.network_hosts import Host, hosts_or_skip

# nats, fp32, trainer and engine with the same weights; 0.13 when one rank of two keeps its old ones
MAX_GAP = 5e-5
START_S = 700.0  # of an engine and a trainer, on a loaded machine of two cores
SERVER = "sglang::scheduler"


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_an_engine_of_two_hosts(three: list[Host], tmp_path: Path) -> None:
    """Without lag each step trains what the last publish sampled: bytes to both hosts were right.

    Every death ends the whole engine, which is started again and gets the current weights.
    """
    settings = (
        *("engine.count=1", "engine.tp=2", "engine.nodes=2", "engine.args.ep_size=2"),
        *("run.steps=12", "checkpoint.every=4", "sync.timeout_s=30", "rollout.buffer_depth=0"),
        *("rollout.max_lag=0", "supervision.max_restarts=6", "trainer.step_timeout_s=700"),
        *("trainer.parallel.dp=1", "trainer.parallel.ep=1", f"engine.start_timeout_s={START_S}"),
    )
    with cluster_run(three, tmp_path, *settings, engines=2) as run:
        run.wait_for(lambda: len(run.rows()) >= 2, START_S)
        for host in (run.engine_nodes[0], run.head):
            (scheduler,) = below(host.pid, SERVER)  # one rank on each host
            kill(run, scheduler)
        kill(run, only_follower(run))  # its server ends with it, and node 0's host too
        run.finish(900)
        rows = run.rows()
    assert [row["step"] for row in rows] == list(range(12))
    for name in ("routing/replay_cover_frac", "keep/cover_frac"):
        assert {row[name] for row in rows} == {1.0}
    gaps = [row["mismatch/abs_dlogp_max/lag_0"] for row in rows]
    print(f"max |d| of {len(gaps)} steps: {max(gaps):.1e}")
    assert max(gaps) <= MAX_GAP
    assert run.output.read_text().count("engine 0 is back") == 3


def kill(run: ClusterRun, victim: psutil.Process) -> None:
    """All servers of the engine end, and steps are made with new ones."""
    servers = [one for pid in hosts_of(run) for one in below(pid, SERVER)]
    assert len(servers) == 2
    before = len(run.rows())
    victim.kill()
    run.wait_for(lambda: not alive(servers))
    run.wait_for(lambda: len(run.rows()) >= before + 2, START_S)


def only_follower(run: ClusterRun) -> psutil.Process:
    """The process on the engine's second node; Ray chooses which host that is."""
    (found,) = [one for pid in hosts_of(run) for one in below(pid, "ray::FollowerActor")]
    return found


def hosts_of(run: ClusterRun) -> list[int]:
    return [run.head.pid, run.engine_nodes[0].pid]


def below(pid: int, name: str) -> list[psutil.Process]:
    """Processes of a name that a host's script started."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(child.cmdline()):
                found.append(child)
    return found


def alive(members: list[psutil.Process]) -> list[psutil.Process]:
    return [m for m in members if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]

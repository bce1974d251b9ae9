"""A trainer node whose run's root process was killed: real processes, torchrun at its rendezvous.

Nothing closes the endpoints folder, so it names a controller for ever.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from moerl.config import load_config, save_config
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import Patience, patience
from tests.helpers.train_runs import survivors

LEASE_S = 6.0
ROOT = f"""
import sys, time
from pathlib import Path
from moerl.launch.nodes.lease import LeaseKeeper
from moerl.runtime.run_dir import RunDir
endpoints = RunDir(Path(sys.argv[1])).endpoints
endpoints.open("tcp://127.0.0.1:1", "token")
keeper = LeaseKeeper(endpoints.lease, {LEASE_S})
while True:
    keeper.renew()
    time.sleep(0.1)
"""
SETTINGS = [
    *("cluster=hosts", "cluster.interface=lo", "cluster.nodes.engine.hosts=[127.0.0.1]"),
    *("cluster.nodes.trainer.count=2", "cluster.nodes.trainer.hosts=[127.0.0.1,127.0.0.2]"),
]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_trainer_node_leaves_when_the_root_process_was_killed(tmp_path: Path) -> None:
    """The second node never comes, so torchrun waits and starts no ranks."""
    run = RunDir(tmp_path / "run")
    run.create()
    settings = [*SETTINGS, f"run.root={tmp_path}", "run.name=run"]
    save_config(load_config("quickstart", settings), run.config)
    root = subprocess.Popen([sys.executable, "-c", ROOT, str(run.root)])
    command = [sys.executable, "-m", "moerl.launch.nodes.trainer_node", str(run.root), "0"]
    node = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        members = with_torchrun(node)
        time.sleep(2 * LEASE_S)
        assert node.poll() is None, "control: the root process lives"
        root.kill()
        left = survivors(members, 60.0)
        assert not left, [(p.pid, p.cmdline()[:4]) for p in left]
        assert node.wait(patience(5)) == 1
        assert node.stderr is not None
        assert "no sign of the run's root process for" in node.stderr.read()
        assert run.endpoints.start(), "control: the folder still names a controller"
    finally:
        for process in (root, node):
            process.kill()
            process.wait()


def with_torchrun(node: subprocess.Popen[str]) -> list[psutil.Process]:
    """The node's processes, once torchrun is among them."""
    limit = Patience(120.0)
    while not limit.over():
        assert node.poll() is None, node.stderr and node.stderr.read()
        below = psutil.Process(node.pid).children(recursive=True)
        if below:
            return [psutil.Process(node.pid), *below]
        time.sleep(0.2)
    raise AssertionError("no torchrun was started")

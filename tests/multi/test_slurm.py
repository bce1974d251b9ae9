"""tools/launch/slurm.sbatch over two hosts, preempted once; srun, scontrol and sbatch are stubs.

The script, `moerl train`, torchrun and the hosts (network namespaces) are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from moerl.observe.metrics import read_rows
from moerl.runtime.run_dir import RunDir
from tests.helpers.network_hosts import ROOT, Host, environment, hosts_or_skip
from tests.helpers.patience import Patience, patience

SCRIPT = ROOT / "tools/launch/slurm.sbatch"
STUB = ROOT / "tests/helpers/stub_slurm.py"
WAIT_S = 500.0


class Slurm:
    """An allocation of two nodes, as the script sees it."""

    def __init__(self, folder: Path, nodes: dict[str, Host] | None = None) -> None:
        self.folder = folder
        for name in ("srun", "scontrol", "sbatch"):
            stub = folder / "bin" / name
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(f"#!{sys.executable}\n{STUB.read_text()}")
            stub.chmod(0o755)
        commands = {name: host.command([]) for name, host in (nodes or {}).items()}
        (folder / "hosts.json").write_text(json.dumps(commands))

    def start(self, *arguments: str, job: str = "", nodes: str = "") -> subprocess.Popen[str]:
        env = environment() | {"STUB_SLURM": str(self.folder)}
        env["PATH"] = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env.pop("SLURM_JOB_ID", None)
        if job:
            env |= {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes}
        with (self.folder / f"job-{job or 'submit'}.txt").open("a") as log:
            return subprocess.Popen(
                ["bash", str(SCRIPT), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
                cwd=ROOT,
            )

    def calls(self, name: str) -> list[list[str]]:
        lines = (self.folder / "calls.log").read_text().splitlines()
        return [call[1:] for call in map(json.loads, lines) if call[0] == name]


def test_it_submits_itself_with_the_recipes_nodes(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    arguments = ("qwen3-30b-a3b", "cluster.slurm.partition=gpu", "--run", "a")
    assert slurm.start(*arguments).wait(patience(120)) == 0, (
        tmp_path / "job-submit.txt"
    ).read_text()
    ((*options, script, recipe, setting, _, _),) = slurm.calls("sbatch")
    assert {"--nodes=4", "--gpus-per-node=8", "--requeue", "--partition=gpu"} < set(options)
    assert (script, recipe, setting) == ("tools/launch/slurm.sbatch", *arguments[:2])
    assert slurm.start("no-such-recipe", "--run", "a").wait(patience(120)) != 0, (
        "and refuses in a sentence"
    )
    assert "RECIPE = 'no-such-recipe'" in (tmp_path / "job-submit.txt").read_text()


def test_an_engine_over_nodes_has_a_step_on_each(tmp_path: Path) -> None:
    """Each step runs a stand-in for its command, which ends when all three steps have begun.

    The script ends the other steps when the controller's is done, even one that has only begun.
    """
    slurm, nodes = Slurm(tmp_path), ("10.231.17.1", "10.231.17.2", "10.231.17.3")
    begun = f"until (($(grep -c '\"srun\"' {tmp_path / 'calls.log'}) == 3)); do sleep 0.1; done"
    stand_in = ["timeout", "60", "bash", "-c", begun]
    (tmp_path / "hosts.json").write_text(json.dumps(dict.fromkeys(nodes, stand_in)))
    recipe = (
        *("quickstart", "cluster=hosts", "cluster.launcher=slurm", f"run.root={tmp_path}"),
        *("engine.count=1", "engine.tp=2", "engine.nodes=2", "cluster.nodes.engine.count=2"),
        *("cluster.nodes.trainer.count=1", "--run", "run"),
    )
    job = slurm.start(*recipe, job="7", nodes=",".join(nodes))
    assert job.wait(patience(120)) == 0, (tmp_path / "job-7.txt").read_text()
    found = {}
    for call in slurm.calls("srun"):
        at = call.index("--open-mode=append")
        node = next(word for word in call[:at] if word.startswith("--nodelist="))
        found[node.removeprefix("--nodelist=")] = call[at + 1 :]
    run = str(tmp_path / "run")
    assert found[nodes[1]] == ["tools/launch/engine_node.sh", run, "1"]
    assert found[nodes[2]] == ["tools/launch/torchrun.sh", run, "0"]
    assert f"cluster.nodes.engine.hosts=[{nodes[0]},{nodes[1]}]" in found[nodes[0]]
    assert set(recipe[1:]) < set(found[nodes[0]]), "the controller's step gets every setting"


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts_or_skip(2) as made:
        yield made


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_a_preempted_job_goes_on_where_it_was(two: list[Host], tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, {two[0].address: two[0], two[1].address: two[1]})
    run, nodes = RunDir(tmp_path / "run"), ",".join(host.address for host in two)
    recipe = (
        *("quickstart", "cluster=hosts", "cluster.launcher=slurm", f"run.root={tmp_path}"),
        *("cluster.nodes.trainer.count=1", "run.steps=12", "checkpoint.every=2"),
        *("rollout.groups_per_step=8", "rollout.group_size=4", "observe.engine_alone_s=0"),
        *("run.console=lines", "--run", "run"),
    )
    job = slurm.start(*recipe, job="7", nodes=nodes)
    try:
        wait_until(lambda: len(read_rows(run.metrics)) >= 4, job, tmp_path)
        members = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(patience(120)) != 0
        assert slurm.calls("scontrol")[-1] == ["requeue", "7"]
        assert not alive(members), "a step outlives the job"
        trained = len(read_rows(run.metrics))

        job = slurm.start(*recipe, job="7", nodes=nodes)
        wait_until(lambda: job.poll() is not None, None, tmp_path)
        assert job.returncode == 0, (tmp_path / "job-7.txt").read_text()
    finally:
        if job.poll() is None:
            for member in psutil.Process(job.pid).children(recursive=True):
                member.kill()
            job.kill()
    rows = read_rows(run.metrics)
    assert [row["step"] for row in rows] == list(range(12))
    assert trained < 12
    assert len({row["version"].split(".")[0] for row in rows}) == 2, "the second start went on"
    assert (run.hf / "config.json").is_file()
    names = {path.name for path in run.logs.glob("slurm-7-*.log")}
    assert names == {"slurm-7-controller.log", "slurm-7-trainer-0.log"}


def wait_until(what: Callable[[], bool], job: subprocess.Popen[str] | None, folder: Path) -> None:
    limit = Patience(WAIT_S)
    while not what():
        logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("run/logs/slurm*"))
        assert job is None or job.poll() is None, (folder / "job-7.txt").read_text() + logs
        assert not limit.over(), logs
        time.sleep(0.2)


def alive(members: list[psutil.Process]) -> list[psutil.Process]:
    limit = Patience(30)
    while True:
        left = [m for m in members if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]
        if not left or limit.over():
            return left
        time.sleep(0.1)

"""Engine nodes of a run over four hosts: one more from the start, one that joins, one that is lost.

Hosts are network namespaces (`tests/helpers/network_hosts`); Ray, SGLang, Megatron and the scripts
are real.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moerl.records.blob_copies import copied_blobs_of
from tests.helpers.cluster_runs import ClusterRun, cluster_run, ranks_of
from tests.helpers.network_hosts import Host, environment, hosts_or_skip
from tests.helpers.patience import patience

STEPS = 80


@pytest.fixture
def four() -> Iterator[list[Host]]:
    with hosts_or_skip(4) as made:
        yield made


def engines(run: ClusterRun, host: Host, *arguments: str) -> str:
    """`moerl engines` on a host."""
    done = subprocess.run(
        host.command([sys.executable, "-m", "moerl", "engines", *arguments]),
        capture_output=True, text=True, timeout=patience(120), check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def responses(run: ClusterRun, text: str) -> bool:
    return text in run.output.read_text()


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_engine_nodes_come_and_go(
    four: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is made while the late node starts, so that the run is not over before it has."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("MOERL_TEST_GATE", str(gate))
    first, second, trainer, late = four
    settings = (
        *("engine.count=2", f"run.steps={STEPS}", "checkpoint.every=4", "sync.timeout_s=20"),
        *("supervision.max_restarts=6", "trainer.step_timeout_s=120"),
        *("task.reward=tests.helpers.run_rewards:gated", "task.score_timeout_s=300"),
        *("task.pass_environment=[MOERL_TEST_GATE]", "task.limits.user=same"),  # it sees the gate
    )
    folder = str(tmp_path / "run")
    with cluster_run([first, second, trainer], tmp_path, *settings, engines=2) as run:
        run.wait_for(lambda: len(run.rows()) >= 2)
        assert run.rows()[-1]["async/engines"] == 2.0, engines(run, first, "list", folder)
        run.wait_for(lambda: f"reads blobs of node {second.address}" in trainer_log(run))

        gate.touch()
        joining = run.start(late, "tools/launch/engine_node.sh", folder, "--slots", "1")
        run.wait_for(lambda: responses(run, "engine 2 has joined"))
        gate.unlink()
        run.wait_for(lambda: f"reads blobs of node {late.address}" in trainer_log(run))

        end_of(run.engine_nodes[0])  # with its store, for good
        run.wait_for(lambda: responses(run, "engine 1 died"))
        before = len(run.rows())
        run.wait_for(lambda: len(run.rows()) >= before + 6)
        assert " 1 " in engines(run, first, "list", folder), "it may come back on another node"
        engines(run, first, "remove", folder, "1")
        run.wait_for(lambda: responses(run, "engine 1 has left"))

        joining.send_signal(signal.SIGTERM)
        run.wait_for(lambda: responses(run, "engine 2 has left"))
        assert joining.wait(patience(120)) == 0
        run.finish(600)
        rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    for name in ("routing/replay_cover_frac", "keep/cover_frac"):
        assert {row[name] for row in rows} == {1.0}
    assert rows[-1]["async/engines"] == 1.0
    assert max(row["async/engines"] for row in rows) == 3.0
    print("groups lost with a node:", sum(row["async/dropped_lost_groups"] for row in rows))


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_shared_records_outlive_an_engine_node(four: list[Host], tmp_path: Path) -> None:
    """It is lost with records of groups in the line: they are trained from the run directory.

    The ranks are stopped until it is lost, so that they have not read these records before.
    """
    first, second, trainer, _ = four
    settings = (
        *("engine.count=2", "run.steps=24", "checkpoint.every=4", "sync.timeout_s=20"),
        *("supervision.max_restarts=6", "trainer.step_timeout_s=300"),
        "rollout.durability=shared",
    )
    folder = str(tmp_path / "run")
    with cluster_run([first, second, trainer], tmp_path, *settings, engines=2) as run:
        run.wait_for(lambda: len(run.rows()) >= 2)
        ranks = ranks_of(run)
        assert len(ranks) == 2
        for rank in ranks:
            rank.suspend()
        run.wait_for(lambda: unread_of(run, second) >= 1)  # the line fills up, with both engines'
        end_of(run.engine_nodes[0])
        run.wait_for(lambda: responses(run, "engine 1 died"))
        before = len(run.rows())
        for rank in ranks:
            rank.resume()
        run.wait_for(lambda: len(run.rows()) >= before + 4)
        engines(run, first, "remove", folder, "1")
        run.finish(600)
        rows = run.rows()
        assert f"blobs of node {second.address}" in copies_read(run)
    assert [row["step"] for row in rows] == list(range(24))
    for name in ("routing/replay_cover_frac", "keep/cover_frac"):
        assert {row[name] for row in rows} == {1.0}
    assert sum(row["async/dropped_lost_groups"] for row in rows) == 0
    assert not run.dir.segments.exists()
    print("groups trained from copies:", sum(row["async/copied_groups"] for row in rows))


def unread_of(run: ClusterRun, host: Host) -> int:
    """Groups with records of a host that are in no plan: the trainer does not know them yet."""
    journal = f"file:{run.dir.journal / 'journal.sqlite'}?mode=ro"
    with contextlib.closing(sqlite3.connect(journal, uri=True)) as db:
        ready = [row[0] for row in db.execute("select id from groups where state = 'ready'")]
    files = [copied_blobs_of(run.dir.segments / f"{group}.group") or {} for group in ready]
    return sum(any(host.address in name for name in parts) for parts in files)


def copies_read(run: ClusterRun) -> str:
    """What the controller and trainer ranks say of copies that they read."""
    lines = trainer_log(run).splitlines()
    lines += (run.dir.logs / "controller.log").read_text().splitlines()
    return "\n".join(line for line in lines if "read from copies" in line)


def trainer_log(run: ClusterRun) -> str:
    return "".join(path.read_text() for path in run.dir.logs.glob("trainer-*.log"))


def end_of(process: subprocess.Popen[str]) -> None:
    """SIGKILL of everything that a host's script started."""
    tree = psutil.Process(process.pid)
    for member in (tree, *tree.children(recursive=True)):
        member.kill()
    process.wait()

"""A run over three hosts: controller and engine on one, a trainer of two ranks on the two others.

The hosts are network namespaces of this machine with addresses of their own
(`tests/helpers/network_hosts`); everything else is real: SGLang, Ray's head, torchrun with its
rendezvous, gloo across hosts for the trainer and for the weights, records read from the engine's
host by byte range.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.cluster_runs import ClusterRun, cluster_run, ranks_of
from tests.helpers.network_hosts import Host, hosts_or_skip
from tests.helpers.patience import Patience
from tests.helpers.train_runs import check_history

STEPS, CUT_S = 16, 20.0


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_run_over_three_hosts_whose_links_are_cut(three: list[Host], tmp_path: Path) -> None:
    """The engines' host is away for 20 s, then a trainer host until its ranks start again."""
    assert all("default" not in host.routes() for host in three), "nothing outside is reachable"
    settings = (f"run.steps={STEPS}", "checkpoint.every=2", "trainer.step_timeout_s=30")
    with cluster_run(three, tmp_path, *settings, "supervision.max_restarts=6") as run:
        run.wait_for(lambda: len(run.rows()) >= 3)
        members = run.members()
        secrets = [(run.dir.endpoints.folder / name).read_text() for name in ("token", "ray-token")]
        assert no_command_line_has(secrets, members)
        assert (run.dir.endpoints.folder.stat().st_mode & 0o777) == 0o700
        assert "10.231.17.1:17110" in blobs_of(run), "records were read from the engine's host"
        cut_engines(run)
        members += cut_trainer(run)
        run.finish(600)
        check_rows(run)
        assert (run.dir.hf / "config.json").is_file()
        assert run.dir.latest_checkpoint() is not None
        for secret in secrets:
            assert secret not in run.text(), "a log shows a secret"
        assert not psutil_alive(members), "a process outlives the run"
        assert not (run.dir.endpoints.folder / "token").exists()


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_trainer_that_hangs_is_started_again(three: list[Host], tmp_path: Path) -> None:
    """All ranks are stopped: nobody among them notices, and their nodes have to end them."""
    settings = (f"run.steps={STEPS}", "checkpoint.every=2", "trainer.step_timeout_s=30")
    with cluster_run(three, tmp_path, *settings, "supervision.max_restarts=6") as run:
        run.wait_for(lambda: len(run.rows()) >= 3)
        before, ranks = incarnation(run), ranks_of(run)
        assert len(ranks) == 2
        for rank in ranks:
            rank.suspend()
        run.wait_for(lambda: incarnation(run) > before)
        assert "it made no step for" in run.output.read_text()
        assert not psutil_alive(ranks)
        run.finish()
        check_rows(run)


def cut_engines(run: ClusterRun) -> None:
    """The first host is away; afterwards the run goes on."""
    run.hosts[0].cut()
    before = len(run.rows())
    time.sleep(CUT_S)
    run.hosts[0].restore()
    run.wait_for(lambda: len(run.rows()) > before + 2)


def cut_trainer(run: ClusterRun) -> list[psutil.Process]:
    """The last host is away until its trainer fell or was given up; returns the next processes."""
    before = incarnation(run)
    run.hosts[2].cut()
    run.wait_for(lambda: trainer_fell(run) or "trainer died" in run.output.read_text())
    run.hosts[2].restore()
    run.wait_for(lambda: incarnation(run) > before)
    return run.members()


def check_rows(run: ClusterRun) -> None:
    """One row per surviving step, replay complete in each, two incarnations, each group once."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    for name in ("routing/replay_cover_frac", "keep/cover_frac"):
        assert {row[name] for row in rows} == {1.0}
    assert len({row["version"].split(".")[0] for row in rows}) >= 2
    assert sum(row["async/dropped_lost_groups"] for row in rows) == 0, "a live blob was deleted"
    check_history(run, run.trained.groups(rows))


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_reference_ranks_over_two_hosts(three: list[Host], tmp_path: Path) -> None:
    """The reference ranks are a second torchrun job, with a rendezvous of its own."""
    settings = ("run.steps=3", "ref_models.placement=separate", "ref_models.parallel.pp=2")
    with cluster_run(three, tmp_path, *settings, recipe="deepseek-v32") as run:
        run.finish()
        rows = run.rows()
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert abs(rows[0]["loss/kl_ref_k3"]) < 1e-3, "the student starts as its reference"
        assert rows[2]["loss/kl_ref_k3"] != rows[0]["loss/kl_ref_k3"]
        assert (run.dir.logs / "ref_models-1.log").is_file()
        assert "10.231.17.1:17110" in (run.dir.logs / "ref_models-1.log").read_text(), (
            "sampling masks"
        )


def incarnation(run: ClusterRun) -> int:
    """Of the trainer that made the newest step."""
    return int(run.rows()[-1]["version"].split(".")[0])


def trainer_fell(run: ClusterRun) -> bool:
    """Its ranks ended: they say so in the log that torchrun keeps."""
    logs = run.dir.logs.glob("torchrun-*.log")
    return any("TrainerError: trainer rank" in log.read_text(errors="replace") for log in logs)


def no_command_line_has(secrets: list[str], members: list[psutil.Process]) -> bool:
    seen = 0
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            line = " ".join(member.cmdline())
            seen += "moerl.trainer.main" in line
            assert not any(secret in line for secret in secrets), line
    assert seen >= 2, "the ranks are among those looked at"
    assert all(len(secret) >= 32 for secret in secrets)
    return True


def psutil_alive(members: list[psutil.Process]) -> list[psutil.Process]:
    limit = Patience(20)
    while True:
        left = [m for m in members if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]
        if not left or limit.over():
            return left
        time.sleep(0.1)


def blobs_of(run: ClusterRun) -> str:
    return (run.dir.logs / "trainer-0.log").read_text()

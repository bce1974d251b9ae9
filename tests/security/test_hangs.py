"""What hangs or keeps dying in a real run: it is seen, ended, started again or left out.

A stopped process (SIGSTOP) is alive for the kernel, so no exit status and no closed connection
tells of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.helpers.cluster_runs import cluster_run
from tests.helpers.network_hosts import Host, hosts_or_skip
from tests.helpers.patience import patience
from tests.helpers.train_runs import Run, start, survivors

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.timeout(900)]

SETTINGS = [
    "checkpoint.every=10",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
    "supervision.backoff_s=0.1",
]


def children(pid: int, word: str) -> list[psutil.Process]:
    """Descendants of a process with a word in their command line."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    found.append(process)
    return found


def victim(run: Run, what: str) -> int:
    pids = run.pids()
    if what != "scheduler":
        return pids[{"server": "engine-0", "host": "engine-0-host"}[what]]
    return children(pids["engine-0"], "sglang::scheduler")[0].pid


def test_what_hangs_of_an_engine_is_started_again(tmp_path: Path) -> None:
    """Its server, the scheduler below it, its host: one after the other, and all steps are made."""
    limits = ("engine.answer_timeout_s=20", "supervision.answer_timeout_s=25", "sync.timeout_s=40")
    run = start(tmp_path, "quickstart", *SETTINGS, *limits, "run.steps=60", name="x")
    try:
        for number, what in enumerate(("server", "scheduler", "host"), 1):
            seen = len(run.rows()) + 3
            run.wait_for(lambda seen=seen: len(run.rows()) >= seen)
            run.wait_for(lambda: "engine-0" in run.pids() and "engine-0-host" in run.pids())
            pid, begin = victim(run, what), time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            run.wait_for(
                lambda number=number: run.text().count("engine 0 died, restart") == number, 240.0
            )
            print(f"{what}: ended {time.monotonic() - begin:.1f} s after it was stopped")
            run.wait_for(lambda number=number: run.text().count("engine 0 is back") == number)
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    assert [row["step"] for row in run.rows()] == list(range(60))
    silences = re.findall(r"the server hangs: it answered nothing for (\d+) s", run.text())
    # A commit that is in progress after 20 s keeps its own deadline; no second one is waited for.
    assert silences
    assert all(20 <= int(seconds) <= 20 + 40 + 2 for seconds in silences), silences
    assert "the host of engine 0" in run.text()


def test_a_signal_ends_a_run_whose_controller_hangs(tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *SETTINGS, "run.steps=4000", name="x")
    try:
        run.wait_for(lambda: len(run.rows()) >= 3)
        os.kill(run.pids()["controller"], signal.SIGSTOP)
        time.sleep(3.0)  # the supervisor has asked it something
        ends = (run.process.pid, run.pids()["root"])
        others = [member for member in run.members() if member.pid not in ends]
        asked = time.time()
        run.process.send_signal(signal.SIGTERM)
        left = survivors(others, 15.0)
        print(f"all but the report was done {time.time() - asked:.1f} s after SIGTERM")
        assert not left, [(p.pid, p.cmdline()[:4]) for p in left]
        assert run.process.wait(patience(120)) == 130  # a report is drawn at the end
    finally:
        run.end()
    assert "the run was interrupted" in run.text()
    seen_s = noticed(run) - asked
    print(f"seen {seen_s:.2f} s after SIGTERM")
    assert seen_s < 5.0


def noticed(run: Run) -> float:
    """Unix time at which the root process logged why the run ends."""
    lines = (run.dir.logs / "root.log").read_text().splitlines()
    line = next(line for line in lines if "the run failed" in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def test_an_engine_that_dies_at_each_start_is_left_out(tmp_path: Path) -> None:
    rules = ("supervision.max_deaths=4", "supervision.max_restarts=20")  # the first one is meant
    more = ("engine.count=2", "run.steps=80", *rules)
    run = start(tmp_path, "quickstart", *SETTINGS, *more, name="x")
    try:
        run.wait_for(lambda: "step 2/" in run.text())  # before the first one a death ends the run
        host = run.pids()["engine-1-host"]
        while "engine 1 is excluded" not in run.text():
            for server in children(host, "moerl.engine.plugin.server_process")[:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.kill()
            assert run.process.poll() is None, f"the run ended early:\n{run.text()}"
            time.sleep(0.1)
        before = len(run.rows())
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(80))
    assert before < 75, "the run was nearly over: it shows nothing"
    assert sum(row["async/engines_excluded"] for row in rows) == 1
    assert rows[-1]["async/engines"] == 1.0
    assert "it died 4 times (supervision.max_deaths)" in run.text()


@pytest.mark.parametrize("names", [("gcs_server", "raylet"), ("raylet", "gcs_server")])
def test_a_daemon_of_ray_may_die_once(names: tuple[str, str], tmp_path: Path) -> None:
    """Calls to actors would hang for minutes, those of the end of the run too."""
    run = start(tmp_path, "quickstart", *SETTINGS, "run.steps=4000", name="x")
    daemons, before = [], 0
    try:
        for name in names:
            run.wait_for(lambda before=before: len(run.rows()) >= before + 3)
            front, *members = run.members()
            (daemon,) = [one for one in members if one.name() == name]
            daemons.append(f"Ray's {name} (process {daemon.pid}) died")
            begin, before = time.monotonic(), len(run.rows())
            daemon.kill()
            if len(daemons) == 1:  # no checkpoint was written: all steps are repeated
                run.wait_for(lambda: run.text().count("waiting for ray") == 2)
                assert not survivors(members, 0.0), "the second start began beside the first"
                run.wait_for(lambda: run.text().count("step 1/4000") == 2)
        assert run.process.wait(patience(60)) == 1
        print(f"ended {time.monotonic() - begin:.1f} s after {names[1]} was killed")
        assert not survivors([front, *members], 5.0)
    finally:
        run.end()
    first, second = (run.text().partition(one)[2] for one in daemons)
    assert "and the run is resumed, this once" in first.splitlines()[0]
    assert f"continue with: moerl train --resume {run.dir.root}" in second
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert {row["version"].split(".")[0] for row in rows} == {"1"}
    assert rows[-1]["journal/cut_steps"] >= 3


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.mark.parametrize("how", ["lost", "ended"])
def test_other_nodes_leave_a_run_that_is_over(three: list[Host], tmp_path: Path, how: str) -> None:
    """lost: the controller's node, without a word; ended: by a signal, while the trainer hangs.

    The next engine node and the trainer node have nothing but the run directory to learn it from.
    """
    settings = ("run.steps=4000", "engine.count=2", "supervision.lease_s=12")
    with cluster_run(three, tmp_path, *settings, engines=2) as run:
        run.wait_for(lambda: len(run.rows()) >= 2)
        others = [*run.trainers, *run.engine_nodes]
        members = [member for process in others for member in tree(process)]
        assert len(members) > 4
        if how == "lost":
            for member in tree(run.head):
                member.kill()
        else:
            for member in members:
                if "moerl.trainer.main" in " ".join(member.cmdline()):
                    member.suspend()
            run.head.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        left = survivors(members, 60.0)
        took_s = time.monotonic() - begin
        print(f"{how}: the other nodes have left after {took_s:.1f} s")
        assert not left, [(p.pid, p.cmdline()[:4]) for p in left]
        assert took_s < 40.0, "supervision.lease_s = 12, and 5 s of grace"
        codes = {process.wait(patience(10)) for process in others}
        text = run.output.read_text()
        if how == "lost":
            assert codes == {1}
            assert text.count("no sign of the run's root process for") == len(others)
            assert run.dir.endpoints.start(), "control: the folder looks like that of a living run"
        else:
            assert codes == {0}
            assert text.count("moerl: the run has ended") == len(others)


def test_a_root_that_is_suspended_for_less_than_the_lease_is_waited_for(
    three: list[Host], tmp_path: Path
) -> None:
    settings = ("run.steps=40", "engine.count=2", "supervision.lease_s=20")
    with cluster_run(three, tmp_path, *settings, engines=2) as run:
        run.wait_for(lambda: len(run.rows()) >= 2)
        (root,) = [one for one in tree(run.head) if "moerl.launch.train" in " ".join(one.cmdline())]
        root.suspend()
        time.sleep(10.0)
        root.resume()
        run.finish(400)
        assert [row["step"] for row in run.rows()] == list(range(40))


def tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    front = psutil.Process(process.pid)
    return [front, *front.children(recursive=True)]

"""A real run with a scorer in each home, while scorers are killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.patience import patience
from tests.helpers.score_homes import Service, every_home, processes, service, spans
from tests.helpers.train_runs import Run, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500), pytest.mark.full]

STEPS = 12
SETTINGS = [
    f"run.steps={STEPS}",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
    "supervision.answer_timeout_s=20",
]


def hurt(run: Run, http: Service) -> None:
    """SIGKILL and SIGSTOP, one after the other, while the run goes on."""
    front = psutil.Process(run.process.pid)
    run.wait_for(lambda: len(run.rows()) >= 2)
    http.kill()
    actors = processes(front, "ray::RewardActor")
    judges = [one for one in actors if one.children()]
    for actor in actors:
        if actor not in judges:
            actor.send_signal(signal.SIGSTOP)
    time.sleep(3)
    http.start()
    run.wait_for(lambda: len(run.rows()) >= 5)
    servers = judges[0].children(recursive=True)
    send(servers, signal.SIGSTOP)  # questions wait for an answer when it dies
    http.process.send_signal(signal.SIGSTOP)
    time.sleep(patience(8))
    send(servers, signal.SIGKILL)
    http.process.send_signal(signal.SIGCONT)
    run.wait_for(lambda: len(run.rows()) >= 8)
    psutil.Process(run.pids()["scorer"]).send_signal(signal.SIGSTOP)


def send(processes: list[psutil.Process], signal_number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal_number)


def test_scorers_die_and_nothing_is_lost(tmp_path: Path) -> None:
    with service() as http:
        homes = every_home(tmp_path, http.port)
        run = start(
            tmp_path,
            "quickstart-smoke",
            *SETTINGS,
            homes,
            name="x",
            copies=True,
        )
        hurt(run, http)
        assert run.finish(900) == 0, run.text()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert sum(row["scorer/failed"] for row in rows) == 0, "no group was given up"
    for name in ("exact", "object", "place", "judge"):
        assert all(f"reward/{name}" in row for row in rows), name
        assert sum(row.get(f"scorer/asked/{name}", 0) for row in rows) >= 16 * STEPS
    assert all(0 < row["reward/judge"] < 1 for row in rows), "a mean of its choices"
    for name in ("object", "place", "judge"):
        assert sum(row.get(f"scorer/repeated/{name}", 0) for row in rows) > 0, f"{name} was hurt"
    assert rows[-1]["scorer/restarts"] >= 1, "the stopped process was replaced"
    trained = [group.group_id for _, group in run.trained.groups(rows)]
    assert sorted(trained) == list(range(4 * STEPS)), "each group once"
    check_spans(run)


def check_spans(run: Run) -> None:
    """At least one score is given while the trainer computes.

    That no step waits for a score outside its batch is shown by tests/unit/test_episode_scores.py.
    """
    steps = spans(run.dir.root, "trainer-0", "step")
    scores = spans(run.dir.root, "scorer", "score")
    beside = [
        s for s in scores if any(s["begin"] < t["end"] and t["begin"] < s["end"] for t in steps)
    ]
    assert beside, "no score was given while a step was computed"

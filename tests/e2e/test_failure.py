"""SIGKILL of any process, and Ctrl-C: cause in one sentence, no orphan, resume, each step once.

One run is ended again and again in other ways and resumed each time; what survives must be one
history.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.patience import patience
from tests.helpers.train_runs import (
    SOME_REWARD,
    STAGES,
    Run,
    check_deletion,
    check_trained,
    start,
    survivors,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 40
SETTINGS = [
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
    "supervision.max_restarts=0",
]
CAUSES = {
    "interrupt": "interrupted",
    "trainer": "trainer",
    "engine": "engine 0",
    "controller": "controller",
    "engine host": "engine 0",
    "front": None,  # nobody is left to print a cause, and nothing may be left at all
}


def victim_of(run: Run, how: str) -> int:
    if how == "front":
        return run.process.pid
    pids = run.pids()
    names = {"trainer": "trainer", "controller": "controller", "engine": "engine-0"}
    return pids[{**names, "engine host": "engine-0-host"}[how]]


def end_one(run: Run, how: str) -> None:
    """Let it make steps and a checkpoint, end one process, and look at what is left."""
    before = len(run.rows())
    run.wait_for(lambda: len(run.rows()) >= before + 3 and run.dir.latest_checkpoint() is not None)
    members = run.members()
    assert len(members) > 8, [m.name() for m in members]
    if how == "interrupt":
        run.process.send_signal(signal.SIGINT)
    else:
        os.kill(victim_of(run, how), signal.SIGKILL)
    left = survivors(members, 10.0)
    assert not left, f"10 s after {how}: {[(p.pid, p.cmdline()[:4]) for p in left]}"
    assert run.process.wait(patience(5)) != 0
    if (cause := CAUSES[how]) is not None:
        assert cause in run.text().split("moerl: ")[1].splitlines()[0], run.text()
        assert "--resume" in run.text()


@pytest.mark.parametrize(
    ("job", "hows"),
    [
        # what else dies is started again: test_chaos.py
        (["ppo", SOME_REWARD, *STAGES], ("interrupt",)),
        pytest.param(
            ["quickstart"],
            ("controller", "trainer", "engine", "engine host", "trainer", "front"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["interrupt", "others"],
)
def test_one_history_over_many_deaths(
    job: list[str], hows: tuple[str, ...], tmp_path: Path
) -> None:
    """The first job is what most runs are: PPO with a critic over stages of a pipeline."""
    run = start(tmp_path, *job, *SETTINGS, name="x", copies=True)
    try:
        for how in hows:
            end_one(run, how)
            total = len(run.rows()) + 3
            more = () if how != hows[-1] else (f"run.steps={total}",)
            run = start(tmp_path, "--resume", str(run.dir.root), *more, copies=True)
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    assert [row["step"] for row in run.rows()] == list(range(total))
    assert run.dir.hf.is_dir()
    check_deletion(run, in_flight=16)
    check_trained_once(run)
    if job[0] == "ppo":
        check_trained(run.rows())
        assert all({"loss/value", "critic/grad_norm"} <= row.keys() for row in run.rows())


def check_trained_once(run: Run) -> None:
    """In the surviving history each prompt group is trained once and none is skipped."""
    trained = [group.group_id for _, group in run.trained.groups(run.rows())]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    assert set(range(max(trained) + 1)) - set(trained) <= set(
        range(max(trained) - 12, max(trained) + 1)
    ), "a group was lost"


@pytest.mark.full
def test_two_runs_side_by_side(tmp_path: Path) -> None:
    """Ports, folders, Ray clusters and processes of two runs never meet."""
    small = [s for s in SETTINGS if "steps" not in s or "per_step" in s]
    runs = [start(tmp_path / n, "quickstart", "run.steps=3", *small, name=n) for n in ("a", "b")]
    try:
        assert [run.finish() for run in runs] == [0, 0], [run.text() for run in runs]
    finally:
        for run in runs:
            run.end()
    assert all([row["step"] for row in run.rows()] == [0, 1, 2] for run in runs)


@pytest.mark.full
def test_a_reward_that_is_not_finite_names_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    run = start(
        tmp_path,
        "quickstart",
        *SETTINGS,
        "task.name=jsonl",
        f"task.path={path}",
        "task.reward=tests.helpers.run_rewards:not_finite",
        name="nan",
    )
    assert run.finish(180) == 1
    cause = run.text().split("moerl: ")[1].splitlines()[0]
    assert "task.reward = 'tests.helpers.run_rewards:not_finite'" in cause, cause
    assert "nan" in cause
    assert "finite" in cause


@pytest.mark.full  # test_engine_e2e.py asks the host for the same
def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The engine's own cause with the end of its log, not a silent wait."""
    wrong = "engine.args.schedule_policy=no_such_policy"
    run = start(tmp_path, "quickstart", *SETTINGS, wrong, name="bad")
    assert run.finish(120) == 1
    cause = run.text().split("moerl: ")[1].splitlines()[0]
    assert cause.startswith("engine did not start: "), cause
    assert "no_such_policy" in run.text()


def test_an_unknown_engine_argument_is_refused_before_the_start(tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *SETTINGS, "engine.args.attention_backed=x", name="bad")
    assert run.finish(60) == 1
    assert "engine.args.attention_backed = 'x'" in run.text()
    assert "waiting for ray" not in run.text()


@pytest.mark.full
def test_a_terminal_that_is_closed_ends_the_run(tmp_path: Path) -> None:
    """`moerl train ... | head`: its lines have no reader; every process ends, a resume goes on."""
    settings = [*SETTINGS, f"run.root={tmp_path}", "run.name=x", "run.steps=40"]
    command = [sys.executable, "-m", "moerl", "train", "quickstart", *settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert any(line.startswith("step 1/") for line in process.stdout)
        started = psutil.Process(process.pid).children(recursive=True)
        process.stdout.close()
        assert process.wait(patience(120)) != 0
    _, alive = psutil.wait_procs(started, timeout=patience(10))
    assert not alive

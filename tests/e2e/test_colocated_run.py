"""A run whose engine and trainer take turns; its processes are killed at edges of a turn."""

from __future__ import annotations

import os
import re
import signal
import statistics
from pathlib import Path

import psutil
import pytest

from moerl.observe.overlap import intervals
from moerl.runtime.trace import read_spans
from tests.helpers.short_agent_runs import ROOT
from tests.helpers.train_runs import Run, check_deletion, check_history, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SETTINGS = [
    "checkpoint.every=3",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "supervision.backoff_s=0.1",
    "supervision.max_restarts=8",
    "supervision.window_s=1",
    "observe.engine_alone_s=0",
    "turn.moves=[gradients,kv_cache,engine_weights,optimizer,trainer_weights]",
]
EDGES = [
    ("trainer rank", "train"),
    ("controller", "closing"),
    ("scheduler", "handing"),
    ("controller", "opening"),
    ("engine-0", "train"),
    ("trainer rank", "generate"),
]
MORE = [
    ("engine-0-host", "closing"),
    ("controller", "train"),
    ("trainer rank", "handing"),
    ("scheduler", "opening"),
    ("controller", "handing"),
    ("engine-0-host", "generate"),
]


def entered(run: Run, phase: str) -> int:
    """How often a controller has entered a phase."""
    log = run.dir.logs / "controller.log"
    return log.read_text().count(f"turn: {phase}\n") if log.exists() else 0


def kill(run: Run, victim: str) -> None:
    pids = run.pids()
    if victim == "trainer rank":
        ranks = psutil.Process(pids["trainer"]).children()
        pid = next(r.pid for r in ranks if "moerl.trainer.main" in r.cmdline())
    elif victim == "scheduler":
        parts = psutil.Process(pids["engine-0"]).children(recursive=True)
        pid = next(p.pid for p in parts if "scheduler" in " ".join(p.cmdline()))
    else:
        pid = pids[victim]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "edges", [EDGES, pytest.param(EDGES + MORE, marks=pytest.mark.full)], ids=["6", "12"]
)
def test_the_run_goes_on_after_a_death_at_an_edge(
    tmp_path: Path, edges: list[tuple[str, str]]
) -> None:
    steps = 4 * len(edges)
    run = start(
        tmp_path, "quickstart-colocated", f"run.steps={steps}", *SETTINGS, name="x", copies=True
    )
    ever: set[psutil.Process] = set()
    try:
        for victim, phase in edges:
            rows = len(run.rows())
            run.wait_for(lambda rows=rows: len(run.rows()) > rows)
            if victim == "trainer rank":
                run.wait_for(lambda: run.dir.latest_checkpoint() is not None)
            run.wait_for(lambda v=victim: all(n in run.pids() for n in ("trainer", "engine-0")))
            ever |= set(run.members())
            seen = entered(run, phase)
            run.wait_for(lambda phase=phase, seen=seen: entered(run, phase) > seen)
            kill(run, victim)
        ever |= set(run.members())
        assert run.finish(900.0) == 0, run.text()
        left = survivors(list(ever), 10.0)
        assert not left, [(p.pid, p.cmdline()[:4]) for p in left]
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    check_history(run, run.trained.groups(rows))
    check_deletion(run, in_flight=16)


@pytest.mark.full
def test_agents_whose_timeout_is_shorter_than_a_turn_are_answered_once(tmp_path: Path) -> None:
    """Each request becomes one turn: none is cancelled, and none is sampled for a second time."""
    seconds, agent = 0.3, f"{ROOT}/tests/helpers/hasty_agent.py"
    settings = [one for one in SETTINGS if "checkpoint" not in one and "group" not in one]
    run = start(
        tmp_path,
        "digits-by-agent",
        "cluster.colocated=turns",
        "rollout.in_flight_mode=retract",
        f"task.agent.command=[python, {agent}, '8', '{seconds}']",
        "task.max_turns=8",
        "run.steps=6",
        "checkpoint.every=0",
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "trainer.max_tokens_per_microbatch=128",
        *settings,
        name="x",
    )
    assert run.finish(600.0) == 0, run.text()
    rows = run.rows()
    again = re.findall(r"asked again: (\d+)", (run.dir.logs / "agents.log").read_text())
    spans = read_spans(run.dir.trace)
    starts = [begin for begin, _ in intervals(spans, "trainer-0", "unpark")]
    ends = [end for _, end in intervals(spans, "trainer-0", "hand over")]
    turns_s = [
        min(end for end in ends if end > begin) - begin for begin in starts if begin < max(ends)
    ]
    print(
        f"turns of {min(turns_s):.2f} to {max(turns_s):.2f} s, asked again {sum(map(int, again))}"
    )
    assert statistics.median(turns_s) > seconds
    assert sum(map(int, again)) > 0

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows)

    assert total("agent/cancelled") == total("agent/origin/repeated") == 0
    assert (
        sum(row.get("agent/failed/error", 0) + row.get("agent/failed/exit", 0) for row in rows) == 0
    )
    assert total("agent/turns") == 8 * total("agent/episodes") > 0


@pytest.mark.full
def test_it_learns_as_the_quickstart_does(tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart-colocated", "run.steps=60", name="x")
    try:
        assert run.finish(600.0) == 0, run.text()
    finally:
        run.end()
    rows = run.rows()
    rewards = [row["reward/mean"] for row in rows]
    print(f"reward {sum(rewards[:5]) / 5:.3f} to {sum(rewards[-5:]) / 5:.3f}")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    turns = [row for row in rows if "turn/generate_s" in row]  # others had a batch ready
    assert len(turns) >= len(rows) // 3
    assert all("turn/close_s" in row for row in rows)

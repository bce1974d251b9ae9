"""A run whose engine and trainer take turns; its processes are killed at edges of a turn.

The weights that engines serve are compared with the trainer's after each switch, and each segment
of a rollout is scored again with the weights of its version.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from moerl.core.types import Rollout
from moerl.observe.overlap import intervals
from moerl.runtime.trace import read_spans
from tests.helpers import live_weights
from tests.helpers.short_agent_runs import ROOT
from tests.helpers.slow_objective import SECONDS
from tests.helpers.train_runs import Run, check_deletion, check_history, start, survivors
from tests.helpers.turn_figures import turn_figures
from tests.helpers.warm_score import difference, score_all

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
    "checkpoint.keep_versions=true",
    "replay.audit=true",
    "sync.bucket_bytes=65536",  # several rounds
    "sampling.max_new_tokens=64",
    "engine.max_running_requests=20",  # of 32, so that some run through a switch
]
ROLES = [  # two of one policy, as in the recipe proposer-solver
    "task.environment=examples.two_roles:reply",
    "task.reward=examples.two_roles:reward",
    "task.max_turns=2",
    "task.roles={proposer: {}, solver: {}}",
    "algorithm.advantage=grpo_std",
]
SPOILT = "0.2"
EDGES = [
    ("controller", "opening"),
    ("scheduler", "handing"),
    ("trainer rank", "train"),
]
MORE = [
    ("controller", "closing"),
    ("engine-0", "train"),
    ("trainer rank", "generate"),
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


def find(run: Run, victim: str) -> int | None:
    """The process of a victim; None while it is being started."""
    pids = run.pids()
    with suppress(psutil.NoSuchProcess):
        if victim == "trainer rank":
            parts, word = psutil.Process(pids["trainer"]).children(), "moerl.trainer.main"
        elif victim == "scheduler":
            parts, word = psutil.Process(pids["engine-0"]).children(recursive=True), victim
        else:
            return pids[victim]
        return next((part.pid for part in parts if word in " ".join(part.cmdline())), None)
    return None


def kill_in(run: Run, victim: str, phase: str) -> None:
    """Kill in the next such phase in which the victim runs: an engine may be starting again."""
    pid = None
    while pid is None:
        seen = entered(run, phase)
        run.wait_for(lambda seen=seen: entered(run, phase) > seen)
        pid = find(run, victim)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "edges", [EDGES, pytest.param(EDGES + MORE, marks=pytest.mark.full)], ids=["3", "12"]
)
def test_the_run_goes_on_after_a_death_at_an_edge(
    tmp_path: Path, edges: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "live"
    live.mkdir()
    monkeypatch.setenv(live_weights.FOLDER, str(live))
    monkeypatch.setenv(live_weights.SPOILS, SPOILT)
    steps = 4 * len(edges)
    settings = [f"run.steps={steps}", *SETTINGS, *ROLES]
    run = start(tmp_path, "quickstart-colocated", *settings, name="x", copies=True)
    ever: set[psutil.Process] = set()
    try:
        for victim, phase in edges:
            rows = len(run.rows())
            run.wait_for(lambda rows=rows: len(run.rows()) > rows)
            if victim == "trainer rank":
                run.wait_for(lambda: run.dir.latest_checkpoint() is not None)
            run.wait_for(lambda: all(name in run.pids() for name in ("trainer", "engine-0")))
            ever |= set(run.members())
            kill_in(run, victim, phase)
        ever |= set(run.members())
        assert run.finish(900.0) == 0, run.text()
        left = survivors(list(ever), 10.0)
        assert not left, [(p.pid, p.cmdline()[:4]) for p in left]
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    groups = run.trained.groups(rows)
    check_history(run, groups)
    check_deletion(run, in_flight=16)
    check_switches(run, live)
    check_segments(run, [r for _, group in groups for r in group.rollouts()], tmp_path)
    roles = {row.role for _, group in groups for episode in group.episodes for row in episode.turns}
    assert roles == {"proposer", "solver"}


def check_switches(run: Run, folder: Path) -> None:
    """What engines serve is what the trainer had, and a changed element was noticed."""
    trained, served = live_weights.trained(folder), live_weights.served(folder)
    print(f"{len(served)} switches, {len(served[0][1])} tensors each")
    assert len(served) >= len(run.rows())
    assert len({str(tensors) for _, tensors in served}) > len(run.rows()) // 2, "they change"
    for version, tensors in served:
        assert tensors == {hf: trained[version][hf] for hf in tensors}, version
    log = (run.dir.logs / "trainer-0.log").read_text()
    assert log.count("arrived damaged") == 1, "control: one element, once"
    assert sum(row.get("async/sync_resent_buckets", 0) for row in run.rows()) <= 1


def check_segments(run: Run, rollouts: list[Rollout], folder: Path) -> None:
    """Segments of rollouts that ran through a switch have the weights of their versions."""
    over = [rollout for rollout in rollouts if len(rollout.versions) > 1][-12:]
    assert over, "no rollout ran through a switch"
    versions = sorted({span.version for rollout in over for span in rollout.versions})
    own = [(run.dir.versions / str(version), str(version)) for version in versions]
    other = (own[0][0], str(versions[-1]))
    jobs = score_all(
        run.plan(), over, folder, variants=["both"], dtypes=["fp32"], weights=[*own, other]
    )
    *gaps, control = [difference(Path(job.out)) for job in jobs]
    most = max(float(gap.max()) for gap in gaps)
    print(f"{len(over)} rollouts, {len(versions)} versions: max {most:.1e}, {control.max():.1e}")
    for version, gap in zip(versions, gaps, strict=True):
        assert gap.max() <= 5e-5, f"segments of {version}: {gap.max()}"
    assert control.max() > 1e-3, "control: another version's weights must not fit"


@pytest.mark.full
def test_agents_whose_timeout_is_shorter_than_a_turn_are_answered_once(tmp_path: Path) -> None:
    """Each request becomes one turn: none is cancelled, and none is sampled for a second time."""
    seconds, agent = SECONDS / 2, f"{ROOT}/tests/helpers/hasty_agent.py"
    settings = [one for one in SETTINGS if "checkpoint" not in one and "group" not in one]
    run = start(
        tmp_path,
        "digits-by-agent",
        "cluster.colocated=turns",
        "rollout.in_flight_mode=retract",
        f"task.agent.command=[python, {agent}, '8', '{seconds}']",
        "task.max_turns=8",
        "run.steps=4",
        "checkpoint.every=0",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "algorithm.objective=tests.helpers.slow_objective:slow",
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
    assert min(turns_s) > 2 * seconds
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
    spans = [s for s in read_spans(run.dir.trace) if s["process"] == "trainer-0"]
    found = turn_figures(rows, spans)
    print(*(f"{name}: {value:.4g} {unit}" for name, (value, unit) in found.items()), sep="; ")
    assert found["turns"][0] == len(rows) - 1
    assert 0 < found["switching"][0] < 1
    turns = [row for row in rows if "turn/generate_s" in row]  # others had a batch ready
    assert len(turns) >= len(rows) // 3
    assert all("turn/close_s" in row for row in rows)

"""Processes of a run are killed at random points, and it makes one history all the same.

Each kill is drawn from a seed: whom, and how long after the one before.  Engines, their hosts,
trainer ranks and torchrun itself (also steps after a checkpoint), the scorer, the controller.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from moerl.core.types import EpisodeGroup, PolicyVersion, Rollout
from moerl.runtime.trace import read_spans
from tests.helpers.train_runs import Run, check_deletion, check_history, last_step, start, survivors
from tests.helpers.warm_score import score

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

SETTINGS = [
    "checkpoint.every=5",
    "checkpoint.keep_versions=true",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "supervision.backoff_s=0.1",
    "supervision.max_restarts=5",
    "supervision.window_s=1",  # these deaths are no fault of the engines: none is excluded
    "observe.engine_alone_s=0",
]
ONE_EACH = ("engine-0", "trainer rank", "scorer", "controller")
MANY = (*ONE_EACH, "engine-0-host", "trainer", "controller", "engine-1", "trainer rank")


@pytest.mark.parametrize(
    ("seed", "victims", "steps", "extra", "scored"),
    [
        pytest.param(0, ONE_EACH, 28, (), 1, id="one-each"),
        pytest.param(1, MANY * 3, 160, ("engine.count=2", "sync.quorum=1"), 4, id="many"),
    ],
)  # fmt: skip
def test_the_run_goes_on(
    seed: int,
    victims: tuple[str, ...],
    steps: int,
    extra: tuple[str, ...],
    scored: int,
    tmp_path: Path,
) -> None:
    run = start(
        tmp_path, "quickstart", f"run.steps={steps}", *SETTINGS, *extra, name="x", copies=True
    )
    ever: set[psutil.Process] = set()
    killed: list[tuple[str, float]] = []
    try:
        run.wait_for(lambda: len(run.rows()) >= 2)
        for victim, pause_steps, pause_s in schedule(seed, victims, steps):
            seen = last_step(run) + pause_steps
            run.wait_for(lambda seen=seen: last_step(run) >= seen)
            time.sleep(pause_s)
            ever |= set(run.members())
            if "trainer" in victim:  # without a checkpoint its death ends the run
                run.wait_for(lambda: run.dir.latest_checkpoint() is not None)
            pid = pid_of(run, victim)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append((victim, time.time()))
        ever |= set(run.members())
        assert run.finish(1200.0) == 0, run.text()
        left = survivors(list(ever), 10.0)
        assert not left, [(p.pid, p.cmdline()[:4]) for p in left]
    finally:
        run.end()
    assert len(killed) >= len(victims) * 3 // 4, f"too few were there to be killed: {killed}"
    assert [row["step"] for row in run.rows()] == list(range(steps))
    check_deletion(run, in_flight=16 * len(extra or (0,)))
    trained = run.trained.groups(run.rows())
    check_history(run, trained)
    check_versions(run, trained, scored, tmp_path)
    say_downtimes(run, killed)


def schedule(seed: int, victims: tuple[str, ...], steps: int) -> Iterator[tuple[str, int, float]]:
    """(whom, new steps to wait for, seconds after that), in an order of the seed's choosing."""
    draw = random.Random(seed)
    order = draw.sample(victims, len(victims))
    longest = max(1, 2 * (steps - 8) // (3 * len(victims)))
    for victim in order:
        yield victim, draw.randint(1, longest), draw.uniform(0.0, 1.0)


def pid_of(run: Run, victim: str) -> int | None:
    """None when it is not there at the moment."""
    with contextlib.suppress(KeyError, psutil.Error):
        if victim != "trainer rank":
            process = psutil.Process(run.pids()[victim])
            return process.pid if process.status() != psutil.STATUS_ZOMBIE else None
        ranks = psutil.Process(run.pids()["trainer"]).children()
        return next((r.pid for r in ranks if "moerl.trainer.main" in r.cmdline()), None)
    return None


def check_versions(
    run: Run, trained: list[tuple[int, EpisodeGroup]], count: int, folder: Path
) -> None:
    """Rollouts of a version, scored again with the weights that were saved under its name."""
    by_version: dict[PolicyVersion, list[Rollout]] = {}
    for _, group in trained:
        for rollout in group.rollouts():
            if len(rollout.versions) == 1:
                by_version.setdefault(rollout.versions[0].version, []).append(rollout)
    newest = max(by_version)
    assert newest.incarnation > 0, "nothing was sampled after the trainer's restart"
    oldest, *others = sorted(set(by_version) - {newest})
    scored = [newest, oldest, *random.Random(0).sample(others, max(count - 2, 0))][:count]
    for version in scored:
        assert gap(run, by_version[version], version, folder) <= 5e-5, version
    # of the oldest: late in training a mask may keep one token everywhere, which all weights fit
    assert gap(run, by_version[oldest], newest, folder) > 1e-3, "control: other weights fit too"


def gap(run: Run, rollouts: list[Rollout], version: PolicyVersion, folder: Path) -> float:
    """Largest difference between the engine's log-probabilities and those of saved weights."""
    weights = run.dir.versions / str(version)
    job = score(
        run.plan(), rollouts[:16], folder, variants=["both"], dtypes=["fp32"], model=weights
    )
    scores = np.load(job.out)
    return float(np.abs(scores["fp32/both"] - scores["engine"]).max())


def say_downtimes(run: Run, killed: list[tuple[str, float]]) -> None:
    """Figures for docs/fault-tolerance.md; pytest shows them with -s."""
    downs = [span for span in read_spans(run.dir.trace) if span["process"] == "supervisor"]
    for victim, when in killed:
        kind = victim.split()[0].replace("-host", "").replace("-", " ")
        span = next((s for s in downs if s["name"] == f"{kind} down" and s["start_s"] > when), None)
        if span is not None:
            print(
                f"{victim}: seen after {span['start_s'] - when:.2f} s, back "
                f"{span['end_s'] - when:.1f} s after the kill, its start {span['starting_s']:.1f} s"
            )

"""`moerl train` with the reference on ranks of its own: overlap, a killed trainer, a clean end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from moerl.observe.overlap import intersect, length
from moerl.runtime.trace import read_spans
from tests.helpers.train_runs import ENOUGH, SMALL, start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

OWN = [
    "ref_models.placement=separate",
    "trainer.parallel={dp: 1, ep: 1}",
    "supervision.backoff_s=0.5",
]


def test_killed_reference_ranks_are_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path, "deepseek-v32", *SMALL, *ENOUGH, *OWN, "run.steps=12", name="x")
    try:
        run.wait_for(lambda: len(run.rows()) >= 3)
        first = run.pids()["ref_models"]
        os.kill(first, signal.SIGKILL)
        run.wait_for(lambda: run.pids().get("ref_models", first) != first)
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(12)), "each step once"
    assert all("loss/kl_ref_k3" in row for row in rows)
    assert abs(rows[0]["loss/kl_ref_k3"]) < 1e-3, "the student starts as its reference"
    assert rows[-1]["loss/kl_ref_k3"] > 0
    assert "ref_models died, restart 1" in run.text()
    spans = read_spans(run.dir.trace)
    of = {
        kind: [
            (s["start_s"], s["end_s"]) for s in spans if s["process"] == who and s["name"] == kind
        ]
        for who, kind in (("ref_models-0", "score"), ("trainer-0", "step"))
    }
    print(
        f"scored {length(of['score']):.2f} s, stepped {length(of['step']):.2f} s, "
        f"both {length(intersect(of['score'], of['step'])):.2f} s; waited for scores "
        f"{sum(row.get('ref_models/wait_s', 0) for row in rows):.2f} s"
    )
    assert len(of["score"]) >= 2


def test_reference_ranks_that_are_not_started_again_end_the_run_with_its_cause(
    tmp_path: Path,
) -> None:
    settings = [*SMALL, *ENOUGH, *OWN, "run.steps=50", "supervision.max_restarts=0"]
    run = start(tmp_path, "deepseek-v32", *settings, name="x")
    try:
        run.wait_for(lambda: len(run.rows()) >= 2)
        os.kill(run.pids()["ref_models"], signal.SIGKILL)
        begin = time.monotonic()
        assert run.finish() != 0
        print(f"over after {time.monotonic() - begin:.1f} s")
    finally:
        run.end()
    assert (
        "the reference ranks ended with signal 9" in run.text().split("moerl: ")[1].splitlines()[0]
    )
    assert "--resume" in run.text()

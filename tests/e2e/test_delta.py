"""Deltas on a real training run: the quickstart, with an engine that keeps weights in bf16."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.train_runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
_PUBLISHES = 20

RUN = [
    f"run.steps={_PUBLISHES + 3}",  # the first is full; step 0 and the last publish have no row
    "rollout.groups_per_step=8",
    "sync.delta=true",
    "engine.dtype=bfloat16",
    "trainer.optimizer.lr=1e-6",  # of post-training, where few words of bf16 change
    "trainer.optimizer.min_lr=1e-6",
    "checkpoint.every=0",
    "checkpoint.keep_versions=true",
    "observe.engine_alone_s=0",
]


def test_twenty_publishes_are_bitwise_equal_and_smaller(tmp_path: Path) -> None:
    """Twice: by the digests of the run's own sessions, and by bytes from the versions it kept."""
    run = start(tmp_path, "quickstart", *RUN, name="delta")
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "async/sync_bytes" in row]
    full, *sent = (row["async/sync_bytes"] for row in rows)
    assert len(sent) >= _PUBLISHES
    assert all(row["async/sync_engines_behind"] == 0 for row in rows)
    assert all(row["async/sync_resent_buckets"] == 0 for row in rows), "a digest did not agree"
    served = re.findall(
        r"engine 0 serves \S+, digest (\w+)", (run.dir.logs / "trainer-0.log").read_text()
    )
    assert len(set(served)) >= _PUBLISHES
    ratio = full / statistics.median(sent)
    print(f"{len(sent)} publishes of {full:,.0f} bytes, median ratio {ratio:.1f}")
    assert ratio > 10

    bench = [sys.executable, "bench/delta_ratio.py", str(run.dir.root), "--dtype", "bfloat16"]
    done = subprocess.run(
        bench, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience(300)
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    (count,) = re.findall(r"^(\d+) publishes, bitwise equal after each", done.stdout, re.MULTILINE)
    assert int(count) >= _PUBLISHES

"""Keep Indexer end to end: a real SGLang records positions, Megatron-core attends to them.

A tiny DeepSeek-V3.2 with few index heads: many of its scores are exactly 0, so the trainer's own
indexer chooses other positions than the engine's although weights and precision are equal.  Long
requests are aborted and resumed after an update; each segment is scored under its own weights.
Other requests compute one prefix at the same time, with and without the hook that lets each of them
keep its own cache slots.  tests/e2e/test_model_families.py has a small form for the default
selection.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from moerl.audit.score_job import ScoreJob
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import PolicyVersion, Rollout
from tests.helpers.patience import patience
from tests.helpers.rank_server import run_ranks, start_server
from tests.helpers.replay_scenario import A, B
from tests.helpers.sparse_servers import WAVES
from tests.helpers.trainer_support import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(600)]

LIMIT, FAR = 5e-5, 0.05  # nats: right records in fp32, and the least of a control
CONTROLS = ("both_indexer_live", "both_indexer_moved", "both_shifted")
Gaps = Mapping[str, np.ndarray]  # trainer minus engine, by rollout id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dsa")
    start_server()  # it imports Megatron while the engines run
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.sparse_servers", str(folder)],
        cwd=ROOT,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=patience(500),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for failed in folder.glob("*/failed.txt"):
        raise AssertionError(failed.read_text())
    return folder


def rollouts_of(folder: Path) -> list[Rollout]:
    found: list[Rollout] = decode_value((folder / "rollouts.msgpack").read_bytes(), list[Rollout])
    return found


@pytest.fixture(scope="module")
def jobs(served: Path) -> dict[str, ScoreJob]:
    """All is scored with one start of the trainer."""
    own = rollouts_of(served / "own")
    seams = [r for r in own if len(r.versions) > 1]
    plain = [r for r in own if len(r.versions) == 1]
    found = {
        "plain": job(served / "own", "plain", plain, A, CONTROLS),
        "seam_a": job(served / "own", "seam_a", seams, A, CONTROLS, one_segment=True),
        "seam_b": job(served / "own", "seam_b", seams, B, CONTROLS, one_segment=True),
        "shared": job(served / "shared", "shared", rollouts_of(served / "shared"), A, ()),
    }
    for name, one in found.items():
        one.save(served / f"{name}.json")
    paths = [str(served / f"{name}.json") for name in found]
    run_ranks(1, ["-m", "moerl.audit.score_ranks", "--job", *paths], timeout_s=240.0)
    return found


def job(
    folder: Path,
    name: str,
    rollouts: list[Rollout],
    weights: PolicyVersion,
    controls: tuple[str, ...],
    *,
    one_segment: bool = False,
) -> ScoreJob:
    path = folder / f"{name}.msgpack"
    path.write_bytes(encode_value(rollouts))
    return ScoreJob(
        model=str(folder / str(weights)),
        rollouts=str(path),
        blob_dir=str(folder / "blobs"),
        blob_node="node0",
        out=str(folder / f"{name}.npz"),
        variants=["both", *controls],
        platform="cpu",
        version=str(weights) if one_segment else "",
    )


def gaps(scored: ScoreJob, variant: str = "both") -> Gaps:
    found = np.load(scored.out)
    ends = np.cumsum(found["num_sampled"])[:-1]
    parts = np.split(np.abs(found[f"fp32/{variant}"] - found["engine"]), ends)
    return dict(zip(found["rollout_ids"].tolist(), parts, strict=True))


def largest(found: Gaps) -> float:
    return max(float(part.max()) for part in found.values())


def test_records_are_whole(served: Path) -> None:
    own = {rollout.rollout_id: rollout for rollout in rollouts_of(served / "own")}
    assert {"plain.300", "turn.30", "seam.0", "seam.1", "wave.0.0"} <= set(own)
    for rollout in own.values():
        assert rollout.indexer[-1].row_end == rollout.num_tokens - 1
    assert {len(own[name].versions) for name in ("seam.0", "seam.1")} == {2}
    cached = json.loads((served / "own/cached.json").read_text())
    assert cached[f"turn.30@{A}"] >= 30, "the turn found its prefix in the cache"


@pytest.mark.parametrize("name", ["plain", "seam_a", "seam_b"])
def test_recorded_positions_make_both_sides_equal(name: str, jobs: dict[str, ScoreJob]) -> None:
    assert largest(gaps(jobs[name])) <= LIMIT
    for control in CONTROLS:
        assert largest(gaps(jobs[name], control)) > FAR, control


def test_a_prefix_that_others_compute_too(jobs: dict[str, ScoreJob]) -> None:
    """Without the hook the record names what another request chose."""
    own, shared = gaps(jobs["plain"]), gaps(jobs["shared"])
    waves = [name for name in own if name.startswith("wave.")]
    assert sorted(waves) == sorted(shared)
    assert len(waves) == 6 * WAVES
    assert max(float(own[name].max()) for name in waves) <= LIMIT
    assert largest(shared) > FAR, "control: the hook is off"

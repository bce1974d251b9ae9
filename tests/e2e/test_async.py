"""Asynchrony is real: the engine decodes while the trainer steps, and records survive it.

Outputs of 200 tokens, a publish after every step: rollouts are interrupted and resumed.  Each
segment, with its own rows (`replay.audit`), is scored again with the weights of its own version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moerl.audit.verify_run import verify
from moerl.core.types import Rollout
from moerl.observe.overlap import decode_overlap
from moerl.runtime.trace import read_spans
from tests.helpers.train_runs import Run, start
from tests.helpers.warm_score import difference, score, score_all

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.full]

SETTINGS = [
    "sampling.max_new_tokens=200",
    "sampling.ignore_eos=true",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_lag=3",
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
    "task.name=jsonl",
    "task.reward=tests.helpers.run_rewards:digit_share",
    "trainer.optimizer.warmup_steps=0",
]
LONG = [
    *SETTINGS,
    "run.steps=16",  # the first step and the last max_lag ones have nothing left to overlap with
    "rollout.buffer_depth=2",
    "replay.audit=true",
    "checkpoint.keep_versions=true",
]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("async")
    run = start(root, "quickstart", *LONG, f"task.path={prompts(root)}", name="x", copies=True)
    assert run.finish() == 0, run.text()
    return run


@pytest.fixture(scope="module")
def trained(long_run: Run) -> list[tuple[int, Rollout]]:
    """(step, rollout) of everything that was trained."""
    groups = long_run.trained.groups(long_run.rows())
    return [(step, rollout) for step, group in groups for rollout in group.rollouts()]


def test_the_engine_decodes_while_the_trainer_steps(long_run: Run) -> None:
    overlap = decode_overlap(read_spans(long_run.dir.trace))
    assert overlap is not None
    assert overlap >= 0.5, overlap


def test_depth_zero_shows_no_overlap(tmp_path: Path) -> None:
    """Control: a synchronous run of the same shape; it keeps a stream."""
    settings = [*SETTINGS, "run.steps=3", "rollout.buffer_depth=0", "stream.keep_steps=2"]
    run = start(tmp_path, "quickstart", *settings, f"task.path={prompts(tmp_path)}", name="sync")
    assert run.finish() == 0, run.text()
    overlap = decode_overlap(read_spans(run.dir.trace))
    assert overlap is not None
    assert overlap < 0.02, overlap
    assert all(row["async/lag_max"] == 0 for row in run.rows())
    assert len(list(run.dir.stream.glob("steps/*.step"))) == 2
    found = verify(run.dir.root)
    assert not found.differences
    assert (found.steps, found.kept_from, found.groups) == (3, 1, 3 * 4)


def test_no_token_is_too_old(long_run: Run, trained: list[tuple[int, Rollout]]) -> None:
    lags = [step - rollout.oldest.step for step, rollout in trained]
    assert min(lags) >= 0
    assert max(lags) <= 3
    assert max(lags) == max(row["async/lag_max"] for row in long_run.rows())


def test_outputs_are_long_and_some_span_versions(trained: list[tuple[int, Rollout]]) -> None:
    assert min(rollout.num_sampled for _, rollout in trained) >= 200
    spans = [len(rollout.versions) for _, rollout in trained]
    assert max(spans) >= 2, "no trained rollout was interrupted by a publish"


def test_each_segment_matches_its_own_version(
    long_run: Run, trained: list[tuple[int, Rollout]], tmp_path: Path
) -> None:
    rollouts = [rollout for _, rollout in trained if len(rollout.versions) >= 2][:24]
    versions = sorted({span.version for rollout in rollouts for span in rollout.versions})
    folders = [long_run.dir.versions / str(version) for version in versions]
    weights = [(folder, str(version)) for folder, version in zip(folders, versions, strict=True)]
    controls = [(folders[0], str(version)) for version in versions[1:]]
    jobs = score_all(
        long_run.plan(),
        rollouts,
        tmp_path,
        variants=["both"],
        dtypes=["fp32"],
        weights=weights + controls,
    )
    gaps = [difference(Path(job.out)) for job in jobs]
    for version, gap in zip(versions, gaps, strict=False):
        assert gap.max() <= 5e-5, f"segments of {version}: {gap.max()}"
        assert gap.mean() <= 5e-6
    for gap in gaps[len(versions) :]:
        assert gap.max() > 1e-3, "control: another version's weights must not fit"


def test_one_version_for_the_whole_rollout_fails(
    long_run: Run, trained: list[tuple[int, Rollout]], tmp_path: Path
) -> None:
    """Control: an interrupted rollout scored with its last version's weights alone."""
    rollouts = [rollout for _, rollout in trained if len(rollout.versions) >= 2][:8]
    newest = max(span.version for rollout in rollouts for span in rollout.versions)
    job = score(
        long_run.plan(),
        rollouts,
        tmp_path,
        variants=["both"],
        dtypes=["fp32"],
        model=long_run.dir.versions / str(newest),
    )
    assert difference(Path(job.out)).max() > 1e-3


def prompts(folder: Path) -> Path:
    """Any text does: the reward looks at the response alone."""
    path = folder / "prompts.jsonl"
    rows = [{"prompt": f"write some digits {i}: ", "answer": ""} for i in range(64)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path

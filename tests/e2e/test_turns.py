"""Episodes of several turns on real SGLang and Megatron: each turn matches the weights it met."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.types import Rollout
from tests.e2e.test_async import difference
from tests.helpers.train_runs import start
from tests.helpers.warm_score import score

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

SETTINGS = [
    "run.steps=4",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.groups_per_request=2",
    "replay.audit=true",
    "checkpoint.every=0",
    "checkpoint.keep_versions=true",
    "evaluation.every=2",
    "evaluation.prompts=8",
    "observe.engine_alone_s=0",
    "trainer.optimizer.warmup_steps=0",
    # A random model earns some: its weights move.
    "task.reward=tests.helpers.run_rewards:digit_share",
]


def test_every_turn_is_trained_on_its_own_rows(tmp_path: Path) -> None:
    run = start(tmp_path, "digits-in-turns", *SETTINGS, name="x", copies=True)
    assert run.finish() == 0, run.text()
    assert [row["eval/step"] for row in run.rows() if "eval/step" in row][:1] == [0.0]
    assert run.rows()[-1]["eval/step"] == 4, "the last weights, too"
    groups = [group for _, group in run.trained.groups(run.rows())]
    later: list[Rollout] = []
    for episode in (episode for group in groups for episode in group.episodes):
        for before, after in zip(episode.turns, episode.turns[1:], strict=False):
            responses = before.rollout.token_ids.tolist()
            assert after.rollout.token_ids.tolist()[: len(responses)] == responses
            later.append(after.rollout)
    assert len(later) > 20, "most answers of a random model are wrong: it is asked again"
    named = [rollout for rollout in later if len(rollout.routing) > 1]
    assert named, "rows of the turn before were named"
    whole = [r for r in later if len({part.version for part in r.routing}) == 1]
    for version in sorted({r.versions[0].version for r in whole if len(r.versions) == 1}):
        own = [r for r in whole if [s.version for s in r.versions] == [version]]
        weights = run.dir.versions / str(version)
        job = score(run.plan(), own, tmp_path, variants=["both"], dtypes=["fp32"], model=weights)
        gap = difference(Path(job.out))
        print(f"{len(own)} later turns of {version}: max {gap.max():.1e}, mean {gap.mean():.1e}")
        assert gap.max() <= 5e-5
        other = 0 if version.step else 1
        wrong = run.dir.versions / f"0.{other}"
        job = score(run.plan(), own, tmp_path, variants=["both"], dtypes=["fp32"], model=wrong)
        assert difference(Path(job.out)).max() > 1e-3, "control: weights of another version"

"""Episodes of several turns on real SGLang and Megatron: every token matches the weights it met."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moerl.core.types import Episode, PolicyVersion, Rollout
from tests.helpers.train_runs import start
from tests.helpers.warm_score import score

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

LAG_0 = "mismatch/abs_dlogp_max/lag_0"
JOINED = "mismatch/abs_dlogp_max/joined_lag_"
SETTINGS = [
    "run.steps=4",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "replay.audit=true",
    "checkpoint.every=0",
    "checkpoint.keep_versions=true",
    "evaluation.every=2",
    "evaluation.prompts=8",
    "observe.engine_alone_s=0",
    "trainer.optimizer.warmup_steps=0",
    # A random model earns some: its weights move.
    "task.reward=tests.helpers.run_rewards:digit_share",
    # Episodes take longer than a step, so updates come between their turns.
    "task.environment=tests.helpers.run_rewards:slow_reply",
]


@pytest.mark.parametrize("turn_rows", ["join", "split"])
def test_every_turn_is_trained_on_the_rows_of_its_weights(tmp_path: Path, turn_rows: str) -> None:
    """Each part of a row under one version is scored with that version's saved weights."""
    settings = [*SETTINGS, f"rollout.turn_rows={turn_rows}"]
    run = start(tmp_path, "digits-in-turns", *settings, name="x", copies=True)
    assert run.finish() == 0, run.text()
    assert [row["eval/step"] for row in run.rows() if "eval/step" in row][:1] == [0.0]
    assert run.rows()[-1]["eval/step"] == 4, "the last weights, too"
    groups = [group for _, group in run.trained.groups(run.rows())]
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [turn.rollout for episode in episodes for turn in episode.turns]
    assert sum(len(episode.turn_lengths()) for episode in episodes) > 20 + len(episodes), (
        "most answers of a random model are wrong: it is asked again"
    )
    check_rows(turn_rows, episodes, rows)
    check_bins(turn_rows, run.rows())
    for version in sorted({span.version for row in rows for span in row.versions}):
        weights = run.dir.versions / str(version)
        found = {}
        for name, model in (("own", weights), ("other", run.dir.versions / other(version))):
            job = score(
                run.plan(),
                rows,
                tmp_path,
                variants=["both", "both_shifted"],
                dtypes=["fp32"],
                model=model,
                version=str(version),
            )
            scores = np.load(job.out)
            for variant in job.variants:
                gap = np.abs(scores[f"fp32/{variant}"] - scores["engine"])
                found[f"{name}/{variant}"] = float(gap.max())
        print(f"{turn_rows}, {len(gap)} tokens of {version}: {found}")
        assert found["own/both"] <= 5e-5
        assert found["own/both_shifted"] > 1e-2, "control: rows of the token before"
        assert found["other/both"] > 1e-3, "control: weights of another version"


def test_tails_of_an_update_in_place_are_in_bins_of_their_own(tmp_path: Path) -> None:
    """Turns continue on the KV cache of the older weights; a later turn is prefilled anew."""
    settings = [*SETTINGS, "rollout.in_flight_mode=in_place"]
    run = start(tmp_path, "digits-in-turns", *settings, name="x")
    assert run.finish() == 0, run.text()
    check_bins("join", run.rows())


def check_bins(turn_rows: str, steps: list[dict[str, float]]) -> None:
    """Tokens behind an update are in bins of their own, so all others of lag 0 are exact."""
    gaps = [step[LAG_0] for step in steps if LAG_0 in step]
    assert gaps
    assert max(gaps) <= 5e-5
    behind = {name for step in steps for name in step if name.startswith(JOINED)}
    assert bool(behind) == (turn_rows == "join")


def check_rows(turn_rows: str, episodes: list[Episode], rows: list[Rollout]) -> None:
    joined = [row for row in rows if len(row.versions) > 1]
    if turn_rows == "split":
        assert not joined
        assert len(rows) > len(episodes), "an update came between two turns, or into one"
    else:
        assert joined, "an update came between two turns, or into one"
        assert len(rows) == len(episodes)
        assert max(len(row.ends) for row in rows) == 3


def other(version: PolicyVersion) -> str:
    return f"0.{0 if version.step else 1}"

"""An episode whose context grows to 32k tokens, recorded, trained and scored as one row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moerl.config import load_config
from moerl.data.tiny_model import make_tiny_model
from tests.helpers.train_runs import start, survivors
from tests.helpers.warm_score import score

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(2400)]

TURNS, RESULT = 17, 1930  # turns of an episode; characters, so tokens, of a tool's result
LONG = 32_768
AGENT = Path(__file__).parents[1] / "helpers/text_agent.py"
SETTINGS = [
    f"task.max_turns={TURNS}",
    "task.wall_s=1800",
    "sampling.max_new_tokens=4",
    "engine.max_total_tokens=80000",
    "trainer.max_tokens_per_microbatch=35000",
    "rollout.groups_per_step=1",
    "rollout.group_size=2",
    "rollout.max_groups_in_flight=1",
    "rollout.buffer_depth=1",
    "checkpoint.every=0",
    "checkpoint.keep_versions=true",
    "observe.engine_alone_s=0",
    "run.steps=1",
]


def long_model(folder: Path) -> None:
    """The recipe's tiny model, for positions up to 40,960."""
    make_tiny_model(folder, load_config("quickstart", []).model.tiny, 0)
    for name, field in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: 40_960}))


def test_an_episode_of_32k_tokens_is_one_exact_row(tmp_path: Path) -> None:
    long_model(tmp_path / "model")
    command = f"task.agent.command=[python, {AGENT}, '{TURNS}', '{RESULT}']"
    model = f"model.path={tmp_path / 'model'}"
    run = start(tmp_path, "digits-by-agent", model, command, *SETTINGS, name="x", copies=True)
    members = run.members()
    assert run.finish(2000.0) == 0, run.text()
    assert not survivors(members, 10.0)
    (row,) = run.rows()
    (group,) = [group for _, group in run.trained.groups([row])]
    rollouts = [node.rollout for episode in group.episodes for node in episode.turns]
    assert len(rollouts) == 2, "each episode is one row"
    assert all(len(rollout.ends) == TURNS for rollout in rollouts)
    assert min(rollout.num_tokens for rollout in rollouts) >= LONG
    print(f"|dlogp| max {row['mismatch/abs_dlogp_max/lag_0']:.2e}, {rollouts[0].num_tokens} tokens")
    assert row["mismatch/abs_dlogp_max/lag_0"] <= 5e-5
    job = score(
        run.plan(),
        rollouts[:1],
        tmp_path,
        variants=["both", "both_shifted"],
        dtypes=["fp32"],
        model=run.dir.versions / "0.0",
    )
    scores = np.load(job.out)
    gaps = {name: np.abs(scores[f"fp32/{name}"] - scores["engine"]) for name in job.variants}
    print({name: float(gap.max()) for name, gap in gaps.items()})
    assert gaps["both"].max() <= 5e-5
    assert gaps["both_shifted"].max() > 1e-2, "control: rows of the token before"

"""The same path with other parts: precision, layout, tasks, engines.  A few steps each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.train_runs import SMALL, start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

VARIANTS = {
    "bf16-trainer": ["trainer.dtype=bf16"],
    "tp2": [f"trainer.parallel.{k}" for k in ("dp=1", "ep=1", "tp=2", "etp=2")],
    "distributed-optimizer": ["trainer.optimizer.distributed=true"],
    "two-engines": ["engine.count=2"],
    "no-truncation": ["sampling.top_p=1.0", "sampling.top_k=-1"],
    "allgather": ["trainer.dispatcher=allgather"],
    "stages": [
        *(f"trainer.parallel.{k}" for k in ("dp=1", "ep=1", "pp=2")),
        "trainer.packing=true",
        "trainer.share_prompts=true",
        "trainer.megatron={recompute_granularity: full, recompute_method: uniform, "
        "recompute_num_layers: 1}",
        "rollout.buffer_depth=0",
    ],
    "context": [
        *(f"trainer.parallel.{k}" for k in ("dp=1", "ep=1", "cp=2")),
        "trainer.packing=true",
        "rollout.buffer_depth=0",
    ],
    "off-policy-mask": [
        "algorithm.corrections=[opsm]",
        "algorithm.off_policy_delta=0.1",
        "algorithm.aggregation=token_mean",
    ],
    "tensorboard": ["observe.tensorboard=true"],
    "reasoning-gym": [
        "task.name=reasoning_gym",
        "task.dataset=chain_sum",
        "task.dataset_args={min_terms: 2, max_terms: 2}",
        "sampling.max_new_tokens=8",
    ],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, tmp_path: Path) -> None:
    run = start(tmp_path, "quickstart", *SMALL, *VARIANTS[name], name="x")
    assert run.finish() == 0, run.text()
    rows = run.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["routing/replay_cover_frac"] == 1.0 for row in rows)
    assert not [key for row in rows for key in row if key.startswith("refused/")]
    limit = 0.5 if name == "bf16-trainer" else 5e-5
    assert rows[0]["mismatch/abs_dlogp_max/lag_0"] <= limit
    if "rollout.buffer_depth=0" in VARIANTS[name]:  # what was published is what was gathered
        assert all(row["mismatch/abs_dlogp_max/lag_0"] <= limit for row in rows)
    if "trainer.share_prompts=true" in VARIANTS[name]:  # the engine's records of siblings agree
        assert all(row["perf/shared_frac"] > 0.1 for row in rows)
        assert all("routing/prompts_apart" in row for row in rows)
    truncated = name != "no-truncation"
    assert all(row.get("keep/cover_frac") == (1.0 if truncated else None) for row in rows)


def test_own_prompts_with_math_verify_and_chat(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1), "level": i}
        for i in range(9)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    task = [
        "task.name=jsonl",
        f"task.path={path}",
        "task.reward=math_verify",
        "task.chat_template=true",
        "sampling.max_new_tokens=6",
    ]
    run = start(tmp_path, "quickstart", *SMALL, *task, name="x")
    assert run.finish() == 0, run.text()
    assert [row["step"] for row in run.rows()] == [0, 1, 2]


def test_the_trained_folder_is_a_model_like_any_other(tmp_path: Path) -> None:
    """A run continues from another run's hf/ folder, as from any local Qwen3-MoE."""
    first = start(tmp_path, "quickstart", *SMALL, name="a")
    assert first.finish() == 0, first.text()
    again = start(tmp_path, "quickstart", *SMALL, f"model.path={first.dir.hf}", name="b")
    assert again.finish() == 0, again.text()
    assert again.rows()[0]["mismatch/abs_dlogp_max/lag_0"] <= 5e-5

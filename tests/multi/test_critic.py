"""The critic learns its returns, does not depend on the ranks, and survives a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_support import ROOT, make_model, torchrun


def _run(model: Path, work: Path, ranks: int) -> dict[str, Any]:
    arguments = [f"--model={model}", f"--work={work}", f"--dp={ranks}"]
    output = torchrun(ranks, [str(ROOT / "tests" / "multi" / "critic.py"), *arguments])
    return json.loads(output.split("FOUND ")[1].splitlines()[0])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    root = tmp_path_factory.mktemp("critic")
    model = make_model(root / "model")
    return {ranks: _run(model, root / f"work{ranks}", ranks) for ranks in (1, 2)}


def test_the_critic_learns_the_returns(found: dict[int, dict[str, Any]]) -> None:
    rows = found[1]["rows"]
    assert rows[0]["critic/explained_frac"] == pytest.approx(0.0, abs=1e-6), "values are 0"
    assert rows[0]["adv/std"] == pytest.approx(1.0, abs=1e-3)
    assert rows[-1]["loss/value"] < 0.7 * rows[0]["loss/value"]
    assert rows[-1]["critic/explained_frac"] > 0.1


def test_two_expert_parallel_ranks_train_the_same_critic(found: dict[int, dict[str, Any]]) -> None:
    one, two = found[1], found[2]
    for a, b in zip(one["rows"], two["rows"], strict=True):
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=2e-4), name
    assert max(one["values"]) - min(one["values"]) > 1e-2, "control: values differ by token"


def test_a_checkpoint_continues_policy_and_critic(found: dict[int, dict[str, Any]]) -> None:
    for ranks in (1, 2):
        assert found[ranks]["resumed"] == pytest.approx(found[ranks]["after"], rel=1e-5, abs=1e-7)
        last, after = found[ranks]["rows"][-1], found[ranks]["after"]
        assert after["loss/value"] != pytest.approx(last["loss/value"], rel=1e-5), "control"

"""The critic learns its returns, does not depend on the ranks, and survives a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model


def _run(model: Path, work: Path, ranks: int) -> dict[str, Any]:
    arguments = [f"--model={model}", f"--work={work}", f"--dp={ranks}"]
    output = run_ranks(ranks, [str(ROOT / "tests" / "helpers" / "critic_ranks.py"), *arguments])
    return json.loads(output.split("FOUND ")[1].splitlines()[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("critic") / "model")


@pytest.fixture(scope="module")
def two(model: Path) -> dict[str, Any]:
    return _run(model, model.parent / "work2", 2)


def test_the_critic_learns_the_returns(two: dict[str, Any]) -> None:
    rows = two["rows"]
    assert rows[0]["critic/explained_frac"] == pytest.approx(0.0, abs=1e-6), "values are 0"
    assert rows[0]["adv/std"] == pytest.approx(1.0, abs=1e-3)
    assert rows[-1]["loss/value"] < 0.7 * rows[0]["loss/value"]
    assert rows[-1]["critic/explained_frac"] > 0.1
    assert max(two["values"]) - min(two["values"]) > 1e-2, "values differ by token"


def test_a_checkpoint_continues_policy_and_critic(two: dict[str, Any]) -> None:
    assert two["resumed"] == pytest.approx(two["after"], rel=1e-5, abs=1e-7)
    last = two["rows"][-1]
    assert two["after"]["loss/value"] != pytest.approx(last["loss/value"], rel=1e-5), "control"


def test_a_checkpoint_in_bf16_continues_bitwise(two: dict[str, Any]) -> None:
    """With the plain and with the distributed optimizer, which save fp32 weights beside bf16."""
    for before, again in two["halves"]:
        assert again == before
    assert two["halves"][0][0] != two["rows"][1], "control: it is not fp32"


def test_a_critic_that_diverges_ends_the_step(two: dict[str, Any]) -> None:
    """Its weights would go into the next checkpoint, and every restart would begin with them."""
    assert "the critic: the gradient norm is" in two["refused"]


@pytest.mark.full
def test_two_expert_parallel_ranks_train_the_same_critic_as_one(
    two: dict[str, Any], model: Path
) -> None:
    one = _run(model, model.parent / "work1", 1)
    for a, b in zip(one["rows"], two["rows"], strict=True):
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=2e-4), name

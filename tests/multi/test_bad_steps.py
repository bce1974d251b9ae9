"""Optimizer steps whose loss or gradient is not finite: not taken, named, bounded, on all ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("bad_steps")
    arguments = [f"--model={make_model(root / 'model')}", f"--work={root / 'work'}"]
    output = run_ranks(2, [str(ROOT / "tests" / "helpers" / "bad_step_ranks.py"), *arguments])
    result: dict[str, Any] = json.loads(output.split("FOUND ")[1].splitlines()[0])
    return result


@pytest.mark.parametrize("kind", ["loss", "gradient", "distributed", "lora"])
def test_a_bad_step_is_not_taken_and_named(found: dict[str, Any], kind: str) -> None:
    case = found[kind]
    assert case["kept"], "weights, moments and step counts are those before, bit for bit"
    assert case["as_if_never_seen"]
    assert case["moved"], "control: good batches do change them"
    assert case["rows"] == [[0.0, True], [1.0, False], [0.0, True]]
    assert case["schedule"] == 3, "the rate follows the batches"
    assert case["want"]
    assert case["named"] == case["want"]
    assert " of data-parallel rank 1 (rollouts " in case["text"]
    assert case["want"][0] in case["text"]
    what = "the loss is nan" if kind == "loss" else "the gradient norm is "
    assert case["text"].startswith(f"step 1: {what}")
    assert "1 in a row of trainer.skip_bad_steps = 1" in case["text"]


def test_the_limit_counts_batches_in_a_row(found: dict[str, Any]) -> None:
    limit = found["limit"]
    assert [limit[most][0] for most in "012"] == [0, 1, 2]
    assert limit["0"][1].startswith("step 0: the loss is nan in microbatch 0 of data-parallel rank")
    assert "rollouts" in limit["0"][1]
    assert limit["1"][1].startswith("step 1: the loss is nan")
    assert limit["2"][1] == ""
    assert all(limit[most][2] for most in "012"), "weights that end a run are whole, too"
    assert [limit[most][3] for most in "012"] == [1, 2, 2], "the last one is reported, too"
    assert limit["apart"] == 2, "a good batch between them begins again"


def test_a_minibatch_alone_is_not_taken(found: dict[str, Any]) -> None:
    assert found["minibatches"] == {"equal": True, "skipped": 1.0, "norm": True}


def test_no_rank_steps_alone(found: dict[str, Any]) -> None:
    assert found["alone"]["kept"]
    assert "no microbatch alone gives it" in found["alone"]["text"]
    assert not found["unguarded"], "control: Megatron's step would take it"


def test_the_critic_counts_with_the_policy(found: dict[str, Any]) -> None:
    critic = found["critic"]
    assert critic["kept"]
    assert critic["policy_moved"]
    assert critic["skipped"] == 1.0
    assert critic["first"].startswith("step 0: the critic: the gradient norm is nan")
    assert critic["second"].startswith("step 1: the loss is nan"), "two batches in a row"


def test_an_error_names_microbatch_and_rollouts(found: dict[str, Any]) -> None:
    error = found["raised"]
    assert error.startswith("ValueError: the objective does not like these tokens; in microbatch 1")
    assert "(rollouts " in error

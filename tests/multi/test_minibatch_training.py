"""A batch in several optimizer steps: proximal policy, its own routes (R2), M2PO, online DPO; a
trainer that is parked between two steps.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import LAYERS, ROOT, TOP_K, make_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("minibatches")
    arguments = [f"--model={make_model(root / 'model')}", f"--work={root / 'work'}"]
    output = run_ranks(1, [str(ROOT / "tests" / "helpers" / "minibatch_ranks.py"), *arguments])
    result: dict[str, Any] = json.loads(output.split("FOUND ")[1].splitlines()[0])
    return result


def test_r2_in_one_optimizer_step_is_bitwise_the_live_router(found: dict[str, Any]) -> None:
    one = found["one_step"]
    assert one["r2_is_live"]
    assert one["same_loss"]
    assert not one["r3_is_live"], "control: the engine's routes are others"
    assert one["cover"] == 1.0
    assert one["bytes"] == LAYERS * TOP_K


def test_the_second_minibatch_runs_the_experts_of_the_proximal_weights(
    found: dict[str, Any],
) -> None:
    two = found["two_steps"]
    assert two["second_runs_old_experts"], "bitwise those of a fresh model with the old weights"
    assert not two["later_weights_do"], "control: after the step live routers choose others"
    assert two["moved_k3"] > 1e-4


def test_mismatch_is_that_of_the_weights_a_batch_starts_from(found: dict[str, Any]) -> None:
    two = found["two_steps"]
    assert two["mismatch"][0] == pytest.approx(two["mismatch"][1], rel=1e-6)
    before, after = two["mismatch_moved"]
    assert after != pytest.approx(before, rel=1e-3), "control: later weights give another number"


def test_every_group_is_in_one_minibatch(found: dict[str, Any]) -> None:
    first, second = found["two_steps"]["groups"]
    assert len(first) == len(second) == 2
    assert sorted(first + second) == [0, 1, 2, 3]
    assert found["two_steps"]["rows"] == list(range(16))


def test_two_optimizer_steps_are_two_plans(found: dict[str, Any]) -> None:
    plain = found["plain_steps"]
    assert plain["equal"], "bitwise the weights after two plans"
    assert not plain["backwards_equal"], "control: the order matters"
    for name in ("pg", "tokens", "grad_norm", "lr"):
        got, want = plain[name]
        assert got == pytest.approx(want, rel=1e-6), name
    assert plain["schedule"] == [1, 2], "the schedule counts batches"


def test_m2po_cuts_the_same_tokens_however_the_batch_is_split(found: dict[str, Any]) -> None:
    one, two = found["second_moment"]["0.5"]
    assert one == two
    assert 0.05 < one < 0.95
    assert found["second_moment"]["1000000000.0"] == [0.0, 0.0]


def test_online_dpo_learns_its_pairs(found: dict[str, Any]) -> None:
    loss = found["pairs"]["loss"]
    assert loss[0] == pytest.approx(0.6931, abs=1e-3), "the policy is still its reference"
    assert loss[-1] < loss[0]


def test_router_losses_are_megatrons_where_the_record_is_the_live_choice(
    found: dict[str, Any],
) -> None:
    losses = found["router_losses"]
    assert losses["microbatches"] == 4
    assert losses["distance"] < 1e-6, "all gradients"
    assert losses["router_gradient"] > 1e-4
    for name, want in losses["theirs"].items():
        assert losses["values"][name] == pytest.approx(want, rel=1e-6), name
    assert losses["distance_other"] > 1e-3, "control: other routes"
    other, want = losses["other"], losses["theirs"]
    assert other["router_balance"] != pytest.approx(want["router_balance"], rel=1e-3)


def test_a_parked_trainer_goes_on_as_if_it_had_stayed(found: dict[str, Any]) -> None:
    parked = found["parked"]
    assert parked["equal"], "bitwise"
    assert not parked["lost_is_equal"], "control: moments that do not come back"
    assert all(parked["sizes"])
    assert parked["empty"] == 0

"""Experts by grouped products: gradients of a step are the loop's, in each layout and model.

Without adapters they are equal bitwise on a CPU, where torch's grouped product is the same loop of
products; adapters get the same sums in another order.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.rank_server import ROOT, run_ranks

WORKER = str(ROOT / "tests" / "helpers" / "grouped_ranks.py")
SAME = (
    "plain", "bf16", "unused", "recompute", "packed", "allgather", "biases", "shared",
    "weighed inputs", "blackwell", "no rows",
)  # fmt: skip
NEAR = 1e-6  # of the largest gradient, in fp32
CONTROLS = ("ends moved", "unmasked", "no way to factors")
WORLDS = {"ep2": 2, "tp2-ep2": 2, "tp2-etp2": 2, "cp2-ep2": 2, "pp2-ep2": 4}

Found = dict[str, list[dict[str, float]]]  # of each case, by rank


def answers(work: Path, layout: str, *cases: str, world: int = 1) -> Found:
    run_ranks(world, [WORKER, str(work), layout, *cases], timeout_s=200)
    return {case: json.loads((work / f"{case}.{layout}.json").read_text()) for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return answers(tmp_path_factory.mktemp("one"), "one", *SAME, "lora", *CONTROLS)


@pytest.mark.parametrize("case", SAME)
def test_gradients_are_those_of_the_loop(found: Found, case: str) -> None:
    assert found[case][0]["equal"], found[case]
    assert found[case][0]["loss"] == 0


def test_adapters_have_the_gradients_of_the_loop(
    found: Found,
) -> None:
    assert found["lora"][0]["gap"] <= NEAR


@pytest.mark.parametrize("case", CONTROLS)
def test_a_wrong_product_is_noticed(found: Found, case: str) -> None:
    """Rows of the next expert; an empty expert's gradient as Blackwell leaves it; no factors."""
    assert found[case][0]["gap"] > 0.1


@pytest.mark.full
@pytest.mark.parametrize("layout", WORLDS)
def test_every_layout_has_the_gradients_of_the_loop(tmp_path: Path, layout: str) -> None:
    more = ("overlapped",) if layout == "ep2" else ()
    every = answers(tmp_path, layout, "plain", "unused", "lora", *more, world=WORLDS[layout])
    assert all(rank["gap"] <= NEAR for rank in every.pop("lora"))
    for case, by_rank in every.items():
        assert all(rank["equal"] for rank in by_rank), (case, by_rank)

"""Siblings and branches that share their leading tokens train as rows of their own do.

Loss, gradient, router losses and loads of experts are equal, with replayed, own and live routes,
with recompute, in the form of a GPU and in several layouts; a few optimizer steps are, too.
Controls: a row that sees its sibling, positions that do not go on behind the prompt, shared rows
that count once in router losses, prompts of other routes that are shared nevertheless.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model

LIMIT = 1e-6  # relative; 4e-7 and less measured
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "dp2-ep2": {"dp": 2, "ep": 2},
}


def ranks(number: int, root: Path, work: str, *more: str) -> dict[str, Any]:
    script = str(ROOT / "tests" / "helpers" / "shared_prompts_ranks.py")
    output = run_ranks(
        number, [script, f"--model={root / 'model'}", f"--work={root / work}", *more]
    )
    found: dict[str, Any] = json.loads(output.split("FOUND ")[1].splitlines()[0])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared_prompts")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    return ranks(1, root, "one", "--parallel={}")


def check(gap: dict[str, float]) -> None:
    assert gap["gradient"] <= LIMIT, gap
    assert gap["loss"] <= LIMIT, gap
    assert gap["routers"] <= LIMIT, gap
    assert gap["forwarded"] < 0.7, "control: tokens are shared"


@pytest.mark.parametrize("form", ["shared", "R2", "off", "recompute", "flex"])
def test_shared_rows_train_like_rows_of_their_own(found: dict[str, Any], form: str) -> None:
    check(found[form])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_do_in_other_layouts(root: Path, layout: str) -> None:
    sizes = f"--parallel={json.dumps(LAYOUTS[layout])}"
    check(ranks(2, root, layout, "--quick", sizes)["shared"])


@pytest.mark.parametrize("wrong", ["sees_siblings", "own_positions", "any_routes", "not_weighed"])
def test_mistakes_train_something_else(found: dict[str, Any], wrong: str) -> None:
    assert found[wrong]["gradient"] > 10_000 * LIMIT
    assert found[wrong]["routers"] > 100 * LIMIT


def test_rows_that_count_once_change_router_losses_alone(found: dict[str, Any]) -> None:
    assert found["not_weighed"]["loss"] <= LIMIT
    assert found["not_weighed"]["routers"] > 0.1


def test_steps_are_the_same(found: dict[str, Any]) -> None:
    steps = found["steps"]
    assert max(steps["far"].values()) <= LIMIT, steps["far"]
    assert steps["moved"] > 0.01, "control: the weights change"
    assert steps["routing/replay_cover_frac"] == 1.0
    assert steps["perf/shared_frac"] > 0.3
    assert steps["routing/prompts_apart"] == 2, "one sibling of each of two groups"
    assert steps["alone"] == [], "not shared: no such metrics"

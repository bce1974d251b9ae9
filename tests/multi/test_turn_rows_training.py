"""Turns in one row train as a row per turn does: equal loss, equal gradient.

Both replays are on, padded and packed.  Controls: rows shifted by one token, a turn trained twice.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model

LIMIT = 1e-5  # relative; 1e-6 and less measured


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("turn_rows")
    script = str(ROOT / "tests" / "helpers" / "turn_rows_ranks.py")
    model = make_model(root / "model")
    output = run_ranks(1, [script, "--model", str(model), "--work", str(root)])
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.mark.parametrize("layout", ["", "/packed"])
@pytest.mark.parametrize("graph", ["chain", "branch"])
def test_one_row_trains_like_a_row_per_turn(
    gaps: dict[str, dict[str, float]], graph: str, layout: str
) -> None:
    gap = gaps[f"{graph}/join{layout}"]
    assert gap["loss"] <= LIMIT, gap
    assert gap["gradient"] <= LIMIT, gap


@pytest.mark.parametrize("layout", ["", "/packed"])
@pytest.mark.parametrize("wrong", ["chain/shifted", "chain/twice", "branch/twice"])
def test_wrong_rows_train_something_else(
    gaps: dict[str, dict[str, float]], wrong: str, layout: str
) -> None:
    assert gaps[f"{wrong}{layout}"]["gradient"] > 1000 * LIMIT

"""A step with score centering, or with the KL to a teacher over a support, on several layouts.

One rank gives the sums that dense rows of logits give; every layout gives those of one rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model

TERMS = {
    "centering, mask": "loss/centering",
    "centering, top": "loss/centering",
    "reverse, mask": "loss/kl_teacher",
    "forward, top": "loss/kl_teacher",
}
each_case = pytest.mark.parametrize("case", TERMS)
Found = dict[str, dict[str, float]]


def run(models: list[Path], work: Path, ranks: int, *layout: str) -> Found:
    student, teacher = models
    arguments = [f"--student={student}", f"--teacher={teacher}", f"--work={work}", *layout]
    output = run_ranks(ranks, [str(ROOT / "tests" / "helpers" / "support_ranks.py"), *arguments])
    found: Any = json.loads(output.split("FOUND ")[1].splitlines()[0])
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"model{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def one(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(models, tmp_path_factory.mktemp("one"), 1)


@each_case
def test_the_term_is_that_of_all_logits(one: Found, case: str) -> None:
    assert one[case][TERMS[case]] == pytest.approx(one[case]["oracle"], rel=1e-5, abs=1e-6)
    assert abs(one[case]["oracle"]) > 1e-3


def test_bytes_of_the_engines_numbers(one: Found) -> None:
    """2 per kept entry beside a mask; 6 per likeliest entry, whose ids and offsets come, too."""
    assert 2 < one["centering, mask"]["bytes"] < 16
    assert 9 * 6 + 8 <= one["centering, top"]["bytes"] < 9 * 6 + 12
    assert one["reverse, mask"]["bytes"] == 0


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, ["--tp=2"], id="tp2"),
        pytest.param(2, ["--cp=2"], id="cp2"),
        pytest.param(4, ["--tp=2", "--pp=2"], id="tp2 pp2", marks=pytest.mark.full),
    ],
)
def test_layouts_give_what_one_rank_gives(
    one: Found, models: list[Path], tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    found = run(models, tmp_path, ranks, *layout)
    for case, name in TERMS.items():
        for key in ("loss/total", "grad_norm", name):
            assert found[case][key] == pytest.approx(one[case][key], rel=1e-5, abs=1e-7), (
                case,
                key,
            )

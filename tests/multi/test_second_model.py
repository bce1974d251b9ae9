"""A reference and a teacher beside the trained model, two expert-parallel ranks."""

from __future__ import annotations

import json

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    root = tmp_path_factory.mktemp("second")
    student, other = (make_model(root / f"model{seed}", seed=seed) for seed in range(2))
    arguments = [f"--student={student}", f"--other={other}", f"--work={root / 'work'}"]
    output = run_ranks(2, [str(ROOT / "tests" / "helpers" / "ref_models_ranks.py"), *arguments])
    return json.loads(output.split("FOUND ")[1].splitlines()[0])


def test_the_student_as_its_own_reference_and_teacher_has_nothing_to_learn(
    found: dict[str, list[dict[str, float]]],
) -> None:
    assert all(abs(value) < 1e-6 for value in found["itself"][0].values()), found["itself"][0]


def test_other_weights_give_a_kl_and_a_gradient(found: dict[str, list[dict[str, float]]]) -> None:
    first, second = found["other"]
    assert first["loss/kl_ref_k3"] > 0.01
    assert first["loss/kl_ref"] > 0
    assert first["loss/grad_norm"] > 0.01
    assert second["loss/kl_ref_k3"] != first["loss/kl_ref_k3"], "the student moved, or the plan"

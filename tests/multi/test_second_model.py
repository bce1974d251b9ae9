"""A reference and a teacher beside the trained model, two expert-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainer_support import ROOT, make_model, torchrun


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("second")
    return [make_model(root / f"model{seed}", seed=seed) for seed in range(2)]


def _run(student: Path, reference: Path, teacher: Path, work: Path) -> list[dict[str, float]]:
    paths = {"student": student, "reference": reference, "teacher": teacher, "work": work}
    arguments = [f"--{name}={path}" for name, path in paths.items()]
    output = torchrun(2, [str(ROOT / "tests" / "multi" / "second_model.py"), *arguments])
    return json.loads(output.split("FOUND ")[1].splitlines()[0])


def test_the_student_as_its_own_reference_and_teacher_has_nothing_to_learn(
    models: list[Path], tmp_path: Path
) -> None:
    first, _ = _run(models[0], models[0], models[0], tmp_path)
    assert all(abs(value) < 1e-6 for value in first.values()), first


def test_other_weights_give_a_kl_and_a_gradient(models: list[Path], tmp_path: Path) -> None:
    first, second = _run(models[0], models[1], models[1], tmp_path)
    assert first["loss/kl_ref_k3"] > 0.01
    assert first["loss/kl_ref"] > 0
    assert first["loss/grad_norm"] > 0.01
    assert second["loss/kl_ref_k3"] != first["loss/kl_ref_k3"], "the student moved, or the plan"

"""Which version of the policy each following teacher has at a step, and its folder in the run.

The version depends on the step alone, never on the moment of a publish.  So a plan has one version
of each teacher, and after a crash a step meets the teacher that it met before.

An incarnation's steps replace later steps of earlier incarnations: a version is named by the
trainer that made its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moerl.config.algorithms import followers_of
from moerl.config.schema import AlgorithmConfig, TeacherConfig
from moerl.core.types import PolicyVersion
from moerl.runtime.run_dir import RunDir


def version_at(begins: Sequence[PolicyVersion], step: int) -> PolicyVersion:
    """The version after `step` optimizer steps.  begins: first version of each trainer, rising."""
    made = [begin for begin in begins if begin.step < step] or [
        begin for begin in begins if begin.step <= step
    ]
    return PolicyVersion((made or begins)[-1].incarnation, step)


def teacher_step(teacher: TeacherConfig, step: int) -> int:
    """Optimizer steps in the version that a following teacher has when batch `step` is trained."""
    return max(0, (step - teacher.lag) // teacher.every * teacher.every)


def teachers_at(
    algorithm: AlgorithmConfig, begins: Sequence[PolicyVersion], step: int
) -> dict[str, PolicyVersion]:
    """Version of each following teacher when batch `step` is trained, by name."""
    return {
        name: version_at(begins, teacher_step(teacher, step))
        for name, teacher in followers_of(algorithm).items()
    }


def teacher_folder(run: RunDir, name: str, version: PolicyVersion) -> Path:
    """It exists only when it is whole."""
    return run.teachers / name / str(version)

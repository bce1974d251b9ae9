"""Data sets whose scorers run the policy's answer as Python; they need `task.isolation: bwrap`."""

from __future__ import annotations

from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError

# By eval or sympy's parse_expr, in reasoning-gym 0.1.25; `composite` asks the scorers of others.
EVALUATING = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


def check_isolation(task: TaskConfig) -> None:
    """Raises ConfigError for a task that runs the policy's text outside a box."""
    evaluates = task.name == "reasoning_gym" and task.dataset in EVALUATING
    if evaluates and task.isolation != "bwrap":
        raise ConfigError(
            "task.isolation",
            task.isolation,
            f"the scorer of {task.dataset} runs the policy's answer as Python; use bwrap",
        )

"""Runs of hypothesis state machines: the same examples each time, a few seconds each.

With `MOERL_SHRINK=1` a failure is made as short as possible, which takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def explore(machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Try `examples` histories of at most `steps` operations; a failure prints its history."""
    shrinks = [Phase.shrink] if os.environ.get("MOERL_SHRINK") else []
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, *shrinks],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)

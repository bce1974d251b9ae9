"""`moerl train` with a verifiers environment, unchanged and in an environment of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.agent_clients import PYTHON, environment, verifiers_agent
from tests.helpers.short_agent_runs import SETTINGS, check_agent_run
from tests.helpers.train_runs import start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.clients, pytest.mark.timeout(1200)]


def agent_settings(harness: str, taskset: str = "sort_taskset") -> list[str]:
    """A worker that plays a set of tasks; `env` gives it the variables of its environment."""
    variables = [f"{name}={value}" for name, value in environment().items()]
    command = ["env", *variables, str(PYTHON), *verifiers_agent(taskset, harness)]
    return [
        "task.agent.workers=1",
        f"task.agent.command={json.dumps(command)}",
        "task.max_turns=4",
        "task.limits.processes=512",
    ]


def test_a_verifiers_environment_is_trained(tmp_path: Path) -> None:
    """Its chat program is verifiers' own: a process per answer."""
    run = start(
        tmp_path, "digits-by-agent", *SETTINGS, *agent_settings("null"), "run.steps=2",
        "task.wall_s=600", name="x", copies=True,
    )  # fmt: skip
    run.wait_for(lambda: bool(run.rows()))
    members = run.members()
    assert run.finish() == 0, run.text()
    check_agent_run(run, 2)
    rewards = [row["reward/mean"] for row in run.rows() if "reward/mean" in row]
    assert rewards
    assert all(0 <= reward <= 1 for reward in rewards)
    assert not survivors(members, 10.0)


def test_held_out_tasks_are_played_and_not_trained(tmp_path: Path) -> None:
    """The harness runs in the worker; weights stay, so that greedy evaluations are equal."""
    run = start(
        tmp_path, "digits-by-agent", *SETTINGS,
        *agent_settings("here_harness", "last_digit_taskset"), "sampling.max_new_tokens=1",
        "trainer.optimizer={lr: 0, min_lr: 0, warmup_steps: 0}", "evaluation.every=1",
        "evaluation.prompts=8", "evaluation.hold_s=180", "run.steps=2", name="x", copies=True,
    )  # fmt: skip
    assert run.finish() == 0, run.text()
    found = [row for row in run.rows() if "eval/step" in row]
    assert [row["eval/step"] for row in found] == [0.0, 1.0, 2.0]
    assert len({row["eval/reward_mean"] for row in found}) == 1
    assert all((row["eval/failed"], row["eval/length_mean"]) == (0.0, 1.0) for row in found)

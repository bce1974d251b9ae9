"""`moerl train` with stateful environments, on real SGLang and Megatron."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from moerl.observe.metrics import read_rows
from tests.helpers import chat_tokenizer, engine_tiny_model
from tests.helpers.documented_metrics import undocumented
from tests.helpers.short_agent_runs import LAG_0, SETTINGS
from tests.helpers.train_runs import Run, check_deletion, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

METRICS = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text()
LOCKS = ["task.environment=examples.live_environment:Locks", "task.max_turns=3"]
# Most words of this model's vocabulary are whole calls of `shell`; what they print, it cannot know.
TOOLS = [
    "task.environment=sandbox_tools",
    "task.tools=[shell]",
    "task.reward=source",
    "task.call_format=qwen25",
    "task.max_turns=3",
    "sampling.max_new_tokens=12",
]


def calling_model(folder: Path) -> Path:
    engine_tiny_model.save(folder, 0)
    chat_tokenizer.save(folder, [shell_call(number) for number in range(60)])
    return folder


def shell_call(number: int) -> str:
    command = f"echo $(({number} + 1)) >> file; cat file"
    arguments = f'{{"command":"{command}"}}'
    return f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'


def checked(run: Run, steps: int) -> list[dict[str, float]]:
    """Every step is there, exact at lag 0, and of several turns."""
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(steps))
    assert not undocumented((name for row in rows for name in row if "/" in name), METRICS)
    gaps = [row[LAG_0] for row in rows if LAG_0 in row]
    assert gaps
    assert max(gaps) <= 5e-5
    groups = [group for _, group in run.trained.groups(rows)]
    assert len({group.group_id for group in groups}) == len(groups) == 2 * steps
    ends = [len(node.rollout.ends) for g in groups for e in g.episodes for node in e.turns]
    assert max(ends) > 1, "turns of one conversation are one row"
    check_deletion(run, in_flight=16)
    return rows


def total(rows: list[dict[str, float]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


def test_calls_of_the_policy_are_executed_and_its_turns_trained(tmp_path: Path) -> None:
    model = calling_model(tmp_path / "model")
    settings = [*SETTINGS, *TOOLS, f"model.path={model}", "model.tiny.enabled=false"]
    run = start(tmp_path, "quickstart", *settings, "run.steps=2", name="x", copies=True)
    run.wait_for(lambda: bool(run.members()))
    members = run.members()
    assert run.finish() == 0, run.text()
    rows = checked(run, 2)
    calls = total(rows, "agent/tool/calls")
    assert calls >= 4
    assert total(rows, "agent/tool/errors") < calls, "at least one was executed"
    assert total(rows, "agent/tool/ended/lost") == 0
    assert not survivors(members, 10.0)


def test_an_environment_whose_worker_is_killed_costs_no_step(tmp_path: Path) -> None:
    slow = "task.environment_options={wait_s: 0.5}"
    run = start(
        tmp_path, "quickstart", *SETTINGS, *LOCKS, slow, "run.steps=3", name="x", copies=True
    )
    try:
        run.wait_for(lambda: len(read_rows(run.dir.metrics)) >= 1 and bool(workers_of(run)))
        members = run.members()
        os.kill(workers_of(run)[0].pid, signal.SIGKILL)
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    rows = checked(run, 3)
    assert total(rows, "agent/failed/lost") > 0
    assert total(rows, "scorer/failed") == 0
    assert not survivors(members, 10.0)


def workers_of(run: Run) -> list[psutil.Process]:
    """Workers with environments, not their keepers."""
    found = []
    for member in run.members():
        try:
            command = member.cmdline()
        except psutil.Error:
            continue
        if command[2:3] == ["-c"] and "environment_worker" in command[3]:
            found.append(member)
    return found

"""Both modes of templates with switches: supervised runs, and agents whose turns share a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.data.tasks import load_tokenizer
from moerl.observe.metrics import read_rows
from tests.helpers.patience import patience
from tests.helpers.short_agent_runs import ROOT, SETTINGS, check_agent_run
from tests.helpers.train_runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

FOLDER = ROOT / "tests/data/templates"
OPENED = "<|im_start|>assistant\n"
MODES = [  # template, its arguments, what opens an answer, what stands in the first message
    ("thinking", "{enable_thinking: false}", f"{OPENED}<think>\n\n</think>\n\n", ""),
    ("thinking", "{enable_thinking: true}", OPENED, ""),
    ("effort", "{reasoning_effort: low}", OPENED[:-1], "Effort: low"),
    ("effort", "{reasoning_effort: high}", OPENED[:-1], "Effort: high"),
]


@pytest.mark.parametrize(("name", "arguments", "opened", "begun"), MODES)
def test_an_agent_of_two_turns_is_exact(
    name: str, arguments: str, opened: str, begun: str, tmp_path: Path
) -> None:
    agent = f"task.agent.command=[python, {ROOT}/tests/helpers/text_agent.py, '2', '12']"
    template = [f"task.chat_template={FOLDER / name}.jinja", f"task.template_arguments={arguments}"]
    settings = [*SETTINGS, agent, *template, "run.steps=2"]
    run = start(tmp_path, "digits-by-agent", *settings, name="x", copies=True)
    assert run.finish() == 0, run.text()
    check_agent_run(run, 2)
    decode = load_tokenizer(run.plan().model_path).decode
    groups = [group for _, group in run.trained.groups(run.rows())]
    read = [
        decode(node.rollout.token_ids.tolist(), skip_special_tokens=False)
        for group in groups
        for episode in group.episodes
        for node in episode.turns
    ]
    assert read
    assert all(text.count(opened) == text.count(OPENED[:-1]) == 2 for text in read), read
    assert all(begun in text for text in read)
    is_on = arguments == "{enable_thinking: true}"
    assert not is_on or not any("</think>\n\n" in text for text in read), "control: another mode"
    assert f"chat template {FOLDER / name}.jinja, " in (run.dir.root / "report.html").read_text()


@pytest.mark.parametrize("name", ["thinking", "effort"])
def test_a_supervised_run_learns_both_modes(name: str, tmp_path: Path) -> None:
    path, (key, off, on) = (
        tmp_path / "demos.jsonl",
        {
            "thinking": ("enable_thinking", False, True),
            "effort": ("reasoning_effort", "low", "high"),
        }[name],
    )
    rows = [
        {"prompt": f"{i % 10}=", "answer": str((i + 1) % 10), "chat_template_kwargs": {key: mode}}
        for i, mode in zip(range(40), [off, on] * 20, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "moerl", "sft", "quickstart", f"run.root={tmp_path}"]
    command += ["task.name=jsonl", f"task.path={path}", "task.reward=exact_match", "--run", "warm"]
    command += [f"task.chat_template={FOLDER / name}.jinja", "run.steps=20"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(600), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    nll = [row["loss/nll"] for row in read_rows(tmp_path / "warm" / "metrics.jsonl")]
    assert nll[-1] < 0.7 * nll[0], nll

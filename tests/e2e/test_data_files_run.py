"""Files in the forms of other systems train three steps, with the settings of docs/data.md.

They are the tasks of one run: twelve starts would show the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers import data_forms
from tests.helpers.data_forms import ANSWERS, FORMS
from tests.helpers.train_runs import SMALL, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.full]


def entry(name: str, folder: Path) -> dict[str, object]:
    """The task of a file: the settings of its line, with a label."""
    _, *settings = data_forms.words_of(name)
    pairs = (word.removeprefix("task.").split("=", 1) for word in settings)
    fields = {key: yaml.safe_load(value) for key, value in pairs}
    return fields | {"path": str(folder / name), "label": name.replace(".", "-")}


def test_files_of_other_systems_train(tmp_path: Path) -> None:
    data_forms.write(tmp_path)
    tasks = [entry(name, tmp_path) for name in FORMS]
    settings = [*SMALL, f"rollout.groups_per_step={len(tasks)}", f"tasks={json.dumps(tasks)}"]
    run = start(tmp_path, "quickstart-smoke", *settings, name="x", copies=True)
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    groups = run.trained.groups(rows)
    for step in range(3):
        prompts = [group.prompt for at, group in groups if at == step]
        assert len(prompts) == len(FORMS)
        assert all(prompt.answer in ANSWERS for prompt in prompts)
    labels = [group.prompt.task for _, group in groups]
    assert {labels.count(task["label"]) for task in tasks} == {3}, "each file in each step"

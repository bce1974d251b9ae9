"""Each file of docs/data.md in the form of another system trains three steps by its line there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import data_forms
from tests.helpers.data_forms import ANSWERS, FORMS
from tests.helpers.train_runs import SMALL, start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.full]


@pytest.mark.parametrize("name", FORMS)
def test_a_file_of_another_system_trains(name: str, tmp_path: Path) -> None:
    data_forms.write(tmp_path)
    recipe, *settings = data_forms.words_of(name)
    settings = [word.replace("task.path=", f"task.path={tmp_path}/") for word in settings]
    run = start(tmp_path, recipe, *settings, *SMALL, name="x", copies=True)
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    trained = [group.prompt for _, group in run.trained.groups(rows)]
    assert len(trained) == 12
    assert {prompt.answer for prompt in trained} == set(ANSWERS)
    assert all(prompt.name.endswith(f" of {prompt.origin.path}") for prompt in trained)

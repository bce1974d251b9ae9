"""Files in the forms that other systems document load by the lines of docs/data.md."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config
from moerl.config.checks import check
from moerl.config.task_mixture import entries_of
from moerl.core.errors import ConfigError
from moerl.data.tasks import PromptMixture, load_tokenizer
from moerl.launch.line_checks import LineChecks
from tests.helpers import data_forms
from tests.helpers.data_forms import ANSWERS, ASKED, FORMS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    data_forms.write(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def begun(words: list[str], tokenizer: Any) -> PromptMixture:
    """The prompts of a command, as a start makes and checks them."""
    config = load_config(words[0], words[1:])
    check(config, starts=False)
    prompts = PromptMixture(entries_of(config), tokenizer, 0, 4090)
    LineChecks([prompts]).begin(lambda line: pytest.fail(line))
    return prompts


def test_each_form_has_a_line() -> None:
    paths = [
        word.removeprefix("task.path=")
        for line in data_forms.lines()
        for word in shlex.split(line)
        if word.startswith("task.path=")
    ]
    assert paths == list(FORMS)
    assert len(paths) == 12


@pytest.mark.parametrize("name", FORMS)
def test_a_file_of_another_system_loads(
    name: str, files: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    words = data_forms.words_of(name)
    prompts = begun([*words, "task.shuffle=false"], tokenizer)
    for place, (asked, answer) in enumerate(zip(ASKED, ANSWERS, strict=True)):
        prompt = prompts.prompt(place)
        if "chat" in name or "slime" in name or "verl" in name or name.startswith("nemo-gym"):
            assert prompt.text.endswith(f"user: {asked}\nassistant: ")
        assert asked in prompt.text
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert prompt.answer == answer
        assert answer not in map(str, prompt.extra.values()), "no program sees it"
    if columns := [word for word in words if word.startswith("task.columns=")]:
        words.remove(columns[0])
        with pytest.raises(ConfigError, match=r"(line|row|entry) \d "):
            begun(words, tokenizer)

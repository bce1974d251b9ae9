"""Settings that are refused, with the sentence that a user reads, for each row of a rule.

A line of tests/data/refusals.txt has the words of a `moerl train`, and the sentence or `accepted`.
Without a recipe it is quickstart; <...> is any text, <rewards> are the names of that table.
`unresolved` before the words: `check` of the settings as they are written, without derived settings
and folders of other models.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from moerl import config as package
from moerl.config import Config, load_config, resolve
from moerl.config.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, KLS, OBJECTIVES
from moerl.config.checks import check
from moerl.config.functions import functions
from moerl.config.task_tables import (
    ENVIRONMENT_NAMES,
    REWARD_NAMES,
    REWARDS,
    SOURCES,
    STEP_REWARDS,
)
from moerl.config.validate import either
from moerl.core.errors import ConfigError

TABLE = Path(__file__).parents[1] / "data/refusals.txt"
RULES = Path(package.__file__).parent
ACCEPTED = "accepted"
NAMES = {  # in sentences
    "<rewards>": functions(REWARD_NAMES),
    "<rewards of files>": functions(REWARDS),
    "<rewards of episodes>": functions(name for name in REWARD_NAMES if name not in STEP_REWARDS),
    "<environments>": functions(ENVIRONMENT_NAMES),
    "<sources>": either(tuple(SOURCES)),
    "<objectives or a function>": functions(OBJECTIVES),
    "<advantages>": ", ".join(sorted(ADVANTAGES)),
    "<objectives>": ", ".join(sorted(OBJECTIVES)),
    "<corrections>": ", ".join(sorted(CORRECTIONS)),
    "<kls>": ", ".join(sorted(KLS)),
    "<aggregations>": ", ".join(sorted(AGGREGATIONS)),
}
YIELDED = ("Rows", "Reasons")  # of moerl.config.rules
# Rows that need more than settings, with their tests
ELSEWHERE = {
    "checks.sparse_attention": "test_model_indexer.py",
    "engine_context._of_task": "test_data_command.py",
    "resume._weights_of": "test_resume.py",
    "resume._optimizer_of": "test_resume.py",
}


def cases() -> Iterator[tuple[str, str]]:
    """(words, sentence) of the table."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("# "):
            words, _, sentence = line.partition(" => ")
            yield words, sentence


CASES = list(cases())


@functools.cache
def loaded(recipe: str, *words: str) -> Config:
    return load_config(recipe, words)


def answer(words: str) -> str:
    """The sentence about settings, or `accepted`."""
    found = shlex.split(words)
    is_plain = found[0] == "unresolved"
    found = found[is_plain:]
    recipe = found.pop(0) if "=" not in found[0] else "quickstart"
    try:
        config = loaded(recipe, *found)
        check(config if is_plain else resolve(config), starts=not is_plain)
    except ConfigError as error:
        return str(error)
    return ACCEPTED


@pytest.mark.parametrize(("words", "sentence"), CASES, ids=[words for words, _ in CASES])
def test_settings_are_refused_with_their_sentence(words: str, sentence: str) -> None:
    for name, names in NAMES.items():
        sentence = sentence.replace(name, names)
    assert re.fullmatch(re.escape(sentence).replace("<\\.\\.\\.>", ".*"), answer(words))


def rows_of(file: Path) -> dict[str, set[range]]:
    """Lines of the rows, by the generator that yields them."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "") in YIELDED:
            yields = [part for part in ast.walk(node) if isinstance(part, ast.Yield)]
            lines = {range(part.lineno, (part.end_lineno or 0) + 1) for part in yields}
            found[f"{file.stem}.{node.name}"] = lines
    return found


def lines_run(words: Iterable[str]) -> set[tuple[str, int]]:
    """Lines of moerl/config that these settings run, by module."""
    found = set()

    def note(frame: FrameType, _event: str, _: object) -> object:
        file = frame.f_code.co_filename
        if not file.startswith(f"{RULES}/") or not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None
        found.add((Path(file).stem, frame.f_lineno))
        return note

    before = sys.gettrace()
    sys.settrace(note)  # type: ignore[arg-type]
    try:
        for one in words:
            answer(one)
    finally:
        sys.settrace(before)
    return found


def not_refused(run: set[tuple[str, int]]) -> list[str]:
    """Rows that no settings reached: module, function and line."""
    rows = {name: lines for file in RULES.glob("*.py") for name, lines in rows_of(file).items()}
    assert ELSEWHERE.keys() <= rows.keys()
    return [
        f"{name} line {lines.start}"
        for name, ranges in rows.items()
        for lines in ranges
        if name not in ELSEWHERE and not any((name.partition(".")[0], n) in run for n in lines)
    ]


def test_every_row_of_a_rule_refuses_settings_of_the_table() -> None:
    assert not_refused(lines_run(words for words, sentence in CASES if sentence != ACCEPTED)) == []
    one = not_refused(lines_run(["rollout.cancel_lag=5"]))  # control: it runs one row of many
    assert len(one) > 100

"""Links, anchors, settings, commands and files that the pages name exist.

Each check takes text and returns its mistakes; the negative controls give it wrong text.
A setting is a code span such as `rollout.max_lag` or `sync.delta: true`.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.doc_commands import (
    FENCE,
    FOLDERS,
    ROOT,
    commands,
    is_setting,
    named_settings,
    spans,
    wrong_command,
)

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


# --- links ---------------------------------------------------------------------------------------
def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    found: Counter[str] = Counter()
    names = set()
    for title in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def broken_links(text: str, page: Path) -> list[str]:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(text if file == page else file.read_text()):
            wrong.append(f"{target}: no such heading")
    return wrong


# --- settings ------------------------------------------------------------------------------------
def unknown_settings(text: str) -> list[str]:
    return [name for name in named_settings(text) if not is_setting(name)]


# --- files ---------------------------------------------------------------------------------------
FILE = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]+")


def missing_files(text: str) -> list[str]:
    named = [span.split("::")[0] for span in spans(text) if FILE.fullmatch(span.split("::")[0])]
    real = [name for name in named if not re.search(r"\b[A-Z]+\b", Path(name).stem)]  # not NAME.py
    return [name for name in real if not (ROOT / name).exists()]


# --- the pages -----------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_points_at_things_that_exist(page: Path) -> None:
    text = page.read_text()
    assert broken_links(text, page) == []
    assert unknown_settings(text) == []
    assert {line: why for line in commands(text) if (why := wrong_command(line))} == {}
    assert missing_files(text) == []


def test_enough_is_looked_at() -> None:
    """A pattern that matches nothing would find nothing wrong."""
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(named_settings(text)) > 150
    assert len(list(commands(text))) > 60
    assert sum(FILE.fullmatch(span) is not None for span in spans(text)) > 60


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](docs/none.md)", "docs/none.md: no such file"),
        ("[a](docs/weight-sync.md#none)", "docs/weight-sync.md#none: no such heading"),
        ("[a](#none)\n# Some", "#none: no such heading"),
    ],
)
def test_broken_links_are_found(text: str, wrong: str) -> None:
    assert broken_links(text, ROOT / "README.md") == [wrong]
    good = "[a](docs/weight-sync.md#the-plan) [b](#a-b-c) [c](https://example.org/x#y)\n## A `b`, c"
    assert broken_links(good, ROOT / "README.md") == []


def test_unknown_settings_are_found() -> None:
    assert unknown_settings("`rollout.max_lags` `sync.dleta: true` `model.tiny.size=3`") == [
        "rollout.max_lags", "sync.dleta", "model.tiny.size",
    ]  # fmt: skip
    good = "`rollout.max_lag` `engine.args.tp_size=2` `model.tiny.*` `cluster.nodes.engine.hosts`"
    assert unknown_settings(f"{good} `cluster.ports.ray` `report.html` `torch.compile`") == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("moerl tarin quickstart", "moerl has no tarin"),
        ("moerl engines drop a", "moerl has no engines drop"),
        ("moerl train quickstart --dryrun", "moerl train has no --dryrun"),
        ("moerl train quickstart run.step=3", "run.step is no setting"),
        ("moerl train quikstart", "there is no recipe quikstart"),
        ("tools/tset", "there is no tools/tset"),
        ("tools/quickstart --smok", "tools/quickstart has no --smok"),
        ("python bench/none.py", "there is no bench/none.py"),
        ("python bench/replay_overhead.py --pear 2", "bench/replay_overhead.py has no --pear"),
        ("pytest -s tests/e2e/test_none.py", "there is no tests/e2e/test_none.py"),
        ("python -m moerl.kernels.none", "there is no moerl/kernels/none.py"),
    ],
)
def test_wrong_commands_are_found(line: str, wrong: str) -> None:
    assert wrong_command(line) == wrong
    assert list(commands(f"see `{line}` here")) == list(commands(f"```\n{line}\n```")) == [line]


def test_missing_files_are_found() -> None:
    assert missing_files("`moerl/none.py` `tests/unit/test_docs.py::x` `docs/`") == [
        "moerl/none.py"
    ]


# --- versions ------------------------------------------------------------------------------------
def test_versions_are_the_same_in_readme_locks_and_extras() -> None:
    table = {
        row[0].split(" (")[0]: row[1:]
        for line in (ROOT / "README.md").read_text().split("Pinned versions:")[1]
        .split("\n\n")[1].splitlines()
        if (row := [cell.strip() for cell in line.strip("|").split("|")])
    }  # fmt: skip
    lock = (ROOT / "requirements/cpu.lock").read_text()
    lock += (ROOT / "requirements/cpu-nodeps.lock").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for name, package in {
        "torch": "torch", "SGLang": "sglang", "megatron-core": "megatron-core",
        "transformers": "transformers", "Ray": "ray", "Transformer Engine": "transformer-engine",
    }.items():  # fmt: skip
        cpu, cuda = (cell.split(" (")[0] for cell in table[name])
        assert cpu == "-" or f"\n{package}=={cpu} --hash" in lock
        pinned = [pin for pin in extras["gpu"] if re.match(rf"{package}[\[=>]", pin)]
        assert len(pinned) == 1
        assert pinned[0].endswith((f"=={cuda}", f">={cuda.removesuffix(' or newer')}"))
    for pin in extras["cpu"]:
        name, equals, version = re.sub(r"\[.*\]", "", pin).partition("==")
        assert not equals or re.search(rf"^{name}=={version}(\+cpu)? ", lock, re.MULTILINE), pin

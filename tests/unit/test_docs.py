"""What the pages point at exists: links and anchors, settings, commands with their options, files.

Each check takes text and returns what is wrong in it; the negative controls give it wrong text.
A setting is a code span such as `rollout.max_lag` or `sync.delta: true`; a command is a code span
or a line of a code block that begins with moerl, tools/, bench/, python or pytest.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import typer

from moerl.cli import app
from moerl.config.load import CONFIG_ROOT, PARTS
from moerl.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = ["moerl", "tests", "tools", "docs", "configs", "bench", "csrc", "requirements"]
FOLDERS += ["examples", "patches", ".github"]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:moerl(?: |$)|tools/|bench/|python3? (?:-m )?|pytest|\.venv/bin/)")


def spans(text: str) -> list[str]:
    """Code spans outside code blocks, a line break inside one as a space."""
    found = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [" ".join(span.split()) for span in found]


def commands(text: str) -> Iterator[str]:
    """Code spans and lines of code blocks that are commands, continued lines joined."""
    blocks = [block.group() for block in FENCE.finditer(text)]
    indented = re.findall(r"(?:^ {4}.*\n?)+", FENCE.sub("", text), re.MULTILINE)
    for block in [*blocks, *indented]:
        for line in block.replace("\\\n", " ").splitlines():
            if COMMAND.match(line.strip()):
                yield line.strip()
    yield from (span for span in spans(text) if COMMAND.match(span) and ":" not in span[:12])


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
SECTIONS = {item.name for item in fields(Config)}
SETTING = re.compile(rf"((?:{'|'.join(SECTIONS)})(?:\.[\w*]+)+)(?:\.?$|[=:, ].*)")


def unknown_settings(text: str) -> list[str]:
    return [name for name in named_settings(text) if not is_setting(name)]


def named_settings(text: str) -> list[str]:
    """Names in code spans that begin with a section; `replay.md` and the like are files."""
    named = [match.group(1) for span in spans(text) if (match := SETTING.fullmatch(span))]
    return [name for name in named if not name.endswith((".md", ".log", ".html", ".py"))]


def is_setting(name: str) -> bool:
    """Whether the schema has it; `x.*` stands for a section, below a table everything is free."""
    type_: object = Config
    for part in name.split("."):
        if get_origin(type_) is dict:
            type_ = get_args(type_)[1]  # cluster.nodes.GROUP
            continue
        if not (isinstance(type_, type) and is_dataclass(type_)):
            return not isinstance(type_, type)  # below Any: engine.args.*
        if part == "*":
            return True
        hints = get_type_hints(type_)
        if part not in hints:
            return False
        type_ = hints[part]
    return True


# --- commands ------------------------------------------------------------------------------------
def wrong_command(line: str) -> str:
    """What is wrong with a command; empty when nothing is."""
    words = shlex.split(line.split("  #")[0].split(" | ")[0].removesuffix(" ..."))
    if words[0].startswith(".venv/bin/"):
        words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] == "moerl":
        return wrong_moerl(words[1:])
    if words[0].startswith(("python", "pytest")):
        words = words[1:]
        if words[:1] == ["-m"]:
            if words[1] == "pytest":
                return wrong_paths(words[2:])
            if words[1].startswith(("moerl", "tools")):
                words = [words[1].replace(".", "/") + ".py", *words[2:]]
            else:
                return ""
        elif not words or not words[0].startswith("bench/"):
            return wrong_paths(words)
    file = ROOT / words[0]
    if not file.is_file():
        return wrong_paths(words[:1])
    known = options_of(file)
    given = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
    unknown = [word for word in given if word not in known]
    return f"{words[0]} has no {unknown[0]}" if unknown else wrong_paths(words[1:])


def wrong_paths(words: list[str]) -> str:
    missing = [w for w in words if w.startswith(tuple(f"{f}/" for f in FOLDERS))]
    missing = [word for word in missing if not (ROOT / word.split("::")[0]).exists()]
    return f"there is no {missing[0]}" if missing else ""


def options_of(file: Path) -> set[str]:
    """Options that stand in a script, and in modules of this repository that it imports."""
    text = file.read_text()
    found = set(re.findall(r"--[a-z][\w-]*", text))
    if "moerl train" in text or "moerl.cli" in text:
        found |= moerl_options("train")
    if file.suffix != ".py":
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            near = (ROOT / node.module.replace(".", "/")).with_suffix(".py")
            beside = file.parent / f"{node.module}.py"
            for other in (near, beside):
                if other.is_file() and other != file:
                    found |= set(re.findall(r"--[a-z][\w-]*", other.read_text()))
    return found


def moerl_options(*names: str) -> set[str]:
    return {option for parameter in command(names).params for option in parameter.opts}


def command(names: tuple[str, ...]) -> Any:
    """Typer's object for `moerl NAMES`: a group has `commands`, a command `params`."""
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.commands[name]
    return found


def wrong_moerl(words: list[str]) -> str:
    names: tuple[str, ...] = ()
    while words and (known := getattr(command(names), "commands", None)):
        if words[0].startswith("-") and words[0] in ("--help",):
            return ""
        if words[0] not in known:
            return f"moerl has no {' '.join((*names, words[0]))}"
        names, words = (*names, words[0]), words[1:]
    if not words or not names:
        return ""
    options = moerl_options(*names)
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in options:
            return f"moerl {' '.join(names)} has no {word}"
    plain = [word for index, word in enumerate(words) if not is_value(words, index, names)]
    for word in plain:
        key, equals, _ = word.partition("=")
        if equals and not (key in PARTS or is_setting(key)):
            return f"{key} is no setting"
    recipes = {path.stem for folder in ("recipes", "clusters") for path in
               (CONFIG_ROOT / folder).glob("*.yaml")}  # fmt: skip
    takes_recipe = names[0] in ("train", "sft", "mismatch", "plan", "doctor")
    first = plain[0] if plain and takes_recipe and "=" not in plain[0] else ""
    if first and not first.isupper() and not first.startswith("configs/") and first not in recipes:
        return f"there is no recipe {first}"
    return ""


def is_value(words: list[str], index: int, names: tuple[str, ...]) -> bool:
    """Whether a word is an option, or the value of the option before it."""
    if words[index].startswith("-"):
        return True
    before = words[index - 1] if index else ""
    return any(
        before in parameter.opts and not getattr(parameter, "is_flag", False)
        for parameter in command(names).params
    )


# --- files ---------------------------------------------------------------------------------------
FILE = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]+")


def missing_files(text: str) -> list[str]:
    named = [span.split("::")[0] for span in spans(text) if FILE.fullmatch(span.split("::")[0])]
    real = [name for name in named if not re.search(r"\b[A-Z]+\b", Path(name).stem)]  # not NAME.py
    return [name for name in real if not (ROOT / name).exists()]


# --- the pages -----------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_points_at_things_that_exist(page: Path) -> None:
    text, _, _ = page.read_text().partition("\n### Renamed\n")  # CHANGELOG.md: names of the past
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
        for line in (ROOT / "README.md").read_text().split("Versions that it goes with")[1]
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
        assert cpu == "-" or f"\n{package}=={cpu}\n" in lock
        pinned = [pin for pin in extras["gpu"] if re.match(rf"{package}[\[=>]", pin)]
        assert len(pinned) == 1
        assert pinned[0].endswith((f"=={cuda}", f">={cuda.removesuffix(' or newer')}"))
    for pin in extras["cpu"]:
        name, equals, version = re.sub(r"\[.*\]", "", pin).partition("==")
        assert not equals or re.search(rf"^{name}=={version}(\+cpu)?$", lock, re.MULTILINE), pin

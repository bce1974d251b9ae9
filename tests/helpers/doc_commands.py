"""Commands in the pages: where they stand, and whether their options, paths and settings exist.

A command is a line that begins with moerl, tools/, bench/, python or pytest, in a fenced block or
in a code span.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from moerl.cli import app
from moerl.config.load import CONFIG_ROOT, PARTS
from moerl.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["moerl", "tests", "tools", "docs", "configs", "bench", "csrc", "requirements"]
FOLDERS += ["examples", "patches", ".github"]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:moerl(?: |$)|tools/|bench/|python3? (?:-m )?|pytest|\.venv/bin/)")
SHELLS = ("", "bash", "sh", "shell", "console")
TAKES_RECIPE = ("train", "sft", "mismatch", "plan", "doctor")


@dataclass(frozen=True)
class Block:
    """A fenced block: ```LANGUAGE MARK."""

    language: str
    mark: str  # run, check, elsewhere or empty
    text: str

    @property
    def lines(self) -> list[str]:
        """Lines of shell, continued lines joined, without comments and here-documents."""
        found, end = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            if end:
                end = "" if line.strip() == end else end
                continue
            if word := re.search(r"<<'?(\w+)'?", line):
                end = word.group(1)
            elif line.strip() and not line.strip().startswith("#"):
                found.append(re.sub(r"\s{2,}#.*", "", line).strip())
        return found

    @property
    def files(self) -> dict[str, str]:
        """Files that the block writes by `cat > NAME <<'END'`."""
        written = re.findall(r"(?ms)^cat > (\S+) <<'(\w+)'\n(.*?)^\2$", self.text)
        return {name: text for name, _, text in written}


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order, without their indentation."""
    found = re.findall(r"(?ms)^( *)```([^\n`]*)\n(.*?)^ *```", text)
    made = []
    for indent, info, body in found:
        language, _, mark = info.strip().partition(" ")
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        made.append(Block(language, mark.strip(), "".join(lines)))
    return made


def spans(text: str) -> list[str]:
    """Code spans outside code blocks, a line break inside one as a space."""
    found = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [" ".join(span.split()) for span in found]


def commands(text: str) -> Iterator[str]:
    """Code spans and lines of code blocks that are commands, continued lines joined."""
    for block in blocks(text):
        if block.language in SHELLS:
            yield from (line for line in block.lines if COMMAND.match(line))
    yield from (span for span in spans(text) if COMMAND.match(span) and ":" not in span[:12])


# --- settings ------------------------------------------------------------------------------------
SECTIONS = {item.name for item in fields(Config)}
SETTING = re.compile(rf"((?:{'|'.join(SECTIONS)})(?:\.[\w*]+)+)(?:\.?$|[=:, ].*)")


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
    """The mistake in a command; empty without one."""
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
    found = _root()
    for name in names:
        found = found.commands[name]
    return found


@cache
def _root() -> Any:
    return typer.main.get_command(app)


def wrong_moerl(words: list[str]) -> str:
    names: tuple[str, ...] = ()
    while words and (known := getattr(command(names), "commands", None)):
        if words[0] == "--help":
            return ""
        if words[0] not in known:
            return f"moerl has no {' '.join((*names, words[0]))}"
        names, words = (*names, words[0]), words[1:]
    if not words or not names:
        return ""
    options = moerl_options(*names)
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in (*options, "--help"):
            return f"moerl {' '.join(names)} has no {word}"
    plain = [word for index, word in enumerate(words) if not is_value(words, index, names)]
    for word in plain:
        key, equals, _ = word.partition("=")
        if equals and not (key in PARTS or is_setting(key)):
            return f"{key} is no setting"
    first = plain[0] if plain and names[0] in TAKES_RECIPE and "=" not in plain[0] else ""
    if first and not first.isupper() and not first.startswith("configs/"):
        recipes = {path.stem for folder in ("recipes", "clusters") for path in
                   (CONFIG_ROOT / folder).glob("*.yaml")}  # fmt: skip
        if first not in recipes and not first.endswith(".yaml"):
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

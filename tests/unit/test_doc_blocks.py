"""Blocks of the pages that a reader can paste: each has a mark, and the mark is tried.

    ```bash run        executed (at most ten in all pages; full suite)
    ```bash check      moerl commands: settings resolve and pass the checks, or a dry run
    ```bash elsewhere  needs another machine, time or a run: options and paths exist
    ```python check    compiles, and imports of moerl and examples resolve
    ```yaml check      a recipe

The blocks of a page share one folder, in order.  It has examples, configs and tools of the
repository; a file comes from `cat > NAME <<'END'`, or from a block whose first line is `# NAME.py`
or `# NAME.yaml`.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.core.errors import MoerlError
from moerl.launch import trainer_check
from tests.helpers import trainer_checks
from tests.helpers.doc_commands import (
    COMMAND,
    FOLDERS,
    ROOT,
    SHELLS,
    Block,
    blocks,
    is_value,
    wrong_command,
)

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = {"bash": ("run", "check", "elsewhere"), "python": ("check",), "yaml": ("check",)}
EXECUTED = ("plan", "check-layout", "check-dump")  # start nothing and load no weights
KEYS = ("JUDGE_KEY", "WANDB_API_KEY")  # variables that blocks read
MOST_RUNS = 10


def unmarked(text: str) -> list[str]:
    """First lines of blocks with commands that have no mark, or a mark that nothing tries."""
    wrong = []
    for block in blocks(text):
        is_shell = block.language in SHELLS and any(COMMAND.match(line) for line in block.lines)
        needs_mark = block.language == "bash" or is_shell or bool(block.mark)
        if needs_mark and block.mark not in MARKS.get(block.language, ()):
            wrong.append(block.text.partition("\n")[0])
    return wrong


def mistakes(block: Block, folder: Path) -> list[str]:
    """Mistakes of one block; `folder` holds the files of the blocks before it, and gets its own."""
    for name, text in block.files.items():
        (folder / name).write_text(text)
    if block.language == "bash":
        tried = check_line if block.mark == "check" else wrong_command
        lines = [line for line in block.lines if COMMAND.match(line) or block.mark == "check"]
        return [f"{line}: {why}" for line in lines if (why := tried(line))]
    if name := re.match(r"# (\w+\.(?:py|yaml))\b", block.text):
        (folder / name.group(1)).write_text(block.text)
    return python_mistakes(block.text) if block.language == "python" else yaml_mistakes(block.text)


def check_line(line: str) -> str:
    """The mistake that a command of moerl reports without starting anything."""
    words = shlex.split(line)
    if words[0] in ("cat", "source"):
        return ""
    if words[0] != "moerl":
        return "only commands of moerl can be checked; mark it `run` or `elsewhere`"
    if "--help" in words or "--dry-run" in words or words[1] in EXECUTED:
        done = CliRunner().invoke(app, words[1:])
        return "" if done.exit_code == 0 else f"{done.exception} {done.output[-500:]}"
    if words[1] not in ("train", "sft", "mismatch", "doctor") or "--resume" in words:
        return "it needs a run; mark it `run` or `elsewhere`"
    if why := wrong_command(line):
        return why
    names = tuple(words[1:2])
    plain = [word for n, word in enumerate(words) if n > 1 and not is_value(words, n, names)]
    try:
        check(resolve(load_config(plain[0], plain[1:])), starts=False)
    except MoerlError as error:
        return str(error)
    return ""


def python_mistakes(text: str) -> list[str]:
    wrong = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("moerl.", "examples")):
            module = importlib.import_module(str(node.module))
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            wrong += [f"{node.module} has no {name}" for name in missing]
    return wrong


def yaml_mistakes(text: str) -> list[str]:
    Path("block.yaml").write_text(text)
    try:
        check(resolve(load_config("block.yaml", [])), starts=False)
    except MoerlError as error:
        return [str(error)]
    return []


def make_folder(folder: Path) -> Path:
    """A folder that looks like a checkout, without the runs of this one."""
    for name in [*FOLDERS, "README.md", "pyproject.toml", "setup.py"]:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(trainer_check, "ask", trainer_checks.ask)
    for key in KEYS:
        monkeypatch.setenv(key, "secret")
    return tmp_path


def marked(page: Path, *marks: str) -> list[Block]:
    return [block for block in blocks(page.read_text()) if block.mark in marks]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_shell_block_has_a_mark(page: Path) -> None:
    assert unmarked(page.read_text()) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if marked(page, "check", "elsewhere")], ids=page_id
)
def test_blocks_that_start_nothing(page: Path, folder: Path) -> None:
    wrong = {
        block.text: found
        for block in marked(page, "run", "check", "elsewhere")
        if (found := mistakes(block, folder))
    }
    assert wrong == {}


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if marked(page, "run")], ids=page_id)
def test_blocks_that_run(page: Path, folder: Path) -> None:
    """In a shell, as a reader pastes them, with the environment of this checkout."""
    path = os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for block in marked(page, "run"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    shutil.rmtree(folder / "runs", ignore_errors=True)


def test_few_blocks_run() -> None:
    assert 3 <= sum(len(marked(page, "run")) for page in PAGES) <= MOST_RUNS


# --- negative controls ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "block",
    ["```\nmoerl train gspo\n```", "```bash\nls\n```", "```bash chekc\nmoerl train gspo\n```",
     "1. a\n   ```sh\n   pytest -q\n   ```"],
)  # fmt: skip
def test_a_block_without_a_mark_is_found(block: str) -> None:
    assert len(unmarked(f"text\n\n{block}\n")) == 1
    assert unmarked("```text\nmoerl train gspo\n```\n```\nstep 3  reward 0.4\n```") == []


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ("bash check\nmoerl train quickstart run.step=3", "run.step"),
        ("bash check\nmoerl train quickstart algorithm.objective=gpso", "gpso"),
        ("bash check\nmoerl train quikstart", "quikstart"),
        ("bash check\nmoerl train quickstart task.environment=nowhere:F", "nowhere"),
        ("bash check\nmoerl report mine", "needs a run"),
        ("bash check\nls", "only commands of moerl"),
        ("bash elsewhere\nmoerl report mine --jsn", "--jsn"),
        ("python check\nfrom moerl.config import nothing", "nothing"),
        ("yaml check\ninclude: [recipes/quickstart]\nrollout: {max_lags: 3}", "max_lags"),
    ],
)
def test_a_wrong_block_is_found(block: str, part: str, folder: Path) -> None:
    (found,) = blocks(f"```{block}\n```\n")
    assert part in "".join(mistakes(found, folder))


def test_files_of_earlier_blocks_are_there(folder: Path) -> None:
    text = (
        "```python check\n# own.py\ndef share(prompt, answer, response, extra):\n    return 0.5\n"
        "```\n\n```bash check\nmoerl train quickstart \\\n  task.reward=own:share  # mine\n```\n"
    )
    assert [mistakes(block, folder) for block in blocks(text)] == [[], []]

"""tools/rename.py and tools/same_trees.py on a small git repository: what they do and find.

The repository has a module that moves, a function that is renamed everywhere, an attribute that is
renamed in one module only, and a string value.  Both programs are run as a contributor runs them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = """
- step: weights
  modules: {moerl.sync: moerl.weight_sync, moerl.sync.line: moerl.weight_sync.sender}
  names: {open_outlet: open_publisher}
  inside:
    moerl.sync.line: {terms: spec}
  values: {own: separate}
"""
LINE = """\"\"\"Sends along a line; see moerl/sync/line.py.\"\"\"

class Sender:
    def __init__(self, terms: str) -> None:
        self.terms = terms

    def send(self, count: int) -> int:
        return count + 1


def open_outlet(terms: str) -> Sender:
    return Sender("own" if terms == "own" else "its own")
"""
MAIN = """from moerl.sync.line import open_outlet

terms = 3  # not the attribute of moerl.sync.line


def run() -> str:
    return open_outlet("own").terms + str(terms)
"""
SENDER = "moerl/weight_sync/sender.py"


def git(repository: Path, *words: str) -> None:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)


def tool(repository: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *words]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)


def commit(repository: Path, tag: str) -> None:
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", tag)
    git(repository, "tag", tag)


def proof(repository: Path, new: str) -> subprocess.CompletedProcess[str]:
    return tool(repository, "same_trees.py", "old", new, "renames.yaml")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Committed as `old`, renamed by the program, committed as `new`."""
    for name, text in {
        "moerl/__init__.py": "",
        "moerl/main.py": MAIN,
        "moerl/sync/__init__.py": "",
        "moerl/sync/line.py": LINE,
        "docs/sync.md": "`moerl/sync/line.py` has `open_outlet`.\n",
        "renames.yaml": TABLE,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path, "old")
    done = tool(tmp_path, "rename.py", "renames.yaml", "weights")
    assert done.returncode == 0, done.stderr
    commit(tmp_path, "new")
    return tmp_path


def change(repository: Path, file: str, old: str, new: str) -> subprocess.CompletedProcess[str]:
    """The proof of a tree that was changed by hand after the renaming."""
    path = repository / file
    assert path.read_text().count(old) == 1, path.read_text()
    path.write_text(path.read_text().replace(old, new))
    commit(repository, "changed")
    return proof(repository, "changed")


def test_modules_names_scopes_values_and_pages_are_renamed(repository: Path) -> None:
    sender, main = ((repository / name).read_text() for name in (SENDER, "moerl/main.py"))
    assert not (repository / "moerl/sync/line.py").exists()
    assert "def open_publisher(spec: str)" in sender
    assert "self.spec = spec" in sender
    assert 'Sender("separate" if spec == "separate" else "its own")' in sender
    assert "see moerl/weight_sync/sender.py" in sender
    assert "from moerl.weight_sync.sender import open_publisher\n" in main
    assert "\nterms = 3" in main, "the scope is one module"
    assert 'open_publisher("separate")' in main
    page = (repository / "docs/sync.md").read_text()
    assert page == "`moerl/weight_sync/sender.py` has `open_publisher`.\n"


def test_an_attribute_of_another_module_is_left_to_the_person(repository: Path) -> None:
    """A scope does not follow values: `inside` of the user, or `chains`, has to say so."""
    assert 'open_publisher("separate").terms' in (repository / "moerl/main.py").read_text()


def test_a_renaming_has_the_same_trees(repository: Path) -> None:
    done = proof(repository, "new")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("[same trees] 4 files, 0 differ\n")


def test_comments_docstrings_and_layout_do_not_count(repository: Path) -> None:
    change(repository, "moerl/main.py", "  # not the attribute of", "\n# not that of")
    git(repository, "tag", "-d", "changed")
    done = change(repository, SENDER, "Sends along a line", "Sends weights")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (SENDER, "count + 1", "count + 2"),
        (SENDER, "(self, count: int)", "(self, count: int = 1)"),
        (SENDER, '"its own"', '"another"'),
        (SENDER, "self.spec = spec", "self.terms = spec"),
        ("moerl/main.py", "terms = 3", "spec = 3"),
        ("moerl/main.py", 'open_publisher("separate")', 'open_publisher("own")'),
    ],
    ids=["logic", "default", "text", "missed attribute", "outside the scope", "missed value"],
)
def test_control_what_the_table_does_not_say_is_found(
    repository: Path, file: str, old: str, new: str
) -> None:
    done = change(repository, file, old, new)
    assert done.returncode == 1
    assert "1 differ" in done.stdout
    assert done.stdout.startswith(f"{file}:\n  want ")


def test_control_a_file_that_was_not_moved_is_found(repository: Path) -> None:
    git(repository, "mv", SENDER, "moerl/weight_sync/line.py")
    commit(repository, "changed")
    done = proof(repository, "changed")
    assert done.returncode == 1
    assert f"{SENDER}: missing\n" in done.stdout
    assert "moerl/weight_sync/line.py: not in the old tree\n" in done.stdout


def test_an_unknown_step_is_refused(repository: Path) -> None:
    done = tool(repository, "rename.py", "renames.yaml", "engine")
    assert done.returncode == 1
    assert "no step engine in renames.yaml; it has weights" in done.stderr

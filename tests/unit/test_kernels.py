"""Building csrc/: an outdated library is not loaded, a failing compiler is an error."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.kernels import build as builder
from moerl.kernels import library as libraries
from moerl.kernels.build import TARGETS, BuildError, Target, build
from tests.helpers.patience import patience

STUB = """#!/bin/bash
# A compiler: writes what it was told to compile, or fails.
echo call >>"$(dirname "$0")/calls"
if grep -q broken -- "$@" 2>/dev/null; then echo "a.cpp:1: error: broken" >&2; exit 3; fi
while [[ $1 != -o ]]; do shift; done
echo library >"$2"
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target with its own sources, output folder and compiler."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")
    (sources / "a.h").write_text("int h;")
    compiler = tmp_path / "stub++"
    compiler.write_text(STUB)
    compiler.chmod(0o755)
    for module in (builder, libraries):
        monkeypatch.setattr(module, "BUILT", tmp_path / "built")
    monkeypatch.setattr(builder, "source_folder", lambda: sources)
    made = replace(TARGETS["cpu"], compilers=(str(compiler),))
    monkeypatch.setitem(TARGETS, "cpu", made)
    libraries.library.cache_clear()
    yield made
    libraries.library.cache_clear()


def calls(target: Target) -> int:
    diary = Path(target.compilers[0]).parent / "calls"
    return len(diary.read_text().split()) if diary.exists() else 0


@pytest.mark.parametrize("changed", ["a.cpp", "a.h", "new.cpp"])
def test_changed_sources_make_a_library_outdated(target: Target, changed: str) -> None:
    assert "Python, not built" in libraries.describe("cpu")
    assert "built in" in build(target)
    first = target.library()
    assert "up to date" in build(target)
    assert calls(target) == 1
    assert libraries.describe("cpu") == f"cpu kernels: built ({first.name})"

    (builder.source_folder() / changed).write_text("int other;")
    assert target.library() != first
    assert libraries.library("cpu") is None, "the library of older sources must not be opened"
    assert "Python, built from other sources" in libraries.describe("cpu")
    assert "built in" in build(target)
    assert not first.exists()
    assert calls(target) == 2


def test_changed_flags_make_a_library_outdated(target: Target) -> None:
    assert replace(target, flags=(*target.flags, "-g")).library() != target.library()


def test_a_failing_compiler_is_an_error_with_its_last_lines(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    (builder.source_folder() / "a.cpp").write_text("broken")
    with pytest.raises(BuildError, match=r"(?s)exited with 3 on the cpu kernels.*error: broken"):
        build(target)
    assert not target.library().exists()
    assert libraries.library("cpu") is None
    with pytest.raises(SystemExit, match="error: broken"):
        builder.main()


def test_no_compiler_and_no_sources_are_skipped_with_a_reason(target: Target) -> None:
    absent = replace(target, compilers=("no-such-compiler",))
    assert build(absent) == "skipped, none of no-such-compiler was found"
    assert "skipped, no *.nothing" in build(replace(target, pattern="*.nothing"))
    assert calls(target) == 0


def test_a_library_that_cannot_be_opened_is_no_silent_fallback(target: Target) -> None:
    build(target)  # the stub's output is no library
    with pytest.raises(OSError, match=r"invalid ELF header|file too short"):
        libraries.library("cpu")


def test_the_real_sources_build_once_for_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if TARGETS["cpu"].compiler() is None:
        return
    code = (
        "import sys; from pathlib import Path; import moerl.kernels.build as b;"
        f"b.BUILT = Path({str(tmp_path)!r}); print(b.build(b.TARGETS['cpu']))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    responses = sorted(process.communicate(timeout=patience(200))[0] for process in started)
    assert sum("built in" in line for line in responses) == 1, responses
    monkeypatch.setattr(builder, "BUILT", tmp_path)
    lib = ctypes.CDLL(str(TARGETS["cpu"].library()))
    assert lib.moerl_changed
    assert list(tmp_path.glob("*.so")) == [TARGETS["cpu"].library()]

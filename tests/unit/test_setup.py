"""tools/setup.sh against stub interpreters, and the locks against the installed packages.

The stub stands for Python, venv and pip and writes down every call, so that freshness,
interruption, concurrency and each error message are tested in seconds and without a network.  A
real installation is what runs before these tests do.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["bash", "cat", "chmod", "dirname", "find", "flock", "grep", "mkdir", "rm", "sha256sum"]
TOOLS += ["sleep", "tail", "wc"]

STUB = r"""#!/bin/bash
# Python 3.11, venv and pip in one; $STUB holds its behaviour and its diary.
case "$1 $2" in
  "-c import sys"*) cat "$STUB/version" ;;
  "-c import venv"*) [[ ! -e $STUB/no_venv ]] ;;
  "-m venv")
    echo venv >>"$STUB/calls"
    rm -rf "$4"; mkdir -p "$4/bin" "$4/lib/python3.11/site-packages"
    echo "VIRTUAL_ENV=\"$PWD/$4\"" >"$4/bin/activate"
    echo "version = 3.11.7" >"$4/pyvenv.cfg"
    cat "$0" >"$4/bin/python"; chmod +x "$4/bin/python" ;;
  "-m pip")
    echo "pip ${*: -1}" >>"$STUB/calls"
    if [[ -e $STUB/hang ]]; then exec sleep 300; fi
    if [[ -e $STUB/pip_says ]]; then cat "$STUB/pip_says"; exit 1; fi
    if [[ -e $STUB/project_breaks && ${*: -1} == . ]]; then exit 1; fi ;;
  "- ") PYTHONPATH="$STUB/site" exec "$REAL_PYTHON" -S - ;;
esac
"""
INSTALL = ["pip --requirement=requirements/cpu-nodeps.lock", "pip ."]


class Project:
    """A copy of what setup.sh reads, with a PATH that holds stubs and a few system tools only."""

    def __init__(self, folder: Path) -> None:
        self.root, self.stub, self.bin = folder / "project", folder / "stub", folder / "bin"
        for path in (self.root / "tools", self.stub / "site/torch", self.bin):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "tools/setup.sh", self.root / "tools")
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.executable("python3.11", STUB)
        self.executable("cc", "#!/bin/bash\n")
        (self.stub / "version").write_text("3.11\n")
        self.torch(cuda=None)

    def executable(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def torch(self, cuda: str | None) -> None:
        """The torch that the check after the installation imports."""
        (self.stub / "site/torch/__init__.py").write_text(
            f"__version__ = '9'\nclass version:\n    cuda = {cuda!r}\n"
        )

    def start(self) -> subprocess.Popen[str]:
        environment = {"PATH": str(self.bin), "STUB": str(self.stub), "REAL_PYTHON": sys.executable}
        return subprocess.Popen(
            [str(self.root / "tools/setup.sh")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self) -> tuple[int, str, str]:
        process = self.start()
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        """What the stub was asked to do since the last time, in order."""
        diary = self.stub / "calls"
        lines = diary.read_text().splitlines() if diary.exists() else []
        diary.unlink(missing_ok=True)
        return lines

    def wait_for_pip(self) -> None:
        for _ in range(600):
            if (self.stub / "calls").exists() and "pip" in (self.stub / "calls").read_text():
                return
            time.sleep(0.05)
        raise AssertionError("pip was never started")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_first_run_installs_and_the_second_does_nothing(project: Project) -> None:
    code, out, err = project.run()
    assert (code, err) == (0, "")
    assert "environment ready" in out
    assert project.calls() == ["venv", *INSTALL]
    assert project.run() == (0, "", "")
    assert project.calls() == []


@pytest.mark.parametrize("file", ["requirements/cpu.lock", "pyproject.toml", ".venv/pyvenv.cfg"])
def test_changed_input_installs_over_the_old_environment(project: Project, file: str) -> None:
    project.run()
    project.calls()
    with (project.root / file).open("a") as stream:
        stream.write("# changed\n")
    assert project.run()[0] == 0
    assert project.calls() == INSTALL


def test_moved_checkout_is_rebuilt(project: Project) -> None:
    project.run()
    project.calls()
    project.root = project.root.rename(project.root.with_name("elsewhere"))
    assert project.run()[0] == 0
    assert project.calls() == ["venv", *INSTALL]


def test_failed_installation_shows_pips_words_and_is_rebuilt(project: Project) -> None:
    (project.stub / "pip_says").write_text("the disk is full\n")
    code, _, err = project.run()
    assert code == 1
    assert "the disk is full" in err
    assert err.splitlines()[-1].startswith("setup: pip exited with 1 while installing")
    project.calls()
    (project.stub / "pip_says").unlink()
    assert project.run()[0] == 0
    assert project.calls() == ["venv", *INSTALL]


def test_project_that_does_not_build_leaves_the_packages(project: Project) -> None:
    (project.stub / "project_breaks").touch()
    assert "while installing this project" in only_sentence(project)
    project.calls()
    (project.stub / "project_breaks").unlink()
    assert project.run()[0] == 0
    assert project.calls() == INSTALL


def test_interrupted_installation_stops_pip_and_is_rebuilt(project: Project) -> None:
    (project.stub / "hang").touch()
    process = project.start()
    project.wait_for_pip()
    process.send_signal(signal.SIGTERM)
    process.communicate(
        timeout=30
    )  # returns only when pip, which holds the pipes' log, is gone too
    assert process.returncode != 0
    project.calls()
    (project.stub / "hang").unlink()
    assert project.run()[0] == 0  # would wait for the lock if the first pip lived on
    assert project.calls() == ["venv", *INSTALL]


def test_two_runs_at_once_install_once(project: Project) -> None:
    first, second = project.start(), project.start()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert project.calls() == ["venv", *INSTALL]
    assert sum("environment ready" in out for out in outputs) == 1


def test_own_cuda_environment_is_left_alone(project: Project) -> None:
    version = project.root / ".venv/lib/python3.11/site-packages/torch/version.py"
    version.parent.mkdir(parents=True)
    version.write_text("cuda: Optional[str] = '13.0'\n")
    assert project.run() == (0, "", "")
    assert project.calls() == []
    version.write_text("cuda: Optional[str] = None\n")  # control: a CPU build is not one
    assert project.run()[0] == 0
    assert project.calls() == ["venv", *INSTALL]


def only_sentence(project: Project) -> str:
    """The last line of standard error of a run that must fail and must not leave a stamp."""
    code, _, err = project.run()
    assert code == 1
    stamp = project.root / ".venv/.moerl-stamp"
    assert not stamp.exists() or stamp.read_text() in ("incomplete\n", "packages\n")
    return err.splitlines()[-1]


def test_other_python_is_refused(project: Project) -> None:
    (project.stub / "version").write_text("3.12\n")
    assert re.fullmatch(
        r"setup: Python 3\.11 with venv is needed on PATH: \S+ is 3\.12", only_sentence(project)
    )


def test_no_python_is_refused(project: Project) -> None:
    (project.bin / "python3.11").unlink()
    assert only_sentence(project).endswith("is needed on PATH: none was found")


def test_python_without_venv_is_refused(project: Project) -> None:
    (project.stub / "no_venv").touch()
    assert "lacks the modules venv and ensurepip" in only_sentence(project)


def test_missing_compiler_is_refused(project: Project) -> None:
    (project.bin / "cc").unlink()
    assert "no C compiler" in only_sentence(project)
    assert project.calls() == []


def test_index_without_cpu_torch_is_explained(project: Project) -> None:
    (project.stub / "pip_says").write_text(
        "ERROR: No matching distribution found for torch==2.13.0+cpu\n"
    )
    assert "offers no CPU build of torch" in only_sentence(project)


def test_cuda_build_of_torch_is_refused(project: Project) -> None:
    project.torch(cuda="13.0")
    assert "torch 9 is a CUDA build" in only_sentence(project)


def test_nvidia_wheel_is_refused(project: Project) -> None:
    info = project.stub / "site/nvidia_cublas-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cublas\nVersion: 1\n")
    assert "nvidia-cublas must not be in the CPU profile" in only_sentence(project)


# --- the locks -----------------------------------------------------------------------------------
def read_lock(name: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.partition("==")
            assert version, f"{name}: {line!r} is not of the form name==version"
            assert canonicalize_name(package) not in pins, f"{name}: {package} is named twice"
            pins[canonicalize_name(package)] = version
    return pins


def unmet(pins: dict[str, str], requirements: list[str]) -> list[str]:
    """The requirements, markers applied and extras left out, that no pin satisfies."""
    found = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{text} (pinned: {version})")
    return found


def test_every_requirement_of_a_pinned_package_is_pinned() -> None:
    pins = read_lock("cpu.lock")
    for package in pins:
        assert unmet(pins, importlib.metadata.requires(package) or []) == [], package


def test_every_requirement_of_this_project_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = project["project"]["dependencies"] + project["build-system"]["requires"]
    assert unmet(read_lock("cpu.lock"), requirements) == []


def test_missing_and_wrong_pins_are_found() -> None:
    """Negative control of the two tests above."""
    pins = read_lock("cpu.lock")
    requirements = importlib.metadata.requires("fastapi") or []
    assert unmet(pins, requirements) == []
    without = {name: version for name, version in pins.items() if name != "starlette"}
    assert len(unmet(without, requirements)) == 1
    assert len(unmet(pins | {"starlette": "0.0.1"}, requirements)) == 1


def test_installed_versions_are_the_pinned_ones() -> None:
    for package, version in (read_lock("cpu.lock") | read_lock("cpu-nodeps.lock")).items():
        assert importlib.metadata.version(package) == version, package


def test_cpu_profile_names_no_cuda_package() -> None:
    pins = read_lock("cpu.lock") | read_lock("cpu-nodeps.lock")
    assert pins["torch"].endswith("+cpu")
    assert not [name for name in pins if "nvidia" in name or "cuda" in name or "-cu1" in name]
    assert os.access(ROOT / "tools/setup.sh", os.X_OK)

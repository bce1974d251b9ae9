"""tools/setup.sh --gpu against stub interpreters, and the lock of the GPU profile."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ["bash", "cat", "chmod", "dirname", "find", "flock", "grep", "mkdir", "rm", "sha256sum"]
TOOLS += ["sleep", "tail", "touch", "wc"]
TE = "transformer-engine-torch"

STUB = r"""#!/bin/bash
# Python 3.12, venv and pip in one; $STUB holds its behaviour and its diary.
site=$4/lib/python3.12/site-packages
case "$1 $2 $3" in
  "-c import sys"*) echo 3.12 ;;
  "-c import venv"*) ;;
  "-m venv"*)
    mkdir -p "$4/bin" "$4/lib/python3.12/site-packages"
    echo "VIRTUAL_ENV=\"$4\"" >"$4/bin/activate"
    echo "version = 3.12.1" >"$4/pyvenv.cfg"
    cat "$0" >"$4/bin/python"; chmod +x "$4/bin/python"
    mkdir -p "$site/torch"; echo "cuda: str = '13.0'" >"$site/torch/version.py"
    if [[ ! -e $STUB/no_nvcc ]]; then
      mkdir -p "$site/nvidia/cu13/bin"; touch "$site/nvidia/cu13/bin/nvcc"
      chmod +x "$site/nvidia/cu13/bin/nvcc"
    fi ;;
  "-m pip wheel")
    echo "wheel ${*: -1} force=$NVTE_PYTORCH_FORCE_BUILD home=${CUDA_HOME#"$PWD/"}" >>"$STUB/calls"
    echo "$*" >"$STUB/wheel_arguments"; echo "$CPATH" >"$STUB/cpath"
    if [[ -e $STUB/te_breaks ]]; then echo "error: cudnn.h not found"; exit 1; fi
    while [[ $1 != --wheel-dir ]]; do shift; done
    touch "$2/transformer_engine_torch-${*: -1: 1}.whl"
    for word in "$@"; do version=${word#transformer-engine-torch==}; done
    rm "$2"/*; touch "$2/transformer_engine_torch-$version-cp312-cp312-linux_x86_64.whl" ;;
  "-m pip install") echo "install ${*: -1}" >>"$STUB/calls" ;;
  "-m moerl.kernels.build "*) echo "kernels with $(command -v nvcc)" >>"$STUB/calls" ;;
  "-  ") cat >/dev/null; echo check >>"$STUB/calls" ;;
esac
"""


class Project:
    """A copy of what setup.sh reads, with a PATH that holds stubs and a few system tools only."""

    def __init__(self, folder: Path) -> None:
        self.root, self.stub, self.bin = folder / "project", folder / "stub", folder / "bin"
        for path in (self.root / "tools", self.stub, self.bin):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "tools/setup.sh", self.root / "tools")
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        for name, text in (("python3.12", STUB), ("cc", "#!/bin/bash\n")):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """(exit status, standard error, calls of the stub)."""
        done = subprocess.run(
            [str(self.root / "tools/setup.sh"), *arguments],
            env={"PATH": str(self.bin), "STUB": str(self.stub), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        diary = self.stub / "calls"
        calls = diary.read_text().splitlines() if diary.exists() else []
        diary.unlink(missing_ok=True)
        return done.returncode, done.stderr, calls


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements/gpu.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_transformer_engine_is_compiled_once_for_the_torch_of_the_lock(project: Project) -> None:
    version, home = pins()[TE], ".venv/lib/python3.12/site-packages/nvidia/cu13"
    code, error, calls = project.run("--gpu")
    assert (code, error) == (0, "")
    wheel = f"build/wheels/torch-{pins()['torch']}/transformer_engine_torch-{version}-cp312-cp312-"
    assert calls == [
        "install --requirement=build/gpu-wheels.txt",
        f"wheel {TE}=={version} force=TRUE home={home}",
        f"install {wheel}linux_x86_64.whl",
        "install .",
        "check",
        f"kernels with {project.root / home}/bin/nvcc",
    ]
    assert "--no-build-isolation" in (project.stub / "wheel_arguments").read_text()
    cpath = (project.stub / "cpath").read_text().strip().split(":")
    assert [Path(path).parent.name for path in cpath] == ["nccl", "cudnn", "cu13"]
    installed = (project.root / "build/gpu-wheels.txt").read_text()
    assert f"\n{TE}==" not in installed
    assert "\ntorch==" in installed
    assert project.run("--gpu") == (0, "", []), "a second call does nothing"
    assert project.run() == (0, "", []), "the CPU profile leaves an environment with CUDA alone"
    (project.root / ".venv/.moerl-stamp").write_text("gpu of another lock")
    assert project.run() == (0, "", [])
    _, _, again = project.run("--gpu")
    assert not any(call.startswith("wheel") for call in again), "the wheel is kept"


def test_the_wheels_may_lie_elsewhere(project: Project, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    code, error, _ = project.run("--gpu", MOERL_WHEELS=str(shared))
    assert (code, error) == (0, "")
    assert list(shared.glob(f"torch-{pins()['torch']}/*.whl"))


def test_the_environment_may_be_another_folder(project: Project) -> None:
    """For a machine without a GPU: .venv stays what it is."""
    code, error, calls = project.run("--gpu", "build/gpu-profile")
    assert (code, error) == (0, "")
    home = project.root / "build/gpu-profile/lib/python3.12/site-packages/nvidia/cu13"
    assert f"kernels with {home}/bin/nvcc" in calls
    assert not (project.root / ".venv").exists()
    assert project.run("--gpu", "build/gpu-profile") == (0, "", []), "a second call does nothing"


def test_failures_name_their_cause(project: Project) -> None:
    assert project.run("--cuda")[:2] == (
        2,
        "setup: unknown argument --cuda; use --gpu, or none for the CPU profile\n",
    )
    (project.stub / "te_breaks").touch()
    code, error, calls = project.run("--gpu")
    assert code == 1
    assert "cudnn.h not found" in error
    assert "Transformer Engine did not compile" in error
    assert not any(call == "install ." for call in calls), "nothing is installed after it"
    shutil.rmtree(project.root / ".venv")
    (project.stub / "no_nvcc").touch()
    code, error, _ = project.run("--gpu")
    assert code == 1
    assert "cu13/bin/nvcc is missing: requirements/gpu.lock needs nvidia-cuda-nvcc" in error


def test_the_lock_has_what_the_extra_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = pins()
    for text in (*project["dependencies"], *project["optional-dependencies"]["gpu"]):
        wanted = Requirement(text)
        assert wanted.specifier.contains(found[canonicalize_name(wanted.name)]), text
    assert len({found[name] for name in found if name.startswith("transformer-engine")}) == 1
    assert "transformer-engine-cu13" in found, "the core for the CUDA that torch is built for"
    others = [name for name in found if name.endswith(("-cu11", "-cu12"))]
    assert others == ["nvidia-cutlass-dsl-libs-cu12"], "no core or library of another CUDA"


@pytest.mark.parametrize("package", ["sglang", "megatron-core"])
def test_the_lock_is_legal_for_engine_and_trainer(package: str) -> None:
    """Against what the installed packages require, for the Python of the GPU profile."""
    found, checked = pins(), 0
    assert importlib.metadata.version(package) == found[package], "one version in both profiles"
    for text in importlib.metadata.requires(package) or []:
        wanted = Requirement(text)
        where = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.1"}
        if wanted.marker is not None and not wanted.marker.evaluate(where):
            continue
        name = canonicalize_name(wanted.name)
        assert name in found, text
        assert wanted.specifier.contains(found[name], prereleases=True), text
        checked += 1
    assert checked > 1
    extras = map(Requirement, importlib.metadata.requires("megatron-core") or [])
    engines = [r for r in extras if canonicalize_name(r.name) == "transformer-engine"]
    assert engines
    for wanted in engines:
        assert wanted.specifier.contains(found["transformer-engine"]), str(wanted)


def test_the_image_does_what_the_script_does() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.12-", text, re.MULTILINE)
    assert "tools/setup.sh --gpu" in text
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".venv" in ignored
    assert not {"requirements", "csrc", "configs", "tools", "moerl", "setup.py"} & set(ignored)
    assert os.access(ROOT / "tools/setup.sh", os.X_OK)
    assert sys.version_info >= (3, 11)

"""The lock of the GPU profile: uv resolves the extra to it, and its compiler fits its headers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
UV = "uv==0.13.9"
RESOLVE = ("pip", "compile", "pyproject.toml", "--extra", "gpu", "--python-version", "3.12")
RESOLVE += ("--python-platform", "x86_64-manylinux_2_34", "--no-header", "--no-annotate", "--quiet")


def uv(folder: Path) -> Path:
    """The program, in a folder of its own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, UV]
    subprocess.run(pip, check=True, timeout=patience(280))
    return folder / "bin/uv"


COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")


def minors(lock: str) -> dict[str, str]:
    """CUDA's version without its patch, by package of compiler and headers."""
    pins = dict(line.split("==") for line in lines(lock))
    return {name: pins[name].rpartition(".")[0] for name in COMPILER}


def test_the_compiler_has_the_version_of_the_headers() -> None:
    """CCCL, which kernels of SGLang include, refuses others.  Control: the newest compiler."""
    lock = (ROOT / "requirements/gpu.lock").read_text()
    assert set(minors(lock).values()) == {"13.0"}
    newer = re.sub(r"(?m)^nvidia-cuda-nvcc==.*$", "nvidia-cuda-nvcc==13.5.37", lock)
    assert set(minors(newer).values()) == {"13.0", "13.5"}


def lines(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line and not line.startswith("#")}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_lock_is_one_legal_set(tmp_path: Path) -> None:
    """No wheel is installed: uv reads metadata.  Control: a torch that SGLang does not ask for."""
    program, lock = uv(tmp_path / "uv"), ROOT / "requirements/gpu.lock"

    def resolve(constraints: Path) -> subprocess.CompletedProcess[str]:
        command = [program, *RESOLVE, "--constraint", constraints]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=patience(800)
        )

    done = resolve(lock)
    assert done.returncode == 0, done.stderr
    build = {line for line in lines(lock.read_text()) if line.startswith("wheel==")}
    assert lines(done.stdout) == lines(lock.read_text()) - build
    other = tmp_path / "other.lock"
    other.write_text(lock.read_text().replace("\ntorch==2.14.1 ", "\ntorch==2.13.0 "))
    refused = resolve(other)
    assert refused.returncode != 0
    assert "torch" in refused.stderr

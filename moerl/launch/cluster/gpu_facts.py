"""Parts of the GPU profile on a node: driver, CUDA, compiler, cuDNN, NCCL, Transformer Engine.

Nothing is imported: versions come from the programs nvidia-smi and nvcc, from installed
distributions, and from torch's version file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# By purpose: the distributions of which one must be there, for the CUDA that torch is built for
LIBRARIES = {
    "cuDNN": "nvidia-cudnn-cu{major}",
    "NCCL": "nvidia-nccl-cu{major}",
    "Transformer Engine": "transformer-engine",
    "Transformer Engine core": "transformer-engine-cu{major}",
    "Transformer Engine torch": "transformer-engine-torch",
}
_SECONDS = 20.0  # nvidia-smi wakes an idle driver
_NVCC = ("nvcc", "/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class GpuFacts:
    """Versions; empty = not found."""

    driver: str = ""
    driver_cuda: str = ""  # newest CUDA that the driver runs
    torch_cuda: str = ""  # CUDA that torch is built for; empty for a CPU build
    nvcc: str = ""
    libraries: dict[str, str] = field(default_factory=dict)  # by purpose


def gpu_facts() -> GpuFacts:
    smi = _said("nvidia-smi")
    torch_cuda = _torch_cuda()
    major = torch_cuda.partition(".")[0]
    return GpuFacts(
        driver=_found(r"Driver Version: ([\d.]+)", smi),
        driver_cuda=_found(r"CUDA Version: ([\d.]+)", smi),
        torch_cuda=torch_cuda,
        nvcc=_nvcc(major),
        libraries={
            purpose: _version(name.format(major=major)) for purpose, name in LIBRARIES.items()
        },
    )


def _nvcc(major: str) -> str:
    """Version of the compiler on PATH, else of the CUDA wheels."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    packaged = [f"{folder}/cu{major}/bin/nvcc" for folder in folders]
    program = next((path for name in (*_NVCC, *packaged) if (path := shutil.which(name))), None)
    return _found(r"release ([\d.]+)", _said(program, "--version")) if program else ""


def _torch_cuda() -> str:
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    return _found(r"(?m)^cuda\b[^=]*= '([\d.]+)'", text)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""

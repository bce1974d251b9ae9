"""What tests of a device share: numbers for the table of tools/gpu-check, and the double's name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata

import torch

Figure = Callable[[str, float, str], None]  # name, value, unit
_PACKAGES = ("megatron-core", "transformer-engine", "sglang", "flashinfer-python", "ray", "numpy")


def on_double() -> bool:
    """Whether the device is the double of tests/double, where sizes must be small."""
    return torch.cuda.is_available() and torch.cuda.get_device_name() == "double"


def on_gpu() -> bool:
    """Whether there is a device that is no double."""
    return torch.cuda.is_available() and not on_double()


def machine() -> dict[str, str]:
    """Hardware and versions that figures belong to."""
    found = torch.cuda.get_device_properties(0)
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "device": torch.cuda.get_device_name(),
        "devices": str(torch.cuda.device_count()),
        "device memory": f"{found.total_memory / 1e9:.1f} GB",
        "capability": f"{found.major}.{found.minor}",
        "host": f"{platform.machine()}, {_cores()} cores",
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": _first_line("nvcc", "--version", last=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **{name: version for name, version in versions.items() if version},
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _first_line(program: str, *words: str, last: bool = False) -> str:
    path = shutil.which(program)
    if path is None:
        return "none"
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or ["no answer"]
    return lines[-1 if last else 0]

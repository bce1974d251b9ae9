"""This machine as a plan or a start sees it, without torch: host memory, and GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_GPUS = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_ANSWER_S = 30.0  # the first question to an idle driver takes seconds
_MIB = 2**20


def host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may use: of the machine, or the lowest limit of its cgroups."""
    info = (root / "proc/meminfo").read_text("ascii")
    found = [int(re.findall(r"MemTotal:\s+(\d+) kB", info)[0]) * 1024]
    for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        base, file = root / "sys/fs/cgroup", "memory.max"
        if "memory" in controllers.split(","):  # version 1
            base, file = base / "memory", "memory.limit_in_bytes"
        elif controllers:
            continue
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if (folder / file).is_file():
                limit = (folder / file).read_text("ascii").strip()
                found += [int(limit)] if limit.isdecimal() else []  # or max
            if folder == base:
                break
    return min(found)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Bytes of each GPU visible in an environment; empty without nvidia-smi."""
    try:
        answer = subprocess.run(
            _GPUS, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    named: dict[str, int] = {}
    for line in answer.stdout.splitlines():
        index, uuid, size = (field.strip() for field in line.split(","))
        named[index] = named[uuid] = int(size) * _MIB if size.isdecimal() else 0
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    entries = [name for name in named if name.isdecimal()] if listed is None else listed.split(",")
    return [named[entry] for entry in entries if entry in named]


def torch_cuda() -> str:
    """CUDA that the installed torch is built for; empty for a CPU build.

    From torch's version file: an import would take seconds.
    """
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    match = re.search(r"(?m)^cuda\b[^=]*= '([\d.]+)'", text)
    return match[1] if match else ""

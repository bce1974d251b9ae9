"""Wheels that `tools/gpu-check --parts` brings to a machine with torch, and their unpacking.

    tools/gpu-check --pack [--python 3.12]      here: needs pip and its package index
    tools/gpu-check --parts                      there: needs neither

Versions are those that are installed here.  A wheel is an archive of importable files: it is
unpacked, and nothing is installed.  torch and what it requires are the machine's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "gpu-check" / "wheels"
_MARK = WHEELS / "PYTHON"  # the version that they are for
MOST_BYTES = 50_000_000
PACKED = (
    "megatron-core",
    "numpy",
    "einops",
    "packaging",
    "msgspec",
    "omegaconf",
    "antlr4-python3-runtime",
    "pyroaring",
    "pyyaml",
    "pyzmq",
    "xxhash",
    "zstandard",
    "safetensors",
    "psutil",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "pytest",
    "pluggy",
    "iniconfig",
)
_PLATFORMS = tuple(
    f"manylinux{glibc}_x86_64" for glibc in ("_2_28", "_2_24", "_2_17", "2014", "_2_12", "2010")
)


def pack(python: str) -> int:
    """Download the wheels for one Python, `3.11` or `3.12`.  Returns their bytes."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in PACKED]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--ignore-requires-python"]
    command += [word for name in _PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, "--dest", str(WHEELS), *wanted], check=True)
    _MARK.write_text(f"{python}\n")
    shutil.rmtree(WHEELS.parent / f"site-{python}", ignore_errors=True)
    size = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    if size > MOST_BYTES:
        raise SystemExit(f"gpu-check: {size} bytes of wheels, at most {MOST_BYTES} are promised")
    return size


def unpacked() -> Path | None:
    """The folder of the packed modules, made on the first call; None where the environment has them
    and nothing fits.  SystemExit where neither is there.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    packed_for = _MARK.read_text().strip() if _MARK.exists() else "no Python"
    if packed_for != here:
        if importlib.util.find_spec("megatron") is not None:
            return None
        raise SystemExit(
            f"gpu-check: wheels are packed for {packed_for}, this is Python {here}: run "
            f"`tools/gpu-check --pack --python {here}` where there is a package index, and copy "
            f"{WHEELS.relative_to(ROOT)}"
        )
    folder = WHEELS.parent / f"site-{here}"
    if not folder.exists():
        new = Path(tempfile.mkdtemp(dir=WHEELS.parent))
        for wheel in sorted(WHEELS.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(new)
        new.rename(folder)
    return folder

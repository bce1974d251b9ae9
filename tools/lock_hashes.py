"""Write the hash of each file that an installation takes into requirements/*.lock.

    .venv/bin/python tools/lock_hashes.py UV

Run it after a change of a version, with .venv's Python 3.11.  UV is the program uv (`pip install
uv==0.13.9`), which lists the files of each version; the best one for the profile's Python on Linux
x86-64 (glibc 2.34) is named, a source package where there is no wheel.  Two are fetched by pip,
from where its own configuration says: PyTorch's CPU build, whose version has a local part, and
megatron-core, whose wheel for Python 3.11 declares 3.12.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCKS = {"cpu": "3.11", "cpu-nodeps": "3.11", "clients": "3.11", "gpu": "3.12"}  # their Pythons
_BY_PIP = {("3.11", "megatron-core")}
GLIBC = 34
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
]


def tags_of(python: str) -> list[Tag]:
    """The best first."""
    major, minor = map(int, python.split("."))
    interpreter = f"cp{major}{minor}"
    own = cpython_tags((major, minor), [interpreter], PLATFORMS)
    return [*own, *compatible_tags((major, minor), interpreter, PLATFORMS)]


def hash_of(package: dict[str, Any], tags: list[Tag]) -> str:
    ranks: list[tuple[int, str]] = []
    for wheel in package.get("wheels", ()):
        name = str(wheel.get("name") or wheel["url"].rpartition("/")[2])
        found = parse_wheel_filename(name)[3]
        ranks += [(tags.index(tag), wheel["hashes"]["sha256"]) for tag in found & set(tags)]
    return min(ranks)[1] if ranks else str(package["sdist"]["hashes"]["sha256"])


def hashes(uv: str, lock: Path, python: str) -> Iterator[tuple[str, str]]:
    """(name==version, hash) of each pin."""
    pins = [line.split()[0] for line in lock.read_text().splitlines() if "==" in line[:80]]
    pins = [pin for pin in pins if not pin.startswith("#")]
    by_pip = [pin for pin in pins if "+" in pin or (python, pin.partition("==")[0]) in _BY_PIP]
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "pins.txt")
        given.write_text("\n".join(pin for pin in pins if pin not in by_pip))
        platform = ("--python-version", python, "--python-platform", f"x86_64-manylinux_2_{GLIBC}")
        form = ("--no-deps", "--format", "pylock.toml", "--no-header", "--quiet")
        command = [uv, "pip", "compile", str(given), *form, *platform]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for package in tomllib.loads(text)["packages"]:
            yield f"{package['name']}=={package['version']}", hash_of(package, tags_of(python))
        for pin in by_pip:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
            subprocess.run([*pip, "--dest", folder, pin], check=True, capture_output=True)
            (file,) = Path(folder).glob("*.whl")
            with file.open("rb") as stream:
                yield pin, hashlib.file_digest(stream, "sha256").hexdigest()
            file.unlink()


def write(uv: str, lock: Path, python: str) -> None:
    found = {canonical(pin): digest for pin, digest in hashes(uv, lock, python)}
    lines = []
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            pin = line.split()[0]
            line = f"{pin} --hash=sha256:{found[canonical(pin)]}"
        lines.append(line)
    lock.write_text("\n".join(lines) + "\n")


def canonical(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{canonicalize_name(name)}=={version}"


def main() -> None:
    for name, python in LOCKS.items():
        write(sys.argv[1], ROOT / f"requirements/{name}.lock", python)


if __name__ == "__main__":
    main()

"""Compile csrc/ into shared libraries:

    python -m moerl.kernels.build

`cpu` from csrc/*.cpp by the C++ compiler.  A target whose compiler is missing is skipped with a
message; a failing compiler is an error.  Libraries are written to
`built/` in this folder, named after a hash of their sources and flags, so an outdated one is never
loaded.  A library exports C functions on plain pointers and is opened with ctypes; no torch header
is read, so a build takes seconds and stays valid across torch versions.

Rejected: torch.utils.cpp_extension (slow, one build per torch version), building at import.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moerl.core.errors import MoerlError
from moerl.runtime.resources import resource_folder

BUILT = Path(__file__).resolve().parent / "built"
_COMMON = ("-O3", "-std=c++17", "-shared")


class BuildError(MoerlError):
    """A compiler that failed; carries its last lines."""


@dataclass(frozen=True, slots=True)
class Target:
    """One library: its sources and compiler."""

    name: str
    pattern: str  # pattern of its sources in csrc/
    compilers: tuple[str, ...]  # the first one on PATH is used
    flags: tuple[str, ...]

    def compiler(self) -> str | None:
        return next((path for name in self.compilers if (path := shutil.which(name))), None)

    def sources(self) -> list[Path]:
        return sorted(source_folder().glob(self.pattern))

    def library(self) -> Path:
        """Path of the library built from the current sources."""
        digest = hashlib.sha256(" ".join(self.flags).encode())
        for source in sorted([*self.sources(), *source_folder().glob("*.h")]):
            digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
        return BUILT / f"{self.name}-{platform.machine()}-{digest.hexdigest()[:16]}.so"


TARGETS = {
    # No -march: the folder may be used by a machine other than the build machine.
    "cpu": Target(
        "cpu",
        "*.cpp",
        ("c++", "g++", "clang++"),
        (*_COMMON, "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    ),
}


def source_folder() -> Path:
    """csrc/ of the checkout, or the copy that a wheel installs."""
    return resource_folder("csrc")


def build(target: Target) -> str:
    """Compile one target unless its library exists.  Returns one sentence on the result.

    Raises BuildError with the compiler's last lines.
    """
    sources = target.sources()
    if not sources:
        return f"skipped, no {target.pattern} in {source_folder()}"
    library = target.library()
    if library.exists():
        return f"{library.name} is up to date"
    compiler = target.compiler()
    if compiler is None:
        return f"skipped, none of {', '.join(target.compilers)} was found"
    BUILT.mkdir(exist_ok=True)
    with (BUILT / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits here and finds the work done
        if library.exists():
            return f"{library.name} is up to date"
        start = time.monotonic()
        _compile(compiler, target, sources, library)
        for outdated in BUILT.glob(f"{target.name}-{platform.machine()}-*.so"):
            if outdated != library:
                outdated.unlink()
        return f"{library.name} built in {time.monotonic() - start:.1f} s"


def _compile(compiler: str, target: Target, sources: list[Path], library: Path) -> None:
    temporary = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *target.flags, *map(str, sources), "-o", str(temporary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        temporary.unlink(missing_ok=True)
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(
            f"{compiler} exited with {done.returncode} on the {target.name} kernels:\n{last}"
        )
    temporary.rename(library)


def main() -> None:
    """Build every target that has a compiler; exit status 1 when a compiler fails."""
    for target in TARGETS.values():
        try:
            print(f"kernels, {target.name}: {build(target)}", flush=True)
        except BuildError as error:
            sys.exit(f"BuildError: {error}")


if __name__ == "__main__":
    main()

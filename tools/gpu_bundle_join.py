#!/usr/bin/env python3
"""Make the GPU environment of a bundle's pieces, on a machine without a network.

    python3 join.py add PIECE... --env FOLDER       unpack pieces, in any order, as they arrive
    python3 join.py missing --env FOLDER            names of the pieces that have not been added
    python3 join.py finish [PIECE...] --env FOLDER --project MOERL
                                                    add the rest, check, link, write programs
    python3 join.py check FOLDER                    digests of the pieces in a folder

`python3` is Python 3.12 of the machine.  Unless the bundle was made with `--with cuda`, it is the
Python that has torch for CUDA 13: its NVIDIA libraries are linked, its other packages not seen.
FOLDER is a new folder, 5 GB, and not inside MOERL, the folder of the project's files.  bundle.json
lies beside this file.  A folder in place of PIECE means all pieces in it.

Only the standard library is used.  A piece that is damaged or of another bundle, a wrong Python, a
full disk and a folder with something else are refused before anything is written.  A call that was
interrupted may be repeated.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

STATE = ".gpu-bundle"  # folder of an environment: the manifest, and one file per added piece
ABOUT = "gpu-bundle.json"  # in the environment's folder: read by the import hook and by moerl
OFFSET = "moerl.offset"  # of a part in its file, in the archive
_BLOCK = 1 << 20
_ZEROS = bytes(1 << 16)
_SPARE = 64 << 20  # bytes of a disk that stay free
_SKIP_CUDNN_CHECK = "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK"


class Refusal(Exception):
    """A fault of the user's files or machine, in one sentence."""


# --- the manifest --------------------------------------------------------------------------------
def seal(manifest: dict[str, Any]) -> str:
    """Digest of a manifest's other entries: the bundle's name."""
    rest = {name: value for name, value in manifest.items() if name != "id"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def read_manifest(file: Path) -> dict[str, Any]:
    """Raises Refusal for a file that is missing, cut or changed."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        whole = seal(found) == found["id"]
    except FileNotFoundError:
        raise Refusal(f"{file} is missing: copy bundle.json and join.py with the pieces") from None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise Refusal(f"{file} is damaged: copy it again")
    return found


def digest(file: Path) -> str:
    total = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def identify(manifest: dict[str, Any], file: Path) -> str:
    """The name of a piece, by its bytes.  Raises Refusal."""
    if not file.is_file():
        raise Refusal(f"{file} does not exist")
    found = digest(file)
    for name, piece in manifest["pieces"].items():
        if piece["sha256"] == found:
            return str(name)
    of = re.match(r"gpu-([0-9a-f]{8})-\d+", file.name)
    if of and of[1] != manifest["plan"][:8]:
        raise Refusal(f"{file} is of bundle {of[1]}, this is bundle {manifest['plan'][:8]}")
    wanted = manifest["pieces"].get(file.name)
    if wanted is None:
        raise Refusal(f"{file} is no piece of bundle {manifest['plan'][:8]}")
    size = file.stat().st_size
    why = f"{size} of {wanted['bytes']} bytes" if size != wanted["bytes"] else "its digest differs"
    raise Refusal(f"{file} is damaged ({why}): copy it again")


def pieces_of(words: Iterable[Path]) -> list[Path]:
    """Files; a folder stands for the pieces in it."""
    found: list[Path] = []
    for word in words:
        found += sorted(word.glob("gpu-*.tar.xz")) if word.is_dir() else [word]
    return found


def check(manifest: dict[str, Any], folder: Path) -> None:
    """Raises Refusal, which names each piece that is damaged or missing."""
    faults, seen = [], set()
    for file in pieces_of([folder]):
        try:
            seen.add(identify(manifest, file))
        except Refusal as fault:
            faults.append(str(fault))
    lacking = [name for name in manifest["pieces"] if name not in seen]
    whole = [name for name in lacking if not (folder / name).exists()]
    faults += [f"{name} is missing" for name in whole]
    if faults:
        raise Refusal("; ".join(faults))
    size = sum(piece["bytes"] for piece in manifest["pieces"].values())
    say(f"{len(seen)} pieces, {size:,} bytes, all digests are right")


# --- refusals before anything is written ---------------------------------------------------------
def check_machine(manifest: dict[str, Any]) -> None:
    """Raises Refusal for another Python, processor or C library."""
    has = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if has != manifest["python"]:
        raise Refusal(
            f"{sys.executable} is Python {has}, the bundle is for {manifest['python']}: "
            f"call join.py with python{manifest['python']}"
        )
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        raise Refusal(f"the bundle is for Linux on x86_64, this is {platform.machine()}")
    _, libc = platform.libc_ver()
    if libc and _numbers(libc) < _numbers(manifest["glibc"]):
        raise Refusal(f"the bundle needs glibc {manifest['glibc']}, this machine has {libc}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def check_folder(manifest: dict[str, Any], env: Path) -> None:
    """Raises Refusal for a folder that holds something else, or another bundle."""
    kept = env / STATE / "bundle.json"
    if not env.exists() or (env.is_dir() and not any(env.iterdir())):
        return
    if not kept.is_file():
        raise Refusal(f"{env} is no environment of a bundle: name a new folder with --env")
    found = read_manifest(kept)
    if found["id"] != manifest["id"]:
        raise Refusal(
            f"{env} is of bundle {found['plan'][:8]}, this is bundle {manifest['plan'][:8]}: "
            "name another folder with --env, or remove it"
        )


def check_disk(manifest: dict[str, Any], env: Path) -> None:
    """Raises Refusal where the pieces that are not yet there do not fit."""
    there = next(path for path in (env, *env.parents) if path.is_dir())
    waiting = sum(manifest["pieces"][name]["unpacked"] for name in missing(manifest, env))
    needed, free = waiting + _SPARE, shutil.disk_usage(there).free
    if waiting and free < needed:
        raise Refusal(f"{needed / 1e9:.2f} GB are needed in {there}, {free / 1e9:.2f} GB are free")


def check_project(manifest: dict[str, Any], project: Path) -> None:
    lock = project / "requirements/gpu.lock"
    if not (project / "moerl/__init__.py").is_file() or not lock.is_file():
        raise Refusal(f"{project} is not the folder of moerl's files: give it with --project")
    if digest(lock) != manifest["lock"]:
        raise Refusal(f"the bundle was made for another {lock}: make it again from this project")


# --- pieces --------------------------------------------------------------------------------------
def missing(manifest: dict[str, Any], env: Path) -> list[str]:
    return [name for name in manifest["pieces"] if not (env / STATE / name).exists()]


def add(manifest: dict[str, Any], env: Path, files: list[Path]) -> None:
    """Unpack pieces.  Raises Refusal, before anything is written, if one of them cannot be."""
    begin = time.monotonic()
    check_machine(manifest)
    check_folder(manifest, env)
    check_disk(manifest, env)
    with ThreadPoolExecutor(_workers()) as pool:
        names = list(pool.map(lambda file: identify(manifest, file), files))
    (env / STATE).mkdir(parents=True, exist_ok=True)
    (env / STATE / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    waiting = {*missing(manifest, env)}
    new = {name: file for name, file in zip(names, files, strict=True) if name in waiting}
    with ThreadPoolExecutor(_workers()) as pool:
        for done, (name, file) in enumerate(new.items(), 1):
            places = _places(manifest["pieces"][name]["units"])
            list(pool.map(lambda place, file=file: _unpack(env, file, *place), places))
            (env / STATE / name).touch()
            say(f"{name}: unpacked, {done} of {len(new)}, {time.monotonic() - begin:.1f} s")
    for name in names:
        if name not in new:
            say(f"{name}: was there already")
    lacking = missing(manifest, env)
    say(f"{len(manifest['pieces']) - len(lacking)} of {len(manifest['pieces'])} pieces are there")


def _workers() -> int:
    return min(16, os.cpu_count() or 1)


def _places(units: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Offset and size of each unit of a piece, which is compressed by itself."""
    at = 0
    for size in units:
        yield at, size
        at += size


def _unpack(env: Path, file: Path, at: int, size: int) -> None:
    with file.open("rb") as packed:
        packed.seek(at)
        data = io.BytesIO(lzma.decompress(packed.read(size)))
    with tarfile.open(fileobj=data, mode="r:") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is None:
                raise Refusal(f"{file}: {member.name} is no file")
            _write(env, member, cast(BinaryIO, content))


def _write(env: Path, member: tarfile.TarInfo, data: BinaryIO) -> None:
    """A file, or a part of one at its place.  Blocks of zeros stay holes, but for the last.

    Other parts of the file may be written at the same time, so that nothing is truncated.
    """
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise Refusal(f"a piece names {member.name}, which is outside the environment")
    target = env / path
    target.parent.mkdir(parents=True, exist_ok=True)
    at = int(member.pax_headers.get(OFFSET, 0))
    handle = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        end = at + member.size
        while block := data.read(len(_ZEROS)):
            if block != _ZEROS[: len(block)] or at + len(block) == end:
                os.pwrite(handle, block, at)
            at += len(block)
        os.fchmod(handle, member.mode)
    finally:
        os.close(handle)


# --- the environment -----------------------------------------------------------------------------
def finish(manifest: dict[str, Any], env: Path, project: Path) -> None:
    """Raises Refusal while a piece is missing."""
    begin = time.monotonic()
    check_machine(manifest)
    check_folder(manifest, env)
    check_project(manifest, project)
    if lacking := missing(manifest, env):
        raise Refusal(f"{len(lacking)} pieces are missing: {', '.join(lacking)}")
    machine = find_machine(manifest)
    say("checking the digests of large files")
    with ThreadPoolExecutor(_workers()) as pool:
        list(pool.map(lambda one: _check_large(env, *one), manifest["large"].items()))
    command = [sys.executable, "-m", "venv", "--without-pip", str(env)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise Refusal(f"{sys.executable} cannot make an environment: {made.stdout}{made.stderr}")
    site = env / manifest["site"]
    link_machine(machine, site)
    link_compiler(env, site)
    (site / "moerl-project.pth").write_text(f"{project.resolve()}\n", encoding="utf-8")
    write_programs(env, site)
    build_kernels(env)
    differing = list(differences(manifest, site))
    write_about(manifest, env, differing)
    for name, found, wanted in differing:
        say(f"of the machine: {name} {found}, requirements/gpu.lock has {wanted}")
    for line in lacks(manifest, env):
        say(f"this machine: {line}")
    say(f"{env} is whole after {time.monotonic() - begin:.0f} s; take it with:")
    say(f"  . {env}/bin/activate")


def _check_large(env: Path, name: str, wanted: str) -> None:
    if digest(env / name) != wanted:
        for mark in (env / STATE).glob("gpu-*"):
            mark.unlink()
        raise Refusal(f"{env / name} is damaged: add all pieces again")


def find_machine(manifest: dict[str, Any]) -> list[Path]:
    """Folders `nvidia` of this Python.  Raises Refusal if they are needed and not there."""
    if not manifest["machine"]:
        return []
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(one) for one in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        raise Refusal(
            f"{sys.executable} has no NVIDIA packages, which come with torch for CUDA 13: call "
            "join.py with the Python that has torch, or make the bundle with `--with cuda`"
        )
    return folders


def link_machine(folders: Iterable[Path], site: Path) -> None:
    """NVIDIA's libraries of the machine, and their metadata, where torch looks for them.

    Transformer Engine, torch and `moerl doctor` see the versions that are there.
    """
    for folder in folders:
        _link_into(folder, site / "nvidia")
        for about in folder.parent.glob("nvidia_*.dist-info"):
            name = about.name.partition("-")[0]
            if not any(site.glob(f"{name}-*.dist-info")):
                (site / about.name).symlink_to(about.resolve())


def _link_into(source: Path, target: Path) -> None:
    """Every entry of a folder that the target does not have; what a bundle brings stays."""
    target.mkdir(parents=True, exist_ok=True)
    for one in source.iterdir():
        there = target / one.name
        if one.name == "__pycache__":
            continue
        if not there.exists() and not there.is_symlink():
            there.symlink_to(one.resolve())
        elif one.is_dir() and there.is_dir() and not there.is_symlink():
            _link_into(one, there)


def link_compiler(env: Path, site: Path) -> None:
    """ENV/cuda, where moerl and SGLang look for nvcc: that of the bundle, or of a toolkit here."""
    home, packaged = env / "cuda", site / "nvidia/cu13"
    home.mkdir(exist_ok=True)
    toolkit = None if (packaged / "bin/nvcc").exists() else find_toolkit()
    if toolkit:  # every entry: its nvcc.profile names `targets`
        _link_into(toolkit, home)
    elif (packaged / "bin/nvcc").exists():
        for part in ("bin", "include", "nvvm"):
            _relink(home / part, packaged / part)
        link_libraries(packaged / "lib", home / "lib64")


def find_toolkit() -> Path | None:
    """Folder of CUDA's compiler here."""
    nvcc = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [Path(one) for one in named if one]
    places += [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next((one for one in places if (one / "bin/nvcc").exists()), None)


def link_libraries(source: Path, target: Path) -> None:
    """Under the names that a linker asks for; the driver's library is a stub for it."""
    (target / "stubs").mkdir(parents=True, exist_ok=True)
    for library in source.glob("lib*.so.*"):
        _relink(target / library.name, library)
        _relink(target / f"{library.name.partition('.so.')[0]}.so", library)
    if driver := find_driver():
        _relink(target / "stubs/libcuda.so", driver)


def _relink(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target)


def find_driver() -> Path | None:
    program = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    listed = subprocess.run([program, "-p"], capture_output=True, text=True) if program else None
    found = re.search(r"libcuda\.so\.1 .*=> (\S+)", listed.stdout) if listed else None
    return Path(found[1]) if found else None


def write_programs(env: Path, site: Path) -> None:
    """`moerl`, `ray`, `torchrun` and the others, from the entry points of packages."""
    for file in sorted(site.glob("*.dist-info/entry_points.txt")):
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(file.read_text(encoding="utf-8"))
        if parser.has_section("console_scripts"):
            for name, value in parser.items("console_scripts"):
                _write_program(env, name, value)


def _write_program(env: Path, name: str, value: str) -> None:
    module, _, function = value.split("[")[0].strip().partition(":")
    target = env / "bin" / name
    lines = [f"#!{env}/bin/python", "import sys", f"from {module} import {function.split('.')[0]}"]
    target.write_text("\n".join([*lines, f"sys.exit({function}())", ""]), encoding="utf-8")
    target.chmod(0o755)


def build_kernels(env: Path) -> None:
    """moerl's own, of its C++ sources: seconds.  A run without them is slower."""
    command = [str(env / "bin/python"), "-m", "moerl.kernels.build"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        say(f"moerl's kernels were not built, so runs are slower: {last}")


def differences(manifest: dict[str, Any], site: Path) -> Iterator[tuple[str, str, str]]:
    """(distribution, version here, version of the lock) of what the machine brings."""
    found = {}
    for about in site.glob("*.dist-info"):
        given, _, number = about.name[: -len(".dist-info")].partition("-")
        found[_plain(given)] = number
    for name, wanted in manifest["machine"].items():
        here = found.get(_plain(name), "absent")
        if here != wanted and name not in manifest["compiler"]:
            yield name, here, wanted


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def write_about(
    manifest: dict[str, Any], env: Path, differing: Iterable[tuple[str, str, str]]
) -> None:
    """Facts for the import hook and for moerl; another cuDNN needs torch's own switch."""
    names = {name for name, _, _ in differing}
    variables = {_SKIP_CUDNN_CHECK: "1"} if "nvidia-cudnn-cu13" in names else {}
    for name, value in variables.items():
        say(f"every process of the environment has {name}={value}: cuDNN is another version")
    facts = {name: manifest[name] for name in ("id", "plan", "architectures", "left_out")}
    facts |= {"attention": manifest["attention"], "environment": variables}
    (env / ABOUT).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def lacks(manifest: dict[str, Any], env: Path) -> Iterator[str]:
    """Sentences about parts that engine or trainer need at their start and that are not here."""
    if not (env / "cuda/bin/nvcc").exists():
        yield "no nvcc of CUDA 13, which engines compile with: install CUDA's toolkit"
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        yield "no C++ compiler, which engines and moerl's kernels compile with"
    base = Path(sys.base_prefix, "include", f"python{manifest['python']}", "Python.h")
    if not base.exists():
        yield f"no {base}, which Triton compiles with (on Debian: python3.12-dev)"
    if find_driver() is None:
        yield "no driver (libcuda.so.1)"
    for card in cards():
        if not any(card // 10 == one // 10 and one <= card for one in manifest["architectures"]):
            made = " ".join(map(str, manifest["architectures"]))
            yield f"a GPU of compute capability {card / 10}, the bundle was made with --arch {made}"


def cards() -> list[int]:
    """Compute capabilities of the GPUs here, 9.0 as 90."""
    if not shutil.which("nvidia-smi"):
        return []
    words = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return sorted(
        {int(major) * 10 + int(minor) for major, minor in re.findall(r"(\d+)\.(\d)", said)}
    )


# --- command -------------------------------------------------------------------------------------
def say(line: str) -> None:
    print(line, flush=True)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("add", "missing", "finish", "check"))
    parser.add_argument("pieces", type=Path, nargs="*", metavar="PIECE")
    parser.add_argument("--env", type=Path, default=Path.home() / "gpu-env", metavar="FOLDER")
    parser.add_argument("--project", type=Path, default=Path(), metavar="MOERL")
    return parser.parse_args(words)


def act(chosen: argparse.Namespace) -> None:
    env, here = chosen.env.absolute(), Path(__file__).resolve().parent
    files = pieces_of(chosen.pieces)
    if chosen.what == "check":
        folder = chosen.pieces[0] if chosen.pieces else here
        return check(read_manifest(folder / "bundle.json"), folder)
    manifest = read_manifest(here / "bundle.json")
    if chosen.what == "missing":
        return say("\n".join(missing(manifest, env)) or "none")
    if chosen.what == "add" and not files:
        raise Refusal("name the pieces to add, or the folder that they are in")
    if chosen.what == "finish":
        check_project(manifest, chosen.project)
    if files:
        add(manifest, env, files)
    if chosen.what == "finish":
        finish(manifest, env, chosen.project)


def main() -> int:
    try:
        act(arguments())
    except (Refusal, OSError) as error:
        print(f"join: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make a bundle: the environment of requirements/gpu.lock in pieces, for machines without network.

    tools/gpu-bundle make OUT [--arch 90] [--piece-mib 50]     pieces in OUT/pieces
    tools/gpu-bundle make OUT --transformer-engine WHEEL       with Transformer Engine
    tools/gpu-bundle check OUT                                 digests of OUT/pieces
    tools/gpu-bundle left-out                                  what is left out, why, and its option

The pieces, bundle.json and join.py of OUT/pieces travel.  There, with Python 3.12 alone:

    python3 join.py finish . --env FOLDER --project MOERL

`make` needs pip with its package index, `strip`, 9 GB of disk and no GPU: three minutes to fetch,
10 to 25 of one core to compress.  It may be interrupted: OUT/wheels keeps what was fetched,
OUT/packed what was compressed, by wheel and in units of 8 MiB, so that another call, with another
piece size or one more wheel, compresses only what is new.  WHEEL is the compiled torch part, which
`tools/setup.sh --gpu` leaves in build/wheels.  KERNELS is the folder of tools/engine_kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moerl import __version__
from tools import fat_binaries, gpu_bundle_join, gpu_bundle_parts
from tools.gpu_bundle_join import OFFSET, Refusal, digest, say, seal
from tools.gpu_bundle_parts import Group

ROOT = Path(__file__).resolve().parents[1]
PYTHON, GLIBC = "3.12", "2.34"
SITE = f"lib/python{PYTHON}/site-packages"
UNIT = 8 << 20  # raw bytes that are compressed together
_GLIBCS = (5, 12, 14, 17, 18, 24, 26, 27, 28, 31, 34)
_PLATFORMS = tuple(f"manylinux_2_{n}_x86_64" for n in _GLIBCS)
_PLATFORMS += ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")
_BATCH = 24  # distributions of one pip command
_END = bytes(1024)  # of an archive
_LARGE = 1 << 20  # files from here on may hold GPU code
# What fat_binaries keeps of flash_ops, and the refusal of other models.
_ATTENTION = {
    "dtype": "bfloat16",
    "widths": [64, 128],
    "sentence": "this GPU bundle has FlashAttention 3 for bf16 and heads of 64 and 128; "
    "`tools/gpu-bundle make OUT --attention all` brings the rest, or set "
    "engine.args.attention_backend=triton",
}
_FLASH = "sgl_kernel/flash_ops"


@dataclass(frozen=True, slots=True)
class Options:
    """What decides the bytes of a packed wheel."""

    architectures: tuple[int, ...]
    attention: str  # bf16 or all
    preset: int  # of xz

    def key(self, wheel: Path) -> str:
        """Names the packed form of a wheel."""
        rules = [gpu_bundle_parts.patterns(self.architectures).pattern, fat_binaries.__file__]
        rules[1] = digest(Path(rules[1]))
        facts = [wheel.name, digest(wheel), asdict(self), rules, gpu_bundle_parts.STRIPPED, UNIT]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Unit:
    """A compressed part of an archive."""

    file: Path
    sha256: str
    packed: int
    unpacked: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed wheel.  large: digests of files that are in several units."""

    units: tuple[Unit, ...]
    large: dict[str, str]


# --- wheels --------------------------------------------------------------------------------------
def wanted(brought: Sequence[str], *, transformer_engine: bool) -> dict[str, str]:
    """Lines of the locks, by name, of the distributions that travel."""
    lock = gpu_bundle_parts.locked(ROOT / "requirements/gpu.lock")
    tests = gpu_bundle_parts.locked(ROOT / "requirements/cpu.lock")
    groups = gpu_bundle_parts.left_out(brought, transformer_engine=transformer_engine)
    away = {name for group in groups for name in group.modules} | {"transformer-engine-torch"}
    found = {name: line for name, line in lock.items() if name not in away}
    return found | {name: tests[name] for name in gpu_bundle_parts.TESTS}


def fetch(lines: Mapping[str, str], folder: Path) -> list[Path]:
    """The wheels, downloaded by pip where the folder lacks them, with the lock's hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    lacking = [name for name, line in lines.items() if _find(folder, name, line) is None]
    plain = [name for name in lacking if name not in gpu_bundle_parts.FROM_SOURCE]
    for begin in range(0, len(plain), _BATCH):
        batch = plain[begin : begin + _BATCH]
        say(f"fetching {begin + 1} to {begin + len(batch)} of {len(plain)}: {batch[0]} ...")
        words = ["download", "--only-binary=:all:", "--python-version", PYTHON]
        words += ["--implementation", "cp", "--ignore-requires-python", "--dest", str(folder)]
        words += [word for name in _PLATFORMS for word in ("--platform", name)]
        _pip(words, [lines[name] for name in batch])
    for name in sorted({*lacking} - {*plain}):
        say(f"{name}: making a wheel of its source")
        _pip(["wheel", "--wheel-dir", str(folder)], [lines[name]])
        made = _find(folder, name, lines[name])
        if made and not re.search("none-any|cp312", made.name):
            made.unlink()
            raise Refusal(f"{name} is compiled: set PYTHON to a Python {PYTHON} and call again")
    found = {name: _find(folder, name, line) for name, line in lines.items()}
    if gone := [name for name, file in found.items() if file is None]:
        raise Refusal(f"pip fetched no wheel of {', '.join(gone)}")
    return [file for file in found.values() if file]


def _find(folder: Path, name: str, line: str) -> Path | None:
    stem, number = re.sub(r"[-_.]+", "_", name).lower(), gpu_bundle_parts.version(line)
    for file in folder.glob("*.whl"):
        given, has = file.name.split("-")[:2]
        if re.sub(r"[-_.]+", "_", given).lower() == stem and has == number:
            return file
    return None


def _pip(words: Sequence[str], lines: Iterable[str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--no-input"]
        command += ["--require-hashes", "--requirement", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Refusal("; ".join(errors[-2:] or ["pip failed"]))


def check_wheel(wheel: Path) -> None:
    """Raises Refusal for a file that is not Transformer Engine's torch part of the lock."""
    lock = gpu_bundle_parts.locked(ROOT / "requirements/gpu.lock")
    number = gpu_bundle_parts.version(lock["transformer-engine-torch"])
    name = f"transformer_engine_torch-{number}-cp312-cp312-linux_x86_64.whl"
    if wheel.name != name or not wheel.is_file():
        raise Refusal(
            f"--transformer-engine {wheel} is not usable: give the file {name}, which "
            "`tools/setup.sh --gpu` leaves in build/wheels"
        )


def check_paths(wheels: Iterable[Path], dropped: re.Pattern[str]) -> None:
    """Raises Refusal where two wheels have a file of one name and different contents."""
    seen: dict[str, tuple[int, Path]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for item in archive.infolist():
                if dropped.search(item.filename) or item.is_dir():
                    continue
                other, owner = seen.setdefault(item.filename, (item.CRC, wheel))
                if other != item.CRC:
                    raise Refusal(f"{owner.name} and {wheel.name} differ in {item.filename}")


# --- one wheel -----------------------------------------------------------------------------------
def unpack(wheel: Path, root: Path, dropped: re.Pattern[str]) -> None:
    """A wheel is an archive; its `.data` folder holds what belongs beside site-packages."""
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if not item.is_dir() and not dropped.search(item.filename):
                _extract(archive, item, root)


def _extract(archive: zipfile.ZipFile, item: zipfile.ZipInfo, root: Path) -> None:
    target = root / SITE / item.filename
    part = re.fullmatch(r"[^/]+\.data/(scripts|purelib|platlib|data|headers)/(.+)", item.filename)
    if part:
        places = {"scripts": "bin", "data": ".", "headers": "include"}
        target = root / places.get(part[1], SITE) / part[2]
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(item) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    is_program = (item.external_attr >> 16) & 0o111 or (part and part[1] == "scripts")
    target.chmod(0o755 if is_program else 0o644)


def cut(root: Path, options: Options) -> None:
    """Strip debug information and zero the GPU code of other cards, in place."""
    site = root / SITE
    for name in gpu_bundle_parts.STRIPPED:
        if (site / name).exists():
            subprocess.run(["strip", "--strip-unneeded", site / name], check=True)
    for file in sorted(site.rglob("*.so*")):
        if file.stat().st_size < _LARGE:
            continue
        name = str(file.relative_to(site))
        is_cut = options.attention == "bf16" and name.startswith(_FLASH)
        done = fat_binaries.thin(file, options.architectures, bf16_attention=is_cut)
        if done.zeroed:
            say(f"  {name}: {done.kept:,} bytes of GPU code kept, {done.zeroed:,} zeroed")


def members(root: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Files of a folder in order, large ones in parts with their offset."""
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        mode, at = file.stat().st_mode & 0o777, 0
        with file.open("rb") as data:
            while (part := data.read(UNIT)) or not at:
                info = tarfile.TarInfo(str(file.relative_to(root)))
                info.size, info.mode = len(part), mode
                info.pax_headers = {OFFSET: str(at)} if at else {}
                yield info, part
                at += len(part)
                if len(part) < UNIT:
                    break


def archives(root: Path) -> Iterator[bytes]:
    """Parts of a tar archive, each of about UNIT bytes and without the end of an archive."""
    buffer = io.BytesIO()
    for info, part in members(root):
        if buffer.tell() and buffer.tell() + len(part) > UNIT:
            yield buffer.getvalue()
            buffer = io.BytesIO()
        buffer.write(info.tobuf(tarfile.PAX_FORMAT) + part + bytes(-len(part) % tarfile.BLOCKSIZE))
    if buffer.tell():
        yield buffer.getvalue()


def compress(folder: Path, number: int, data: bytes, preset: int) -> Unit:
    """Write a unit unless an earlier call did."""
    name = f"{number:04}-{hashlib.sha256(data).hexdigest()[:16]}.xz"
    file = folder / name
    if not file.exists():
        new = file.with_suffix(".new")
        new.write_bytes(lzma.compress(data, preset=preset))
        new.rename(file)
    return Unit(file, digest(file), file.stat().st_size, len(data))


def compress_all(root: Path, folder: Path, options: Options, workers: int) -> Packed:
    """Pack a folder's files in units; as many units are in memory as there are workers, and one."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, said, done, waiting = time.monotonic(), time.monotonic(), [], []
    with ThreadPoolExecutor(workers) as pool:
        for number, data in enumerate(archives(root)):
            waiting.append(pool.submit(compress, folder, number, data, options.preset))
            if len(waiting) > workers:
                done.append(waiting.pop(0).result())
            if time.monotonic() > said + 10:
                said = time.monotonic()
                say(f"  unit {number}, {said - begin:.0f} s")
        done += [each.result() for each in waiting]
    large = (path for path in root.rglob("*") if path.is_file() and path.stat().st_size > UNIT)
    return Packed(tuple(done), {str(path.relative_to(root)): digest(path) for path in large})


def pack(wheel: Path, out: Path, options: Options, workers: int) -> Packed:
    """The packed form of a wheel, made unless OUT/packed has it."""
    folder = out / "packed" / f"{wheel.name.partition('-')[0]}-{options.key(wheel)}"
    about = folder / "about.json"
    if about.exists():
        return read_packed(about)
    with tempfile.TemporaryDirectory(dir=out, prefix="stage-") as stage:
        unpack(wheel, Path(stage), gpu_bundle_parts.patterns(options.architectures))
        cut(Path(stage), options)
        packed = compress_all(Path(stage), folder, options, workers)
    write_packed(packed, about)
    return packed


def write_packed(packed: Packed, file: Path) -> None:
    rows = [asdict(unit) | {"file": unit.file.name} for unit in packed.units]
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"units": rows, "large": packed.large}), encoding="utf-8")
    new.rename(file)


def read_packed(file: Path) -> Packed:
    read = json.loads(file.read_text(encoding="utf-8"))
    units = (Unit(**row | {"file": file.parent / row["file"]}) for row in read["units"])
    return Packed(tuple(units), read["large"])


# --- our own files -------------------------------------------------------------------------------
def own_files(root: Path, kernels: Path | None) -> None:
    """moerl's metadata, the import hook, and kernels that were compiled before."""
    site = root / SITE
    about = site / f"moerl-{__version__}.dist-info"
    about.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: moerl\nVersion: {__version__}\n"
    (about / "METADATA").write_text(text, encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"]} | project["entry-points"]
    parts = [f"[{g}]\n" + "".join(f"{n} = {v}\n" for n, v in e.items()) for g, e in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(parts), encoding="utf-8")
    shutil.copy(ROOT / "tools/gpu_bundle_hook.py", site)
    line = "import gpu_bundle_hook; gpu_bundle_hook.install()\n"
    (site / "gpu-bundle.pth").write_text(line, encoding="utf-8")
    if kernels:
        shutil.copytree(kernels, root / "cuda/kernels")


def pack_own(out: Path, kernels: Path | None, options: Options) -> Packed:
    if kernels and not any(kernels.rglob("*.so")):
        raise Refusal(f"--kernels {kernels} holds no kernels: tools/engine_kernels fills it")
    with tempfile.TemporaryDirectory(dir=out, prefix="stage-") as stage:
        own_files(Path(stage), kernels)
        return compress_all(Path(stage), out / "packed/own", options, 1)


# --- pieces --------------------------------------------------------------------------------------
def share(units: Iterable[Unit], most: int) -> list[list[Unit]]:
    """Units by piece, of at most so many bytes: each in the first piece with room, large first.

    Raises Refusal for a unit that is larger than a piece.
    """
    pieces: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda one: (-one.packed, one.sha256)):
        if unit.packed > most:
            raise Refusal(f"--piece-mib is too small: one unit has {unit.packed:,} bytes")
        place = next((n for n, left in enumerate(room) if left >= unit.packed), len(room))
        if place == len(room):
            pieces.append([])
            room.append(most)
        pieces[place].append(unit)
        room[place] -= unit.packed
    return pieces


def write_pieces(pieces: Sequence[Sequence[Unit]], folder: Path, plan: str) -> dict[str, Any]:
    """Rows of the manifest: digest, bytes and unpacked bytes by name."""
    end, rows = lzma.compress(_END), {}
    for number, units in enumerate(pieces):
        file = folder / f"gpu-{plan[:8]}-{number:02}.tar.xz"
        with file.open("wb") as piece:
            for unit in units:
                piece.write(unit.file.read_bytes())
            piece.write(end)
        unpacked = sum(unit.unpacked for unit in units)
        rows[file.name] = {"sha256": digest(file), "bytes": file.stat().st_size}
        rows[file.name] |= {"unpacked": unpacked, "units": [unit.packed for unit in units]}
        say(f"{file.name}: {file.stat().st_size:,} bytes")
    return rows


def manifest(groups: Sequence[Group], packed: Iterable[Packed], options: Options) -> dict[str, Any]:
    """All of bundle.json but the pieces and the seal."""
    lock = gpu_bundle_parts.locked(ROOT / "requirements/gpu.lock")
    away = [
        name for group in groups if group.name == gpu_bundle_parts.CUDA for name in group.modules
    ]
    return {
        "python": PYTHON,
        "glibc": GLIBC,
        "site": SITE,
        "lock": digest(ROOT / "requirements/gpu.lock"),
        "architectures": list(options.architectures),
        "attention": _ATTENTION if options.attention == "bf16" else None,
        "machine": {name: gpu_bundle_parts.version(lock[name]) for name in away},
        "compiler": ["cuda-toolkit", *(n for n in away if re.search("nvcc|crt|nvvm|cccl", n))],
        "left_out": gpu_bundle_parts.rows(groups),
        "large": {name: value for one in packed for name, value in one.large.items()},
    }


def make(chosen: argparse.Namespace) -> None:
    """OUT/pieces of the options.  Raises Refusal."""
    begin, out = time.monotonic(), chosen.out.absolute()
    options = Options(tuple(sorted({*chosen.arch})), chosen.attention, chosen.preset)
    engine: Path | None = chosen.transformer_engine
    if engine:
        check_wheel(engine)
    if not shutil.which("strip"):
        raise Refusal("strip is not on PATH: install binutils")
    out.mkdir(parents=True, exist_ok=True)
    wheels = fetch(wanted(chosen.brought, transformer_engine=bool(engine)), out / "wheels")
    wheels += [engine] if engine else []
    check_paths(wheels, gpu_bundle_parts.patterns(options.architectures))
    packed = [pack_own(out, chosen.kernels, options)]
    for number, wheel in enumerate(sorted(wheels, key=lambda one: -one.stat().st_size), 1):
        if wheel.stat().st_size > 4 * UNIT or number % 20 == 0:
            say(f"{wheel.name}: {number} of {len(wheels)}, {time.monotonic() - begin:.0f} s")
        packed.append(pack(wheel, out, options, chosen.workers))
    groups = gpu_bundle_parts.left_out(chosen.brought, transformer_engine=bool(engine))
    write_bundle(out / "pieces", manifest(groups, packed, options), packed, chosen.piece_mib)
    say(f"{len(wheels)} wheels, {time.monotonic() - begin:.0f} s in all")


def write_bundle(
    folder: Path, about: dict[str, Any], packed: Iterable[Packed], piece_mib: int
) -> None:
    """Pieces, bundle.json and join.py, in place of an earlier bundle."""
    most = (piece_mib << 20) - 1024
    pieces = share((unit for one in packed for unit in one.units), most)
    facts = [[unit.sha256 for unit in units] for units in pieces]
    about["plan"] = hashlib.sha256(json.dumps([facts, about]).encode()).hexdigest()[:16]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about["pieces"] = write_pieces(pieces, folder, about["plan"])
    about["id"] = seal(about)
    (folder / "bundle.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    shutil.copy(gpu_bundle_join.__file__, folder / "join.py")
    size = sum(row["bytes"] for row in about["pieces"].values())
    raw = sum(row["unpacked"] for row in about["pieces"].values())
    say(f"{len(pieces)} pieces, {size:,} bytes, {raw:,} unpacked: {folder}")


# --- command -------------------------------------------------------------------------------------
def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu-bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    maker = commands.add_parser("make", help="fetch, cut, compress; OUT/pieces travels")
    maker.add_argument("out", type=Path, metavar="OUT")
    maker.add_argument(
        "--arch", type=int, nargs="+", default=[90], metavar="ARCH",
        help="cards by compute capability, 90 for H100 and H200 (default), 100 for B200",
    )  # fmt: skip
    maker.add_argument("--piece-mib", type=int, default=50, help="largest piece (default 50)")
    maker.add_argument(
        "--transformer-engine", type=Path, metavar="WHEEL",
        help="its compiled torch part; without it none of Transformer Engine travels",
    )  # fmt: skip
    maker.add_argument(
        "--kernels", type=Path, metavar="KERNELS", help="compiled by tools/engine_kernels"
    )
    groups = [group.name for group in gpu_bundle_parts.GROUPS]
    maker.add_argument(
        "--with", dest="brought", nargs="+", default=[], choices=[*groups, gpu_bundle_parts.ALL],
        metavar="GROUP", help=f"bring what is left out: {', '.join(groups)} or all",
    )  # fmt: skip
    maker.add_argument(
        "--attention", choices=("bf16", "all"), default="bf16",
        help="kernels of FlashAttention 3: bf16, heads of 64 and 128 (default), or all (150 MB)",
    )  # fmt: skip
    maker.add_argument("--preset", type=int, default=1, help="of xz, 0 to 9 (default 1)")
    maker.add_argument("--workers", type=int, default=os.cpu_count(), help="threads of xz")
    checker = commands.add_parser("check", help="digests of OUT/pieces")
    checker.add_argument("out", type=Path, metavar="OUT")
    commands.add_parser("left-out", help="what is left out, why, and the option that brings it")
    return parser.parse_args(words)


def act(chosen: argparse.Namespace) -> None:
    if chosen.what == "left-out":
        say("\n".join([*gpu_bundle_parts.table(), *gpu_bundle_parts.dropped_table()]))
    elif chosen.what == "check":
        folder = chosen.out / "pieces"
        gpu_bundle_join.check(gpu_bundle_join.read_manifest(folder / "bundle.json"), folder)
    else:
        make(chosen)


def main() -> int:
    try:
        act(arguments())
    except Refusal as refusal:
        print(f"gpu-bundle: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

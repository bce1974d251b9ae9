"""GPU code inside shared objects: which cards it is for, and zeros in place of code for others.

    .venv/bin/python -m tools.fat_binaries FILE...                what each file holds
    .venv/bin/python -m tools.fat_binaries --arch 90 100 FILE...  keeps these cards' code, in place

A section `.nv_fatbin` of a shared object is a row of containers, one for each unit that nvcc
compiled.  A container is a row of entries: machine code (a cubin) of one architecture, or PTX text,
which the driver compiles for newer cards.  The driver reads the entry that it takes and no other,
so the bytes of the others may be zeros: addresses, symbols and sizes stay, and a compressor makes
nothing of zeros.

A card runs machine code of its own architecture, or of an older one with the same first digit: 8.9
runs code for 8.0.  PTX is kept where a container has no such code.
"""

from __future__ import annotations

import argparse
import mmap
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MAGIC = 0xBA55ED50
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_ELF64 = b"\x7fELF\x02\x01"  # little endian
PTX, CUBIN = 1, 2
_COMPRESSED = 0x8000  # of an entry's flags
_ENTRY_BYTES, _CONTAINER_BYTES = 48, 16  # of headers, at least
# Of FlashAttention 3's kernels: columns of values, and their type.
_BF16 = re.compile(rb"Li(?:64|128)ENS_10bfloat16_t")


class DamagedError(Exception):
    """A section that is no row of containers."""


class Entry(NamedTuple):
    """Code of one architecture."""

    kind: int  # PTX or CUBIN
    arch: int  # 90 is 9.0
    compressed: bool
    start: int  # offset of its bytes in the file
    size: int


def sections(data: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections with GPU code; none where data is no 64-bit ELF file."""
    if data[: len(_ELF64)] != _ELF64:
        return
    table, each, count, names = struct.unpack_from("<Q10xHHH", data, 0x28)
    headers = [struct.unpack_from("<II16xQQ", data, table + each * n) for n in range(count)]
    strings = headers[names][2] if count else 0
    for name, kind, offset, size in headers:
        end = data.find(b"\0", strings + name)
        if data[strings + name : end] in _SECTIONS and kind != 8:  # 8: without bytes in the file
            yield offset, size


def containers(data: bytes | mmap.mmap) -> Iterator[list[Entry]]:
    """The entries of each container.  Raises DamagedError."""
    for offset, size in sections(data):
        at, end = offset, offset + size
        while at <= end - _CONTAINER_BYTES:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != _MAGIC:
                at += 8  # padding
                continue
            if at + header + length > end:
                raise DamagedError(f"a container at byte {at} ends behind its section")
            yield list(_entries(data, at + header, at + header + length))
            at = (at + header + length + 7) & ~7


def _entries(data: bytes | mmap.mmap, at: int, end: int) -> Iterator[Entry]:
    while at <= end - _ENTRY_BYTES:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        (flags,) = struct.unpack_from("<Q", data, at + 40)
        if header < _ENTRY_BYTES or at + header + size > end:
            raise DamagedError(f"an entry at byte {at} ends behind its container")
        yield Entry(kind, arch, bool(flags & _COMPRESSED), at + header, size)
        at += header + size


# --- choice --------------------------------------------------------------------------------------
def runs_on(code: int, card: int) -> bool:
    """Whether machine code of one architecture runs on a card of another."""
    return code // 10 == card // 10 and code <= card


def kept(container: Sequence[Entry], cards: Collection[int]) -> set[Entry]:
    """The entries that cards of these architectures may take."""
    found = set()
    for card in cards:
        code = {e for e in container if e.kind == CUBIN and runs_on(e.arch, card)}
        found |= code or {e for e in container if e.kind == PTX and e.arch <= card}
    return found


def is_bf16_attention(entry: Entry, data: bytes | mmap.mmap) -> bool:
    """Whether an entry has no attention kernel, or one in bf16 with values of 64 or 128 columns.

    FlashAttention 3 in `sglang-kernel` has a unit for each type, width and option; a kernel's name
    says which.  Compressed entries are those with keys wider than values.
    """
    if entry.compressed:
        return False
    names = re.findall(rb"\.text\.(_Z\w+)", data[entry.start : entry.start + entry.size])
    mains = [name for name in names if b"CollectiveMainloop" in name]
    return not mains or any(_BF16.search(name) and b"float_e4m3" not in name for name in mains)


class Thinned(NamedTuple):
    """Bytes of GPU code that a file keeps, and that became zeros."""

    kept: int
    zeroed: int


def thin(path: Path, cards: Collection[int], *, bf16_attention: bool = False) -> Thinned:
    """Replace code that no such card takes by zeros, in place.

    bf16_attention: further drop what `is_bf16_attention` refuses.  Raises DamagedError.
    """
    stays = zeroed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for container in list(containers(data)):
            chosen = kept(container, cards)
            if bf16_attention:
                chosen = {entry for entry in chosen if is_bf16_attention(entry, data)}
            for entry in container:
                if entry in chosen:
                    stays += entry.size
                else:
                    data[entry.start : entry.start + entry.size] = bytes(entry.size)
                    zeroed += entry.size
    return Thinned(stays, zeroed)


# --- command -------------------------------------------------------------------------------------
def listing(path: Path) -> list[str]:
    """A line for each kind and architecture."""
    found: Counter[tuple[str, int]] = Counter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for container in containers(data):
            for entry in container:
                found["PTX" if entry.kind == PTX else "cubin", entry.arch] += entry.size
    return [f"  {kind:5} {arch:4} {size:13,} bytes" for (kind, arch), size in sorted(found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--arch", nargs="+", type=int, metavar="ARCH", help="90 for H100 and H200")
    chosen = parser.parse_args()
    for file in chosen.files:
        if chosen.arch:
            done = thin(file, chosen.arch)
            print(f"{file}: {done.kept:,} bytes of GPU code kept, {done.zeroed:,} zeroed")
        else:
            print(file, *listing(file), sep="\n")


if __name__ == "__main__":
    main()

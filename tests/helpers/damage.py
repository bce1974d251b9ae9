"""Damage to a file as a broken disk makes it."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])

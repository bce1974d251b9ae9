"""The filter of system calls in boxes: the kernel's numbers, and what its program decides."""

from __future__ import annotations

import errno
import platform
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from moerl.sandbox import syscall_filter as calls

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
COLUMN = {"x86_64": 0, "aarch64": 1}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
NAMED: Mapping[str, tuple[int, int]] = {**calls.REFUSED, **calls.AT_PROCESS, **calls.OTHERS}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_headers(machine: str) -> None:
    if not HEADERS[machine].is_file():
        pytest.skip("needs the kernel's headers: install linux-libc-dev")
    text = HEADERS[machine].read_text()
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    assert {name: int(defined[name]) for name in NAMED} == {
        name: numbers[COLUMN[machine]] for name, numbers in NAMED.items()
    }


def decide(program: bytes, number: int, machine: int, argument: int) -> int:
    """What a filter returns for a system call: a seccomp machine of the five codes that it has."""
    data = struct.pack("IIQ6Q", number, machine, 0, argument, *[0] * 5)
    rows = list(struct.iter_unpack("HBBI", program))
    place = loaded = 0
    while True:
        code, then, otherwise, value = rows[place]
        place += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            (loaded,) = struct.unpack_from("I", data, value)
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: loaded & value}[code]
            place += then if holds else otherwise


@pytest.fixture(params=HEADERS)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    calls.syscall_filter.cache_clear()
    yield str(request.param)
    calls.syscall_filter.cache_clear()


def test_what_the_program_decides(machine: str) -> None:
    program, audit, column = calls.syscall_filter(), AUDIT[machine], COLUMN[machine]

    def result(name: str, argument: int = 5) -> int:
        return decide(program, NAMED[name][column], audit, argument)

    refused = 0x50000 | errno.EPERM
    assert {result(name) for name in calls.REFUSED} == {refused}
    assert result("clone3") == 0x50000 | errno.ENOSYS
    assert result("clone", 0x11) == result("clone", 0x003D0F00) == ALLOW  # a fork, a thread
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert result("clone", bit | 0x11) == refused
    assert [result("socket", family) for family in (1, 2, 10)] == [ALLOW] * 3
    assert {result("socket", family) for family in (0, 16, 17, 38, 40)} == {
        0x50000 | errno.EAFNOSUPPORT
    }
    for name in calls.AT_PROCESS:
        assert result(name) == ALLOW
        for process in (calls.SERVER_MARK, calls.GROUP_MARK, 1, 2**64 - 1):
            assert result(name, process) == refused
    reads = {"x86_64": 0, "aarch64": 63}[machine]
    assert decide(program, reads, audit, 0) == ALLOW
    assert decide(program, reads, audit ^ 1, 0) == KILL
    assert decide(program, 0x40000000, audit, 0) == 0x50000 | errno.ENOSYS


def test_a_machine_whose_numbers_are_unknown_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    calls.syscall_filter.cache_clear()
    assert calls.syscall_filter() == b""  # a box is then tried, and found to be open
    calls.syscall_filter.cache_clear()

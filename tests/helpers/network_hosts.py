"""A few hosts on this machine: network namespaces with addresses of their own, joined by a switch.

Nothing of the machine's own network is touched: the switch is a bridge in a namespace of its own,
and no host has a route to anything but the others, so a packet to the outside has nowhere to go.
Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and `ip`; `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
_NET = "10.231.17"


@dataclass(frozen=True)
class Host:
    name: str  # of its namespace
    address: str
    port: str  # its end at the switch
    switch: str

    def command(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def start(
        self, command: Sequence[str], log: IO[str], extra: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """A process on this host, with this checkout's moerl; extra: of its environment."""
        return subprocess.Popen(
            self.command(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment() | extra,
        )

    def cut(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def restore(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def routes(self) -> str:
        return _ip("-n", self.name, "route").stdout


def environment() -> dict[str, str]:
    return dict(os.environ) | {
        "PYTHONPATH": str(ROOT),
        "MOERL_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def why_not() -> str:
    """Why this machine cannot make hosts; empty when it can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    name = f"moerl-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    try:
        tried = subprocess.run(
            ["ip", "-n", name, "link", "add", "name", "try", "type", "bridge"],
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode:
            return f"bridges are not permitted: {tried.stderr.strip()}"
        entered = subprocess.run(
            ["ip", "netns", "exec", name, "true"], capture_output=True, text=True, check=False
        )
        return "" if entered.returncode == 0 else f"ip netns exec: {entered.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)


@contextmanager
def hosts_or_skip(count: int) -> Iterator[list[Host]]:
    """`hosts`, or a skip that says why, and on which machine the test runs."""
    if reason := why_not():
        pytest.skip(f"{reason}; it runs as root, with iproute2, where namespaces are permitted")
    with hosts(count) as made:
        yield made


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts on one switch; removed afterwards, whatever happened."""
    tag = f"moerl{os.getpid() % 100000}"
    switch = f"{tag}-switch"
    made: list[Host] = []
    names = [switch]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for index in range(count):
            host = Host(f"{tag}-{index}", f"{_NET}.{index + 1}", f"port{index}", switch)
            _ip("netns", "add", host.name)
            names.append(host.name)
            _ip(
                *("-n", host.name, "link", "add", "eth0", "type", "veth"),
                *("peer", "name", host.port, "netns", switch),
            )
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            made.append(host)
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *args], check=True, capture_output=True, text=True, timeout=patience(30)
    )

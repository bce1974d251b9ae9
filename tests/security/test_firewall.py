"""The firewall script in the kernel of three hosts, which are network namespaces."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moerl.doctor.node import FIRST_PORT
from tests.helpers.network_hosts import Host, hosts_or_skip

ROOT = Path(__file__).resolve().parents[2]
LISTEN = """
import socket, sys, time
listeners = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("ready", flush=True)
time.sleep(300)
"""
OWN, OTHER = str(FIRST_PORT + 7), "40007"

pytestmark = pytest.mark.full


@pytest.fixture
def three() -> Iterator[list[Host]]:
    if not shutil.which("nft"):
        pytest.skip("nft is not installed; it runs as root, with nftables and iproute2")
    with hosts_or_skip(3) as made:
        yield made


def inside(host: Host, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host.name, *command]


def reach(host: Host, target: Host) -> tuple[str, str]:
    """What a host finds at both ports of the target."""
    command = [sys.executable, "-m", "moerl.doctor.node", "try-port", target.address]
    found = [
        subprocess.run(
            inside(host, *command, port), cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        for port in (OWN, OTHER)
    ]
    return found[0], found[1]


def test_ports_are_for_the_nodes_of_the_run(three: list[Host]) -> None:
    one, node, stranger = three
    script = str(ROOT / "tools/launch/firewall.sh")
    listener = subprocess.Popen(
        inside(one, sys.executable, "-c", LISTEN, OWN, OTHER), stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        assert reach(stranger, one) == ("open", "open"), "the control"
        for _ in range(2):  # a second call replaces the rules
            subprocess.run(inside(one, script, "--apply", one.address, node.address), check=True)
        assert reach(one, one) == ("open", "open")
        assert reach(node, one) == ("closed", "open")
        assert reach(stranger, one) == ("closed", "closed")
        subprocess.run(inside(one, script, "--remove"), check=True)
        assert reach(stranger, one) == ("open", "open")
    finally:
        listener.kill()
        listener.wait()

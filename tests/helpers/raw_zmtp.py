"""A peer that speaks ZMTP 3.0 by hand: what a stranger can send to a ZeroMQ socket.

Source: https://rfc.zeromq.org/spec/23 (ZMTP 3.0).
"""

from __future__ import annotations

import contextlib
import socket
import struct

_MORE_LONG, _COMMAND = 0x03, 0x04


def connect(endpoint: str, mechanism: bytes = b"NULL") -> socket.socket:
    """A connection after the greetings."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=5)
    signature, version = b"\xff" + bytes(8) + b"\x7f", b"\x03\x00"
    line.sendall(signature + version + mechanism.ljust(20, b"\0") + bytes(32))
    return line


def ready(line: socket.socket) -> None:
    """Say what a DEALER says that wants no security."""
    properties = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
    line.sendall(bytes([_COMMAND, len(properties)]) + properties)


def send_frames(line: socket.socket, size: int, count: int) -> int:
    """Frames of which none is the last; the bytes that were taken."""
    frame = bytes([_MORE_LONG]) + struct.pack(">Q", size) + b"x" * size
    sent = 0
    with contextlib.suppress(OSError):  # sent away, or not read
        for _ in range(count):
            line.sendall(frame)
            sent += len(frame)
    return sent


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

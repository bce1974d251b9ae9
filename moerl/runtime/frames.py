"""Messages on a byte stream: a length of 8 bytes, most significant first, then the message.

The standard library only: the server of a sandbox finds this file without the package.
"""

from __future__ import annotations

import os
import socket
import struct

_LENGTH = struct.Struct("!Q")
HEAD = _LENGTH.size  # bytes in front of a message


def framed(data: bytes) -> bytes:
    """The message with its length in front."""
    return _LENGTH.pack(len(data)) + data


def size_in(head: bytes | bytearray) -> int:
    """Bytes of the message that follows a head.  head: at least HEAD bytes."""
    return int(_LENGTH.unpack_from(head)[0])


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(framed(data))


def receive(connection: socket.socket) -> bytes:
    """The next message; empty at the end of the connection."""
    head = connection.recv(HEAD, socket.MSG_WAITALL)
    return connection.recv(size_in(head), socket.MSG_WAITALL) if len(head) == HEAD else b""


def own_connection() -> socket.socket:
    """The connection from standard input; later prints of this process go to standard error."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return connection

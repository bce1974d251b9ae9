"""A listening socket that serves only callers that know its token.

The token is part of an endpoint, which travels in control messages only.  It is never sent here:
both sides prove that they know it, by HMACs over two random numbers.  So a process that listens in
place of ours learns nothing and is refused.  An unauthenticated caller holds a thread for a few
seconds, and their number is limited: one more sends the caller away that has waited longest, for a
caller of ours proves the token at once.  A stopped process does not answer, so a sender
learns that within its own deadline and not from a library's time-out.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from moerl.core.errors import TransportError
from moerl.runtime.frames import HEAD, framed, size_in

log = logging.getLogger(__name__)

_MAX_FRAME = 1 << 20
_TOKEN_BYTES = 16
_NONCE = _DIGEST = 32  # bytes
_CONNECT_S = 10.0  # a silent caller holds a thread for this long, nothing else
_STRANGERS = 512  # callers that have not proved the token yet
_AGAIN_S = 0.1  # pause after a caller that could not be accepted: no descriptor, no thread


class ServerAddress(msgspec.Struct, frozen=True):
    """Address and token of a TokenServer; part of an endpoint."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"ServerAddress({self.host}:{self.port})"


class TokenServer:
    """Listens on one address and serves each caller that knows the token in a thread."""

    def __init__(
        self, address: str, serve: Callable[[Channel], None], port: int = 0, token: str = ""
    ) -> None:
        """Listen on a port.

        serve: talks to one caller until it returns or raises; both end that caller only.

        port: 0 = any free one.  token: empty = a random one.
        Raises TransportError when no port, descriptor or thread is left.
        """
        self._serve = serve
        self._token = token or secrets.token_hex(_TOKEN_BYTES)
        try:
            listener = socket.create_server((address, port), backlog=128)
        except OSError as error:
            raise TransportError("room", f"no socket on {address}: {error}") from error
        self.server_address = ServerAddress(address, int(listener.getsockname()[1]), self._token)
        self._listener = listener
        self._strangers: OrderedDict[Channel, None] = OrderedDict()  # longest waiting first
        self._lock = threading.Lock()
        self._inside: set[Channel] | None = set()  # None once closed
        try:
            threading.Thread(target=self._accept, name="token-server", daemon=True).start()
        except RuntimeError as error:
            listener.close()
            raise TransportError("room", f"no thread for a socket: {error}") from error

    def close(self) -> None:
        """Close all connections; repeatable."""
        with self._lock:
            inside, self._inside = self._inside or set(), None
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in inside:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                self._take(self._listener.accept()[0])
            except (OSError, RuntimeError) as error:  # closed, or this process is at a limit
                if self._inside is None:
                    return
                log.warning("a caller could not be taken: %s", error)
                time.sleep(_AGAIN_S)

    def _take(self, connection: socket.socket) -> None:
        """Serve a caller in its own thread; close the connection if that is not possible."""
        channel = oldest = None
        try:
            channel = Channel(connection)
            with self._lock:
                if self._inside is None:
                    raise OSError("the token server is closed")
                self._inside.add(channel)
                self._strangers[channel] = None
                if len(self._strangers) > _STRANGERS:
                    oldest, _ = self._strangers.popitem(last=False)
            if oldest is not None:
                oldest.close()
            threading.Thread(target=self._let_in, args=(channel,), daemon=True).start()
        except BaseException:
            if channel is not None:
                self._forget(channel)
            connection.close()
            raise

    def _let_in(self, channel: Channel) -> None:
        try:
            if self._is_known(channel):
                self._serve(channel)
        except (TransportError, RuntimeError):
            return  # the caller's connection is closed, which fails its session
        finally:
            channel.close()
            self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._strangers.pop(channel, None)
            if self._inside is not None:
                self._inside.discard(channel)

    def _is_known(self, channel: Channel) -> bool:
        """Both sides prove that they know the token.  Raises TransportError."""
        deadline = time.monotonic() + _CONNECT_S
        ours = secrets.token_bytes(_NONCE)
        channel.write(ours, deadline)
        reply = channel.read(_NONCE + _DIGEST, deadline)
        both = ours + reply[:_NONCE]
        if not hmac.compare_digest(reply[_NONCE:], _proof(self._token, b"caller", both)):
            return False
        with self._lock:
            self._strangers.pop(channel, None)
        channel.write(_proof(self._token, b"server", both), deadline)
        return True


def _proof(token: str, side: bytes, numbers: bytes) -> bytes:
    return hmac.digest(token.encode(), side + numbers, "sha256")


def open_channel(server_address: ServerAddress, deadline: float) -> Channel:
    """An authenticated connection.  Raises TransportError (peer, refused, deadline)."""
    where = f"{server_address.host}:{server_address.port}"
    try:
        connection = socket.create_connection(
            (server_address.host, server_address.port), timeout=seconds_left(deadline)
        )
    except OSError as error:
        raise failure(deadline, f"{where} cannot be reached: {error}") from error
    channel = Channel(connection)
    try:
        _prove(channel, server_address.token, deadline)
    except TransportError as error:
        channel.close()
        if error.reason != "peer":
            raise
        why = "did not accept the token, or has too many callers without it"
        raise TransportError("refused", f"{where} {why}") from error
    return channel


def _prove(channel: Channel, token: str, deadline: float) -> None:
    """Raises TransportError: the other side does not know the token, or says that we do not."""
    ours = secrets.token_bytes(_NONCE)
    both = channel.read(_NONCE, deadline) + ours
    channel.write(ours + _proof(token, b"caller", both), deadline)
    if not hmac.compare_digest(channel.read(_DIGEST, deadline), _proof(token, b"server", both)):
        raise TransportError("refused", "the process that listens there does not know the token")


class Channel:
    """Frames of (kind, bytes) on a socket; used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close even while another thread waits on it; repeatable."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, kind: int, payload: bytes, deadline: float | None) -> None:
        self.write(framed(bytes([kind]) + payload), deadline)

    def receive(self, deadline: float | None) -> tuple[int, bytes]:
        size = size_in(self.read(HEAD, deadline))
        if not 0 < size <= _MAX_FRAME:
            raise TransportError("refused", f"a control frame of {size} bytes; 1 to {_MAX_FRAME}")
        data = self.read(size, deadline)
        return data[0], data[1:]

    def check(self) -> None:
        """Raise TransportError (peer) if the other side has closed; reads nothing."""
        try:
            self._socket.settimeout(0.0)
            closed = not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            raise failure(None, f"control connection: {error}") from error
        if closed:
            raise TransportError("peer", "the control connection was closed by the other side")

    def write(self, data: bytes, deadline: float | None) -> None:
        try:
            self._socket.settimeout(None if deadline is None else seconds_left(deadline))
            self._socket.sendall(data)
        except OSError as error:
            raise failure(deadline, f"control connection: {error}") from error

    def read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                self._socket.settimeout(None if deadline is None else seconds_left(deadline))
                part = self._socket.recv(size - len(data))
            except OSError as error:
                raise failure(deadline, f"control connection: {error}") from error
            if not part:
                raise TransportError("peer", "the control connection was closed by the other side")
            data += part
        return bytes(data)


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline, at least slightly above 0, which sockets read as `no limit`."""
    return max(deadline - time.monotonic(), 0.001)


def failure(deadline: float | None, detail: str) -> TransportError:
    late = deadline is not None and time.monotonic() >= deadline - 0.001
    return TransportError("deadline" if late else "peer", detail)

"""HTTP for callers with a token, inside a process that does other work.

Callers that have not shown the token are bounded (`CallerLimits`): in the time and the bytes until
it is seen, as sums and not per read, and in their number.  When they are too many, the caller that
has waited longest is sent away: a caller of the run shows the token with its first bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import io
import logging
import socket
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)

_IDLE_S = 300.0  # then a connection is closed; the connection of a lost node would keep its thread


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Limits of callers that have not shown the token."""

    connections: int = 32
    seconds: float = 10.0  # of each, from its first byte to the token
    num_bytes: int = 96 * 1024  # of each; a header with the ranges of a large record has 64 KiB


class BearerServer(http.server.ThreadingHTTPServer):
    """A thread per connection; knows which have not shown the token."""

    daemon_threads = True
    request_queue_size = 128  # 5 by default: readers of a whole trainer connect at once

    def __init__(
        self, address: tuple[str, int], handler: type[BearerHandler], max_strangers: int
    ) -> None:
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()  # longest waiting first
        self._max_strangers, self._lock = max_strangers, threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > self._max_strangers:
                oldest, _ = self._strangers.popitem(last=False)
                with contextlib.suppress(OSError):  # it has left
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def forget(self, request: socket.socket) -> None:
        """It has shown the token, or is closed."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that broke off; its text does not belong on standard error."""
        log.debug("a caller at %s", client_address, exc_info=sys.exc_info())


class _CallerBytes(io.RawIOBase):
    """Bytes of a caller, bounded until it is known."""

    def __init__(self, connection: socket.socket, limits: CallerLimits) -> None:
        self._connection = connection
        self._deadline, self._left = time.monotonic() + limits.seconds, limits.num_bytes
        self.is_known = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self.is_known:
            return self._connection.recv_into(buffer)
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or not self._left:
            raise TimeoutError("no token in the time and the bytes that a caller has")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class BearerHandler(http.server.BaseHTTPRequestHandler):
    """Requests of one connection; methods of subclasses answer nothing before `may_answer`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: otherwise 40 ms per answer
    server: BearerServer
    token: str
    limits: CallerLimits

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # it waits for each read alone
        self._bytes = _CallerBytes(self.connection, self.limits)
        self.rfile = io.BufferedReader(self._bytes)

    def may_answer(self) -> bool:
        """Whether the caller has shown the token; a caller without it is answered and closed."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        allowed = hmac.compare_digest(given.encode(), self.token.encode())
        if allowed:
            self._bytes.is_known = True
            self.server.forget(self.connection)
            self.connection.settimeout(_IDLE_S)
        else:
            self.close_connection = True  # the rest of its request is not read
            self.answer(401)
        return allowed

    def answer(self, status: int, body: bytes = b"", kind: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if kind:
            self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line per request would fill the log."""

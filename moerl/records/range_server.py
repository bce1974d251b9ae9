"""The range server next to every engine: sealed blobs of one folder, for callers with the token.

It runs inside the engine host, whose threads and descriptors it shares, so callers that have not
shown the token are bounded (`CallerLimits`): in the time and the bytes until it is seen, as sums
and not per read, and in their number.  When they are too many, the caller that has waited longest
is sent away: a reader of the run shows the token with its first bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.server
import io
import json
import logging
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.records.blob_store import holds
from moerl.runtime.private_dir import private_dir

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)

_IDLE_S = 300.0  # then a connection is closed; the connection of a lost node would keep its thread
_MAX_BODY = 16 * 2**20  # bytes of a list of names


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Limits of callers that have not shown the token."""

    connections: int = 32
    seconds: float = 10.0  # of each, from its first byte to the token
    num_bytes: int = 96 * 1024  # of each; a header with the ranges of a large record has 64 KiB


class RangeServer:
    """Serves the blobs below one folder on a thread, until `close`."""

    def __init__(
        self,
        root: Path,
        host: str,
        port: int,
        token: str,
        limits: CallerLimits = CallerLimits(),
    ) -> None:
        """Raises OSError when the port is taken."""
        private_dir(root, "cluster.blob_dir")
        handler = type("Handler", (_Handler,), {"root": root, "token": token, "limits": limits})
        self._server = _Server((host, port), handler, limits.connections)
        self.node = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="blobs", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """A thread per connection; knows which have not shown the token."""

    daemon_threads = True
    request_queue_size = 128  # 5 by default: readers of a whole trainer connect at once

    def __init__(
        self, address: tuple[str, int], handler: type[_Handler], max_strangers: int
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


class _Handler(http.server.BaseHTTPRequestHandler):
    """GET /NAME with `Range: bytes=a-b,c-d` (ends exclusive; without it the whole file);
    POST /spans with [begin, end] of the file under each name, answered by the joined bytes;
    POST /delete with names, /missing with the least size of each name.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: otherwise 40 ms per answer
    server: _Server
    root: Path
    token: str
    limits: CallerLimits

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # it waits for each read alone
        self._bytes = _CallerBytes(self.connection, self.limits)
        self.rfile = io.BufferedReader(self._bytes)

    def do_GET(self) -> None:
        path = self._path(self.path[1:])
        if not self._may():
            return
        if "Range" not in self.headers:
            return self._answer_read(200, lambda: _found(path).read_bytes())
        asked = self.headers["Range"].removeprefix("bytes=").split(",")
        self._answer_read(206, lambda: _read_spans(_found(path), [s.split("-") for s in asked]))

    def do_POST(self) -> None:
        if not self._may():  # before a byte of the body is read
            return
        try:
            size = int(self.headers.get("Content-Length", 0))
            if not 0 <= size <= _MAX_BODY:
                raise ValueError(f"{size} bytes of names; {_MAX_BODY} at most")
            names = json.loads(self.rfile.read(size))
        except ValueError:
            self.close_connection = True
            return self._answer(400)
        paths = {name: self._path(name) for name in map(str, names)}
        if self.path == "/spans":
            return self._answer_read(
                200, lambda: b"".join(_read_spans(_found(paths[n]), names[n]) for n in paths)
            )
        if self.path == "/delete":
            for path in filter(None, paths.values()):
                path.unlink(missing_ok=True)
        sizes = names if isinstance(names, dict) else {}
        gone = [n for n, path in paths.items() if path is None or not holds(path, sizes.get(n, 0))]
        self._answer(200, json.dumps(gone).encode())

    def _answer_read(self, status: int, read: Callable[[], bytes]) -> None:
        try:
            body = read()
        except FileNotFoundError:
            return self._answer(404)
        except (LookupError, TypeError, ValueError):
            return self._answer(400)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return self._answer(400)  # the disk fails: the blob is as good as damaged
        self._answer(status, body)

    def _may(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        allowed = hmac.compare_digest(given.encode(), self.token.encode())
        if allowed:
            self._bytes.is_known = True
            self.server.forget(self.connection)
            self.connection.settimeout(_IDLE_S)
        else:
            self.close_connection = True  # the rest of its request is not read
            self._answer(401)
        return allowed

    def _path(self, name: str) -> Path | None:
        """A plain file of the folder; other names count as missing."""
        if not name or name != Path(name).name or name.startswith("."):
            return None
        return self.root / name

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line per request would fill the log."""


def _found(path: Path | None) -> Path:
    if path is None:
        raise FileNotFoundError
    return path


def _read_spans(path: Path, spans: Iterable[Sequence[int | str]]) -> bytes:
    """The joined bytes of the spans [begin, end].

    Raises ValueError for spans outside the file or, together, longer than it.
    """
    with path.open("rb") as file:
        left = file.seek(0, io.SEEK_END)
        parts = []
        for span in spans:
            begin, end = map(int, span)
            left -= end - begin
            if not 0 <= begin <= end or left < 0:
                raise ValueError(f"{span} of {path.name}")
            file.seek(begin)
            parts.append(file.read(end - begin))
            if len(parts[-1]) < end - begin:
                raise ValueError("the file ends before the range")
    return b"".join(parts)

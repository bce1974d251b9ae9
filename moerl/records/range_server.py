"""The range server next to every engine: sealed blobs of one folder, for callers with the token.

It runs inside the engine host, whose threads and descriptors it shares, so callers without the
token are bounded (`moerl.runtime.bearer_server`).
"""

from __future__ import annotations

import errno
import io
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moerl.records.blob_store import holds
from moerl.runtime.bearer_server import BearerHandler, BearerServer, CallerLimits
from moerl.runtime.private_dir import private_dir

_MAX_BODY = 16 * 2**20  # bytes of a list of names


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
        self._server = BearerServer((host, port), handler, limits.connections)
        self.node = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="blobs", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BearerHandler):
    """GET /NAME with `Range: bytes=a-b,c-d` (ends exclusive; without it the whole file);
    POST /spans with [begin, end] of the file under each name, answered by the joined bytes;
    POST /delete with names, /missing with the least size of each name.
    """

    root: Path

    def do_GET(self) -> None:
        path = self._path(self.path[1:])
        if not self.may_answer():
            return
        if "Range" not in self.headers:
            return self._answer_read(200, lambda: _found(path).read_bytes())
        asked = self.headers["Range"].removeprefix("bytes=").split(",")
        self._answer_read(206, lambda: _read_spans(_found(path), [s.split("-") for s in asked]))

    def do_POST(self) -> None:
        if not self.may_answer():  # before a byte of the body is read
            return
        try:
            size = int(self.headers.get("Content-Length", 0))
            if not 0 <= size <= _MAX_BODY:
                raise ValueError(f"{size} bytes of names; {_MAX_BODY} at most")
            names = json.loads(self.rfile.read(size))
        except ValueError:
            self.close_connection = True
            return self.answer(400)
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
        self.answer(200, json.dumps(gone).encode())

    def _answer_read(self, status: int, read: Callable[[], bytes]) -> None:
        try:
            body = read()
        except FileNotFoundError:
            return self.answer(404)
        except (LookupError, TypeError, ValueError):
            return self.answer(400)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return self.answer(400)  # the disk fails: the blob is as good as damaged
        self.answer(status, body)

    def _path(self, name: str) -> Path | None:
        """A plain file of the folder; other names count as missing."""
        if not name or name != Path(name).name or name.startswith("."):
            return None
        return self.root / name


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

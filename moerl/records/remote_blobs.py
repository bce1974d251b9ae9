"""Sealed bytes of other nodes, read from the range server next to every engine.

The node of a URI is the address of its server (blob://10.9.0.1:17110/NAME), so a header is all that
a reader needs; local blobs are read from their file.  One request fetches the digest tables and
every chunk that the runs touch, of many blobs, as plain concatenated bytes; the reader verifies
them exactly as `BlobStore` does.  Each request carries the run's token.  A request to a silent
server is repeated until a deadline, because a link may be down for a while; a blob that the server
does not have is an error at once.

With durability `shared` a blob has a copy in the run directory (`moerl.records.blob_copies`), which
is read as soon as its node does not answer or does not have it: the copy has the same bytes and
checks.  For a minute after that, blobs with a copy are not requested from the node.

A thread sends deletions in batches and retries a silent node for ten minutes.
Rejected: multipart/byteranges (needs a parser), one request per run (a stage has hundreds),
deletion in the controller's event loop (a dead node would stall it).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moerl.config.schema import Config
from moerl.core.errors import BlobError
from moerl.core.types import Array, BlobRef
from moerl.records.blob_copies import Copies
from moerl.records.blob_store import BlobStore, Found, Run
from moerl.runtime.private_dir import private_dir
from moerl.runtime.run_dir import RunDir

log = logging.getLogger(__name__)

_TRY_S = 10.0  # time limit of one request, which is then repeated
_PAUSE_S = 0.2
_ASK_AGAIN_S = 60.0  # time in which copies are read instead of asking the node
_BATCH = 256  # deletions, or blobs to read, per request
_BATCH_BYTES = 32 * 2**20  # of an answer to several reads
_OWED_RETRY_S = 10.0  # seconds between retries of deletions
_MISSING, _SHORT = 404, 400  # statuses: no such file; it ends before the range
_OWED_S = 600.0  # age at which deletions are dropped


class ClusterBlobs(BlobStore):
    """The blobs of all nodes; seals below `root` when this node serves blobs itself."""

    def __init__(
        self,
        root: Path,
        node: str,
        token: str,
        *,
        timeout_s: float = 120.0,
        copies: Path | None = None,
    ) -> None:
        """Read blobs of this node from `root` and other blobs from their servers.

        node: of this process's own range server; empty = it only reads blobs of other nodes.
        copies: folder of the copies that durability `shared` keeps in the run directory, if any.
        """
        self.root, self.node, self.bytes_read = root, node, 0
        self._token, self._timeout_s, self._folder = token, timeout_s, copies
        self._copies = None if copies is None else Copies(copies)
        self._lines = threading.local()
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._deleter: threading.Thread | None = None
        self._silent: set[str] = set()  # nodes that did not answer within the time limit
        self._passed_over: dict[str, float] = {}  # node -> time until which copies are read first
        self._told: set[str] = set()  # nodes for which this was logged
        if node:
            private_dir(root, "cluster.blob_dir")

    def __getstate__(self) -> tuple[Path, str, str, float, Path | None]:
        return self.root, self.node, self._token, self._timeout_s, self._folder

    def __setstate__(self, state: tuple[Path, str, str, float, Path | None]) -> None:
        root, node, token, timeout_s, folder = state
        self.__init__(root, node, token, timeout_s=timeout_s, copies=folder)  # type: ignore[misc]

    def load(self, ref: BlobRef) -> Array:
        if self._is_here(ref.uri):
            return super().load(ref)
        whole = self.read_runs(ref, [(0, ref.num_bytes)])
        return whole.view(ref.dtype).reshape(ref.shape)

    def _fetch(self, spans: Mapping[str, Sequence[Run]]) -> Iterator[list[memoryview]]:
        found = self._fetch_together({u: s for u, s in spans.items() if not self._is_here(u)})
        for uri, of_blob in spans.items():
            if self._is_here(uri):
                yield from super()._fetch({uri: of_blob})
                continue
            data = memoryview(found[uri] if uri in found else self._ask(uri, of_blob))
            size = _size(of_blob)
            if len(data) != size:
                raise BlobError(f"{uri}: {len(data)} bytes came, {size} asked for", uri)
            self.bytes_read += size
            ends = itertools.accumulate(end - begin for begin, end in of_blob)
            yield [
                data[stop - end + begin : stop]
                for (begin, end), stop in zip(of_blob, ends, strict=True)
            ]

    def _fetch_together(self, spans: Mapping[str, Sequence[Run]]) -> dict[str, memoryview]:
        """Spans of many blobs, in few requests per node.

        A blob is left out if its request failed: it is then requested alone, which repeats requests
        to a silent node, reads copies, and finds the blob that is damaged.
        """
        found: dict[str, memoryview] = {}
        failed: set[str] = set()
        for node, several in _batches(spans):
            if len(several) < 2 or self._is_passed_over(node) or node in self._silent | failed:
                continue
            names = {_split(uri)[1]: spans[uri] for uri in several}
            try:
                status, data = self._request(node, "POST", "/spans", json.dumps(names), {})
            except (OSError, http.client.HTTPException):
                self._hang_up(node)
                failed.add(node)
                continue
            if status != 200 or len(data) != sum(_size(spans[uri]) for uri in several):
                continue
            at, view = 0, memoryview(data)
            for uri in several:
                end = at + _size(spans[uri])
                found[uri] = view[at:end]
                at = end
        return found

    def read(self, uri: str) -> bytes:
        return super().read(uri) if self._is_here(uri) else self._ask(uri, None)

    def delete(self, uri: str) -> None:
        """At once on this node; elsewhere later, or never when the node is gone."""
        if self._is_here(uri):
            return super().delete(uri)
        if self._deleter is None:
            self._deleter = threading.Thread(target=self._delete, name="deletions", daemon=True)
            self._deleter.start()
        self._gone.put(uri)

    def find(self, sizes: Mapping[str, int], patience_s: float = 0.0) -> Found:
        """Blobs that their nodes do not have, or whose node does not answer within patience_s.

        From then on such a node gets one request each, until it answers again.
        """
        by_node: dict[str, dict[str, int]] = defaultdict(dict)
        for uri, size in sizes.items():
            by_node[_split(uri)[0]][uri] = size
        found = Found(set(), set())
        for node, wanted in by_node.items():
            if node == self.node:
                found.gone.update(super().find(wanted).gone)
            else:
                gone, copied = self._find_at(node, wanted, patience_s)
                found.gone.update(gone)
                found.copied.update(copied)
        return found

    def _find_at(self, node: str, sizes: Mapping[str, int], patience_s: float) -> Found:
        """The blobs that are missing or too short at their node."""
        copied = self._which(set(sizes)) if self._is_passed_over(node) else set()
        deadline = time.monotonic() + (0.0 if node in self._silent else patience_s)
        while left := sizes.keys() - copied:
            try:
                names = self._post(node, "/missing", {_split(uri)[1]: sizes[uri] for uri in left})
            except (OSError, http.client.HTTPException) as error:
                self._hang_up(node)
                if new := self._which(left):
                    self._pass_over(node, error)
                    copied |= new
                elif time.monotonic() > deadline:
                    log.warning(
                        "%d blobs are lost: node %s does not answer: %s", len(left), node, error
                    )
                    self._silent.add(node)
                    return Found(left, copied)
                else:
                    time.sleep(_PAUSE_S)
            else:
                self._silent.discard(node)
                gone = {f"blob://{node}/{name}" for name in names}
                if new := self._which(gone):
                    self._tell(node, f"it has lost {len(new)} of them")
                return Found(gone - new, copied | new)
        return Found(set(), copied)

    def _which(self, uris: set[str]) -> set[str]:
        """The URIs that have a copy."""
        return self._copies.which(uris) if self._copies is not None and uris else set()

    def _is_passed_over(self, node: str) -> bool:
        return time.monotonic() < self._passed_over.get(node, 0.0)

    def _pass_over(self, node: str, why: object) -> None:
        self._passed_over[node] = time.monotonic() + _ASK_AGAIN_S
        self._tell(node, f"it does not answer: {why}")

    def _tell(self, node: str, why: str) -> None:
        if node not in self._told:
            self._told.add(node)
            log.warning("blobs of node %s are read from copies in %s: %s", node, self._folder, why)

    def sweep(self, uris: Iterable[str]) -> int:
        """Sweep this node's blobs only: folders of other nodes are deleted with their engines."""
        return super().sweep(uris) if self.node else 0

    def _is_here(self, uri: str) -> bool:
        return _split(uri)[0] == self.node

    def _ask(self, uri: str, spans: Sequence[Run] | None) -> bytes:
        """Spans of a file, or all of it (None): from its node, or else from its copy."""
        node, _ = _split(uri)
        if self._is_passed_over(node) and (data := self._read_copy(uri, spans)) is not None:
            return data
        deadline = time.monotonic() + (0.0 if node in self._silent else self._timeout_s)
        while True:
            try:
                status, data = self._get(uri, spans)
            except (OSError, http.client.HTTPException) as error:
                self._hang_up(node)
                if (copy := self._read_copy(uri, spans)) is not None:
                    self._pass_over(node, error)
                    return copy
                if time.monotonic() > deadline:
                    self._silent.add(node)
                    raise BlobError(
                        f"{uri} could not be read within {self._timeout_s:g} s: {error}"
                    ) from error
                time.sleep(_PAUSE_S)
                continue
            self._silent.discard(node)
            if status in (_MISSING, _SHORT):
                if (copy := self._read_copy(uri, spans)) is None:
                    damaged = uri if status == _SHORT else ""
                    raise BlobError(f"{uri}: its node answered {status}", damaged)
                self._tell(node, "it has lost some")
                return copy
            return data

    def _read_copy(self, uri: str, spans: Sequence[Run] | None) -> bytes | None:
        return None if self._copies is None else self._copies.read(uri, spans)

    def _get(self, uri: str, spans: Sequence[Run] | None) -> tuple[int, bytes]:
        """The status and, unless it is _MISSING or _SHORT, the bytes."""
        node, name = _split(uri)
        headers = {}
        if spans is not None:
            headers["Range"] = "bytes=" + ",".join(f"{begin}-{end}" for begin, end in spans)
        status, data = self._request(node, "GET", f"/{name}", None, headers)
        if status not in (_MISSING, _SHORT, 200 if spans is None else 206):
            raise BlobError(f"{uri}: its node answered {status}")
        return status, data

    def _post(self, node: str, path: str, names: list[str] | dict[str, int]) -> list[str]:
        """The names of blobs that the node lacks, or that are shorter than expected."""
        status, data = self._request(node, "POST", path, json.dumps(names), {})
        if status != 200:
            raise http.client.HTTPException(f"{node} answered {status}")
        found: list[str] = json.loads(data)
        return found

    def _request(
        self, node: str, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Status and answer.  A connection that was closed since its last use is opened again."""
        is_old = node in self._lines.__dict__.get("open", {})
        while True:
            line = self._line(node)
            try:
                line.request(
                    method, path, body, headers | {"Authorization": f"Bearer {self._token}"}
                )
                reply = line.getresponse()
                return reply.status, reply.read()
            except (OSError, http.client.HTTPException):
                if not is_old:
                    raise
                is_old = False
                self._hang_up(node)

    def _delete(self) -> None:
        """Runs in a thread.  A node that does not answer is retried for a while; others proceed."""
        owed: dict[str, list[str]] = defaultdict(list)  # names, by node
        failed: dict[str, tuple[float, float]] = {}  # monotonic: first, last failure
        while True:
            with contextlib.suppress(queue.Empty):
                uri = self._gone.get(timeout=_OWED_RETRY_S if owed else None)
                while True:
                    node, name = _split(uri)
                    owed[node].append(name)
                    uri = self._gone.get_nowait()
            for node, names in list(owed.items()):
                first, last = failed.get(node, (math.inf, -math.inf))
                if time.monotonic() - last < _OWED_RETRY_S:
                    continue
                try:
                    while batch := names[:_BATCH]:
                        self._post(node, "/delete", batch)
                        del names[:_BATCH]
                except (OSError, http.client.HTTPException) as error:
                    self._hang_up(node)
                    now = time.monotonic()
                    failed[node] = min(first, now), now
                    if now - first < _OWED_S:
                        continue
                    log.warning("%d blobs stay on %s: %s", len(names), node, error)
                del owed[node]
                failed.pop(node, None)

    def _line(self, node: str) -> http.client.HTTPConnection:
        """This thread's connection to a node."""
        lines: dict[str, http.client.HTTPConnection] = self._lines.__dict__.setdefault("open", {})
        if node not in lines:
            log.info("reads blobs of node %s", node)
            host, _, port = node.rpartition(":")
            lines[node] = http.client.HTTPConnection(host, int(port), timeout=_TRY_S)
        return lines[node]

    def _hang_up(self, node: str) -> None:
        line = self._lines.__dict__.get("open", {}).pop(node, None)
        if line is not None:
            line.close()


def cluster_reader(config: Config, run: RunDir, token: str) -> ClusterBlobs:
    """Reader for the controller and trainer ranks of a run on several nodes; it seals nothing."""
    is_copied = config.rollout.durability == "shared"
    return ClusterBlobs(
        Path(config.cluster.blob_dir),
        "",
        token,
        timeout_s=config.sync.timeout_s,
        copies=run.segments if is_copied else None,
    )


def _split(uri: str) -> tuple[str, str]:
    scheme, _, rest = uri.partition("://")
    node, _, name = rest.partition("/")
    if scheme != "blob" or not name or "/" in name:
        raise BlobError(f"{uri!r} is not blob://NODE/NAME")
    return node, name


def _size(spans: Sequence[Run]) -> int:
    return sum(end - begin for begin, end in spans)


def _batches(spans: Mapping[str, Sequence[Run]]) -> Iterator[tuple[str, list[str]]]:
    """(node, blobs) of each request for several blobs."""
    batch: dict[str, list[str]] = defaultdict(list)
    size: dict[str, int] = defaultdict(int)
    for uri, of_blob in spans.items():
        node, num_bytes = _split(uri)[0], _size(of_blob)
        if len(batch[node]) == _BATCH or size[node] + num_bytes > _BATCH_BYTES:
            yield node, batch.pop(node)
            del size[node]
        batch[node].append(uri)
        size[node] += num_bytes
    yield from batch.items()

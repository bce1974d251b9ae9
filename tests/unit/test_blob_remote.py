"""Blobs of another node: the same bytes, verified, only with the token, over a broken link."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moerl.core.errors import BlobError
from moerl.core.types import BlobRef
from moerl.records import remote_blobs
from moerl.records.blob_store import BlobStore
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs
from moerl.runtime import bearer_server
from moerl.runtime.bearer_server import CallerLimits
from tests.helpers.patience import Patience, patience

TOKEN = "of this run"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[RangeServer, ClusterBlobs, BlobRef]]:
    server = RangeServer(tmp_path / "node", "127.0.0.1", 0, TOKEN)
    owner = ClusterBlobs(tmp_path / "node", server.node, TOKEN)
    array = np.arange(50_000, dtype=np.int32)
    (_, ref) = owner.seal("a", [np.zeros(3, np.uint8), array])
    yield server, ClusterBlobs(tmp_path / "none", "", TOKEN, timeout_s=patience(3)), ref
    server.close()


def test_remote_reads_equal_local_ones(served: tuple[RangeServer, ClusterBlobs, BlobRef]) -> None:
    server, reader, ref = served
    assert ref.uri == f"blob://{server.node}/a"
    local = BlobStore(reader.root.parent / "node", server.node)
    runs = [(100_000, 100_400), (0, 4), (8_000, 20_000), (7, 7), (199_996, 200_000)]
    assert (reader.read_runs(ref, runs) == local.read_runs(ref, runs)).all()
    assert reader.bytes_read == local.bytes_read, "only the touched chunks travel"
    assert (reader.load(ref) == np.arange(50_000)).all()
    assert not reader.root.exists(), "a reader makes no folder"
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.read_runs(ref, [(0, 8)]).view(np.int32) == [0, 1]).all()


def test_many_blobs_come_in_one_request(
    served: tuple[RangeServer, ClusterBlobs, BlobRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, reader, ref = served
    folder = reader.root.parent / "node"
    owner = ClusterBlobs(folder, server.node, TOKEN)
    refs = [ref, *(r for n in "bcd" for r in owner.seal(n, [np.arange(9), np.arange(2000)]))]
    wanted = [(one, [(0, 24), (one.num_bytes - 8, one.num_bytes)]) for one in refs * 2]
    requests: list[str] = []
    whole = ClusterBlobs._request

    def noted(self: ClusterBlobs, node: str, method: str, path: str, *rest: object) -> object:
        requests.append(f"{method} {path}")
        return whole(self, node, method, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ClusterBlobs, "_request", noted)
    assert (reader.read_records(wanted) == owner.read_records(wanted)).all()
    assert requests == ["POST /spans"]
    (folder / "c").write_bytes((folder / "c").read_bytes()[:-1])
    with pytest.raises(BlobError, match="/c: its node answered 400"):
        reader.read_records(wanted)
    (folder / "c").unlink()
    with pytest.raises(BlobError, match="/c: its node answered 404"):
        reader.read_records(wanted)
    assert requests[1:] == ["POST /spans", "GET /a", "GET /b", "GET /c"] * 2, "alone, as asked for"


def test_strangers_and_strange_names_get_nothing(
    served: tuple[RangeServer, ClusterBlobs, BlobRef], tmp_path: Path
) -> None:
    server, reader, ref = served
    (tmp_path / "secret").write_text("x")
    stranger = ClusterBlobs(tmp_path / "none", "", "a guess", timeout_s=patience(1))
    with pytest.raises(BlobError, match="answered 401"):
        stranger.read_runs(ref, [(0, 4)])
    assert stranger.missing([ref.uri]) == {ref.uri}
    for name in ("..%2Fsecret", ".a.tmp", "b"):
        with pytest.raises(BlobError, match="answered 404"):
            reader.read_runs(_renamed(ref, f"blob://{server.node}/{name}"), [(0, 4)])


def test_altered_and_short_blobs_are_refused(
    served: tuple[RangeServer, ClusterBlobs, BlobRef],
) -> None:
    _, reader, ref = served
    path = reader.root.parent / "node" / "a"
    data = bytearray(path.read_bytes())
    data[ref.offset + 5000] ^= 1
    path.write_bytes(data)
    assert len(reader.read_runs(ref, [(0, 4096)])) == 4096, "another chunk is whole"
    with pytest.raises(BlobError, match="does not match its digest"):
        reader.read_runs(ref, [(4096, 4100)])
    path.write_bytes(data[:1000])
    with pytest.raises(BlobError, match="answered 400"):
        reader.read_runs(ref, [(0, 4)])


def test_a_link_that_comes_back_costs_time_only(
    served: tuple[RangeServer, ClusterBlobs, BlobRef], tmp_path: Path
) -> None:
    server, reader, ref = served
    host, _, port = server.node.partition(":")
    server.close()
    again: list[RangeServer] = []

    def restore() -> None:
        time.sleep(0.5)
        again.append(RangeServer(tmp_path / "node", host, int(port), TOKEN))

    thread = threading.Thread(target=restore)
    thread.start()
    assert (reader.read_runs(ref, [(0, 8)]).view(np.int32) == [0, 1]).all()
    thread.join()
    again[0].close()
    with pytest.raises(BlobError, match="could not be read within"):
        ClusterBlobs(tmp_path, "", TOKEN, timeout_s=0.3).read_runs(ref, [(0, 8)])


def test_deletion_reaches_the_node(served: tuple[RangeServer, ClusterBlobs, BlobRef]) -> None:
    server, reader, ref = served
    assert not reader.missing([ref.uri])
    other = f"blob://{server.node}/b"
    assert reader.missing([ref.uri, other]) == {other}
    reader.delete(ref.uri)
    reader.delete(f"blob://{server.node}/never")
    limit = Patience(20)
    while not reader.missing([ref.uri]) and not limit.over():
        time.sleep(0.02)
    with pytest.raises(BlobError, match="answered 404"):
        reader.read_runs(ref, [(0, 4)])


def test_a_connection_that_was_closed_meanwhile_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server keeps no thread for a silent reader, and is not taken for lost when it speaks."""
    monkeypatch.setattr(bearer_server, "_IDLE_S", 0.2)
    before = set(threading.enumerate())

    def serving() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if "process_request" in thread.name]

    server = RangeServer(tmp_path / "node", "127.0.0.1", 0, TOKEN)
    owner = ClusterBlobs(tmp_path / "node", server.node, TOKEN)
    (ref,) = owner.seal("a", [np.zeros(3, np.uint8)])
    reader = ClusterBlobs(tmp_path / "none", "", TOKEN, timeout_s=0.0)
    assert not reader.missing([ref.uri])
    limit = Patience(10)
    while serving() and not limit.over():
        time.sleep(0.02)
    assert not serving(), "the thread of an idle connection"
    assert not reader.missing([ref.uri])
    assert reader.load(ref).tolist() == [0, 0, 0]
    server.close()


def test_deletions_wait_for_a_node_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine host that starts again keeps its folder; other nodes do not wait with it."""
    monkeypatch.setattr(remote_blobs, "_OWED_RETRY_S", 0.2)
    away = RangeServer(tmp_path / "away", "127.0.0.1", 0, TOKEN)
    near = RangeServer(tmp_path / "near", "127.0.0.1", 0, TOKEN)
    reader = ClusterBlobs(tmp_path / "none", "", TOKEN)
    port = int(away.node.rpartition(":")[2])

    def seal(server: RangeServer, name: str) -> Path:
        folder = tmp_path / ("away" if server is away else "near")
        ClusterBlobs(folder, server.node, TOKEN).seal(name, [np.zeros(3, np.uint8)])
        return folder / name

    def goes(path: Path) -> bool:
        limit = Patience(10)
        while path.exists() and not limit.over():
            time.sleep(0.01)
        return not path.exists()

    lasting, other = seal(away, "b"), seal(near, "c")
    away.close()
    reader.delete(f"blob://{away.node}/b")
    reader.delete(f"blob://{near.node}/c")
    assert goes(other)
    assert lasting.exists()
    back = RangeServer(tmp_path / "away", "127.0.0.1", port, TOKEN)
    assert goes(lasting)
    for server in (back, near):
        server.close()


def _renamed(ref: BlobRef, uri: str) -> BlobRef:
    return BlobRef(uri=uri, offset=ref.offset, dtype=ref.dtype, shape=ref.shape, digest=ref.digest)


def _knock(server: RangeServer, head: str) -> socket.socket:
    host, _, port = server.node.rpartition(":")
    line = socket.create_connection((host, int(port)), timeout=20)
    line.sendall(head.replace("\n", "\r\n").encode())
    return line


def test_a_stranger_is_sent_away_before_its_body_is_read(
    served: tuple[RangeServer, ClusterBlobs, BlobRef],
) -> None:
    server, reader, ref = served
    for size in (10**11, -1):
        with _knock(server, f"POST /delete HTTP/1.1\nContent-Length: {size}\n\n") as line:
            assert line.recv(12) == b"HTTP/1.1 401"
            while line.recv(4096):
                pass  # and hung up on
    head = f"POST /missing HTTP/1.1\nAuthorization: Bearer {TOKEN}\nContent-Length: "
    for size in ("-1", "x"):
        with _knock(server, f"{head}{size}\n\n") as line:
            assert line.recv(12) == b"HTTP/1.1 400"
    with _knock(server, head + '13\nConnection: close\n\n["../a", "a"]') as line:
        answer = b"".join(iter(lambda: line.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200")  # one answer, a strange name is missing
        assert answer.endswith(b'["../a"]')
    assert not reader.missing([ref.uri])


def test_a_silent_stranger_keeps_no_thread(tmp_path: Path) -> None:
    server = RangeServer(tmp_path, "127.0.0.1", 0, TOKEN, CallerLimits(seconds=0.2))
    owner = ClusterBlobs(tmp_path, server.node, TOKEN)
    (ref,) = owner.seal("a", [np.arange(9, dtype=np.int32)])
    reader = ClusterBlobs(tmp_path / "none", "", TOKEN, timeout_s=patience(3))
    assert not reader.missing([ref.uri])
    kept = reader._line(server.node).sock
    with _knock(server, "GET /a HTTP/1.1\n") as silent:
        assert silent.recv(1) == b""  # hung up on
    assert not reader.missing([ref.uri])  # who showed the token may be silent as long as it likes
    assert reader._line(server.node).sock is kept
    server.close()

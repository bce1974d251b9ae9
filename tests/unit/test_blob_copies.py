"""Blobs whose node is lost: the same bytes from the run directory, and checked as ever."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moerl.core.errors import BlobError
from moerl.records.blob_copies import Copies, copied_blobs_of, seal
from moerl.records.blob_store import BlobStore, Found
from moerl.records.range_server import RangeServer
from moerl.records.remote_blobs import ClusterBlobs

TOKEN = "of this run"
ARRAY = np.arange(50_000, dtype=np.int32)
RUNS = [(100_000, 100_400), (0, 4), (8_000, 20_000), (7, 7), (199_996, 200_000)]


class World:
    """An engine's node, the run directory, and a trainer rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.node, self.copies = folder, folder / "node", folder / "run" / "segments"
        self.server = RangeServer(self.node, "127.0.0.1", 0, TOKEN)
        _, self.ref = self.at_node().seal("a", [np.zeros(3, np.uint8), ARRAY])
        self.reader = self.read_with(self.copies)

    def at_node(self) -> ClusterBlobs:
        return ClusterBlobs(self.node, self.server.node, TOKEN)

    def read_with(self, copies: Path | None) -> ClusterBlobs:
        return ClusterBlobs(self.folder / "none", "", TOKEN, timeout_s=0.3, copies=copies)

    def ship(self, name: str = "6") -> Path:
        """From another node, as the controller does."""
        data = self.read_with(None).read(self.ref.uri)
        path = self.copies / f"{name}.group"
        seal(path, [("", b"a header"), (self.ref.uri, data)])
        return path

    def lose(self, how: str = "node") -> None:
        if how == "node":
            self.server.close()
        shutil.rmtree(self.node)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.server.close()


@pytest.mark.parametrize("how", ["node", "store"])
def test_copies_are_read_bitwise(world: World, how: str) -> None:
    """The node ends, or comes back with an empty store."""
    expected = BlobStore(world.node, world.server.node).read_runs(world.ref, RUNS)
    blind = world.read_with(None)
    world.ship()
    assert (world.reader.read_runs(world.ref, RUNS) == expected).all(), "as long as it is there"
    world.lose(how)
    assert (world.reader.read_runs(world.ref, RUNS) == expected).all()
    assert (world.reader.load(world.ref) == ARRAY).all()
    again = pickle.loads(pickle.dumps(world.reader))
    assert (again.read_runs(world.ref, RUNS) == expected).all()
    with pytest.raises(BlobError, match=r"answered 404|could not be read within"):
        blind.read_runs(world.ref, RUNS)


def test_a_whole_file_is_shipped_from_another_node(world: World) -> None:
    sealed = (world.node / "a").read_bytes()
    parts = copied_blobs_of(world.ship())
    assert parts is not None
    assert list(parts) == ["", world.ref.uri]
    assert parts[""].read() == b"a header"
    assert parts[world.ref.uri].read() == sealed
    world.lose("store")
    with pytest.raises(BlobError, match="answered 404"):
        world.read_with(None).read(world.ref.uri)
    world.server.close()
    with pytest.raises(BlobError, match=r"could not be read within 0\.3 s"):
        world.read_with(None).read(world.ref.uri)


def test_altered_copies_are_refused(world: World) -> None:
    path = world.ship()
    world.lose()
    parts = copied_blobs_of(path)
    assert parts is not None
    data = bytearray(path.read_bytes())
    data[parts[world.ref.uri].offset + world.ref.offset + 5000] ^= 1
    path.write_bytes(data)
    assert len(world.reader.read_runs(world.ref, [(0, 4096)])) == 4096, "another chunk is whole"
    with pytest.raises(BlobError, match="does not match its digest"):
        world.reader.read_runs(world.ref, [(4096, 4100)])
    with pytest.raises(BlobError, match="does not match its digest"):
        world.reader.read(world.ref.uri)


@pytest.mark.parametrize("how", ["shorter", "longer", "index", "length", "empty"])
def test_damaged_files_hold_no_copies(world: World, how: str) -> None:
    path = world.ship()
    data = bytearray(path.read_bytes())
    if how == "index":
        data[40] ^= 1
    elif how == "length":
        data[20] ^= 1
    changed = {"shorter": data[:-1], "longer": data + b"x", "empty": data[:0]}
    path.write_bytes(changed.get(how, data))
    world.lose()
    assert copied_blobs_of(path) is None
    assert world.reader.missing([world.ref.uri]) == {world.ref.uri}
    with pytest.raises(BlobError, match="could not be read within"):
        world.reader.read_runs(world.ref, RUNS)


@pytest.mark.parametrize("how", ["node", "store"])
def test_who_looks_for_blobs_finds_their_copies(world: World, how: str) -> None:
    uri, other = world.ref.uri, f"blob://{world.server.node}/b"
    path = world.ship()
    assert world.reader.find({uri: 1, other: 1}) == Found({other}, set())
    world.lose(how)
    assert world.reader.find({uri: 1, other: 1}) == Found({other}, {uri})
    assert world.read_with(None).find({uri: 1, other: 1}) == Found({uri, other}, set())
    path.unlink()
    assert world.reader.find({uri: 1}) == Found({uri}, set()), "it went with its group"


def test_files_come_and_go(world: World) -> None:
    copies, uri = Copies(world.copies), world.ref.uri
    assert copies.which([uri]) == set(), "not even a folder"
    first, second = world.ship("6"), world.ship("-7")
    first.unlink()
    assert copies.which([uri]) == {uri}, "a late sibling's group names it too"
    seal(second, [("", b""), ("blob://x:1/other", b"12345")])
    assert copies.which([uri, "blob://x:1/other"]) == {"blob://x:1/other"}
    assert copies.read("blob://x:1/other", [(1, 3), (0, 1)]) == b"231"
    with pytest.raises(BlobError, match="ends before"):
        copies.read("blob://x:1/other", [(1, 6)])
    assert not list(world.copies.glob(".*"))


def test_a_copy_that_is_seen_late_is_waited_for(world: World) -> None:
    """Folders of a network file system show a new file after a while."""
    data = world.at_node().read(world.ref.uri)
    world.lose()
    reader = ClusterBlobs(world.folder, "", TOKEN, timeout_s=60, copies=world.copies)
    path = world.copies / "6.group"
    threading.Timer(0.5, seal, (path, [(world.ref.uri, data)])).start()
    assert (reader.read_runs(world.ref, [(0, 8)]).view(np.int32) == [0, 1]).all()


def test_it_is_said_once_for_a_node(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.ship()

    def responses() -> list[str]:
        return [r.message for r in caplog.records if "are read from copies" in r.message]

    with caplog.at_level(logging.WARNING):
        world.reader.read_runs(world.ref, RUNS)
        assert responses() == []
        world.lose()
        for _ in range(3):
            world.reader.read_runs(world.ref, RUNS)
            world.reader.find({world.ref.uri: 1})
    assert len(responses()) == 1
    assert world.server.node in responses()[0]


def test_a_node_that_is_passed_over_serves_what_has_no_copy(world: World) -> None:
    host, _, port = world.server.node.rpartition(":")
    world.ship()
    world.server.close()
    world.reader.read_runs(world.ref, RUNS)
    world.server = RangeServer(world.node, host, int(port), TOKEN)
    (fresh,) = world.at_node().seal("b", [ARRAY])
    assert (world.reader.load(fresh) == ARRAY).all()
    assert world.reader.find({world.ref.uri: 1, fresh.uri: 1}).gone == set()


def test_half_written_files_are_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moerl.records.blob_copies.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        world.ship()
    assert list(world.copies.iterdir()) == []

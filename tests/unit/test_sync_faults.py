"""Faults of weight sync that once went unnoticed, hung, or left something behind."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.errors import BlobError, LayoutError, TransportError
from moerl.core.messages import Message, PrepareUpdate, PublishFailure, UpdatePrepared
from moerl.core.types import PolicyVersion
from moerl.distributed.token_server import Channel, TokenServer, open_channel
from moerl.records.blob_store import BlobStore
from moerl.runtime.trace import Tracer, read_spans
from moerl.weight_sync import session
from moerl.weight_sync.buckets import Bucket, Piece, Region, WirePolicy
from moerl.weight_sync.commit_copies import check_targets
from moerl.weight_sync.packed_buckets import BucketPacker
from moerl.weight_sync.sender import _RegionSender
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import ReceiverPlan, SenderPlan
from moerl.weight_sync.transports.disk import Disk
from moerl.weight_sync.transports.mooncake import MooncakeStaging, _Registered
from moerl.weight_sync.transports.process_group import GroupTransport
from tests.helpers.patience import patience

V1 = PolicyVersion(0, 1)


class LateLink:
    """A transport that reads what was put only when it is flushed, as gloo and RDMA may."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._puts: list[tuple[int, Tensor]] = []

    def view(self, offset: int, num_bytes: int) -> None: ...

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        self._puts.append((offset, data))

    def flush(self, deadline: float) -> None:
        for offset, data in self._puts:
            self.memory[offset : offset + data.numel()] = data
        self._puts = []


@pytest.mark.parametrize("again", [(0, 2), (1, 3), (0, 1, 3), (2,)])
def test_buckets_sent_again_do_not_overwrite_each_other(again: tuple[int, ...]) -> None:
    box, size = (range(8),), 32
    pieces = tuple(
        Piece(f"h{i}", box, f"s{i}", box, f"d{i}", box, "float32", size, size * i, False)
        for i in range(4)
    )
    buckets = tuple(Bucket(size * i, size, i, i + 1) for i in range(4))
    shard, link = WeightSnapshot(), LateLink(4 * size)
    shard.store({f"s{i}": torch.full((8,), i + 1.0) for i in range(4)}, V1)
    region = Region(0, 0, pieces, buckets, 4 * size)
    packer = BucketPacker(SenderPlan("id", 0, (region,)), shard)
    packer.join()
    starts = [bucket.offset for bucket in buckets]
    sender = _RegionSender(region, starts, link, packer, delta=False)  # type: ignore[arg-type]
    sender.send(range(4), V1, 0.0)
    whole = link.memory.clone()
    assert whole.view(torch.float32)[::8].tolist() == [1.0, 2.0, 3.0, 4.0]
    for number in again:
        link.memory[size * number : size * (number + 1)] = 255  # damaged on its way
    sender.send(again, V1, 0.0, again=True)
    assert torch.equal(link.memory, whole)


@pytest.mark.parametrize("limit", ["descriptors", "threads"])
def test_a_door_outlives_a_caller_that_could_not_be_taken(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    accept, start = socket.socket.accept, threading.Thread.start

    def no_descriptor(self: socket.socket) -> Any:
        caller = accept(self)
        if failed.is_set():
            return caller
        failed.set()
        caller[0].close()
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(self: threading.Thread) -> None:
        if self.name == "token-server" or failed.is_set():
            return start(self)
        failed.set()
        raise RuntimeError("can't start new thread")

    if limit == "descriptors":
        monkeypatch.setattr(socket.socket, "accept", no_descriptor)
    else:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    server = TokenServer("127.0.0.1", lambda _caller: None)
    with pytest.raises(TransportError):
        open_channel(server.server_address, time.monotonic() + 10)
    assert failed.is_set()
    again: Channel = open_channel(server.server_address, time.monotonic() + 20)
    again.close()
    server.close()
    with pytest.raises(TransportError):
        open_channel(server.server_address, time.monotonic() + 10)


@pytest.mark.parametrize("limit", ["descriptors", "threads"])
def test_a_staging_without_a_door_keeps_nothing(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    library: Any = SimpleNamespace(
        register_memory=lambda _base, _size: 0, unregister_memory=lambda _base: 0
    )
    table, opened = _Registered(library), len(os.listdir("/proc/self/fd"))
    if limit == "descriptors":
        monkeypatch.setattr(socket, "create_server", no_socket)
    else:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    for _ in range(3):
        with pytest.raises(TransportError, match=r"Too many open files|new thread"):
            MooncakeStaging(table, "tcp", "s", "127.0.0.1", 1000)
        with pytest.raises(TransportError, match=r"Too many open files|new thread"):
            GroupTransport("127.0.0.1").open(1000)
    assert not table._known, "registered memory is never freed"
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_file_system_without_locks_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(3):
        with pytest.raises(TransportError, match="No locks available"):
            Disk(tmp_path).open(10)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_looked_at_is_not_abandoned(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, real = Disk(tmp_path), os.open
    serving, mine = disk.open(10), iter([True])

    def fail_once(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("owner.lock") and next(mine, False):
            raise OSError(code, "not now")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail_once)
    other = disk.open(10)  # looks for folders without an owner
    assert next(mine, None) is None
    link = disk.connect(serving.endpoint, time.monotonic() + 10)
    link.put(0, torch.full((10,), 7, dtype=torch.uint8), time.monotonic() + 10)
    serving.fetch(time.monotonic() + 10)
    assert serving.buffer.tolist() == [7] * 10
    for closing in (link, serving, other):
        closing.close()
    assert list(tmp_path.iterdir()) == []


def test_blobs_that_could_not_be_written_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path, "n")
    with pytest.raises(BlobError, match="float64"):
        store.seal("a", [np.zeros(3), np.zeros(3, np.uint8)])

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.put_back("blob://n/a", b"bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_fills_rows_twice_and_others_never_is_refused() -> None:
    def plan(*first_rows: int) -> ReceiverPlan:
        pieces = tuple(
            Piece("h", box, "s", box, "d", box, "float32", 16, 16 * i, False)
            for i, row in enumerate(first_rows)
            for box in [(range(row, row + 2), range(2))]
        )
        region = Region(0, 0, pieces, (Bucket(0, 32, 0, 2),), 32)
        return ReceiverPlan("id", 0, (region,), (0,), (), ())

    live = {"d": torch.zeros(4, 2)}
    check_targets(plan(0, 2), live)
    with pytest.raises(LayoutError, match=r"d: the plan fills .* which overlap"):
        check_targets(plan(0, 0), live)  # as many elements as there are


def test_a_full_disk_costs_spans_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracer, full = Tracer(tmp_path, "p"), True
    file = tracer._path.open("a", buffering=1, encoding="utf-8")

    def write(line: str) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(line)

    tracer._file = SimpleNamespace(write=write, tell=file.tell, closed=False)  # type: ignore[assignment]
    for _ in range(3):
        tracer.add("publish", 0.0, 1.0)
    assert caplog.text.count("the trace of p failed: ") == 1
    full = False
    tracer.add("publish", 1.0, 2.0)
    assert [span["start_s"] for span in read_spans(tmp_path)] == [1.0]


def test_an_engine_that_prepares_slowly_is_probed_as_long_as_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one failed publish would leave a large engine behind for good."""
    monkeypatch.setattr(session, "_PROBE_S", 0.01)
    monkeypatch.setattr(session, "_AGAIN_S", 0.0)
    limits: list[float] = []
    looked = threading.Event()

    class Control:
        def expect(self, message: Message, _type: type, _timeout: float = 0) -> Any:
            if isinstance(message, PrepareUpdate):
                limits.append(message.timeout_s)
                time.sleep(0.1)
                return UpdatePrepared((), (), "layout", PolicyVersion(0, 0))
            if len(limits) == 2:
                looked.set()
            raise TransportError("digest", "it is damaged")

        def close(self) -> None: ...

    senders: Any = SimpleNamespace(
        request=lambda _requests, _deadline: {},
        drop_session=lambda: None,
        remove=lambda: None,
    )
    spec = session.SessionSpec(
        0, 0, "plan", "shm", ParallelConfig(), WirePolicy("bfloat16"), "local", 30.0, 0.0
    )
    one = session.EngineSession(spec, senders, Control, None)
    one.start()
    one.publish(V1)
    assert isinstance(one.settle(), PublishFailure)
    one.resume()
    assert looked.wait(patience(20))
    one.remove()
    one.join(patience(20))
    assert limits[0] == pytest.approx(30.0, abs=1.0)
    assert 0.2 <= limits[1] < 30.0

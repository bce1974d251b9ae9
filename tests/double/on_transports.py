"""Transports on the device double: `nccl`, whose groups of two are gloo's, and `cuda_ipc`, whose
driver is one over shared host memory.

For both the checks of every transport (tests/helpers/transport_checks.py); for NCCL device buckets,
pinned staging and aborts; for CUDA IPC the GPUs that a process sees.

Senders and receivers are processes, each on the double; this one uses device 1, so that a thread
that takes its own current device (0) is found.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moerl.core.errors import TransportError
from moerl.weight_sync.transports import pair_pipes, process_group
from moerl.weight_sync.transports.base import Transport
from moerl.weight_sync.transports.factory import make
from moerl.weight_sync.transports.pair_pipes import BUCKET_BYTES
from tests.double import cuda_driver
from tests.double.watch import PAGEABLE, WAITS, memory, watch
from tests.helpers import transport_checks as checks
from tests.helpers.patience import until
from tests.helpers.transport_checks import MIB, PeerProcess, Spawn, connect, raised, soon
from tests.helpers.transport_peer import pattern

OWN_DEVICE = 1


@pytest.fixture
def name() -> str:
    return "nccl"


@pytest.fixture
def spawn(name: str, tmp_path: Path) -> Iterator[Spawn]:
    PeerProcess.loaded = ["tests.double.plugin", "tests.helpers.transport_peer"]
    peers: list[PeerProcess] = []

    def start() -> PeerProcess:
        peers.append(PeerProcess(name, tmp_path))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
    # Threads of a broken connection give their buckets back, or the next test would count them.
    until(_is_free, 60.0, "connections that have ended hold memory of the device")


def _is_free() -> bool:
    gc.collect()
    return not memory(device=OWN_DEVICE).live


@pytest.fixture
def transport(name: str) -> Iterator[Transport]:
    torch.cuda.set_device(OWN_DEVICE)
    yield make(name, address="127.0.0.1")
    torch.cuda.set_device(0)


# --- as every transport ---------------------------------------------------------------------------
def test_bytes_arrive(transport: Transport, spawn: Spawn) -> None:
    checks.bytes_arrive(transport, spawn)


def test_a_put_outside_the_buffer_is_refused(transport: Transport, spawn: Spawn) -> None:
    checks.a_put_outside_the_buffer_is_refused(transport, spawn)


def test_the_receiver_checks_ranges_itself(transport: Transport, spawn: Spawn) -> None:
    checks.the_receiver_checks_ranges_itself("gloo", transport, spawn)


def test_dead_receiver(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    checks.dead_receiver(transport, spawn, tmp_path)


def test_dead_sender(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    """Its bucket serves the next sender."""
    checks.dead_sender(transport, spawn, tmp_path)


def test_a_stopped_receiver_costs_no_more_than_the_deadline(
    transport: Transport, spawn: Spawn
) -> None:
    checks.a_stopped_receiver_costs_no_more_than_the_deadline("gloo", transport, spawn)


def test_a_broken_pair_leaves_the_others_alone(transport: Transport, spawn: Spawn) -> None:
    checks.a_broken_pair_leaves_the_others_alone(transport, spawn)


def test_a_closed_staging_takes_nothing(transport: Transport, spawn: Spawn) -> None:
    checks.a_closed_staging_takes_nothing(transport, spawn)


# --- its own --------------------------------------------------------------------------------------
def test_device_memory_is_two_buckets_on_either_side(transport: Transport, spawn: Spawn) -> None:
    """Whatever is sent: here four buckets and a part, from pinned memory to pinned memory."""
    size = 4 * BUCKET_BYTES + 12_345
    data = pattern(size, 1).pin_memory()
    link = connect(transport, spawn(), size)
    before = memory(device=OWN_DEVICE)
    torch.ops.device_double.reset_peak(OWN_DEVICE)
    with watch() as sent:
        link.put(0, data, soon())
        link.flush(soon())
    assert memory(device=OWN_DEVICE).peak == before.live + 2 * BUCKET_BYTES
    assert memory(device=OWN_DEVICE).live == before.live
    assert (sent.count("h2d_async"), sent.count(PAGEABLE, *WAITS)) == (5, 0)

    staging, sender = transport.open(size), spawn()
    torch.ops.device_double.reset_peak(OWN_DEVICE)
    with watch() as received:
        sender.do("connect", staging.endpoint, 30)
        sender.do("put", 0, size, 1, 30)
        sender.do("flush", 30)
    assert memory(device=OWN_DEVICE).peak <= before.live + 2 * BUCKET_BYTES
    assert memory(device=0).live == 0, "a thread took its own current device"
    assert torch.equal(staging.buffer, data)
    assert received.count("d2h_async") == 5
    staging.close()


def test_device_memory_is_sent_in_order(transport: Transport, spawn: Spawn) -> None:
    """What the caller's stream wrote before is what arrives."""
    receiver = spawn()
    link = connect(transport, receiver, MIB)
    data = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    data.copy_(pattern(MIB, 3))
    link.put(0, data, soon())
    link.flush(soon())
    assert receiver.do("same", 0, MIB, 3)


def test_host_memory_handed_to_nccl_is_found(
    transport: Transport, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the sender as it was, without device buckets."""
    endpoint = spawn().do("open", MIB)

    def without_buckets(group: object, peer: int, *_: object) -> pair_pipes.HostPipe:
        return pair_pipes.HostPipe(group, peer)

    monkeypatch.setattr(process_group, "DevicePipe", without_buckets)
    error = raised(lambda: transport.connect(endpoint, soon()))
    assert "No backend type associated with device type cpu" in error.detail


def test_a_failed_operation_aborts_its_communicator_alone(
    transport: Transport, spawn: Spawn
) -> None:
    """And the group has no watchdog, which would end the process."""
    broken, other = connect(transport, spawn(), MIB), connect(transport, spawn(), MIB)
    group = broken._pipe._group  # type: ignore[attr-defined]
    assert not group.has_watchdog
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    broken.put(0, pattern(MIB, 1), soon())
    for work in group._transfers:
        work._error = RuntimeError("remote process exited")
    error = raised(lambda: broken.flush(soon()))
    assert (error.reason, group._aborted) == ("peer", True)
    other.put(0, pattern(MIB, 1), soon())
    other.flush(soon())


def test_a_peer_that_leaves_is_heard_before_the_deadline(
    transport: Transport, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's own operation never ends: the control socket tells."""
    receiver = spawn()
    link = connect(transport, receiver, MIB)
    group = link._pipe._group  # type: ignore[attr-defined]

    class Endless:
        def is_completed(self) -> bool:
            return False

    monkeypatch.setattr(group, "send", lambda *_: Endless())
    link.put(0, pattern(MIB, 1), soon())
    begin = time.monotonic()
    assert raised(lambda: link.flush(begin + 0.5)).reason == "deadline"
    assert group._aborted
    late = connect(transport, spawn(), MIB)
    other = late._pipe._group  # type: ignore[attr-defined]
    monkeypatch.setattr(other, "send", lambda *_: Endless())
    late.put(0, pattern(MIB, 1), soon())
    late._channel.close()  # type: ignore[attr-defined]
    assert raised(lambda: late.flush(soon())).reason == "peer"
    assert other._aborted


@pytest.mark.parametrize("refused", ["nccl", "cuda_ipc"])
def test_without_cuda_it_is_refused(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportError, match=r"use .*gloo") as caught:
        make(refused, address="127.0.0.1")
    assert caught.value.reason == "missing"


def test_an_end_with_another_setting_is_refused(
    transport: Transport, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in the process that makes the group; what only this host decides may differ."""
    endpoint = spawn().do("open", MIB)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    transport.connect(endpoint, soon()).close()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    error = raised(lambda: transport.connect(endpoint, soon()))
    assert error.reason == "refused"
    assert "NCCL_P2P_DISABLE is not set in the engine and 1 in this trainer rank" in error.detail


# --- cuda_ipc -------------------------------------------------------------------------------------
IPC = pytest.mark.parametrize("name", ["cuda_ipc"])


@IPC
def test_weights_are_cast_into_another_process_on_its_gpu(
    transport: Transport, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender computes on GPU 1 and sees the engine's GPU 0 behind it."""
    receiver = spawn()
    endpoint = receiver.do("open", MIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    link = transport.connect(endpoint, soon())
    view = link.view(64, 4096)
    assert view is not None
    assert str(view.device) == "cuda:1", "second of the GPUs that this process sees"
    weights = torch.linspace(-3, 3, 2048, device="cuda:0")
    view.view(torch.bfloat16).copy_(weights)
    link.put(8192, pattern(1000, 5).pin_memory(), soon())
    link.flush(soon())
    expected = weights.cpu().bfloat16().view(torch.uint8)
    assert receiver.do("read", 64, 4096) == expected.tolist()
    assert receiver.do("same", 8192, 1000, 5)


@IPC
def test_weights_arrive_on_a_gpu_that_both_share(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender computes on the engine's GPU, the only one that it sees."""
    receiver = spawn()
    endpoint = receiver.do("open", MIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    torch.cuda.set_device(0)
    link = make("cuda_ipc", address="127.0.0.1").connect(endpoint, soon())
    view = link.view(64, 4096)
    assert view is not None
    assert str(view.device) == "cuda:0"
    weights = torch.linspace(-3, 3, 2048, device="cuda:0")
    view.view(torch.bfloat16).copy_(weights)
    link.flush(soon())
    assert receiver.do("read", 64, 4096) == weights.cpu().bfloat16().view(torch.uint8).tolist()


@IPC
def test_a_gpu_that_the_sender_does_not_see_is_refused(
    transport: Transport, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a trainer rank with its own GPU alone, as placement gave it before."""
    endpoint = spawn().do("open", MIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    error = raised(lambda: transport.connect(endpoint, soon()))
    assert error.reason == "refused"
    assert "GPU-0 is not visible here, ['GPU-1'] are" in error.detail


@IPC
@pytest.mark.parametrize("call", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuMemAlloc_v2"])
def test_a_driver_that_refuses_is_an_error_with_its_remedy(
    call: str, transport: Transport, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without CUDA IPC.  Control: without the refusal both ends meet."""
    endpoint = spawn().do("open", MIB)
    transport.connect(endpoint, soon()).close()
    monkeypatch.setattr(cuda_driver.DriverDouble, call, lambda *_: 801)
    opens = call != "cuIpcOpenMemHandle_v2"
    work = (lambda: transport.open(MIB)) if opens else lambda: transport.connect(endpoint, soon())
    error = raised(work)
    assert error.detail.startswith(f"{call} answered 801: ")
    assert error.detail.endswith("; sync.transport=shm does without it")


@IPC
def test_a_dead_engine_is_an_error(transport: Transport, spawn: Spawn, tmp_path: Path) -> None:
    checks.dead_receiver(transport, spawn, tmp_path)


@IPC
def test_device_staging_outlives_its_last_mapping(transport: Transport, spawn: Spawn) -> None:
    checks.a_closed_staging_takes_nothing(transport, spawn)


# --- shm ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["shm"])
def test_shared_staging_is_page_locked(transport: Transport) -> None:
    """And is released: the double raises for pages that were not registered."""
    staging = transport.open(MIB)
    link = transport.connect(staging.endpoint, soon())
    link.put(7, pattern(1000, 2), soon())
    with watch() as seen:
        on_device = staging.buffer[7:1007].to("cuda", non_blocking=True)
    assert (seen.count("h2d_async"), seen.count(PAGEABLE)) == (1, 0)
    assert torch.equal(on_device.cpu(), pattern(1000, 2))
    address = staging.buffer.data_ptr()
    staging.close()
    with pytest.raises(RuntimeError, match="not registered"):
        torch.ops.device_double.unregister_host(address)

"""Staging on a GPU: all but the GPU, whose driver is played by memory of this process."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.weight_sync.transports import cuda_ipc
from moerl.weight_sync.transports.cuda_ipc import CudaIpc
from moerl.weight_sync.transports.factory import make


class Pretence:
    """`cuda_driver.Driver` over host memory; handles are addresses."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.mapped: list[int] = []

    def gpu(self) -> str:
        return "GPU-0"

    def allocate(self, num_bytes: int) -> int:
        block = ctypes.create_string_buffer(num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        assert address not in self.mapped, "freed under a mapping"
        del self.blocks[address]

    def export(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def map(self, gpu: str, handle: bytes, num_bytes: int) -> int:
        address = int.from_bytes(handle, "little")
        if gpu != "GPU-0" or address not in self.blocks:
            raise TransportError("refused", "no such memory")
        self.mapped.append(address)
        return address

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    def tensor(self, address: int, num_bytes: int, gone: Callable[[], None]) -> Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(memory, gone)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def wait(self, buffer: Tensor, deadline: float) -> None:
        """Host memory is written when a copy returns."""


@pytest.fixture
def driver() -> Pretence:
    return Pretence()


@pytest.fixture
def transport(driver: Pretence) -> CudaIpc:
    return CudaIpc(driver)  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + 60


def test_without_a_gpu_it_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportError, match="needs a CUDA GPU") as caught:
        make("cuda_ipc", address="127.0.0.9")  # not made yet
    assert caught.value.reason == "missing"
    assert "\n" not in str(caught.value)


def test_bytes_are_put_and_packed_in_place(transport: CudaIpc) -> None:
    staging = transport.open(100)
    link = transport.connect(staging.endpoint, soon())
    link.put(3, torch.arange(10, dtype=torch.uint8), soon())
    view = link.view(50, 2)
    assert view is not None
    view.fill_(7)
    link.flush(soon())
    staging.fetch(soon())
    assert staging.buffer[3:13].tolist() == list(range(10))
    assert staging.buffer[50:52].tolist() == [7, 7]
    for offset, size in ((95, 6), (-1, 1)):
        with pytest.raises(TransportError, match="range"):
            link.put(offset, torch.zeros(size, dtype=torch.uint8), soon())
    with pytest.raises(TransportError, match="deadline"):
        link.flush(time.monotonic() - 1)


def test_memory_stays_as_long_as_somebody_maps_it(transport: CudaIpc, driver: Pretence) -> None:
    staging = transport.open(8)
    link = transport.connect(staging.endpoint, soon())
    view = link.view(0, 8)
    staging.close()
    staging.close()
    assert driver.blocks, "a late sender may still write"
    with pytest.raises(TransportError, match="peer"):
        link.put(0, torch.zeros(1, dtype=torch.uint8), soon())
    with pytest.raises(TransportError, match="peer"):
        link.flush(soon())
    link.close()
    transport.open(1).close()
    assert driver.mapped, "a view is left"
    del view
    assert not driver.mapped
    transport.open(1).close()  # looks after what was in use
    assert not driver.blocks
    assert not cuda_ipc._in_use


def test_a_closed_or_forged_endpoint_is_refused(transport: CudaIpc, driver: Pretence) -> None:
    staging = transport.open(8)
    told = msgspec.msgpack.decode(staging.endpoint, type=cuda_ipc._Endpoint)
    forged = (
        (msgspec.structs.replace(told, name="another"), "peer"),
        (msgspec.structs.replace(told, pid=2**22 + 1), "peer"),
        (msgspec.structs.replace(told, gpu="GPU-1"), "refused"),
        (msgspec.structs.replace(told, handle=bytes(64)), "refused"),
    )
    for endpoint, reason in forged:
        with pytest.raises(TransportError, match=reason):
            transport.connect(msgspec.msgpack.encode(endpoint), soon())
    with pytest.raises(TransportError, match="refused"):
        transport.connect(b"12:3:moerl-staging:8", soon())
    staging.close()
    with pytest.raises(TransportError, match="peer"):
        transport.connect(staging.endpoint, soon())
    assert not driver.blocks, "refused senders keep nothing"

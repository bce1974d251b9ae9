"""Page-locked staging on one GPU; NCCL and CUDA IPC between two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moerl.weight_sync.transports.factory import make
from moerl.weight_sync.transports.pair_pipes import BUCKET_BYTES
from tests.helpers.transport_checks import MIB, PeerProcess, connect, raised, soon
from tests.helpers.transport_peer import pattern

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SIZE = 4 * BUCKET_BYTES + 12_345


@pytest.fixture
def receiver(name: str, tmp_path: Path) -> Iterator[PeerProcess]:
    """On GPU 0; this process uses the last one."""
    peer = PeerProcess(name, tmp_path)
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    yield peer
    torch.cuda.set_device(0)
    peer.kill()


@pytest.mark.parametrize("name", ["shm"])
def test_shared_staging_is_page_locked_and_released(name: str) -> None:
    for _ in range(2):  # the same addresses may be registered again
        staging = make(name, address="127.0.0.1").open(SIZE)
        assert staging.buffer.is_pinned()
        staging.buffer[:MIB] = pattern(MIB, 1)
        on_device = staging.buffer[:MIB].to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(on_device.cpu(), pattern(MIB, 1))
        staging.close()


@TWO
@pytest.mark.parametrize("name", ["nccl"])
def test_nccl_takes_two_buckets_of_device_memory(name: str, receiver: PeerProcess) -> None:
    transport = make(name, address="127.0.0.1")
    link = connect(transport, receiver, SIZE)
    data = pattern(SIZE, 1).pin_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    link.put(0, data, soon())
    link.flush(soon())
    assert torch.cuda.max_memory_allocated() - before <= 2 * BUCKET_BYTES
    assert receiver.do("same", 0, SIZE, 1)
    assert not receiver.do("same", 0, SIZE, 2)  # negative control


@TWO
@pytest.mark.parametrize("name", ["nccl"])
def test_a_dead_receiver_ends_the_pair_and_not_the_process(
    name: str, receiver: PeerProcess
) -> None:
    link = connect(make(name, address="127.0.0.1"), receiver, SIZE)
    link.put(0, pattern(MIB, 1), soon())
    link.flush(soon())
    receiver.kill()

    def write() -> None:
        link.put(0, pattern(SIZE, 2), soon())
        link.flush(soon())

    assert raised(write).reason == "peer"
    assert torch.ones(4, device="cuda").sum().item() == 4


@TWO
@pytest.mark.parametrize("name", ["cuda_ipc"])
def test_weights_are_cast_into_another_gpu(name: str, receiver: PeerProcess) -> None:
    link = connect(make(name, address="127.0.0.1"), receiver, MIB)
    view = link.view(64, 4096)
    assert view is not None
    weights = torch.linspace(-3, 3, 2048, device="cuda")
    assert view.device != weights.device
    view.view(torch.bfloat16).copy_(weights)
    link.flush(soon())
    expected = weights.cpu().bfloat16().view(torch.uint8)
    assert receiver.do("read", 64, 4096) == expected.tolist()

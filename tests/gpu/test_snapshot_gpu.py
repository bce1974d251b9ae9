"""A publish on one GPU: the snapshot under a step, packing, the commit; bytes of memory.

tests/double/on_publish.py does the same with every order of streams checked.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moerl.core.types import PolicyVersion
from moerl.weight_sync.buckets import Bucket, Piece, Region
from moerl.weight_sync.commit_copies import CommitBuckets, CommitCopies
from moerl.weight_sync.packed_buckets import BucketKey, BucketPacker
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import ReceiverPlan, SenderPlan
from moerl.weight_sync.transports.pinned_memory import host_buffer

V1 = PolicyVersion(0, 1)
ROWS, COLS, COUNT = 1024, 1024, 24  # fp32 on the trainer, bf16 on the wire
PIECE = 2 * ROWS * COLS
LATE = 1e9  # a deadline


def plan() -> Region:
    """Two pieces in each bucket."""
    box = (range(ROWS), range(COLS))
    pieces = tuple(
        Piece(f"h{i}", box, f"t{i}", box, f"e{i}", box, "bfloat16", PIECE, PIECE * i, False)
        for i in range(COUNT)
    )
    buckets = tuple(Bucket(PIECE * i, 2 * PIECE, i, i + 2) for i in range(0, COUNT, 2))
    return Region(0, 0, pieces, buckets, PIECE * COUNT)


def weights() -> dict[str, Tensor]:
    return {f"t{i}": torch.randn(ROWS, COLS, device="cuda") for i in range(COUNT)}


@pytest.fixture
def live() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return weights()


def test_a_snapshot_is_of_its_version_while_training_continues(live: dict[str, Tensor]) -> None:
    snapshot, want = WeightSnapshot(), {name: weight.cpu() for name, weight in live.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    snapshot.store(live, V1)
    snapshot.before_write()
    for weight in live.values():
        weight.add_(1.0)
    snapshot.wait()
    for name, tensor in want.items():
        assert torch.equal(snapshot[name], tensor), name
    assert torch.cuda.max_memory_allocated() == before
    assert snapshot[f"t{COUNT - 1}"].is_pinned()


def test_a_commit_streams_host_staging_through_two_buckets(live: dict[str, Tensor]) -> None:
    region, snapshot = plan(), WeightSnapshot()
    snapshot.store(live, V1)
    packer = BucketPacker(SenderPlan("id", 0, (region,)), snapshot)
    packer.join()
    snapshot.wait()
    staging = host_buffer(region.num_bytes)
    for number, bucket in enumerate(region.buckets):
        packed = packer.take(BucketKey(0, number), V1, LATE)
        assert packed.data.is_pinned()
        staging[bucket.offset :][: bucket.num_bytes] = packed.data
        packer.give_back(packed)
    served = {
        f"e{i}": torch.zeros(ROWS, COLS, dtype=torch.bfloat16, device="cuda") for i in range(COUNT)
    }
    received = ReceiverPlan("id", 0, (region,), (0,), (), ())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    buckets = CommitBuckets(received, torch.device("cuda", torch.cuda.current_device()))
    copies = CommitCopies(received, (0,), staging, served, buckets)
    for _ in range(3):
        copies.run()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * 2 * PIECE
    for i in range(COUNT):
        assert torch.equal(served[f"e{i}"], live[f"t{i}"].bfloat16()), i

"""A bucket is packed once for all engines with the same plan, and none waits for another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.core.messages import Destination, SendResult
from moerl.core.types import PolicyVersion
from moerl.weight_sync import packed_buckets
from moerl.weight_sync.buckets import Bucket, Digest, Piece, Region
from moerl.weight_sync.packed_buckets import BucketKey, BucketPacker
from moerl.weight_sync.sender import WeightSender
from moerl.weight_sync.snapshot import LiveWeights, WeightSnapshot
from moerl.weight_sync.transfer_plan import SenderPlan

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
BUCKETS, WORDS = 12, 8  # in each of the two regions
SIZE = 4 * WORDS
LATE_S = 60.0
LATE = 1e9  # a deadline


def plan() -> SenderPlan:
    box = (range(WORDS),)
    regions = []
    for dst in range(2):
        pieces = tuple(
            Piece("h", box, f"{dst}.{i}", box, f"d{i}", box, "float32", SIZE, SIZE * i, False)
            for i in range(BUCKETS)
        )
        buckets = tuple(Bucket(SIZE * i, SIZE, i, i + 1) for i in range(BUCKETS))
        regions.append(Region(0, dst, pieces, buckets, SIZE * BUCKETS))
    return SenderPlan("id", 0, tuple(regions))


def weights(version: PolicyVersion) -> dict[str, Tensor]:
    return {
        f"{dst}.{i}": torch.arange(WORDS) + 100.0 * dst + i + 1000.0 * version.step
        for dst in range(2)
        for i in range(BUCKETS)
    }


def whole(version: PolicyVersion) -> Tensor:
    """What the two ranks of an engine have staged."""
    return torch.cat(list(weights(version).values())).view(torch.uint8)


class Link:
    """Reads what was put when it is flushed; `step` is called before."""

    def __init__(self, memory: Tensor, step: Callable[[], object], mapped: bool) -> None:
        self.memory, self.step, self.mapped = memory, step, mapped
        self._puts: list[tuple[int, Tensor]] = []

    def view(self, offset: int, num_bytes: int) -> Tensor | None:
        return self.memory[offset : offset + num_bytes] if self.mapped else None

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        self._puts.append((offset, data))

    def flush(self, deadline: float) -> None:
        self.step()
        for offset, data in self._puts:
            self.memory[offset : offset + data.numel()] = data
        self._puts = []

    def close(self) -> None: ...


class StagingReceiver:
    """Its staging, and the sender to it."""

    def __init__(
        self, packer: BucketPacker, step: Callable[[], object] = int, *, mapped: bool = False
    ) -> None:
        self.staging = torch.zeros(2 * SIZE * BUCKETS, dtype=torch.uint8)
        self.step, self.mapped = step, mapped
        self.sender = WeightSender(packer, self)  # type: ignore[arg-type]
        self.moved: dict[int, SendResult] = {}
        self.error: TransportError | None = None

    def connect(self, endpoint: bytes, deadline: float) -> Link:
        return Link(self.staging, self.step, self.mapped)

    def send(self, *, again: bool = False) -> None:
        to = {dst: Destination(b"", dst * SIZE * BUCKETS) for dst in range(2)}
        try:
            self.moved = self.sender.send(to, LATE, again=again)
        except TransportError as error:
            self.error = error
            self.sender.drop()


def send_all(engines: Sequence[StagingReceiver]) -> list[threading.Thread]:
    threads = [threading.Thread(target=engine.send, daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    return threads


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LATE_S)
        assert not thread.is_alive()


@pytest.fixture
def packer() -> Iterator[BucketPacker]:
    snapshot = WeightSnapshot()
    snapshot.store(weights(V1), V1)
    made = BucketPacker(plan(), snapshot)
    yield made
    assert all(not one.users for one in made._buffers), "a buffer was not given back"


@pytest.mark.parametrize("num", [1, 3])
def test_engines_in_step_share_each_pack(packer: BucketPacker, num: int) -> None:
    barrier = threading.Barrier(num, timeout=LATE_S)
    engines = [StagingReceiver(packer, barrier.wait) for _ in range(num)]
    for version in (V1, V2):
        packer.snapshot.store(weights(version), version)
        before = packer.num_packed
        join(send_all(engines))
        assert packer.num_packed - before == 2 * BUCKETS, "one pack of each bucket"
        for engine in engines:
            assert torch.equal(engine.staging, whole(version))
            assert engine.moved == engines[0].moved, "the same digests"
    assert len(packer._buffers) <= 2 * num


def test_an_engine_that_stops_delays_no_other_and_packs_for_itself(packer: BucketPacker) -> None:
    reached, continues, count = threading.Event(), threading.Event(), iter(range(1000))

    def stop() -> None:
        if next(count) == 5:
            reached.set()
            assert continues.wait(LATE_S)

    slow, fast = StagingReceiver(packer, stop), StagingReceiver(packer)
    (stopped,) = send_all([slow])
    assert reached.wait(LATE_S)
    join(send_all([fast]))
    assert torch.equal(fast.staging, whole(V1))
    assert len(packer._buffers) <= 4, "buffers of two engines"
    continues.set()
    join([stopped])
    assert torch.equal(slow.staging, whole(V1))
    assert slow.moved == fast.moved
    assert 2 * BUCKETS < packer.num_packed <= 4 * BUCKETS


def test_an_engine_that_fails_fails_alone(packer: BucketPacker) -> None:
    barrier, count = threading.Barrier(2, timeout=LATE_S), iter(range(1000))

    def fail() -> None:
        if next(count) == 5:
            barrier.abort()
            raise TransportError("peer", "it is gone")
        barrier.wait()

    def go() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()

    failing, well = StagingReceiver(packer, fail), StagingReceiver(packer, go)
    join(send_all([failing, well]))
    assert failing.error is not None
    assert well.error is None
    assert torch.equal(well.staging, whole(V1))
    failing.sender.close()
    assert len(packer._buffers) <= 2


def test_engines_of_the_same_machine_share_digests(
    packer: BucketPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = packed_buckets.digest

    def digest(*args: object) -> Digest:
        made.append(args)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(packed_buckets, "digest", digest)
    engines = [StagingReceiver(packer, mapped=True) for _ in range(3)]
    for engine in engines:
        engine.send()
        assert torch.equal(engine.staging, whole(V1))
        assert engine.moved == engines[0].moved
    assert len(made) == 2 * BUCKETS
    assert not packer._buffers, "mapped buckets need none"


def test_a_digest_of_damaged_memory_is_replaced_when_the_bucket_is_sent_again(
    packer: BucketPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = StagingReceiver(packer, mapped=True), StagingReceiver(packer, mapped=True)
    real = packed_buckets.digest

    def damaged(*args: object) -> Digest:
        first.staging[0] ^= 1
        return real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as fault:
        fault.setattr(packed_buckets, "digest", damaged)
        first.send()
    second.send()
    assert torch.equal(second.staging, whole(V1))
    wrong = second.moved[0].digests
    second.send(again=True)
    right = second.moved[0].digests
    assert (right[:8] != wrong[:8], right[8:] == wrong[8:]) == (True, True)


def test_a_late_sender_gives_its_bytes_to_none_of_the_next_version(packer: BucketPacker) -> None:
    packer.join()
    key = BucketKey(0, 0)
    packer.snapshot.store(weights(V2), V2)  # its session had ended
    late = packer.take(key, V1, LATE)
    packer.join()
    late.data.fill_(255)
    taken = packer.take(key, V2, LATE)
    assert torch.equal(taken.data, whole(V2)[:SIZE])
    packer.give_back(late)
    packer.give_back(taken)


@pytest.mark.parametrize("mapped", [False, True])
def test_weights_that_are_parked_are_read_by_no_late_sender(mapped: bool) -> None:
    """`before_write` waits for a bucket that is being packed; the sender gets no other."""
    live, offer = weights(V1), LiveWeights()
    offer.store(live, V1)
    packer, parked = BucketPacker(plan(), offer), threading.Event()

    def step() -> None:
        """After each bucket; the trainer parks its weights after the second."""
        if packer.num_packed == 2:
            offer.before_write()
            for tensor in live.values():
                tensor.untyped_storage().resize_(0)
            parked.set()

    engine = StagingReceiver(packer, step, mapped=mapped)
    engine.send()
    assert parked.is_set()
    assert engine.error is not None
    assert "not offered any more" in str(engine.error)
    assert packer.num_packed == 2
    with pytest.raises(TransportError, match="no weights are offered"):
        engine.sender.send({dst: Destination(b"", 0) for dst in range(2)}, LATE)


def test_senders_read_the_weights_themselves_and_wait_for_none(packer: BucketPacker) -> None:
    live, offer = weights(V1), LiveWeights()
    engine = StagingReceiver(BucketPacker(plan(), offer), mapped=True)
    for version in (V1, V2):
        offer.before_write()
        for name, tensor in weights(version).items():
            live[name].copy_(tensor)
        offer.store(live, version)
        engine.send()
        assert torch.equal(engine.staging, whole(version))
        assert all(offer[name] is tensor for name, tensor in live.items()), "a copy"
    with offer.reading():
        parking = threading.Thread(target=offer.before_write, daemon=True)
        parking.start()
        parking.join(0.2)
        assert parking.is_alive(), "a bucket is being packed"
    parking.join(LATE_S)
    assert not parking.is_alive()
    with pytest.raises(AssertionError, match="another storage"):
        offer.store(weights(V1), V1)


def test_what_cannot_be_packed_is_packed_by_the_next_that_asks(
    packer: BucketPacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    packer.join()
    with monkeypatch.context() as fault:
        fault.setattr(packed_buckets, "digest", lambda *_args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            packer.take(BucketKey(0, 0), V1, LATE)
    packed = packer.take(BucketKey(0, 0), V1, LATE)
    assert torch.equal(packed.data, whole(V1)[:SIZE])
    packer.give_back(packed)

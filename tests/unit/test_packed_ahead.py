"""The next microbatch is packed, read and checked while the one before it is computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from moerl.core.errors import RecordError
from moerl.trainer.passes.schedule import Batches, LoadRoutes, PackedAhead

LIMIT_S = 20.0


class FourBatches:
    """Notes what is packed; `wrong` cannot be packed."""

    num_microbatches = 4

    def __init__(self, wrong: int = -1) -> None:
        self.wrong, self.packed = wrong, list[int]()
        self.done = [threading.Event() for _ in range(self.num_microbatches)]

    def pack(self, index: int, layers: Sequence[int] = ()) -> str:
        self.packed.append(index)
        self.done[index].set()
        if index == self.wrong:
            raise RecordError("mask_rows", f"microbatch {index}")
        return f"batch {index}"


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "pack") as found:
        yield found


def ahead(
    batches: FourBatches, thread: ThreadPoolExecutor, load: LoadRoutes | None = None
) -> PackedAhead:
    return PackedAhead(cast(Batches, batches), thread, load)


def test_one_is_packed_ahead_and_no_more(thread: ThreadPoolExecutor) -> None:
    batches = FourBatches()
    packed = ahead(batches, thread)
    for index in range(4):
        assert cast(Any, packed.take(index, last=True)) == f"batch {index}"
        if index < 3:
            assert batches.done[index + 1].wait(LIMIT_S), "nobody has asked for it"
        thread.submit(int).result()  # all that was begun is done
        assert batches.packed == list(range(min(index + 2, 4)))


def test_every_chunk_gets_the_same_microbatch(thread: ThreadPoolExecutor) -> None:
    """An interleaved schedule: two of the first chunk, then two of the last."""
    batches = FourBatches()
    packed = ahead(batches, thread)
    for first in (0, 2):
        both = [[packed.take(first + i, last=last) for i in (0, 1)] for last in (False, True)]
        assert both[0] == both[1]
    assert batches.packed == [0, 1, 2, 3], "each once"


def test_an_error_comes_where_the_microbatch_is_asked_for(thread: ThreadPoolExecutor) -> None:
    batches = FourBatches(wrong=1)
    packed = ahead(batches, thread)
    packed.take(0, last=True)
    assert batches.done[1].wait(LIMIT_S)
    with pytest.raises(RecordError, match="microbatch 1"):
        packed.take(1, last=True)


def test_routes_are_read_in_the_thread(thread: ThreadPoolExecutor) -> None:
    seen: list[tuple[str, int, str]] = []

    def read(batch: Any, number: int) -> None:
        seen.append((batch, number, threading.current_thread().name))

    packed = ahead(FourBatches(), thread, LoadRoutes(lambda *_: None, read))
    packed.take(0, last=True)
    packed.take(1, last=True)
    assert seen[:2] == [("batch 0", 0, "pack_0"), ("batch 1", 1, "pack_0")]

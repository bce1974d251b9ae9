"""Host bytes of replayed routes: what a rank reads and holds, against all layers in int32.

    python bench/replay_memory.py [--tokens 4096,32768,200000]

For the published sizes of three models a synthetic record of one rollout is sealed and then read as
ranks read it: the layers of a pipeline stage, the two zigzag chunks of a context-parallel rank and
of those the slice of a sequence-parallel rank.  `held` is what comes back (u8), `read` is what was
taken from the file for it (whole chunks of 4 KiB and the digest table).  The comparison is the form
an engine sends, every hidden layer of every token in int32, which a trainer without slices keeps on
each rank.  Numbers are bytes per token of the rollout and of the worst rank of the layout; they do
not depend on the machine.  A data-parallel rank reads its own rollouts only, so dp changes nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moerl.core.types import Array, PolicyVersion, RoutingBlob
from moerl.records import BlobStore
from moerl.records.blob_ranges import Interval, read_routes


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    layers: int  # hidden layers
    first_moe: int  # layers before it are dense
    experts: int
    top_k: int

    @property
    def int32_bytes(self) -> int:
        """Per token, every hidden layer: what the engine sends."""
        return self.layers * self.top_k * 4


@dataclass(frozen=True, slots=True)
class Layout:
    pp: int = 1
    cp: int = 1
    tp: int = 1  # with sequence parallelism

    def __str__(self) -> str:
        return f"pp{self.pp} cp{self.cp} tp{self.tp}"


MODELS = (
    Model("Qwen3-30B-A3B", layers=48, first_moe=0, experts=128, top_k=8),
    Model("Qwen3-235B-A22B", layers=94, first_moe=0, experts=128, top_k=8),
    Model("DeepSeek-V3", layers=61, first_moe=3, experts=256, top_k=8),
)
LAYOUTS = (
    Layout(),
    Layout(pp=4),
    Layout(tp=4),
    Layout(cp=4),
    Layout(pp=4, tp=4),
    Layout(pp=8, cp=2, tp=8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="4096,32768,200000", help="lengths of the rollout")
    args = parser.parse_args()
    lengths = [int(text) for text in args.tokens.split(",")]
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        store = BlobStore(Path(folder), "bench")
        for model in MODELS:
            for length in lengths:
                report(store, model, length)
    print(f"load {os.getloadavg()[0]:.1f} (times only)")


def report(store: BlobStore, model: Model, length: int) -> None:
    blob = seal(store, model, length)
    file_bytes = (store.root / blob.ids.uri.rpartition("/")[2]).stat().st_size
    print(
        f"\n{model.name}, {length} tokens: int32 of all layers {model.int32_bytes} B/token, "
        f"{model.int32_bytes * length / 1e6:.1f} MB a rollout; sealed {file_bytes / 1e6:.1f} MB"
    )
    print("layout          held B/token  read B/token  int32/held  MB/rollout, held  read in ms")
    for layout in LAYOUTS:
        ranks = list(ranks_of(model, layout, length))
        if not ranks:
            print(f"{layout!s:14s}  the length does not divide")
            continue
        held, read, seconds = max(measure(store, blob, *rank) for rank in ranks)
        print(
            f"{layout!s:14s}  {held / length:12.2f}  {read / length:12.2f}  "
            f"{model.int32_bytes * length / held:9.1f}x  {held / 1e6:16.2f}  {1e3 * seconds:10.2f}"
        )
    store.delete(blob.ids.uri)


def measure(
    store: BlobStore, blob: RoutingBlob, layers: tuple[int, ...], rows: list[Interval]
) -> tuple[int, int, float]:
    """(bytes held, bytes read, seconds) of one rank."""
    before, begin = store.bytes_read, time.perf_counter()
    routes = read_routes(store, [blob], layers=layers, rows=rows)
    seconds = time.perf_counter() - begin
    return sum(ids.nbytes for ids in routes.values()), store.bytes_read - before, seconds


def ranks_of(
    model: Model, layout: Layout, length: int
) -> list[tuple[tuple[int, ...], list[Interval]]]:
    """Layers and rows of the first, second and last rank along each axis of the layout."""
    if length % (2 * layout.cp * layout.tp):
        return []
    stages = np.array_split(np.arange(model.layers), layout.pp)
    return [
        (
            tuple(int(layer) for layer in stages[stage] if layer >= model.first_moe),
            rank_rows(length, layout, cp_rank, tp_rank),
        )
        for stage in some(layout.pp)
        for cp_rank in some(layout.cp)
        for tp_rank in some(layout.tp)
    ]


def some(size: int) -> list[int]:
    return sorted({0, min(1, size - 1), size - 1})


def rank_rows(length: int, layout: Layout, cp_rank: int, tp_rank: int) -> list[Interval]:
    """Rows of the zigzag chunks of a context-parallel rank, then of them one of tp slices."""
    chunk = length // (2 * layout.cp)
    chunks = [cp_rank, 2 * layout.cp - 1 - cp_rank]
    size = 2 * chunk // layout.tp
    begin, end = tp_rank * size, (tp_rank + 1) * size
    rows = []
    for place, number in enumerate(chunks):
        low, high = max(begin, place * chunk), min(end, (place + 1) * chunk)
        if low < high:
            shift = number * chunk - place * chunk
            rows.append((low + shift, high + shift))
    return rows


def seal(store: BlobStore, model: Model, length: int) -> RoutingBlob:
    """A record of distinct ids in every row (its length + 1 tokens feed `length`)."""
    moe = tuple(range(model.first_moe, model.layers))
    (ref,) = store.seal(f"{model.name}-{length}", [synthetic(model, len(moe), length)])
    return RoutingBlob(ref, 0, length, PolicyVersion(0, 0), moe, model.experts)


def synthetic(model: Model, num_layers: int, length: int) -> Array:
    rng = np.random.default_rng(0)
    first = rng.integers(0, model.experts, (num_layers, length, 1), np.uint16)
    return ((first + np.arange(model.top_k, dtype=np.uint16)) % model.experts).astype(np.uint8)


if __name__ == "__main__":
    main()

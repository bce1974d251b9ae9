"""Every transport moves the same planned weights, as a ratio to a one-thread memcpy of them.

    python bench/weight_sync.py [--rounds 7] [--only shm,gloo] [--json]

A model of 528 MB with 128 experts per layer, bf16; trainer EP4 (4 ranks) to one engine of TP4 EP4.
One process plays the trainer ranks one after the other, one the engine ranks, one compute thread
each.  The regions and buckets are those of the project's plan.  Timed: from the first put until
every byte is in the staging buffers and acknowledged; both ends' bytes are compared by digest.

    memcpy          the same regions copied within one process, bucket by bucket
    shm             the same, but the destination is the other process' staging, mapped
    snapshot        the pieces of trainer rank 0 from its tensors into its regions
    verify          digests of all pieces in the staging buffers
    commit          the pieces of engine rank 0 from its staging into its parameters

Rounds are interleaved, so that a noisy machine hits all alike; the first is not counted.  Under
load only the best of a row and the CPU seconds (of both processes) mean anything; it is printed.
Then 2,000 small tensors over gloo, acknowledged one by one and packed into a bucket, and the bytes
counted on the wire against the forecast.  It uses about 5 GiB.  mooncake is left out where it
cannot be loaded, with its own complaint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.errors import TransportError
from moerl.layout import model_spec
from moerl.layout.tiles import Box
from moerl.planning.publish_forecast import Links, forecast
from moerl.weight_sync.buckets import Piece, Region, WirePolicy, digest, seeds
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import ReceiverPlan, TransferPlan
from moerl.weight_sync.transports.base import Link
from moerl.weight_sync.transports.factory import make

SPEC = model_spec(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "dtype": "bfloat16",
    }
)
TRAINER = ParallelConfig(ep=4, dp=4)
ENGINE = EngineLayout(tp=4, ep=4)
POLICY = WirePolicy("bfloat16", bucket_bytes=4 * 2**20)
TRANSPORTS = ("shm", "gloo", "mooncake", "disk")
NUM_SMALL = 2000
SMALL_BYTES = (4096, 16384)
LIMIT_S = 300.0
ADDRESS = "127.0.0.1"

Seconds = dict[str, list[float]]


def soon() -> float:
    return time.monotonic() + LIMIT_S


def plans() -> list[ReceiverPlan]:
    plan = TransferPlan(SPEC, TRAINER, ENGINE, 0, POLICY)
    return [plan.receiver(rank) for rank in range(ENGINE.tp)]


def local(parts: Sequence[Piece], *, source: bool) -> dict[str, Tensor]:
    """Tensors just large enough for the boxes that one rank reads or writes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in parts:
        name, box = (piece.src_name, piece.src_box) if source else (piece.dst_name, piece.dst_box)
        ends = tuple(dim.stop for dim in box)
        shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def at(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(dim.start, dim.stop, dim.step) for dim in box)]


def copy_pieces(
    region: Region, tensors: dict[str, Tensor], flat: Tensor, *, into_flat: bool
) -> None:
    """Between a region's bytes and the tensors of a rank: what snapshot and commit do."""
    for piece in region.pieces:
        wire = flat[piece.offset : piece.offset + piece.num_bytes].view(torch.bfloat16)
        name, box = (
            (piece.src_name, piece.src_box) if into_flat else (piece.dst_name, piece.dst_box)
        )
        part = at(tensors[name], box)
        if into_flat:
            wire.view(part.shape).copy_(part)
        else:
            part.copy_(wire.view(part.shape))


def fill(num_bytes: int, seed: int) -> Tensor:
    """Bytes that do not repeat at once; made quickly."""
    block = torch.randint(
        0, 256, (2**20 + 7,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return block.repeat(-(-num_bytes // len(block)))[:num_bytes]


def region_digests(plan: ReceiverPlan, data: Sequence[Tensor]) -> list[int]:
    """Of each region, from its bytes."""
    totals = []
    for region, raw in zip(plan.regions, data, strict=True):
        keys, view = seeds(region), memoryview(raw.numpy().data)
        made = [digest(region, keys, b, view[b.offset :][: b.num_bytes]) for b in region.buckets]
        totals.append(sum(one.total for one in made) % 2**64)
    return totals


def split(plan: ReceiverPlan, staging: Tensor) -> list[Tensor]:
    """The regions of one staging buffer."""
    return [
        staging[start : start + region.num_bytes]
        for start, region in zip(plan.starts, plan.regions, strict=True)
    ]


def own_memory() -> int:
    """KiB of this process, its share of shared pages included once over all processes."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = [row for row in rows if row.startswith("Pss:")]
    return int(line.split()[1])


# --- the engine ranks -----------------------------------------------------------------------------
class Receiver:
    """Runs in the other process; a method per command."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.plans = plans()
        self.stagings: dict[str, list[Any]] = {}
        first = self.plans[0]
        self.parameters = local([p for r in first.regions for p in r.pieces], source=False)

    def open(self, name: str) -> list[bytes]:
        transport = make(name, address=ADDRESS, folder=self.folder)
        self.stagings[name] = [transport.open(plan.staging_bytes) for plan in self.plans]
        for staging in self.stagings[name]:
            staging.buffer.fill_(1)  # fault its pages in
        return [staging.endpoint for staging in self.stagings[name]]

    def fetch(self, name: str) -> None:
        for staging in self.stagings[name]:
            staging.fetch(soon())

    def digests(self, name: str) -> list[list[int]]:
        return [
            region_digests(plan, split(plan, staging.buffer))
            for plan, staging in zip(self.plans, self.stagings[name], strict=True)
        ]

    def close(self, name: str) -> None:
        for staging in self.stagings.pop(name):
            staging.close()

    def cpu(self) -> float:
        return time.process_time()

    def verify(self, name: str) -> None:
        self.digests(name)

    def commit(self, name: str) -> None:
        plan, staging = self.plans[0], self.stagings[name][0]
        for region, flat in zip(plan.regions, split(plan, staging.buffer), strict=True):
            copy_pieces(region, self.parameters, flat, into_flat=False)

    def copy(self, name: str) -> None:
        """A plain copy of as many bytes as a commit copies."""
        source = self.stagings[name][0].buffer
        if not hasattr(self, "aside"):
            self.aside = torch.ones_like(source)
        self.aside.copy_(source)

    def memory(self) -> int:
        return own_memory()

    def small(self, num_bytes: int) -> bytes:
        self.close("small") if "small" in self.stagings else None
        self.stagings["small"] = [make("gloo", address=ADDRESS).open(NUM_SMALL * num_bytes)]
        self.tensors = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(NUM_SMALL)]
        return bytes(self.stagings["small"][0].endpoint)

    def unpack(self) -> None:
        buffer = self.stagings["small"][0].buffer
        for tensor, part in zip(self.tensors, buffer.split(len(self.tensors[0])), strict=True):
            tensor.copy_(part)


def serve(pipe: Connection, folder: str) -> None:
    receiver = Receiver(folder)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(receiver, command)(*arguments))
        except TransportError as error:
            pipe.send(error)


# --- the trainer ranks ----------------------------------------------------------------------------
class Bench:
    def __init__(self, pipe: Connection, folder: str) -> None:
        self.pipe, self.folder = pipe, folder
        self.plans = plans()
        self.ref_models = [
            [fill(region.num_bytes, 100 * plan.rank + region.src) for region in plan.regions]
            for plan in self.plans
        ]
        self.wanted = [
            region_digests(plan, data)
            for plan, data in zip(self.plans, self.ref_models, strict=True)
        ]
        self.links: dict[str, list[Link]] = {}
        self.num_bytes = sum(plan.num_bytes for plan in self.plans)
        self.seconds: Seconds = {}
        self.cpu: Seconds = {}
        self.sent: dict[str, int] = {}  # bytes that each transport put in one round
        mine = [(r, f) for r, f in self.regions() if r.src == 0]
        self.mine = mine
        self.tensors = local([piece for region, _ in mine for piece in region.pieces], source=True)

    def regions(self) -> Iterator[tuple[Region, Tensor]]:
        for plan, data in zip(self.plans, self.ref_models, strict=True):
            yield from zip(plan.regions, data, strict=True)

    def ask(self, command: str, *arguments: object) -> Any:
        self.pipe.send((command, arguments))
        answer = self.pipe.recv()
        if isinstance(answer, TransportError):
            raise answer
        return answer

    def open(self, name: str) -> None:
        transport = make(name, address=ADDRESS, folder=self.folder)
        endpoints = self.ask("open", name)
        self.links[name] = [transport.connect(endpoint, soon()) for endpoint in endpoints]

    def send(self, name: str) -> None:
        """All regions to all engine ranks."""
        num_bytes = 0
        for plan, data, link in zip(self.plans, self.ref_models, self.links[name], strict=True):
            for start, region, raw in zip(plan.starts, plan.regions, data, strict=True):
                for bucket in region.buckets:
                    piece = raw[bucket.offset : bucket.offset + bucket.num_bytes]
                    place = link.view(start + bucket.offset, bucket.num_bytes)
                    if place is not None:
                        place.copy_(piece)
                    else:
                        link.put(start + bucket.offset, piece, soon())
                    num_bytes += bucket.num_bytes
            link.flush(soon())
        self.ask("fetch", name)
        self.sent[name] = num_bytes

    def memcpy(self) -> None:
        for (region, raw), (_, target) in zip(self.regions(), self.targets, strict=True):
            for bucket in region.buckets:
                end = bucket.offset + bucket.num_bytes
                target[bucket.offset : end].copy_(raw[bucket.offset : end])

    def prepare_memcpy(self) -> None:
        self.targets = [(region, torch.ones_like(raw)) for region, raw in self.regions()]

    def snapshot(self) -> None:
        for region, flat in self.mine:
            copy_pieces(region, self.tensors, flat, into_flat=True)

    def clock(self, name: str, work: Callable[[], object], *, both: bool = False) -> None:
        """Time `work`: seconds, and CPU seconds of this process or of both."""
        theirs = self.ask("cpu") if both else 0.0
        cpu, start = time.process_time(), time.perf_counter()
        work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        cpu = time.process_time() - cpu + (self.ask("cpu") - theirs if both else 0.0)
        self.cpu.setdefault(name, []).append(cpu)

    def small(self, num_bytes: int, rounds: int) -> tuple[float, float]:
        """Best seconds of 2,000 tensors: (one by one, packed into one bucket and unpacked)."""
        link = make("gloo", address=ADDRESS).connect(self.ask("small", num_bytes), soon())
        tensors = [fill(num_bytes, 1) for _ in range(NUM_SMALL)]
        bucket = torch.ones(NUM_SMALL * num_bytes, dtype=torch.uint8)
        for _ in range(rounds + 1):
            self.clock(f"one_by_one_{num_bytes}", lambda: self._one_by_one(link, tensors))
            self.clock(f"packed_{num_bytes}", lambda: self._packed(link, tensors, bucket))
        link.close()
        one, packed = (
            min(self.seconds.pop(f"{kind}_{num_bytes}")[1:]) for kind in ("one_by_one", "packed")
        )
        return one, packed

    def _one_by_one(self, link: Link, tensors: list[Tensor]) -> None:
        """Each tensor acknowledged before the next, as an update request per tensor does it."""
        offset = 0
        for tensor in tensors:
            link.put(offset, tensor, soon())
            link.flush(soon())
            offset += len(tensor)
        self.ask("unpack")

    def _packed(self, link: Link, tensors: list[Tensor], bucket: Tensor) -> None:
        torch.cat(tensors, out=bucket)
        link.put(0, bucket, soon())
        link.flush(soon())
        self.ask("unpack")


def measure(bench: Bench, names: Sequence[str], rounds: int) -> None:
    """Interleaved rounds."""
    for name in names:
        bench.open(name)
    bench.prepare_memcpy()
    for turn in range(rounds + 1):
        order = [*names[turn % len(names) :], *names[: turn % len(names)]]
        bench.clock("memcpy", bench.memcpy)
        for name in order:
            bench.clock(name, partial(bench.send, name), both=True)
        bench.clock("memcpy", bench.memcpy)
        for stage in ("verify", "commit", "copy"):
            bench.clock(stage, partial(bench.ask, stage, names[0]), both=True)
    for name in names:
        assert bench.ask("digests", name) == bench.wanted, f"{name}: the bytes differ"
    for _ in range(rounds + 1):  # last: it overwrites what the digests are of
        bench.clock("snapshot", bench.snapshot)


def table(bench: Bench, names: Sequence[str]) -> list[dict[str, object]]:
    """One row per path; ratios to the best and to the median memcpy."""
    own = sum(region.num_bytes for region, _ in bench.mine)
    first = bench.plans[0].num_bytes
    sizes = {"snapshot": own, "commit": first, "copy": first}
    reference = bench.seconds["memcpy"][2:]
    rows = []
    for name in ("memcpy", *names, "snapshot", "verify", "commit", "copy"):
        warm = 2 if name == "memcpy" else 1
        seconds, cpu = bench.seconds[name][warm:], bench.cpu[name][warm:]
        size = sizes.get(name, bench.num_bytes)
        share = size / bench.num_bytes
        rows.append(
            {
                "path": name,
                "bytes": size,
                "best_gb_s": size / min(seconds) / 1e9,
                "median_gb_s": size / statistics.median(seconds) / 1e9,
                "best_ratio": min(reference) * share / min(seconds),
                "median_ratio": statistics.median(reference) * share / statistics.median(seconds),
                "cpu_s_per_gb": min(cpu) / size * 1e9,
            }
        )
    return rows


def traffic(sent: dict[str, int]) -> dict[str, float]:
    """Counted bytes against the forecast, and against a broadcast into every rank."""
    expected = forecast(SPEC, TRAINER, ENGINE, POLICY, Links())
    assert len(set(sent.values())) == 1, f"transports put different amounts: {sent}"
    counted = next(iter(sent.values()))
    assert counted == expected.planned_bytes, f"{counted} on the wire, {expected} planned"
    return {
        "wire_bytes": counted,
        "forecast_bytes": expected.planned_bytes,
        "ratio_to_broadcast": expected.rank_ratio,
    }


def usable(names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        try:
            make(name, address=ADDRESS, folder=tempfile.gettempdir())
            found.append(name)
        except TransportError as error:
            print(f"{name} is left out: {error.detail}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(TRANSPORTS), help="transports, by comma")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = usable(arguments.only.split(","))
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, folder), daemon=True)
        process.start()
        bench = Bench(pipe, folder)
        measure(bench, names, arguments.rounds)
        rows = table(bench, names)
        small = {size: bench.small(size, arguments.rounds) for size in SMALL_BYTES}
        peak = (own_memory() + bench.ask("memory")) / 2**20
        for name in names:
            bench.ask("close", name)
        pipe.close()
        process.join(30)
    load.append(os.getloadavg()[0])
    bytes_ = traffic(bench.sent)
    if arguments.json:
        print(
            json.dumps(
                {"rows": rows, "small": small, "load": load, "memory_gib": peak, "traffic": bytes_}
            )
        )
        return
    print(f"load {load[0]:.1f} before, {load[1]:.1f} after; {peak:.1f} GiB used")
    print(
        f"{'path':<16}{'MB':>7}{'GB/s best':>11}{'median':>8}{'ratio best':>12}{'median':>8}"
        f"{'CPU s/GB':>10}"
    )
    for row in rows:
        print(
            f"{row['path']:<16}{row['bytes'] / 1e6:>7.0f}{row['best_gb_s']:>11.2f}"
            f"{row['median_gb_s']:>8.2f}{row['best_ratio']:>12.2f}{row['median_ratio']:>8.2f}{row['cpu_s_per_gb']:>10.3f}"
        )
    for size, (one, packed) in small.items():
        print(
            f"{NUM_SMALL} tensors of {size} bytes over gloo: one by one {one * 1e3:.0f} ms, "
            f"packed {packed * 1e3:.1f} ms, {one / packed:.0f} x"
        )
    print(
        f"on the wire {bytes_['wire_bytes']:,} bytes, as forecast; a broadcast into every rank "
        f"{bytes_['ratio_to_broadcast']:.2f} x"
    )


if __name__ == "__main__":
    main()

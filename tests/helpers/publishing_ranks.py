"""A real Megatron rank that publishes on demand instead of training; started by sync_world.py.

    ... -m tests.helpers.publishing_ranks RUN_DIR CONTROLLER INCARNATION

Orders come as files, RUN_DIR/orders/INCARNATION.N.json (`Order`), met by every rank.  Each changes
the weights in a way that depends on the version alone, saves that version as a Hugging Face folder,
RUN_DIR/hf-VERSION, and publishes it.  Rank 0 writes the metrics beside the order, as N.done.

Faults are part of an order and hit the way from one rank to one engine:

    plan    rank 0 names another transfer plan at PREPARE
    flip    the first byte of the staging buffer is damaged once its bucket is digested
    flips   the same, and again after the bucket was sent once more
    halt    at the second flush the rank says so (N.halted) and waits for N.go
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from moerl.config.load import load_saved
from moerl.core.rpc import Keys
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.trainer.model import platform
from moerl.weight_sync.transports.base import Link, Transport
from tests.helpers.patience import patience

_POLL_S = 0.02
_HALT_S = 120.0


class Order(msgspec.Struct, frozen=True):
    step: int
    fault: str = ""
    rank: int = 0
    engine: int = 0


def main() -> None:
    root, controller, incarnation = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    place = platform.prepare("cpu", local_rank=int(os.environ["LOCAL_RANK"]))
    from moerl.core.types import PolicyVersion
    from moerl.trainer.model import parallel
    from moerl.trainer.model.gpt import live_tensors
    from moerl.trainer.train_loop import RankContext, TrainLoop
    from moerl.weight_sync import publisher

    run = RunDir(Path(root))
    config = load_saved(run.config)
    here = parallel.start(config.trainer.parallel, place, timeout_s=patience(120.0))
    faults = Faults(here.rank, publisher.make)
    publisher.make = faults.make  # type: ignore[assignment]
    keys, blobs = Keys.read(run.endpoints.keys), BlobStore(run.root / "b", "n")
    post = RankContext(run, controller, keys, int(incarnation), blobs, None)
    job = TrainLoop(config, post, here, _end)
    assert job.publisher is not None
    for number in count():
        path = run.root / "orders" / f"{incarnation}.{number}.json"
        while not path.exists():
            time.sleep(_POLL_S)
        order = msgspec.json.decode(path.read_bytes(), type=Order)
        version = PolicyVersion(int(incarnation), order.step)
        with torch.no_grad():
            for tensor in live_tensors(job.model.gpt).values():
                tensor.mul_(1 + 0.01 * order.step + 0.1 * int(incarnation))
        job.save_model(run.root / f"hf-{version}")
        faults.arm(order, path.with_suffix(""), job.publisher)
        job.publisher.publish(version)
        metrics = job.publisher.wait()
        faults.disarm()
        job.publisher.resume()
        if here.is_first:
            done = path.with_suffix(".writing")
            done.write_bytes(msgspec.json.encode(metrics))
            done.rename(path.with_suffix(".done"))


class Faults:
    """What goes wrong with the publish under way, on this rank."""

    def __init__(self, rank: int, make: Any) -> None:
        self._rank, self._make = rank, make
        self._engines = count()  # `shards` makes one transport per engine, in order
        self._repair: Any = None
        self.order, self.files = Order(0), Path()

    def make(self, name: str, **where: str) -> Transport:
        plain = self._make(name, **where)
        return FaultyTransport(plain, next(self._engines), self)  # type: ignore[return-value]

    def arm(self, order: Order, files: Path, publisher: Any) -> None:
        self.order, self.files = order, files
        if order.fault == "plan" and self._rank == 0:
            session = publisher._destinations.sessions[order.engine]
            plain = session.spec
            session.spec = replace(plain, plan="0123456789abcdef")
            self._repair = lambda: setattr(session, "spec", plain)

    def disarm(self) -> None:
        self.order = Order(0)
        if self._repair is not None:
            self._repair()
        self._repair = None

    def hit(self, engine: int) -> str:
        """The fault of the way to `engine`, if it is this rank's."""
        mine = self.order.rank == self._rank and self.order.engine == engine
        return self.order.fault if mine else ""


@dataclass
class FaultyTransport:
    """The sending half of a transport; nothing else of it is used on trainer ranks."""

    plain: Transport
    engine: int
    faults: Faults

    def connect(self, endpoint: bytes, deadline: float) -> FaultyLink:
        return FaultyLink(self.plain.connect(endpoint, deadline), self.engine, self.faults)


class FaultyLink:
    def __init__(self, plain: Link, engine: int, faults: Faults) -> None:
        self._plain, self._engine, self._faults = plain, engine, faults
        self._order, self._flushes, self._bad = Order(0), 0, 0
        self.put, self.view, self.close = plain.put, plain.view, plain.close

    def flush(self, deadline: float) -> None:
        fault = self._faults.hit(self._engine)
        if fault and self._order is not self._faults.order:
            self._order, self._flushes = self._faults.order, 0
        self._flushes += 1
        if fault in ("flip", "flips"):
            self._damage(once=fault == "flip")
        if fault == "halt" and self._flushes == 2:
            self._halt()
        self._plain.flush(deadline)

    def _damage(self, *, once: bool) -> None:
        """The first bucket is in place at the first flush; a repaired byte is damaged again."""
        first = self._plain.view(0, 1)
        assert first is not None, "only a mapped buffer can be damaged from here"
        if self._flushes == 1:
            self._bad = int(first) ^ 1
        if self._flushes == 1 or not once:
            first[0] = self._bad

    def _halt(self) -> None:
        files = self._faults.files
        files.with_suffix(files.suffix + ".halted").touch()
        go, deadline = files.with_suffix(files.suffix + ".go"), time.monotonic() + patience(_HALT_S)
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _end(error: BaseException) -> None:
    print(f"ended: {error}", flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()

"""Every trainer rank's way to the engines, by `sync.transport`.

broadcast      rank 0 gathers whole tensors and broadcasts them (`broadcast`)
any other      every rank sends what it holds to the ranks that need it (`shards`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from moerl.config.schema import Config, ParallelConfig
from moerl.layout import Flavor, ModelSpec
from moerl.protocols import Enlisted, Message
from moerl.trace import Tracer
from moerl.types import PolicyVersion

Reply = TypeVar("Reply")


class Control(Protocol):
    """A line to the controller; sockets belong to one thread, and end with their first error."""

    def expect(
        self, message: Message, reply_type: type[Reply], timeout_s: float | None = None
    ) -> Reply: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank's place among the trainer ranks, and what it trains."""

    rank: int
    world_size: int
    control: dist.ProcessGroup  # gloo, all ranks
    spec: ModelSpec
    layout: ParallelConfig
    flavor: Flavor
    backend: str  # of the trainer's collectives: gloo | nccl
    live: Callable[[], Mapping[str, Tensor]]  # parameters by the names of megatron_tiles
    gather: Callable[[], dict[str, Tensor] | None]  # collective: HF tensors on rank 0
    connect: Callable[[], Control]  # a new line to the controller
    token: str  # the run's
    tracer: Tracer
    on_failure: Callable[[BaseException], None]  # ends the process; called on any thread


class Outlet(Protocol):
    """All calls are collective over the trainer ranks."""

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Freeze the weights, start sending them; metrics of the publish that was in flight."""
        ...

    def wait(self) -> dict[str, float]:
        """Wait until nothing is being sent; metrics of that publish, once."""
        ...

    def resume(self) -> None:
        """After `wait`, with the frozen weights unchanged: serve engines that are behind."""
        ...

    def enlist(self, engines: Sequence[Enlisted]) -> None:
        """Publish to exactly these engines from here on; new ones get the frozen weights."""
        ...


def open_outlet(config: Config, **seat: object) -> Outlet:
    """Collective.  seat: the fields of `Seat`."""
    from moerl.sync import broadcast, shards

    opened = Seat(**seat)  # type: ignore[arg-type]
    if config.sync.transport == "broadcast":
        return broadcast.open_outlet(config, opened)
    return shards.open_outlet(config, opened)

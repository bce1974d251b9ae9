"""A publish from a trainer's tensors into an engine's in one process, without an engine.

The ends are those of a run: `WeightSnapshot`, `WeightSender` and `Receiver` with a transport.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.messages import (
    Destination,
    PrepareUpdate,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
)
from moerl.core.types import PolicyVersion
from moerl.layout import ModelSpec, Named, at, hf_shapes, megatron_tiles, sglang_tiles
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.packed_buckets import BucketPacker
from moerl.weight_sync.receiver import Receiver, ReceiverContext
from moerl.weight_sync.sender import WeightSender
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import TransferPlan
from moerl.weight_sync.transports.factory import make

_LATE_S = 300.0


class _PlainWeights:
    """What an engine of one rank serves."""

    def __init__(self, spec: ModelSpec) -> None:
        self._tensors = {
            name: torch.zeros(
                local.shape, dtype=getattr(torch, local.dtype or "bfloat16"), device="cuda"
            )
            for name, local in sglang_tiles(spec, 1, 0).items()
        }

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def run_hook(self, name: str) -> None:
        raise AssertionError(f"no hook is due for this family: {name}")


@dataclass(frozen=True, slots=True)
class Published:
    """One publish: seconds of its parts, and bytes on the wire."""

    send_s: float
    verify_s: float
    commit_s: float
    num_bytes: int


class OneRank:
    """A trainer of one rank and an engine of one rank, joined by a transport of this machine."""

    def __init__(self, spec: ModelSpec, transport: str, *, delta: bool = False) -> None:
        self.spec, self._transport, self._delta = spec, transport, delta
        self._policy, engine = WirePolicy("bfloat16"), EngineLayout()
        plan = TransferPlan(spec, ParallelConfig(), engine, 0, self._policy, "local")
        self._plan_id = plan.id
        self.snapshot, self.served = WeightSnapshot(), _PlainWeights(spec)
        self._sender = WeightSender(
            BucketPacker(plan.sender(0), self.snapshot),
            make(transport, address="127.0.0.1"),
            delta=delta,
        )
        self.receiver = Receiver(
            ReceiverContext(spec, engine, 0, ""),
            self.served,
            lambda name, folder: make(name, address="127.0.0.1", folder=folder),
            PolicyVersion(0, 0),
        )

    def publish(self, *, damage: bool = False) -> Published:
        """Send the stored version and serve it.  damage: a byte of it changes on the way."""
        version, deadline = self.snapshot.version, time.monotonic() + _LATE_S
        assert version is not None, "store a version first"
        prepared = self.receiver.handle(self._prepare(version))
        assert isinstance(prepared, UpdatePrepared)
        there = Destination(prepared.endpoints[0], prepared.starts[0][0])
        begin = time.perf_counter()
        moved = self._sender.send({0: there}, deadline)[0]
        sent = time.perf_counter()
        if damage:
            self._damage()
        deltas = (moved.deltas,) if self._delta else ()
        verified = self.receiver.handle(VerifyUpdate(0, version, (moved.digests,), _LATE_S, deltas))
        assert isinstance(verified, UpdateVerified)
        assert verified.failed == ((),), f"buckets {verified.failed} differ"
        checked = time.perf_counter()
        assert not self.receiver.claim(str(version))
        self.receiver.commit()
        torch.cuda.synchronize()
        return Published(
            sent - begin, checked - sent, time.perf_counter() - checked, moved.num_bytes
        )

    def _damage(self) -> None:
        session = self.receiver._session
        assert session is not None
        session.staging.fetch(time.monotonic() + _LATE_S)
        session.staging.buffer[0] ^= 1

    def _prepare(self, version: PolicyVersion) -> PrepareUpdate:
        return PrepareUpdate(
            engine=0,
            version=version,
            plan_engine=0,
            plan=self._plan_id,
            layout="",
            transport=self._transport,
            trainer=asdict(ParallelConfig()),
            policy=asdict(self._policy),
            layer_spec="local",
            timeout_s=_LATE_S,
            delta=self._delta,
        )

    def differing(self, live: Mapping[str, Tensor]) -> list[str]:
        """Engine tensors that are not what the trainer's are, by the tables of layouts."""
        whole = _joined(self.spec, megatron_tiles(self.spec, ParallelConfig(), 0, "local"), live)
        named = sglang_tiles(self.spec, 1, 0)
        return [
            name
            for name, local in named.items()
            for tile in local.tiles
            if not _equal(
                self.served.tensors()[name][at(tile.box)], whole[tile.hf][at(tile.hf_box)]
            )
        ]

    def close(self) -> None:
        self._sender.drop()
        self.receiver.close()


def _equal(served: Tensor, wanted: Tensor) -> bool:
    """Bitwise after the cast to bf16; a stack of experts has one dimension more."""
    return torch.equal(served.float(), wanted.bfloat16().float().view_as(served))


def _joined(spec: ModelSpec, named: Named, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole Hugging Face tensors from a trainer's."""
    device = next(iter(live.values())).device
    whole = {name: torch.zeros(shape, device=device) for name, shape in hf_shapes(spec).items()}
    for name, local in named.items():
        for tile in local.tiles:
            part = whole[tile.hf][at(tile.hf_box)]
            part.copy_(live[name].detach()[at(tile.box)].view_as(part))
    return whole

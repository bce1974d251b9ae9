"""Publish sessions towards an engine host, from a trainer of one rank that is only its weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.json_files import read_json
from moerl.core.messages import (
    CommitUpdate,
    Destination,
    PrepareUpdate,
    UpdateDone,
    UpdatePrepared,
    UpdateVerified,
    VerifyUpdate,
    WriteUpdate,
)
from moerl.core.types import PolicyVersion
from moerl.engine.host.host import EngineHost
from moerl.layout import at, megatron_tiles, model_spec
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.buckets import WirePolicy, split
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.packed_buckets import BucketPacker
from moerl.weight_sync.sender import WeightSender
from moerl.weight_sync.snapshot import WeightSnapshot
from moerl.weight_sync.transfer_plan import TransferPlan
from moerl.weight_sync.transports.factory import make

POLICY = WirePolicy(dtype="float32", bucket_bytes=2**20)
TRAINER = ParallelConfig()
_DEADLINE_S = 60.0


class Publisher:
    """Sends whole versions, read from Hugging Face folders, through shared memory.

    lora: versions are the factors, by Hugging Face name, in place of what differs in the folders.
    live: the engine sleeps, and takes them into its live weights.
    """

    def __init__(
        self,
        host: EngineHost,
        folders: Mapping[PolicyVersion, Path],
        lora: LoraConfig | None = None,
        factors: Mapping[PolicyVersion, Mapping[str, Tensor]] | None = None,
        *,
        live: bool = False,
    ) -> None:
        self._host, self._folders, self._lora, self._factors = host, folders, lora, factors or {}
        self._spec = model_spec(read_json(next(iter(folders.values())) / "config.json"))
        engine = EngineLayout(tp=host.config.tp)
        plan = TransferPlan(self._spec, TRAINER, engine, host.index, POLICY)
        self._plan = (plan if lora is None else FactorPlan(plan, lora)).sender(0)
        self._shard, self._live = WeightSnapshot(), live
        transport = make("shm", address="127.0.0.1", folder="")
        self._sender = WeightSender(BucketPacker(self._plan, self._shard), transport)

    async def stage(self, version: PolicyVersion) -> None:
        """All of a session but its commit."""
        index = self._host.index
        prepare = PrepareUpdate(
            engine=index,
            version=version,
            plan_engine=index,
            plan=self._plan.plan_id,
            layout="",
            transport="shm",
            trainer=asdict(TRAINER),
            policy=asdict(POLICY),
            layer_spec="local",
            timeout_s=_DEADLINE_S,
            lora=asdict(self._lora) if self._lora else None,
            writes_live=self._live,
        )
        prepared = await self._host.session(prepare)
        assert isinstance(prepared, UpdatePrepared)
        self._shard.store(self._tensors(version), version)
        destinations = {
            rank: Destination(endpoint, prepared.starts[rank][0])
            for rank, endpoint in enumerate(prepared.endpoints)
        }
        deadline = time.monotonic() + _DEADLINE_S
        for number in range(prepared.rounds) or (None,):
            moved = await asyncio.to_thread(self._sender.send, destinations, deadline, number)
            if number is not None:
                await self._host.session(WriteUpdate(index, version, number, _DEADLINE_S))
        digests = tuple(moved[rank].digests for rank in range(len(destinations)))
        verified = await self._host.session(VerifyUpdate(index, version, digests, _DEADLINE_S))
        assert isinstance(verified, UpdateVerified)
        assert not any(verified.failed), verified
        assert all(split(part) for part in digests)

    async def commit(self, version: PolicyVersion, timeout_s: float = _DEADLINE_S) -> UpdateDone:
        closed = await self._host.session(CommitUpdate(self._host.index, version, timeout_s))
        assert isinstance(closed, UpdateDone)
        return closed

    def _tensors(self, version: PolicyVersion) -> dict[str, Tensor]:
        """What the one trainer rank holds, under its own names."""
        whole = load_file(self._folders[version] / "model.safetensors")
        tensors = {}
        for name, local in megatron_tiles(self._spec, TRAINER, 0).items():
            tensors[name] = torch.zeros(local.shape)
            for tile in local.tiles:
                tensors[name][at(tile.box)] = whole[tile.hf][at(tile.hf_box)]
        return tensors | dict(self._factors.get(version, {}))

"""A trainer leaves the device and comes back: its storages are emptied and filled, never replaced.

All views of Megatron (param.data, main_grad, shards, optimizer state, buckets) keep their storage,
so nothing is made again.  Gradients come back as zeros, since each step begins with zeros; the
optimizer and the weights are kept in one buffer of host memory, page-locked for a GPU (torch's own
page-locked memory has a power of two of bytes).

Rejected: Megatron's `offload_to_cpu` (pageable; in fp32 shards of weights stay twice, with
`optimizer_cpu_offload` its host state moves to the device), read at megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from moerl.weight_sync.transports.pinned_memory import host_buffer

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from moerl.trainer.learner.step import Learner

Part = Literal["gradients", "optimizer", "weights"]
PARTS: tuple[Part, ...] = get_args(Part)
Storages = dict[int, torch.UntypedStorage]


class Parked:
    """The storages of one rank, of the policy and of its critic."""

    def __init__(self, learner: Learner, device: torch.device) -> None:
        self._device = device
        self._trained = [(learner.ddp, learner.optimizer)]
        if learner.critic is not None:
            self._trained.append((learner.critic.ddp, learner.critic.optimizer))
        self._away: dict[Part, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[Part, Tensor] = {}  # kept: page-locking it costs more than the copies

    @property
    def away(self) -> tuple[Part, ...]:
        return tuple(part for part in PARTS if part in self._away)

    @torch.no_grad()
    def out(self, parts: Iterable[Part]) -> int:
        """Empty parts that are here; returns bytes.

        Nothing may read them until `back`, copies of a snapshot or a checkpoint included.
        """
        total, wanted = 0, set(parts) - self._away.keys()
        for part in (part for part in PARTS if part in wanted):
            storages = list(self._storages(part).values())
            sizes = [storage.nbytes() for storage in storages]
            if part != "gradients":
                self._copy_out(part, storages, sizes)
            for storage in storages:
                storage.resize_(0)
            self._away[part] = list(zip(storages, sizes, strict=True))
            total += sum(sizes)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # another process needs the memory that torch would keep
        return total

    def _copy_out(
        self, part: Part, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]
    ) -> None:
        on_gpu = self._device.type == "cuda"
        if part not in self._host or self._host[part].numel() != sum(sizes):
            self._host.pop(part, None)
            self._host[part] = host_buffer(sum(sizes))
        for kept, storage in zip(self._host[part].split(list(sizes)), storages, strict=True):
            kept.copy_(_bytes(storage), non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()

    @torch.no_grad()
    def back(self, parts: Iterable[Part] = PARTS) -> None:
        """Fill parts that are away."""
        for part in self._away.keys() & set(parts):
            storages = self._away.pop(part)
            sizes = [size for _, size in storages]
            kept = self._host[part].split(sizes) if part in self._host else [None] * len(sizes)
            for (storage, size), data in zip(storages, kept, strict=True):
                storage.resize_(size)
                if data is None:
                    _bytes(storage).zero_()
                else:
                    _bytes(storage).copy_(data, non_blocking=True)

    def _storages(self, part: Part) -> Storages:
        found: Storages = {}
        for ddp, optimizer in self._trained:
            buffers = [b for chunk in ddp for b in chunk.buffers + chunk.expert_parallel_buffers]
            if part == "gradients":
                found |= self._here(buffer.grad_data for buffer in buffers)
                continue
            modules = [chunk.module for chunk in ddp]
            tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
            model = self._here((*tensors, *(buffer.param_data for buffer in buffers)))
            if part == "optimizer":
                state = self._here(_state(optimizer))
                model = {key: state[key] for key in state.keys() - model.keys()}
            found |= model
        return found

    def _here(self, tensors: Iterable[object]) -> Storages:
        """Storages on the device, each once, by address of the object."""
        found = {}
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found[storage._cdata] = storage
        return found


def _state(optimizer: MegatronOptimizer) -> Iterator[object]:
    """Parameters, fp32 copies and moments of all chained optimizers."""
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = chained.optimizer
        yield from (p.data for group in inner.param_groups for p in group["params"])
        for values in inner.state.values():
            yield from values.values()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, [nbytes] uint8."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))

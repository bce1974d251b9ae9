"""Every rank's parameters -> whole Hugging Face tensors on rank 0.

Each source rank packs what rank 0 lacks into one message per dtype.
Rejected: one message per tensor (thousands of small sends).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError
from moerl.distributed.object_collectives import all_gather_values
from moerl.layout import (
    LayerSpec,
    ModelSpec,
    Op,
    at,
    check_covers,
    hf_shapes,
    hf_tiles,
    join,
    megatron_tiles,
    num_elements,
)


class HfGather:
    """Whole Hugging Face tensors on rank 0, from the parameters of all ranks.

    params: returns this rank's live parameters by local name, called at every gather.
    rank, group: group ranks equal layout ranks 0..world_size-1; group is unused with one rank.
    The plan is made once.  Construction and `gather` are collective over the group.
    Raises LayoutError when the live parameters are not those the layout describes.
    """

    def __init__(
        self,
        params: Callable[[], Mapping[str, Tensor]],
        spec: ModelSpec,
        layout: ParallelConfig,
        rank: int,
        layer_spec: LayerSpec,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._params, self._rank, self._group = params, rank, group
        world = layout.world_size
        sources = {r: megatron_tiles(spec, layout, r, layer_spec) for r in range(world)}
        live = params()
        check_covers(sources[rank], {name: tuple(param.shape) for name, param in live.items()})
        self._dtypes = self._exchange({name: param.dtype for name, param in live.items()}, world)
        self._shapes = hf_shapes(spec)
        self._plan: dict[int, list[Op]] = defaultdict(list)
        for op in join(sources, {0: hf_tiles(spec)}, same_ranks=True):
            self._plan[op.src].append(op)
        self._device = _message_device(live, group) if world > 1 else torch.device("cpu")
        self._flat: dict[torch.dtype, Tensor] = {}
        self._whole: dict[str, Tensor] = {}

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor] | None:
        """HF tensors on the CPU in checkpoint order on rank 0, None on the other ranks.

        The tensors are reused: they stay valid until the next gather.
        """
        params = self._params()
        if self._rank != 0:
            for wire_dtype, ops in self._messages(self._rank):
                flat = self._buffer(wire_dtype, ops)
                for op, piece in _pieces(flat, ops):
                    piece.copy_(params[op.src_name][at(op.src_box)])
                dist.send(flat.view(torch.uint8), group=self._group, group_dst=0)
            return None
        self._allocate()
        for op in self._plan[0]:
            self._whole[op.dst_name][at(op.dst_box)] = params[op.src_name][at(op.src_box)].to(
                "cpu", self._whole[op.dst_name].dtype
            )
        for src in sorted(self._plan.keys() - {0}):
            for wire_dtype, ops in self._messages(src):
                flat = self._buffer(wire_dtype, ops)
                dist.recv(flat.view(torch.uint8), group=self._group, group_src=src)
                for op, piece in _pieces(flat.cpu(), ops):
                    self._whole[op.dst_name][at(op.dst_box)] = piece
        return dict(self._whole)

    def _exchange(self, mine: dict[str, torch.dtype], world: int) -> list[dict[str, torch.dtype]]:
        """Dtypes of every rank's parameters: rank 0 must know how to read a message."""
        if world == 1:
            return [mine]
        assert self._group is not None, "several ranks have one"
        names = {name: str(dtype) for name, dtype in mine.items()}
        every = all_gather_values(names, dict[str, str], self._group)
        return [{name: _dtype(text) for name, text in part.items()} for part in every]

    def _messages(self, src: int) -> Iterable[tuple[torch.dtype, list[Op]]]:
        """The ops of one source by wire dtype, in an order that both ends compute."""
        by_dtype: dict[torch.dtype, list[Op]] = defaultdict(list)
        for op in self._plan[src]:
            by_dtype[self._dtypes[src][op.src_name]].append(op)
        return sorted(by_dtype.items(), key=lambda item: str(item[0]))

    def _buffer(self, dtype: torch.dtype, ops: list[Op]) -> Tensor:
        """A flat message of the ops' elements; one allocation per dtype, grown to the largest."""
        size = sum(num_elements(op.src_box) for op in ops)
        if dtype not in self._flat or self._flat[dtype].numel() < size:
            self._flat[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._flat[dtype][:size]

    def _allocate(self) -> None:
        found: dict[str, torch.dtype] = {}
        for src, ops in self._plan.items():
            for op in ops:
                have = self._dtypes[src][op.src_name]
                if found.setdefault(op.dst_name, have) != have:
                    raise LayoutError(
                        f"{op.dst_name}: rank {src} holds it as {have}, "
                        f"another rank as {found[op.dst_name]}"
                    )
        for name, shape in self._shapes.items():
            if name not in self._whole or self._whole[name].dtype != found[name]:
                self._whole[name] = torch.empty(shape, dtype=found[name])


def _pieces(flat: Tensor, ops: Iterable[Op]) -> Iterable[tuple[Op, Tensor]]:
    """The part of a flat message that belongs to each op, in the shape of its boxes."""
    first = 0
    for op in ops:
        shape = [len(r) for r in op.src_box]
        size = num_elements(op.src_box)
        yield op, flat[first : first + size].view(shape)
        first += size


def _dtype(text: str) -> torch.dtype:
    """The dtype that is printed as `text`, such as torch.bfloat16."""
    found = getattr(torch, text.removeprefix("torch."))
    assert isinstance(found, torch.dtype), text
    return found


def _message_device(params: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """NCCL moves device memory, gloo host memory."""
    if "nccl" in dist.get_backend(group):
        return next(iter(params.values())).device
    return torch.device("cpu")

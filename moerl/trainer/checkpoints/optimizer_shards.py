"""State of Megatron's distributed optimizer in checkpoints: each rank writes and reads its shard.

The optimizer of a rank updates a range of each gradient bucket, so of a parameter it has nothing or
a range of elements in row-major order.  This range is a few boxes, and torch_dist stores any box:

    parameter [4, 3], elements 2 to 8        boxes [0:1, 2:3], [1:3, 0:3]
    . . #
    # # #
    # # #
    . . .

So no rank gathers the state of others, on the device or on the host, and a resume reads the boxes
of its own ranges, whichever layout wrote them.  Tensors have the names and coordinates of
megatron-core's `fully_reshardable` form, which gathers each bucket and writes whole parameters:
this module and megatron-core read each other's folders.

Read at megatron-core 0.19.2: distrib_optimizer.py, dist_checkpointing/mapping.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from moerl.core.errors import TrainerError
from moerl.layout import Box, num_elements
from moerl.layout.tiles import flat_boxes

FORM = "fully_reshardable"
_STATE = "param_state"

Stored: TypeAlias = ShardedTensor | ShardedTensorFactory
State = dict[Any, Any]  # by name, or by number of chained optimizers


def is_sharded(optimizer: MegatronOptimizer) -> bool:
    return all(isinstance(one, DistributedOptimizer) for one in optimizer.chained_optimizers)


def sharded_state(optimizer: MegatronOptimizer, model: State, *, is_loading: bool) -> State:
    """The source of a save, or the targets of a load, which are allocated then.

    model: sharded state of the model.  The optimizer must have Adam's state.
    """
    optimizer._synchronize_steps()
    stored = _by_parameter(model)
    parts = [_one_state(one, stored, is_loading=is_loading) for one in optimizer.chained_optimizers]
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


def load_state(optimizer: MegatronOptimizer, loaded: State) -> None:
    """Give the optimizer the loaded values of `sharded_state`."""
    chained = optimizer.chained_optimizers
    parts = [loaded] if len(chained) == 1 else [loaded[number] for number in range(len(chained))]
    shards = [part.pop(_STATE) for part in parts]
    optimizer.load_state_dict(loaded)
    for one, shard in zip(chained, shards, strict=True):
        _fill(one, shard)


def _by_parameter(model: State) -> dict[int, Stored]:
    """How each parameter is stored, by its id."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    return {id(stored.data): stored for stored in nested_values(sharded)}


def _one_state(
    one: DistributedOptimizer, stored: Mapping[int, Stored], *, is_loading: bool
) -> State:
    shard: dict[int, dict[str, dict[int, ShardedTensor]]] = {}
    for number, owned in enumerate(_owned(one)):
        parts = list(_parts(owned, stored[id(owned.parameter)]))
        shard[number] = {
            name: {place: _box(one, name, part, values) for place, part in enumerate(parts)}
            for name, values in _values(one, owned, is_loading=is_loading).items()
        }
    state: State = one.state_dict()
    return state | {_STATE: shard, "param_state_sharding_type": FORM}


class _Owned(NamedTuple):
    """The range of a parameter that a rank's optimizer updates."""

    parameter: Parameter
    start: int
    stop: int


def _owned(one: DistributedOptimizer) -> Iterator[_Owned]:
    for buffer in one.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    yield _Owned(parameter, places["param"].start, places["param"].end)


def _values(
    one: DistributedOptimizer, owned: _Owned, *, is_loading: bool
) -> dict[str, Tensor | None]:
    """fp32 weights and moments of a range; None to be read."""
    names = ("param", *one.optimizer_state_keys)
    if is_loading:
        return dict.fromkeys(names)
    found = one._get_main_param_and_optimizer_states(owned.parameter)
    return {name: _as_saved(one, found[name].detach()) for name in names}


def _as_saved(one: DistributedOptimizer, values: Tensor) -> Tensor:
    """The optimizer's values of a parameter, in fp32.

    Moments in fewer bits are unscaled into tensors that live as long as the state: on
    the host, so that the device holds one parameter's values at a time.
    """
    if one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        values = values.cpu()
    return values.float()


class _Part(NamedTuple):
    """A box of a stored tensor; its elements begin at `begin` of the range that is owned."""

    leaf: ShardedTensor
    box: Box
    begin: int


def _parts(owned: _Owned, stored: Stored) -> Iterator[_Part]:
    """The boxes of a range, in its order."""
    begin = 0
    for first, leaf in _leaves(stored, owned.parameter):
        num = math.prod(leaf.local_shape)
        start, stop = (min(max(at - first, 0), num) for at in (owned.start, owned.stop))
        for box in flat_boxes(leaf.local_shape, start, stop):
            yield _Part(leaf, box, begin)
            begin += num_elements(box)


def _leaves(stored: Stored, parameter: Parameter) -> Iterator[tuple[int, ShardedTensor]]:
    """The tensors that a parameter is stored as, in its order, and where each begins in it."""
    whole = torch.empty_like(parameter, device="meta")  # views of it tell their places
    built = replace(stored, data=whole)
    leaves = nested_values(built.build()) if isinstance(built, ShardedTensorFactory) else [built]
    end = 0
    for leaf in leaves:
        if not _follows(leaf.data, whole, end):
            raise TrainerError(f"{leaf.key}: stored in parts that are no ranges of its elements")
        yield end, leaf
        end += leaf.data.numel()


def _follows(part: Tensor, whole: Tensor, start: int) -> bool:
    is_view = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return is_view and part.is_contiguous() and part.storage_offset() == start


def _box(one: DistributedOptimizer, name: str, part: _Part, values: Tensor | None) -> ShardedTensor:
    """Describe a range of a parameter for a checkpoint.

    values: of the whole range.  Megatron may store a tensor behind further dims, which are 1.
    """
    leaf, lead = part.leaf, part.leaf.prepend_axis_num
    shape = (*[1] * lead, *map(len, part.box))
    inside = (*[0] * lead, *(side.start for side in part.box))
    end = part.begin + num_elements(part.box)
    return ShardedTensor(
        key=f"optimizer.state.{name}.{leaf.key}",
        data=None if values is None else values[part.begin : end].view(shape),
        dtype=torch.float32,
        local_shape=shape,
        global_shape=leaf.global_shape,
        global_offset=tuple(map(sum, zip(leaf.global_offset, inside, strict=True))),
        axis_fragmentations=None,  # boxes of a tensor differ in size
        # the parameter's, but data-parallel ranks have different ranges of it
        replica_id=(*leaf.replica_id[:2], one.distributed_optimizer_instance_id),
        allow_shape_mismatch=leaf.allow_shape_mismatch,
    )


@torch.no_grad()
def _fill(
    one: DistributedOptimizer, shard: Mapping[int, Mapping[str, Mapping[int, Tensor]]]
) -> None:
    for number, owned in enumerate(_owned(one)):
        values = {
            name: torch.cat([box.flatten() for box in boxes.values()])
            for name, boxes in shard[number].items()
        }
        live = one._get_main_param_and_optimizer_states(owned.parameter)
        if "step" in live:  # torch's Adam has one per parameter, restored with the groups
            values["step"] = live["step"]
        one._set_main_param_and_optimizer_states(owned.parameter, values)
    if isinstance(one.optimizer, HybridDeviceOptimizer):
        one.optimizer._sync_hdo_state_to_sub_optimizers()

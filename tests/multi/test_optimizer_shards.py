"""Ranges of elements as boxes, and the places of a parameter's parts in it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch.nn import Parameter

from moerl.core.errors import TrainerError
from moerl.layout.tiles import at, flat_boxes
from moerl.trainer.checkpoints.optimizer_shards import _leaves


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 3), (3, 1), (1, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_are_the_elements_of_a_range_in_its_order(shape: tuple[int, ...]) -> None:
    num = math.prod(shape)
    places = torch.arange(num).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(num + 1), 2):
        boxes = list(flat_boxes(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = [places[at(box)].flatten() for box in boxes]
        assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, stop))


def _whole(shape: tuple[int, ...]) -> ShardedTensor:
    """The second of two parts along the rows, in an entry of a dim before them."""
    data = Parameter(torch.arange(math.prod(shape), dtype=torch.bfloat16).view(shape))
    return ShardedTensor.from_rank_offsets("w", data, (0, 3, 8), (1, 1, 2), prepend_axis_num=1)


def test_a_tensor_that_is_stored_whole_is_its_own_leaf() -> None:
    stored = _whole((4, 3))
    assert stored.data is not None
    ((first, leaf),) = _leaves(stored, Parameter(stored.data))
    assert (first, leaf.key, leaf.local_shape) == (0, "w", (4, 3))
    assert stored.data is not leaf.data, "the model's own state is not changed"


def test_parts_along_the_rows_have_their_places() -> None:
    stored = _whole((6, 2))
    assert stored.data is not None
    gated: Any = apply_swiglu_sharded_factory(stored, ((0, 3, 8),))
    found = list(_leaves(gated, Parameter(stored.data)))
    assert [first for first, _ in found] == [0, 6]
    assert [leaf.global_offset for _, leaf in found] == [(3, 3, 0), (3, 9, 0)]
    split = _split_tensor_factory(stored, [1, 2, 3], ["q", "k", "v"], 0)
    found = list(_leaves(split, Parameter(stored.data)))
    assert [(first, leaf.key) for first, leaf in found] == [(0, "w.q"), (2, "w.k"), (6, "w.v")]


def test_parts_along_the_columns_are_refused() -> None:
    stored = _whole((2, 6))
    assert stored.data is not None
    split = _split_tensor_factory(stored, [2, 4], ["a", "b"], 1)
    with pytest.raises(TrainerError, match=r"w\.a: stored in parts that are no ranges"):
        list(_leaves(split, Parameter(stored.data)))

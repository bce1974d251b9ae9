"""Digest of a trainer's weights, equal for two trainers of one layout with equal weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from moerl.core.serialization import encode_value
from moerl.distributed.object_collectives import all_gather_values


def weights_digest(tensors: Mapping[str, Tensor], control: dist.ProcessGroup) -> str:
    """xxh3-128 over the ranks' digests of their tensors, by name; 32 hex digits.  Collective."""
    own = xxhash.xxh3_128()
    for name in sorted(tensors):
        own.update(name.encode())
        own.update(_bytes(tensors[name]))
    ranks = all_gather_values(own.hexdigest(), str, control)
    return xxhash.xxh3_128_hexdigest(encode_value(ranks))


def _bytes(tensor: Tensor) -> bytes:
    whole = tensor.detach().contiguous().reshape(-1)
    return whole.view(torch.uint8).cpu().numpy().tobytes()

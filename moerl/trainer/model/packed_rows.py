"""Rows of packed rollouts for megatron-core, with the rollouts' ends on the host, too.

Reading them from the device waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]  # untyped
    host_ends: Tensor | None = None  # cu_seqlens_q_padded


def lengths(packed: PackedSeqParams) -> list[int]:
    """Of the packed rollouts, padding included."""
    ends = packed.host_ends if isinstance(packed, PackedRows) else None
    found: list[int] = (packed.cu_seqlens_q_padded if ends is None else ends).diff().tolist()
    return found


class RotaryOnHostEnds:
    """Latent attention whose rotary embedding gets the ends that are on the host.

    megatron-core's unfused embedding of packed rows reads them twice for queries and twice for keys
    of each layer, and latent attention has no other (0.19.2: rope_utils.py).  Queries, keys and
    values are made with them for that embedding alone; attention gets those on the device.
    """

    config: Any

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        if not self.config.apply_rope_fusion:
            args = tuple(map(_on_host, args))
            kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        return super().get_query_key_value_tensors(*args, **kwargs)  # type: ignore[misc]


def _on_host(value: Any) -> Any:
    if not isinstance(value, PackedRows) or value.host_ends is None:
        return value
    ends = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), value.host_ends)
    return replace(value, **ends)

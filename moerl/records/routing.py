"""Routing records: from the engine's rows to layer-major narrow ids, checked on arrival.

The engine records [rows, num_layers, K]: every hidden layer, also dense layers (their rows are
never written, so they are dropped here by an explicit layer list).
Source: SGLang 0.5.23 `srt/state_capturer/routed_experts.py`.
"""

from __future__ import annotations

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import Array


def id_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """Narrowest unsigned type that holds every expert id."""
    return np.uint8 if num_experts <= 256 else np.uint16


def decode_engine_rows(
    rows: Array,
    *,
    num_rows: int,
    num_layers: int,
    moe_layers: tuple[int, ...],
    top_k: int,
    num_experts: int,
) -> Array:
    """Check the rows of one request.  Returns ids [L_moe, num_rows, K], u8 or u16.

    num_layers: hidden layers of the model; moe_layers: 0-based numbers of the MoE layers.
    Raises RecordError: `routing_rows` (another shape: the engine only logs a warning),
    `routing_range`, `routing_duplicate`, `routing_blank` (unwritten layer).
    """
    want = (num_rows, num_layers, top_k)
    if rows.shape != want or rows.dtype.kind not in "iu":
        raise RecordError("routing_rows", f"{rows.dtype} {rows.shape}, want rows, layers, K {want}")
    ids = rows[:, list(moe_layers)].transpose(1, 0, 2)
    check_ids(ids, num_experts)
    return np.ascontiguousarray(ids.astype(id_dtype(num_experts)))


def check_ids(ids: Array, num_experts: int) -> None:
    """Range and uniqueness of [L, rows, K] ids.  Raises RecordError naming the first bad place."""
    if ids.size == 0:
        return
    bad = (ids < 0) | (ids >= num_experts)
    if bad.any():
        layer, row, _ = np.argwhere(bad)[0]
        raise RecordError(
            "routing_range",
            f"MoE layer {layer} row {row}: ids {ids[layer, row].tolist()} "
            f"not in 0..{num_experts - 1}",
        )
    if ids.shape[-1] < 2:
        return
    ordered = np.sort(ids, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if repeated.any():
        layer, row = np.argwhere(repeated)[0]
        reason = "routing_blank" if not ids[layer].any() else "routing_duplicate"
        raise RecordError(
            reason, f"MoE layer {layer} row {row} repeats an expert: {ids[layer, row].tolist()}"
        )

"""The gate of a shared expert: SGLang has a Triton kernel for it only.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

from torch import Tensor


def add_gated(x_TH: Tensor, gate_H: Tensor, shared_TH: Tensor, output_TH: Tensor) -> None:
    """In place of fused_gate_sigmoid_mul_add: output += sigmoid(x . gate) * shared, in place.

    gate: [H] or [1, H], of any dtype.
    """
    gate_T1 = (x_TH @ gate_H.reshape(-1, 1).to(x_TH.dtype)).sigmoid()
    output_TH.addcmul_(gate_T1, shared_TH)

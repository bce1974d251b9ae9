"""A query/key norm over all heads (MiniMax-M2): SGLang has Triton kernels for it only.

The sums of squares are apart from the norm, so that tensor-parallel ranks can add theirs.

Legend: T tokens, Q and K elements of all query and key heads of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLE = 4  # of elements, which SGLang's own all-reduce wants


def sums_of_squares(q_TQ: Tensor, k_TK: Tensor) -> Tensor:
    """In place of rms_sumsq_serial: those of queries, then those of keys, [2 T and padding] f32."""
    sums = torch.cat([x.float().square().sum(-1) for x in (q_TQ, k_TK)])
    return torch.nn.functional.pad(sums, (0, -len(sums) % _MULTIPLE))


def normalise(
    q_TQ: Tensor,
    k_TK: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    sums: Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """In place of rms_apply_serial; sums: of all ranks, as sums_of_squares orders them."""
    tokens = len(q_TQ)
    q_sums, k_sums = sums[: 2 * tokens].split(tokens)
    return (
        _norm(q_TQ, q_weight, q_sums / (ranks * q_TQ.shape[1]), eps),
        _norm(k_TK, k_weight, k_sums / (ranks * k_TK.shape[1]), eps),
    )


def _norm(x: Tensor, weight: Tensor, mean_T: Tensor, eps: float) -> Tensor:
    scaled = x.float() * (mean_T + eps).rsqrt()[:, None]
    return (scaled * weight.float()).to(x.dtype)

"""Expert parallelism on a plain CPU: SGLang's torch path for experts runs on one rank only.

With experts spread over ranks SGLang numbers the experts of other ranks -1 and sums the ranks'
outputs afterwards.  Its kernels for GPUs skip the entries of -1; the torch path takes them for an
index and fails.  Here each rank runs its own (token, expert) pairs through that path, one expert
per token.  SGLang still routes, records the routes, maps experts to ranks and sums over ranks.

Rejected: a local expert with weight 0 (the torch path needs distinct experts per token).

Legend: T tokens, K experts of a token, P pairs of this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def forward(
    original: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, config: Any
) -> Tensor:
    """AROUND moe_forward_native: x [T, H], its experts [T, K], -1 where another rank has them."""
    ids_TK = topk_output.topk_ids
    token_P, choice_P = (ids_TK >= 0).nonzero(as_tuple=True)
    if len(token_P) == ids_TK.numel():
        return original(layer, x, topk_output, config)
    output_TH = x.new_zeros(x.shape)
    if not len(token_P):
        return output_TH
    pairs = topk_output._replace(
        topk_ids=ids_TK[token_P, choice_P, None],
        topk_weights=topk_output.topk_weights[token_P, choice_P, None],
    )
    return output_TH.index_add_(0, token_P, original(layer, x[token_P], pairs, config))

"""SGLang's sampler in torch, for machines without SGLang.

A restatement of `top_k_top_p_min_p_sampling_from_probs_torch` of SGLang 0.5.23 for requests without
seeds whose weights are asked for; tests/unit/test_top_k_first.py compares both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sort_and_sample(
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """(tokens [B], weights [B, V], ids [B, V], weight of each token [B])."""
    assert sampling_seed is None
    assert return_filtered_probs
    weights, ids = probs.sort(dim=-1, descending=True)
    sums = torch.cumsum(weights, dim=-1)
    ranks = torch.arange(weights.shape[-1], device=probs.device).view(1, -1)
    weights[ranks >= top_ks.view(-1, 1)] = 0.0
    weights[(sums - weights) > top_ps.view(-1, 1)] = 0.0
    if need_min_p_sampling:
        weights[weights < (weights[:, 0] * min_ps).view(-1, 1)] = 0.0
    drawn = torch.multinomial(weights, num_samples=1)
    selected = torch.gather(weights, 1, drawn).view(-1)
    ids = ids.to(torch.int32)
    return torch.gather(ids, 1, drawn).view(-1), weights, ids, selected

"""Sampling from the k likeliest tokens without sorting the vocabulary.

SGLang's sampler in torch takes this short way only where no sampling mask is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sample(
    original: Callable[..., Any],
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
    """Around `top_k_top_p_min_p_sampling_from_probs_torch`: it filters [B, max_top_k], not [B, V].

    Columns at rank top_k and beyond get weight 0 there, so the max_top_k largest carry all that
    survives.  Weights and ids are [B, max_top_k] then, which callers take like [B, V].  Requests
    with seeds keep the whole sort: their draws must not depend on the batch.
    """
    limits = (top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions)
    needs_all = sampling_seed is not None or not return_filtered_probs
    if max_top_k is None or max_top_k >= probs.shape[-1] or needs_all:
        return original(
            probs, *limits, return_filtered_probs=return_filtered_probs, max_top_k=max_top_k
        )
    largest, ids = torch.topk(probs, max_top_k, dim=-1)
    drawn, weights, columns, selected = original(largest, *limits, return_filtered_probs=True)
    token = ids.gather(1, drawn.long()[:, None]).view(-1).to(drawn.dtype)
    return token, weights, ids.gather(1, columns.long()).to(columns.dtype), selected

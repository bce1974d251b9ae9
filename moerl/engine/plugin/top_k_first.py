"""Sampling from the k likeliest tokens without sorting the vocabulary.

SGLang's sampler in torch takes a short way only without a sampling mask and a seed.  The order of
its sort is not defined for equal probabilities.  Here the lower id comes first, as in CUDA's sort,
so no column depends on k.

Read at 0.5.23: srt/layers/sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_STABLE = 64  # columns; CUDA's sort of up to 32 may exchange equal values


def sample(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    *limits: Any,
    max_top_k: int | None = None,
    **asked: bool,
) -> Any:
    """Around `top_k_top_p_min_p_sampling_from_probs_torch`: it filters [B, k], not [B, V].

    Columns at rank top_k and beyond get weight 0 there, and a seed's noise is a function of the
    column, so the max_top_k largest carry all that survives, and the draw.  Weights and ids are
    [B, k] then, which callers take like [B, V].
    """
    if max_top_k is None or max_top_k >= probs.shape[-1]:
        return original(probs, top_ks, *limits, max_top_k=max_top_k, **asked)
    columns = min(max(max_top_k, _STABLE), probs.shape[-1])
    return original(_Largest(*_largest(probs, columns)), top_ks, *limits, **asked)


@dataclass(frozen=True, slots=True)
class _Largest:
    """Sorted columns, in place of the probabilities that the original would sort."""

    weights: Tensor  # [B, k], written to
    ids: Tensor  # [B, k]

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def shape(self) -> torch.Size:
        return self.weights.shape

    def sort(self, *, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
        assert dim == -1, f"sorted along dim {dim}"
        assert descending, "sorted from the smallest"
        return self.weights, self.ids


def _largest(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if probs.is_cuda:  # its selection by digits takes equal values in the order of ids
        return torch.topk(probs, k)
    vocab = probs.shape[-1]
    bits = probs.float().view(torch.int32)  # ordered like the values, none of which is negative
    keys = torch.add(-torch.arange(vocab), bits, alpha=vocab)
    ids = torch.topk(keys, k).indices
    return probs.gather(1, ids), ids

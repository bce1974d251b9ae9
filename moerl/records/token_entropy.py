"""Entropy of each sampled token, from the engine's record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.core.types import Array


def token_entropies(logprobs: Array, support: Sequence[Array], *, is_whole: bool) -> Array:
    """[n] f16, nats.

    logprobs: [n] of the sampled tokens.  support: offsets [n + 1], ids and log-probabilities of
    recorded entries.  is_whole: they are all entries that can be sampled; otherwise the rest counts
    as one entry more.  Without log-probabilities of other entries it is the sampled token's -log q,
    whose mean is the entropy.
    """
    if len(support) < 3 or not len(logprobs):
        return (-logprobs).astype(np.float16)
    offsets, _, recorded = support
    logs = recorded.astype(np.float64)
    entropy = -np.add.reduceat(np.exp(logs) * logs, offsets[:-1])
    if not is_whole:
        rest = np.maximum(1e-12, 1.0 - np.add.reduceat(np.exp(logs), offsets[:-1]))
        entropy -= rest * np.log(rest)
    return entropy.astype(np.float16)

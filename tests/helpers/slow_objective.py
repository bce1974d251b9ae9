"""An objective whose passes last longer than the patience of a client."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moerl.algorithms.objectives import TokenLoss
from moerl.algorithms.tokens import Tokens
from moerl.config.schema import AlgorithmConfig

SECONDS = 4.0  # of each microbatch


def slow(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """The policy gradient."""
    time.sleep(SECONDS)
    loss = -t.advantage * torch.exp(t.logprob - old)
    never = torch.zeros_like(old, dtype=torch.bool)
    return TokenLoss(loss, low=never, high=never, dual=never)

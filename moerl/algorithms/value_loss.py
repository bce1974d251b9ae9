"""The critic's loss: regression to the return, clipped around the values it was sampled with.

Advantages and returns come from `moerl.algorithms.advantages.gae`.

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Loss of each token, to be weighted like a policy loss, and where the clip applied."""

    loss: Tensor  # [N], in the graph
    clipped: Tensor  # [N] bool


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, clip: float) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); clip 0 = no clip.

    The implementation of PPO (arXiv 1707.06347) in OpenAI baselines; the paper has no value clip.
    The maximum is pessimistic: clipping never lowers the loss.  value_N: in the graph; old values
    and returns are not.
    """
    free = (value_N - return_N.detach()).square()
    if clip <= 0:
        return ValueLoss(0.5 * free, torch.zeros_like(free, dtype=torch.bool))
    old = old_value_N.detach()
    near = old + (value_N - old).clamp(-clip, clip)
    held = (near - return_N.detach()).square()
    return ValueLoss(0.5 * torch.maximum(free, held), held > free)

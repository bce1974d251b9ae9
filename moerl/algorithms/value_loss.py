"""The critic's loss: regression to the return.

Advantages and returns come from `moerl.algorithms.advantages.gae`.

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

from torch import Tensor


def value_loss(value_N: Tensor, return_N: Tensor) -> Tensor:
    """1/2 (V - R)^2 of each token, to be weighted like a policy loss.

    value_N: in the graph; returns are not.  Values are not clipped, as in PPO (arXiv 1707.06347).
    """
    return 0.5 * (value_N - return_N.detach()).square()

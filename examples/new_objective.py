"""An objective of your own: the loss of each sampled token, named in a setting.

    moerl train quickstart algorithm.objective=examples.new_objective:soft_clip --run own-objective

PPO's clip has no gradient outside its interval.  This one bounds the log-ratio x smoothly,

    loss = -A exp(c tanh(x / c)),   x = logprob - old,   c = log(1 + clip_high)

so that the gradient fades with distance and is that of the policy gradient where x = 0.

Objectives are composed: the aggregation's weights, corrections for stale or mismatched tokens, KL
and entropy terms are added by moerl (docs/algorithms.md).  `algorithm.ratio` chooses `old`: the
engine's recorded log-probability, or the weights at the start of the batch.  An objective of your
own is taken to have a ratio and may read every setting of `AlgorithmConfig`.  To make it part of
moerl with a name and settings of its own, see CONTRIBUTING.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moerl.algorithms.objectives import TokenLoss
from moerl.algorithms.tokens import Tokens
from moerl.config.schema import AlgorithmConfig

FADED = 0.5  # a token counts as bounded where less than this share of its gradient is left


def soft_clip(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """Returns the loss of the N tokens of a microbatch and which of them were bounded.

    t.logprob: [N] of the current weights, in the graph; t.advantage: [N]; old: [N], no graph.
    """
    bound = math.log1p(s.clip_high)
    x = t.logprob - old
    loss = -t.advantage * torch.exp(bound * torch.tanh(x / bound))
    faded = 1.0 - torch.tanh(x.detach() / bound).square() < FADED
    never = torch.zeros_like(faded)
    return TokenLoss(loss, low=faded & (x.detach() < 0), high=faded & (x.detach() > 0), dual=never)

"""Inputs of the parts of a loss: flat tensors over sampled tokens, and sums over their sequences.

Objectives, corrections and KL terms read the same tensors, so they compose in any combination.
Everything is flat: padding, packing order and row shapes do not appear here.

A sequence is one row: all turns of an episode, unless `rollout.turn_rows` says otherwise.
Statistics of a sequence need all of its sampled tokens; where context parallelism cuts a sequence
over ranks, the trainer joins the tokens before the loss (docs/decisions/trainer.md, 14).

Legend: N sampled tokens of a microbatch on this rank, Q sequences of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_BOUND = 20.0  # nats; real log-ratios stay far below it, and no inf meets a 0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that is held within +-LOG_BOUND, as in verl."""
    return log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp()


@dataclass(slots=True, eq=False)
class Sequences:
    """Index of the sequence of each token.

    Example: two sequences of 3 and 1 sampled tokens: of [0, 0, 0, 1], count 2; mean([3, 0, 0, 5])
    is [1, 1, 1, 5].
    """

    of: Tensor  # [N] i64, 0..count - 1
    count: int  # Q
    _length_Q: Tensor | None = field(default=None, repr=False)

    def sum(self, values_N: Tensor) -> Tensor:
        """[Q]: sum over each sequence; differentiable."""
        return values_N.new_zeros(self.count).index_add(0, self.of, values_N)

    def length(self, dtype: torch.dtype) -> Tensor:
        """[Q]: tokens of each whole sequence, at least 1."""
        if self._length_Q is None:
            ones = torch.ones(len(self.of), dtype=torch.float64, device=self.of.device)
            self._length_Q = self.sum(ones).clamp(min=1)
        return self._length_Q.to(dtype)

    def mean(self, values_N: Tensor) -> Tensor:
        """[N]: at each token, the mean over its whole sequence."""
        return self.spread(self.sum(values_N) / self.length(values_N.dtype))

    def spread(self, values_Q: Tensor) -> Tensor:
        """[N]: at each token, the value of its sequence."""
        return values_Q[self.of]

    def share(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """[N]: 1 / length, so that sums of it over tokens count sequences."""
        return self.spread(1.0 / self.length(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens of one microbatch; log-probabilities in nats, at the sampling temperature and
    over the recorded sampling mask on both sides."""

    logprob: Tensor  # [N] current policy theta, in the graph
    engine: Tensor  # [N] behaviour policy mu, as the engine recorded it
    advantage: Tensor  # [N]
    sequences: Sequences
    lag: Tensor  # [N] i64, versions between the weights trained and those sampled with
    proximal: Tensor | None = (
        None  # [N] weights at the start of the batch; None = logprob, detached
    )
    reference: Tensor | None = None  # [N] reference policy
    teacher: Tensor | None = None  # [N] teachers, the sum of weight x log-probability
    entropy: Tensor | None = None  # [N] of the current policy, not in the graph
    centering: Tensor | None = None  # [N] C of score centering, in the graph
    teacher_kl: Tensor | None = None  # [N] KL over a support, in the graph
    m2_bound: float = math.inf  # bound of the whole batch, see corrections.m2_bound
    teacher_weight: Tensor | None = None  # [N] sum of the teachers' weights; None = 1

    @property
    def prox(self) -> Tensor:
        """[N], detached.

        In the first optimizer step of a batch the weights of this forward are the proximal weights,
        so with one step per batch no further forward is needed.
        """
        return (self.logprob if self.proximal is None else self.proximal).detach()

"""Online DPO: the policy's own best and worst answers to a prompt as a preference pair.

The loss of a pair, -log sigmoid(beta (h(chosen) - h(rejected))) with h = sum over the answer of
theta - ref (DPO, arXiv 2305.18290 eq. 7; on the policy's own answers, 2402.04792), is not a sum
over tokens, and its members may be on different ranks.  Its gradient is a sum: the gradient of the
two answers' log-probabilities, times beta sigmoid(-margin) and its negative.  So with the
margin known before the optimizer step (a forward pass over the batch), online DPO is an advantage,
exact for any split into microbatches and ranks.
Rejected: both members of a pair in one microbatch (long pairs would not fit).

Legend: P pairs, E episodes of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moerl.algorithms.advantages import Outcomes, plan_outcomes
from moerl.config.schema import AlgorithmConfig
from moerl.core.types import BatchPlan


def plan_pairs(
    algorithm: AlgorithmConfig, plan: BatchPlan, gains: Sequence[float]
) -> tuple[list[float], dict[str, float]]:
    """Advantage of each row of `plan.rows`, and metrics of the pairs before the optimizer step.

    gains: of each row, the sum over its sampled tokens of theta - ref.  Raises RecordError
    `score_missing`.
    """
    outcomes, place = plan_outcomes(algorithm, plan)
    gain_E = torch.zeros_like(outcomes.reward)
    for row, gain in zip(plan.rows, gains, strict=True):
        gain_E[place[row.group, row.episode]] += gain
    advantage_E, margin_P = pair_advantages(outcomes, gain_E, algorithm.dpo_beta)
    metrics = {"dpo/pairs": float(len(margin_P))}
    if len(margin_P):
        metrics["dpo/loss"] = -float(torch.nn.functional.logsigmoid(margin_P).mean())
        metrics["dpo/right_frac"] = float((margin_P > 0).double().mean())
    values = advantage_E.tolist()
    return [values[place[row.group, row.episode]] for row in plan.rows], metrics


def pair_advantages(o: Outcomes, gain_E: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """([E], [P]): advantages whose `reinforce` loss under weights 1 / E has the gradient of the
    mean loss over pairs, and the margins beta (h(chosen) - h(rejected))."""
    chosen_P, rejected_P = best_and_worst(o)
    margin_P = beta * (gain_E[chosen_P] - gain_E[rejected_P])
    push_P = beta * torch.sigmoid(-margin_P) * len(gain_E) / max(len(margin_P), 1)
    advantage_E = torch.zeros_like(gain_E)
    advantage_E[chosen_P], advantage_E[rejected_P] = push_P, -push_P
    return advantage_E, margin_P


def best_and_worst(o: Outcomes) -> tuple[Tensor, Tensor]:
    """Episodes with the highest and lowest reward of each group that has a spread: [P], [P].

    arXiv 2402.04792 section 3 with a reward in place of the judge; ties go to the first.
    """
    chosen, rejected = [], []
    for group in range(int(o.group.max()) + 1 if len(o.group) else 0):
        members = (o.group == group).nonzero()[:, 0]
        rewards = o.reward[members]
        if len(members) and rewards.max() > rewards.min():
            chosen.append(int(members[rewards.argmax()]))
            rejected.append(int(members[rewards.argmin()]))
    return torch.tensor(chosen, dtype=torch.int64), torch.tensor(rejected, dtype=torch.int64)

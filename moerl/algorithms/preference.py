"""Online DPO: the policy's own best and worst answers to a prompt as a preference pair.

Legend: P pairs, Q sequences of a microbatch, E episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.algorithms.advantages import Outcomes
from moerl.algorithms.tokens import Tokens


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


def online_dpo(t: Tokens, chosen_P: Tensor, rejected_P: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (h(chosen) - h(rejected))), h = sum over the sequence of theta - ref: [P].

    DPO (arXiv 2305.18290 eq. 7) on pairs of the current policy.  chosen_P, rejected_P: sequences of
    this call, so both members of a pair must be in one microbatch.  Sums, not means, over tokens:
    the log-probability of the whole answer.  Needs the reference over the same kept sets.
    """
    assert t.reference is not None, "online DPO needs log-probabilities of the reference policy"
    gain_Q = t.sequences.sum(t.logprob - t.reference.detach())
    return -torch.nn.functional.logsigmoid(beta * (gain_Q[chosen_P] - gain_Q[rejected_P]))

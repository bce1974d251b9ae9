"""The loss of one microbatch and its metrics, composed from the algorithm settings.

    sum over tokens of weight_N x (correction_N x objective_N + age_N x A_N x C_N + kl_coef x KL_N
                                   + distill_coef x teacher_KL_N - entropy_coef x entropy_N)

C is the term of score centering, which has the weight by ratio in it, so of the corrections it
takes those by age alone.  Distillation over the sampled token adds distill_coef x
(teacher - theta), without a graph, to the objective's advantage in place of the KL.
`weight_N` is the global weight of `moerl.algorithms.aggregation`, so the loss of a step is the
plain sum of this expression over ranks and microbatches.  Corrections scale the policy term only:
a rejected sequence keeps its KL term (DeepSeek-V3.2 eq. 5).  Counts include rejected tokens and are
f64.  A sequence is counted as 1 / length per token, so a sequence that is cut in part counts in
part.

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moerl.algorithms.corrections import Correction
from moerl.algorithms.kl import entropy_bonus, k3_of, unbiased
from moerl.algorithms.objectives import TokenLoss
from moerl.algorithms.registry import choose
from moerl.algorithms.tokens import Tokens, bounded_exp
from moerl.config.algorithms import CORRECTIONS, KLS, OBJECTIVES, exact_distillation
from moerl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of one microbatch and the sums for its metrics."""

    loss: Tensor  # scalar, in the graph
    sums: Tensor  # [len(SUM_NAMES)] f64; add them over microbatches and ranks


SUM_NAMES = (
    "tokens",
    "sequences",
    "pg",  # weighted terms as added to the loss
    "centering",
    "kl",
    "distill",
    "entropy_bonus",
    "clip_low",  # clipped tokens
    "clip_high",
    "clip_dual",
    "kl_value",  # sum over tokens of r * k3 against the reference
    "teacher_kl",  # sum over tokens of r * (theta - teacher), or of the KL over a support
    "drift",  # sum over sequences of mean(mu - theta)
    "moved_k3",  # sum over tokens of x - 1 - log x, x = theta / prox
    "rejected",  # tokens with weight 0
    "rejected_seqs",  # sequences, by the share of their tokens
    *(f"cut/{name}" for name in CORRECTIONS),  # tokens that the correction cut
    *(f"cut_seqs/{name}" for name in CORRECTIONS),  # cut sequences, by the share of their tokens
)


_TERMS = ("pg", "centering", "kl", "distill", "entropy_bonus")


def policy_loss(algorithm: AlgorithmConfig, t: Tokens, weight_N: Tensor) -> PolicyLoss:
    """The loss of one microbatch.  weight_N: [N], the aggregation's weight of each token.

    Without sampled tokens the loss is a zero that stays connected to `t.logprob`, so that backward
    runs on every rank.  Raises ConfigError for an unknown name.
    """
    if algorithm.distill_coef and not exact_distillation(algorithm):
        t = replace(t, advantage=t.advantage + algorithm.distill_coef * distillation(t))
    old = t.engine if algorithm.ratio == "engine" else t.prox
    token: TokenLoss = choose("algorithm.objective", algorithm.objective, OBJECTIVES)(
        t, old, algorithm
    )
    corrections = correct(algorithm, t)
    factor = age = torch.ones_like(t.engine)
    for name, correction in corrections.items():
        factor = factor * correction.weight
        age = age if CORRECTIONS[name].reweighs else age * correction.weight
    pg = (weight_N * factor * token.loss).sum()
    centering = kl = distill = entropy = torch.zeros_like(pg)
    if t.centering is not None:
        centering = (weight_N * age * t.advantage * t.centering).sum()
    if t.teacher_kl is not None:
        distill = algorithm.distill_coef * (weight_N * t.teacher_kl).sum()
    if algorithm.kl != "off":
        kl = algorithm.kl_coef * (weight_N * choose("algorithm.kl", algorithm.kl, KLS)(t)).sum()
    if algorithm.entropy_coef:
        entropy = -algorithm.entropy_coef * (weight_N * entropy_bonus(t)).sum()
    sums = _token_sums(t, token, factor, corrections)
    sums |= {"pg": pg, "centering": centering, "kl": kl, "distill": distill}
    sums |= {"entropy_bonus": entropy}
    loss = pg + centering + kl + distill + entropy
    return PolicyLoss(loss, _packed(sums, pg.device))


def _packed(sums: dict[str, Tensor | float], device: torch.device) -> Tensor:
    """The sums in the order of SUM_NAMES, on the device: the host does not wait for them."""
    values = [sums.get(name, 0.0) for name in SUM_NAMES]
    return torch.stack(
        [
            value.detach().double()
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=torch.float64, device=device)
            for value in values
        ]
    )


def distillation(t: Tokens) -> Tensor:
    """The advantage of on-policy distillation: sg(teacher - theta) per token, [N]; with several
    teachers the sum of weight x (teacher - theta).

    With an importance ratio, its policy gradient equals the gradient of -KL(theta, teacher), the
    reverse KL at each visited state (arXiv 2306.13649 section 3; thinkingmachines.ai/blog/
    on-policy-distillation).  Trap: the expected gradient of theta - teacher as a plain loss is
    zero; the difference must be an advantage.  The teacher is scored over the student's sampling
    mask.
    """
    assert t.teacher is not None, "distillation needs log-probabilities of the teacher"
    own = t.logprob if t.teacher_weight is None else t.teacher_weight * t.logprob
    return (t.teacher - own).detach()


def correct(algorithm: AlgorithmConfig, t: Tokens) -> dict[str, Correction]:
    """The configured corrections by name; the loss multiplies their weights."""
    return {
        name: choose("algorithm.corrections", name, CORRECTIONS)(t, algorithm)
        for name in algorithm.corrections
    }


def loss_metrics(algorithm: AlgorithmConfig, sums: Tensor, num_steps: int = 1) -> dict[str, float]:
    """Metrics of a batch, named as in docs/metrics.md; empty when the batch has no tokens.

    sums: added over microbatches and ranks.  num_steps: optimizer steps in the sums.  Weighted
    terms have one denominator per optimizer step and become means over the steps.
    """
    value = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    tokens, sequences = value["tokens"], value["sequences"]
    if not tokens:
        return {}
    for name in _TERMS:
        value[name] /= num_steps
    metrics = {
        "loss/pg": value["pg"],
        "loss/total": sum(value[name] for name in _TERMS),
        "loss/tokens": tokens,
        "loss/clip_low_frac": value["clip_low"] / tokens,
        "loss/clip_high_frac": value["clip_high"] / tokens,
        "loss/opsm_drift_mean": value["drift"] / sequences,
    }
    if num_steps > 1:
        metrics["loss/moved_k3"] = value["moved_k3"] / tokens
    if algorithm.objective in ("ppo_dual_clip", "dppo_tv", "dppo_kl"):
        metrics["loss/clip_dual_frac"] = value["clip_dual"] / tokens
    if algorithm.centering:
        metrics["loss/centering"] = value["centering"]
    if algorithm.kl != "off":
        metrics["loss/kl_ref"] = value["kl"]
    if algorithm.kl != "off" or algorithm.reward_kl_coef:
        metrics["loss/kl_ref_k3"] = value["kl_value"] / tokens
    if algorithm.distill_coef:
        metrics["loss/kl_teacher"] = value["teacher_kl"] / tokens
    if algorithm.entropy_coef:
        metrics["loss/entropy_bonus"] = value["entropy_bonus"]
    return metrics | _correction_metrics(algorithm, value)


def _correction_metrics(algorithm: AlgorithmConfig, value: dict[str, float]) -> dict[str, float]:
    """Shares of the tokens and sequences that corrections cut.  value: sums by name."""
    tokens, sequences = value["tokens"], value["sequences"]
    metrics = {}
    if algorithm.corrections:
        metrics["loss/reject_frac"] = value["rejected"] / tokens
        metrics["loss/seq_reject_frac"] = value["rejected_seqs"] / sequences
    for name in algorithm.corrections:
        metrics[f"loss/cut_frac/{name}"] = value[f"cut/{name}"] / tokens
        metrics[f"loss/cut_seq_frac/{name}"] = value[f"cut_seqs/{name}"] / sequences
    if "opsm" in algorithm.corrections:
        metrics["loss/opsm_frac"] = metrics["loss/cut_seq_frac/opsm"]
    return metrics


def _token_sums(
    t: Tokens, token: TokenLoss, factor: Tensor, corrections: dict[str, Correction]
) -> dict[str, Tensor | float]:
    share = t.sequences.share()
    rejected = factor == 0
    moved = (t.logprob.detach() - t.prox).double()
    sums: dict[str, Tensor | float] = {
        "tokens": float(len(t.logprob)),
        "sequences": share.sum(),
        "clip_low": token.low.sum(),
        "clip_high": token.high.sum(),
        "clip_dual": token.dual.sum(),
        "drift": ((t.engine - t.logprob.detach()).double() * share).sum(),
        "moved_k3": k3_of(moved).sum(),
        "rejected": rejected.sum(),
        "rejected_seqs": (share * rejected).sum(),
    }
    if t.reference is not None:
        with torch.no_grad():
            sums["kl_value"] = unbiased(t).double().sum()
    if t.teacher_kl is not None:
        sums["teacher_kl"] = t.teacher_kl.detach().double().sum()
    elif t.teacher is not None:
        ratio = bounded_exp(t.logprob.detach() - t.engine)
        sums["teacher_kl"] = -(ratio * distillation(t)).double().sum()
    for name, correction in corrections.items():
        sums[f"cut/{name}"] = correction.cut.sum()
        sums[f"cut_seqs/{name}"] = (share * correction.cut).sum()
    return sums


def value_loss(value_N: Tensor, return_N: Tensor) -> Tensor:
    """The critic's loss per token, [N]: 1/2 (V - R)^2, weighted like a policy loss by the caller.

    value_N is in the graph, return_N is not.  Values are not clipped, as in PPO (arXiv 1707.06347).
    """
    return 0.5 * (value_N - return_N.detach()).square()


def bce_loss(value_N: Tensor, label_N: Tensor) -> Tensor:
    """Binary cross entropy per token, [N]: values are logits, labels probabilities in [0, 1]."""
    return torch.nn.functional.binary_cross_entropy_with_logits(value_N, label_N, reduction="none")

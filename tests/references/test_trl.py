"""Our losses against TRL 1.16: value and gradient of `GRPOTrainer._compute_loss`, called unbound.

The trainer is replaced by the few attributes that the function reads.  All cases carry beta .04
with the bias-corrected KL, so the KL term is compared with each of them.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from moerl.algorithms.advantages import Outcomes, grpo_mean, grpo_std, rloo
from moerl.algorithms.corrections import opsm
from moerl.config.schema import AlgorithmConfig
from tests.helpers.ragged_batches import Ragged, differences, ours, ragged

BETA = 0.04
LIMIT = 1e-6  # fp32
SEEDS = (0, 1, 2)


def trl_loss(
    d: Ragged,
    loss_type: str,
    level: str = "token",
    opsm_delta: float | None = None,
    high: float = 0.28,
    beta: float = BETA,
    **more: object,
) -> Tensor:
    stub = types.SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=high,
        off_policy_mask_threshold=opsm_delta,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_vllm="importance_sampling_ratio" in more,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=d.mask.shape[1],
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction=None: x
        ),
        args=types.SimpleNamespace(
            delta=None,
            use_bias_correction_kl=True,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *a, **k: (d.lp, torch.ones_like(d.lp), None),
    )
    ids = torch.zeros_like(d.mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": d.mask,
        "advantages": d.A,
        "old_per_token_logps": d.old,
        "ref_per_token_logps": d.ref,
        "num_items_in_batch": d.mask.sum(),
        **more,
    }
    return GRPOTrainer._compute_loss(stub, None, inputs)


KL = AlgorithmConfig(kl="unbiased", kl_coef=BETA)
WIDTH = 11
CASES: dict[str, tuple[Callable[[Ragged], Tensor], AlgorithmConfig]] = {
    "grpo": (lambda d: trl_loss(d, "grpo"), KL),
    "bnpo": (lambda d: trl_loss(d, "bnpo"), replace(KL, aggregation="token_mean")),
    "dapo": (lambda d: trl_loss(d, "dapo"), replace(KL, aggregation="token_mean")),
    "dr_grpo": (
        lambda d: trl_loss(d, "dr_grpo"),
        replace(KL, aggregation="constant", constant_tokens=WIDTH),
    ),
    "cispo": (
        lambda d: trl_loss(d, "cispo", high=1.5),
        replace(KL, objective="cispo", clip_low=1.0, clip_high=0.5, aggregation="token_mean"),
    ),
    "sapo": (lambda d: trl_loss(d, "sapo"), replace(KL, objective="sapo")),
    "deepseek_v32": (
        lambda d: trl_loss(d, "grpo", opsm_delta=0.05),
        replace(KL, corrections=["opsm"], off_policy_delta=0.05),
    ),
    "gspo": (
        lambda d: trl_loss(d, "grpo", "sequence", beta=0.0),
        AlgorithmConfig(objective="gspo"),
    ),
    "gspo_token": (
        lambda d: trl_loss(d, "grpo", "sequence", beta=0.0),
        AlgorithmConfig(objective="gspo_token"),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_trl(name: str, seed: int) -> None:
    d = ragged(seed, torch.float32, width=WIDTH)
    theirs, config = CASES[name]
    value, gradient = differences(theirs(d), ours(config, d, d.tokens(d.old)), d.lp)
    assert value <= LIMIT, value
    assert gradient <= LIMIT, gradient


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["tis_token", "mis_token", "icepop"])
def test_corrections_multiply_as_in_trl(name: str, seed: int) -> None:
    """TRL is handed the weight; what is compared is where it enters, KL and denominator aside."""
    d = ragged(seed, torch.float32)
    w = (d.old - d.mu).exp()
    weight = {
        "tis_token": w.clamp(max=1.1),
        "mis_token": ((w >= 0.9) & (w <= 1.1)).float(),
        "icepop": torch.where((w >= 0.9) & (w <= 1.1), w, 0.0),
    }[name]
    config = replace(
        KL,
        ratio="proximal",
        corrections=[name],
        tis_cap=1.1,
        mis_token_low=0.9,
        mis_token_high=1.1,
        icepop_low=0.9,
        icepop_high=1.1,
        kl="off",
    )
    theirs = trl_loss(d, "grpo", beta=0.0, importance_sampling_ratio=weight)
    value, gradient = differences(theirs, ours(config, d, d.tokens(d.mu, d.old)), d.lp)
    assert max(value, gradient) <= LIMIT


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_mask_equals_trl(seed: int) -> None:
    d = ragged(seed, torch.float64)
    theirs = GRPOTrainer.get_off_policy_mask(d.A[:, None], d.lp, d.mu, d.mask, 0.02)
    config = AlgorithmConfig(corrections=["opsm"], off_policy_delta=0.02)
    mine = opsm(d.tokens(d.mu), config).weight
    assert torch.equal(mine, d.flat(theirs.expand_as(d.lp)))
    swapped = replace(d.tokens(d.mu), engine=2 * d.flat(d.lp).detach() - d.flat(d.mu))
    assert not torch.equal(opsm(swapped, config).weight, mine), "control: the sign of the drift"


def test_advantages_equal_trl_formulas() -> None:
    """TRL computes them inline: mean and unbiased std of each group of equal size, std + 1e-4."""
    torch.manual_seed(0)
    reward, group = torch.rand(12).double(), torch.arange(12) // 4
    none = torch.zeros(0, dtype=torch.int64)
    o = Outcomes(reward, group, torch.ones_like(group), none.double(), none, none)
    grouped = reward.view(3, 4)
    centred = (grouped - grouped.mean(1, keepdim=True)).flatten()
    std = grouped.std(1).repeat_interleave(4)
    torch.testing.assert_close(grpo_mean(o), centred)
    torch.testing.assert_close(grpo_std(o), centred / (std + 1e-4))
    torch.testing.assert_close(rloo(o), centred * 4 / 3)


def test_deviation_kl_of_the_sequence_form_uses_the_token_ratio() -> None:
    """TRL multiplies the KL by the SEQUENCE ratio when the policy term has one, eq. 7 never."""
    d = ragged(0, torch.float32)
    config = replace(KL, objective="gspo")
    value, _ = differences(trl_loss(d, "grpo", "sequence"), ours(config, d, d.tokens(d.old)), d.lp)
    assert value > 1e-4
    gap = d.lp - d.old
    log_s = (gap * d.mask).sum(1, keepdim=True) / d.mask.sum(1, keepdim=True)
    r = d.ref - d.lp
    both = (log_s.exp() - gap.exp()) * (r.exp() - 1 - r) * d.mask
    shift = BETA * (both.sum(1) / d.mask.sum(1)).mean()
    explained = ours(config, d, d.tokens(d.old)) + shift
    assert max(differences(trl_loss(d, "grpo", "sequence"), explained, d.lp)) <= LIMIT


def test_deviation_a_nan_engine_logprob_is_refused_at_the_door_not_counted_as_zero() -> None:
    """TRL counts it as no evidence in the drift; our records refuse it (`logprob_finite`)."""
    d = ragged(0, torch.float64)
    mu = d.mu.clone()
    mu[0, 0] = float("nan")
    theirs = GRPOTrainer.get_off_policy_mask(d.A[:, None], d.lp, mu, d.mask, 0.02)
    assert torch.isfinite(theirs).all()
    t = d.tokens(mu)
    drift = t.sequences.mean(t.engine - t.logprob.detach())
    assert torch.isnan(drift[: int(d.mask[0].sum())]).all()


def test_control_a_detached_kl_ratio_is_seen() -> None:
    d = ragged(0, torch.float32)
    wrong = replace(KL, kl="k3")
    config = replace(wrong, kl_coef=0.0)
    gap = (d.lp - d.old).exp().detach()
    r = d.ref - d.lp
    term = gap * (r.exp() - 1 - r) * d.mask
    detached = ours(config, d, d.tokens(d.old)) + BETA * (term.sum(1) / d.mask.sum(1)).mean()
    value, gradient = differences(trl_loss(d, "grpo"), detached, d.lp)
    assert value <= LIMIT
    assert gradient > 100 * LIMIT

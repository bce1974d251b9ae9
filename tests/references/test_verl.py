"""Our functions against verl 0.9.1 `core_algos` and `rollout_corr_helper`, value and gradient."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as core
import verl.trainer.ppo.rollout_corr_helper as corr
from torch import Tensor
from verl.workers.config.actor import ActorConfig

from moerl.algorithms import advantages, kl
from moerl.algorithms.advantages import Outcomes
from moerl.algorithms.loss import correct, value_loss
from moerl.algorithms.mismatch import MismatchSums
from moerl.config.schema import AlgorithmConfig
from tests.helpers.ragged_batches import Ragged, differences, ours, ragged

LIMIT = {torch.float32: 5e-6, torch.float64: 1e-9}
DTYPES = list(LIMIT)
SEEDS = (0, 1, 2)
WIDTH = 11
VERL_LENGTH_EPS = 1e-8  # added to |o| in its sequence means; visible in fp64 only


def verl_config(**changes: object) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        **changes,
    )


def verl_loss(d: Ragged, name: str, how: str, weight: Tensor | None = None) -> Tensor:
    config = verl_config()
    return core.get_policy_loss_fn(name)(d.old, d.lp, d.adv, d.mask, how, config, weight)[0]


SEQ, TOK = "seq-mean-token-mean", "token-mean"
DUAL = AlgorithmConfig(objective="ppo_dual_clip")
CONSTANT = {"aggregation": "constant", "constant_tokens": WIDTH}
CASES: dict[str, tuple[str, str, AlgorithmConfig]] = {
    "vanilla token-mean": ("vanilla", TOK, replace(DUAL, aggregation="token_mean")),
    "vanilla seq-mean-token-mean": ("vanilla", SEQ, DUAL),
    "vanilla seq-mean-token-sum": (
        "vanilla",
        "seq-mean-token-sum",
        replace(DUAL, aggregation="seq_mean_token_sum"),
    ),
    "vanilla constant": ("vanilla", "seq-mean-token-sum-norm", replace(DUAL, **CONSTANT)),
    "gspo": ("gspo", SEQ, AlgorithmConfig(objective="gspo")),
    "gspo_token": ("gspo", TOK, AlgorithmConfig(objective="gspo_token", aggregation="token_mean")),
    "gmpo": ("geo_mean", SEQ, AlgorithmConfig(objective="gmpo")),
    "cispo": ("cispo", TOK, AlgorithmConfig(objective="cispo", aggregation="token_mean")),
    "sapo": ("sapo", SEQ, AlgorithmConfig(objective="sapo")),
    "dppo_tv": (
        "dppo_tv",
        TOK,
        AlgorithmConfig(objective="dppo_tv", dppo_cap=3.0, aggregation="token_mean"),
    ),
    "dppo_kl": (
        "dppo_kl",
        TOK,
        AlgorithmConfig(objective="dppo_kl", dppo_cap=3.0, aggregation="token_mean"),
    ),
    "reinforce": ("gpg", TOK, AlgorithmConfig(objective="reinforce", aggregation="token_mean")),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_policy_loss_and_gradient_equal_verl(name: str, seed: int, dtype: torch.dtype) -> None:
    d = ragged(seed, dtype, width=WIDTH)
    theirs, how, config = CASES[name]
    more = VERL_LENGTH_EPS if how == SEQ and name != "gmpo" else 0.0
    mine = ours(config, d, d.tokens(d.old), more)
    value, gradient = differences(verl_loss(d, theirs, how), mine, d.lp)
    limit = 1e-7 if name == "gmpo" and dtype == torch.float64 else LIMIT[dtype]
    assert value <= limit, value  # gmpo: the same epsilon, inside the exponent
    assert gradient <= limit, gradient


def test_deviation_verl_adds_an_epsilon_to_the_length_of_a_sequence() -> None:
    d = ragged(0, torch.float64)
    theirs = verl_loss(d, "vanilla", SEQ)
    exact = differences(theirs, ours(DUAL, d, d.tokens(d.old)), d.lp)
    told = differences(theirs, ours(DUAL, d, d.tokens(d.old), VERL_LENGTH_EPS), d.lp)
    assert max(told) < 1e-14 < max(exact) < 1e-7


@pytest.mark.parametrize("seed", SEEDS)
def test_kimi_token_equals_verl_dro(seed: int) -> None:
    d = ragged(seed, torch.float64)
    config = verl_config()
    object.__setattr__(config, "policy_loss", types.SimpleNamespace(dro_beta=0.3))
    theirs = core.get_policy_loss_fn("dro")(d.old, d.lp, d.adv, d.mask, TOK, config)[0]
    mine = AlgorithmConfig(objective="kimi_token", kimi_tau=0.3, aggregation="token_mean")
    assert max(differences(theirs, ours(mine, d, d.tokens(d.old)), d.lp)) <= 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_decoupled_ppo_equals_verl_with_its_weights(seed: int) -> None:
    """-sg(prox / mu) min(u A, clip(u) A): verl's vanilla loss with token weights without a cap."""
    d = ragged(seed, torch.float64)
    weight = (d.old - d.mu).exp()
    config = replace(DUAL, ratio="proximal", corrections=["importance"], aggregation="token_mean")
    mine = ours(config, d, d.tokens(d.mu, d.old))
    assert max(differences(verl_loss(d, "vanilla", TOK, weight), mine, d.lp)) <= 1e-9


WEIGHTS: dict[str, tuple[str, float | str, AlgorithmConfig]] = {
    "tis_token": ("token", 1.2, AlgorithmConfig(corrections=["tis_token"], tis_cap=1.2)),
    "tis_sequence": ("sequence", 1.2, AlgorithmConfig(corrections=["tis_sequence"], tis_cap=1.2)),
    "icepop": (
        "token",
        "0.8_1.25",
        AlgorithmConfig(corrections=["icepop"], icepop_low=0.8, icepop_high=1.25),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_equal_verl(name: str, seed: int, dtype: torch.dtype) -> None:
    d = ragged(seed, dtype)
    level, limit, config = WEIGHTS[name]
    theirs, _ = corr.compute_rollout_correction_weights(d.old - d.mu, d.mask, level, limit)
    mine = correct(config, d.tokens(d.mu, d.old))[name]
    torch.testing.assert_close(mine.weight, d.flat(theirs), rtol=0, atol=LIMIT[dtype])
    assert mine.cut.any(), "control: something was cut"
    assert not mine.cut.all()


REJECTIONS: dict[str, tuple[str, str, AlgorithmConfig]] = {
    # verl bounds mu / prox, so its [lo, hi] is our [1 / hi, 1 / lo].
    "mis_token": (
        "token_k1",
        f"{1 / 1.25}_{1 / 0.9}",
        AlgorithmConfig(corrections=["mis_token"], mis_token_low=0.9, mis_token_high=1.25),
    ),
    "mis_sequence": (
        "seq_sum_k1",
        f"{1 / 1.25}_{1 / 0.7}",
        AlgorithmConfig(corrections=["mis_sequence"], mis_sequence_low=0.7, mis_sequence_high=1.25),
    ),
    "mis_geometric": (
        "seq_mean_k1",
        f"{1 / 1.05}_{1 / 0.98}",
        AlgorithmConfig(
            corrections=["mis_geometric"], mis_geometric_low=0.98, mis_geometric_high=1.05
        ),
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejections_equal_verl(name: str) -> None:
    cut = 0
    for seed in range(8):
        d = ragged(seed, torch.float64)
        option, limit, config = REJECTIONS[name]
        kept, _ = corr.compute_rollout_rejection_mask(d.old - d.mu, d.mask, option, limit)
        mine = correct(config, d.tokens(d.mu, d.old))[name]
        assert torch.equal(mine.weight, d.flat(kept))
        cut += int(mine.cut.sum())
    assert cut > 0


def test_control_the_rejection_bound_read_the_other_way_round_selects_others() -> None:
    d = ragged(0, torch.float64)
    config = REJECTIONS["mis_geometric"][2]
    wrong, _ = corr.compute_rollout_rejection_mask(d.old - d.mu, d.mask, "seq_mean_k1", "0.98_1.05")
    mine = correct(config, d.tokens(d.mu, d.old))["mis_geometric"]
    assert not torch.equal(mine.weight, d.flat(wrong))


def outcomes(d: Ragged) -> tuple[Outcomes, Tensor, np.ndarray]:
    """Ours, and verl's reward at the last token with its group names; groups of three."""
    lengths = torch.tensor(d.lengths)
    none = torch.zeros(0, dtype=torch.int64)
    group = torch.arange(len(d.A)) // 3
    o = Outcomes(d.A.double(), group, lengths, none.double(), none, none)
    last = torch.nn.functional.one_hot(lengths - 1, d.mask.shape[1]) * d.A[:, None]
    return o, last, np.array([f"g{int(g)}" for g in group])


ADVANTAGES: dict[str, Callable[[Tensor, Ragged, np.ndarray], Tensor]] = {
    "grpo_mean": lambda r, d, uid: core.compute_grpo_outcome_advantage(
        r, d.mask, uid, norm_adv_by_std_in_grpo=False
    )[0],
    "grpo_std": lambda r, d, uid: core.compute_grpo_outcome_advantage(
        r, d.mask, uid, epsilon=advantages._STD_EPS
    )[0],
    "rloo": lambda r, d, uid: core.compute_rloo_outcome_advantage(r, d.mask, uid)[0],
    "reinforce_pp": lambda r, d, uid: core.compute_reinforce_plus_plus_outcome_advantage(
        r, d.mask, types.SimpleNamespace(gamma=1.0)
    )[0],
    "reinforce_pp_baseline": (
        lambda r, d, uid: core.compute_reinforce_plus_plus_baseline_outcome_advantage(
            r, d.mask, uid
        )[0]
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_verl(name: str, seed: int) -> None:
    d = ragged(seed, torch.float64)
    o, last, uid = outcomes(d)
    theirs = d.flat(ADVANTAGES[name](last, d, uid))
    mine = getattr(advantages, name)(o).repeat_interleave(o.length)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kl_inside_the_reward_equals_verl(seed: int) -> None:
    d = ragged(seed, torch.float64)
    o, last, uid = outcomes(d)
    penalty = 0.1 * core.kl_penalty_forward(d.old, d.ref, "k1") * d.mask
    theirs = d.flat(ADVANTAGES["reinforce_pp"](last - penalty, d, uid))
    mine = advantages.reinforce_pp(replace(o, token_reward=-0.1 * d.flat(d.old - d.ref)))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    without = advantages.reinforce_pp(o).repeat_interleave(o.length)
    assert (mine - without).abs().max() > 1e-3, "control"


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_equals_verl_before_its_whitening(seed: int) -> None:
    d = ragged(seed, torch.float64)
    reward, value = d.ref * d.mask, d.mu * d.mask
    whitened, returns = core.compute_gae_advantage_return(reward, value, d.mask, 0.97, 0.9)
    lengths = torch.tensor(d.lengths)
    mine, target = advantages.gae(d.flat(reward), d.flat(value), lengths, 0.97, 0.9)
    torch.testing.assert_close(target, d.flat(returns), rtol=0, atol=1e-9)
    centred = (mine - mine.mean()) / (mine.var() + 1e-8).sqrt()
    torch.testing.assert_close(centred, d.flat(whitened), rtol=0, atol=1e-9)
    assert (mine - d.flat(whitened)).abs().max() > 1e-3, "deviation: ours is not whitened"


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_equals_verl(seed: int) -> None:
    d = ragged(seed, torch.float64)
    theirs, _ = core.compute_value_loss(d.lp, d.ref, d.old, d.mask, 1e9, TOK)  # never clips
    loss = value_loss(d.flat(d.lp), d.flat(d.ref)).mean()
    assert max(differences(theirs, loss, d.lp)) <= 1e-9
    clipped, share = core.compute_value_loss(d.lp, d.ref, d.old, d.mask, 0.3, TOK)
    assert share > 0
    assert clipped > loss, "deviation: ours is not clipped"


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_equal_verl(name: str) -> None:
    d = ragged(0, torch.float64)
    theirs = d.flat(core.kl_penalty_forward(d.lp, d.ref, name))
    mine = getattr(kl, name)(d.tokens(d.old))
    assert max(differences(theirs.sum(), mine.sum(), d.lp)) <= 1e-9
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


def test_k3_plus_equals_verl() -> None:
    d = ragged(0, torch.float64)
    theirs = d.flat(core.kl_penalty(d.lp, d.ref, "k3+"))
    mine = kl.k3_plus(d.tokens(d.old))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)
    assert max(differences(theirs.sum(), mine.sum(), d.lp)) <= 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_metrics_equal_verl(seed: int) -> None:
    d = ragged(seed, torch.float64)
    theirs = corr.compute_offpolicy_metrics(d.old, d.mu, d.mask)
    t = d.tokens(d.mu)
    sums = MismatchSums.of(d.flat(d.old), d.flat(d.mu), t.lag, t.sequences)
    mine = sums.metrics()
    for ours_, name in (
        ("k1", "kl"),
        ("k3", "k3_kl"),
        ("chi2_token", "chi2_token"),
        ("chi2_seq", "chi2_seq"),
        ("log_ppl_diff_mean", "log_ppl_diff"),
        ("log_ppl_diff_absmax", "log_ppl_abs_diff"),
    ):
        want = theirs[name]
        if ours_ == "log_ppl_diff_absmax":
            diff = ((d.old - d.mu) * d.mask).sum(1) / d.mask.sum(1)
            want = float(diff.abs().max())
        assert mine[f"mismatch/{ours_}"] == pytest.approx(want, abs=1e-6), ours_


# --- documented deviations -----------------------------------------------------------------------
def test_deviation_a_group_of_one_gets_zero_where_verl_gives_the_reward() -> None:
    reward, mask = torch.tensor([[0.0, 0.7]]).double(), torch.ones(1, 2).double()
    theirs = core.compute_grpo_outcome_advantage(
        reward.clone(), mask, np.array(["a"]), norm_adv_by_std_in_grpo=False
    )[0]
    none = torch.zeros(0, dtype=torch.int64)
    o = Outcomes(
        torch.tensor([0.7]).double(),
        torch.tensor([0]),
        torch.tensor([2]),
        none.double(),
        none,
        none,
    )
    assert theirs[0, 0].item() == pytest.approx(0.7)
    assert [float(f(o)[0]) for f in (advantages.grpo_mean, advantages.rloo)] == [0.0, 0.0]


def test_deviation_epsilon_of_the_group_standard_deviation() -> None:
    """verl adds 1e-6, TRL and we 1e-4: visible where rewards hardly differ."""
    d = ragged(0, torch.float64)
    o, last, uid = outcomes(d)
    theirs = d.flat(core.compute_grpo_outcome_advantage(last.clone(), d.mask, uid)[0])
    mine = advantages.grpo_std(o).repeat_interleave(o.length)
    gap = float((mine - theirs).abs().max())
    assert 1e-9 < gap < 1e-3


def test_deviation_verl_geo_mean_averages_over_the_rows_it_is_given() -> None:
    """Halves of a batch do not average to the batch when they hold different numbers of rows."""
    d = ragged(0, torch.float64, batch=5)
    config = AlgorithmConfig(objective="gmpo")
    whole = verl_loss(d, "geo_mean", SEQ)
    fn = core.get_policy_loss_fn("geo_mean")
    parts = [
        fn(d.old[s], d.lp[s], d.adv[s], d.mask[s], SEQ, verl_config())[0]
        for s in (slice(0, 2), slice(2, 5))
    ]
    assert abs(whole.item() - sum(parts).item() / 2) > 1e-3
    assert abs(whole.item() - ours(config, d, d.tokens(d.old)).item()) < 1e-7


def test_deviation_a_fully_masked_sequence_keeps_its_place_in_the_denominator() -> None:
    """verl drops it from the denominator unless given a global size: the others gain 6/5."""
    d = ragged(0, torch.float64)
    gap = d.old - d.mu
    d.mu[1] = d.old[1] - 3.0  # sequence 1 is far off: rejected whole
    config = AlgorithmConfig(
        ratio="proximal", corrections=["mis_geometric"], mis_geometric_low=0.2, mis_geometric_high=5
    )
    kept, _ = corr.compute_rollout_rejection_mask(d.old - d.mu, d.mask, "seq_mean_k1", "0.2_5")
    assert kept[1].sum() == 0
    assert torch.isfinite(gap).all()
    fn = core.get_policy_loss_fn("vanilla")
    mine = ours(replace(config, objective="ppo_dual_clip"), d, d.tokens(d.mu, d.old))
    local = fn(d.old, d.lp, d.adv, kept, SEQ, verl_config())[0]
    assert local.item() == pytest.approx(mine.item() * 6 / 5, abs=1e-7)
    told = verl_config()
    told.global_batch_info["global_batch_size"] = 6
    given = fn(d.old, d.lp, d.adv, kept, SEQ, told)[0]
    assert given.item() == pytest.approx(mine.item(), abs=1e-7)  # verl: length + 1e-8

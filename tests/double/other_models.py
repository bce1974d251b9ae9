"""Reference, teacher and critic of the model of `train_once`: numbers of the double and the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moerl.config.schema import AlgorithmConfig, ModelConfig, ReplayConfig, TeacherConfig
from moerl.core.types import Array, BatchPlan
from tests.double.train_once import (
    MODEL,
    REFERENCE,
    TEACHER,
    Numbers,
    Tensors,
    Trained,
    another,
    numbers,
    small_plan,
    without_times,
)

if TYPE_CHECKING:
    from moerl.trainer.learner.critic import Critic

SOUND_VARIANTS = ("none", "routing", "mask", "both")


# --- reference and teacher ------------------------------------------------------------------------
def ref_settings(reference: Path, teacher: Path) -> AlgorithmConfig:
    return AlgorithmConfig(
        kl="unbiased",
        kl_coef=0.5,
        reference=str(reference),
        distill_coef=1.0,
        teachers=[TeacherConfig(path=str(teacher))],
    )


def with_ref_models(first: Trained, folder: Path) -> Trained:
    algorithm = ref_settings(folder / REFERENCE, folder / TEACHER)
    return another(first, replace(first.learner.config, algorithm=algorithm))


def ref_numbers(trained: Trained) -> Numbers:
    return {"scores": scores(trained)} | numbers(trained)


def scores(trained: Trained, plan: BatchPlan | None = None) -> Tensors:
    """Log-probabilities of each role and microbatch."""
    from moerl.trainer.passes.schedule import Batches

    learner = trained.learner
    batches = Batches(plan or trained.plan, learner.config, learner.parallel, learner.store)
    return {
        f"{role}.{microbatch}": logprob.cpu()
        for role, policy in learner.ref_models.items()
        for microbatch, logprob in policy.logprobs(batches).items()
    }


# --- the critic -----------------------------------------------------------------------------------
def critic_settings(algorithm: AlgorithmConfig, rate: float = 5e-3) -> AlgorithmConfig:
    return replace(algorithm, advantage="gae", gae_lambda=0.9, critic_lr=rate)


def with_critic(first: Trained, rate: float = 5e-3) -> Trained:
    """With what else needs scores on the host: a KL in the reward, and M2PO's bound."""
    config = first.learner.config
    reference = Path(config.model.path).with_name(REFERENCE)
    algorithm = AlgorithmConfig(
        reward_kl_coef=0.1, reference=str(reference), corrections=["m2"], m2_limit=1e-3
    )
    algorithm = critic_settings(algorithm, rate)
    made = another(first, replace(config, algorithm=algorithm), with_critic=True)
    fill_head(critic_of(made))
    return made


def fill_head(critic: Critic) -> None:
    """With random numbers: below zeros nothing would get a gradient."""
    for chunk in critic.model.chunks:
        if chunk.has_loss:
            head = chunk.gpt.output_layer.weight
            noise = np.random.default_rng(0).normal(0, 0.3, tuple(head.shape))
            with torch.no_grad():
                head.copy_(torch.from_numpy(noise))


def critic_of(trained: Trained) -> Critic:
    assert trained.learner.critic is not None
    return trained.learner.critic


def critic_numbers(trained: Trained) -> Numbers:
    critic, plan = critic_of(trained), trained.plan
    found: Numbers = {
        "values": by_row(critic.values(plan)),
        "advantages": by_row(critic.advantages(plan)),
        "metrics": without_times(trained.learner.step(plan)),
    }
    named = dict(critic.model.gpt.named_parameters())
    found["gradients"] = {name: p.main_grad.cpu().clone() for name, p in named.items()}
    found["weights"] = {name: p.detach().cpu().clone() for name, p in named.items()}
    return found


def by_row(values: list[Array]) -> Tensors:
    return {f"row {row}": torch.tensor(value) for row, value in enumerate(values)}


# --- moerl mismatch -------------------------------------------------------------------------------
def audit(first: Trained, folder: Path, plan: BatchPlan | None = None) -> Numbers:
    """The scores of `moerl mismatch`: sound variants, and two controls."""
    from moerl.audit.score_job import ScoreJob
    from moerl.audit.score_ranks import _score_dtype

    learner = first.learner
    job = ScoreJob(
        str(folder / MODEL), "", "", "n0", "", [*SOUND_VARIANTS, "both_rotated", "both_prompt_live"]
    )
    tally = _score_dtype(job, "fp32", plan or first.plan, learner.store, learner.parallel)
    return {
        "logprobs": {
            f"{variant}/{rollout}": torch.tensor(values)
            for variant, found in tally.logprobs.items()
            for rollout, values in found.items()
        },
        "counts": dict(tally.counts),
        "pairs": {str(layer): torch.tensor(found) for layer, found in tally.layer_pairs.items()},
        "margins": torch.tensor(np.concatenate(tally.root_margin)),
    }


# --- further settings -----------------------------------------------------------------------------
_LOSSES = {
    "moe_z_loss_coeff": 1e-3,
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
TRAINER_SETTINGS: dict[str, dict[str, Any]] = {
    "packed rows": {"packing": True},
    "two optimizer steps": {"minibatches": 2},
    "router losses": {"megatron": _LOSSES},
    "recompute": {"megatron": _RECOMPUTE},
}
REPLAY_SETTINGS = {
    "routes of the proximal policy": ReplayConfig(routing="R2"),
    "live routes": ReplayConfig(routing="off"),
    "whole vocabulary": ReplayConfig(sampling_mask=False),
}
SETTINGS = (*TRAINER_SETTINGS, *REPLAY_SETTINGS)


def with_setting(first: Trained, name: str) -> Trained:
    config = first.learner.config
    trainer = replace(config.trainer, **TRAINER_SETTINGS.get(name, {}))
    replay = REPLAY_SETTINGS.get(name, config.replay)
    made = another(first, replace(config, trainer=trainer, replay=replay))
    return Trained(made.learner, small_plan(first, max_tokens=48, groups=2))


def with_latent_attention(first: Trained, folder: Path) -> Trained:
    """DeepSeek-V2's, in packed rows, with live routes: the records are of another model."""
    from tests.helpers.tiny_families import make_family_model

    make_family_model(folder, "deepseek_v2")
    config = first.learner.config
    trainer = replace(config.trainer, packing=True)
    changed = replace(
        config, model=ModelConfig(path=str(folder)), trainer=trainer,
        replay=ReplayConfig(routing="off", sampling_mask=False),
    )  # fmt: skip
    made = another(first, changed)
    return Trained(made.learner, small_plan(first, max_tokens=48, groups=2))


def probed(trained: Trained) -> dict[str, float]:
    """The consistency probe of a step."""
    from moerl.trainer.passes.probe import probe

    learner = trained.learner
    return probe(learner.model, trained.plan, learner.config, learner.parallel, learner.store)

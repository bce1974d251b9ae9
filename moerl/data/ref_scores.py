"""Log-probabilities of reference models (reference, teacher) from separate ranks, with digests.

Separate ranks score a batch while the trainer steps on the previous one, and their numbers come
with the plan, one set per row.  A number next to the wrong token trains silently wrong, so each set
carries a digest of everything it depends on, and the trainer computes the same digest from its own
copy of the record: the ids, which of them were sampled, the temperature, the sampling masks, and of
each model its folder, its configuration (the router list among it) and its precision.  Each set
names the version of every teacher that follows the policy; a batch has one version of each.

Rejected: scores in blobs next to the records (a restarted controller would sweep them).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from moerl.config.algorithms import followers_of, ref_models_of
from moerl.config.schema import Config
from moerl.core.errors import RecordError
from moerl.core.json_files import read_model_config
from moerl.core.types import Array, BatchPlan, RefScores, Rollout
from moerl.data.teacher_versions import teacher_step
from moerl.layout import model_spec


def basis_of(config: Config) -> str:
    """Digest of the models that score and their settings: equal on every process of a run."""
    return _basis(
        tuple(ref_models_of(config).items()), config.trainer.dtype, config.replay.sampling_mask
    )


@functools.cache
def _basis(models: tuple[tuple[str, str], ...], dtype: str, with_masks: bool) -> str:
    facts: list[object] = [dtype, with_masks]
    for role, folder in models:
        hf = read_model_config(Path(folder))
        routers = [list(model_spec(hf).moe_layers), model_spec(hf).experts_per_token]
        facts.append([role, folder, hf, routers])
    return xxhash.xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())


def record_digest(rollout: Rollout, basis: str) -> str:
    """Digest of the inputs of a rollout's scores.  basis: `basis_of` the run."""
    digest = xxhash.xxh3_64()
    digest.update(f"{basis} {rollout.rollout_id} {rollout.sampling.temperature!r}".encode())
    digest.update(np.ascontiguousarray(rollout.token_ids).tobytes())
    digest.update(np.ascontiguousarray(rollout.loss_mask).tobytes())
    for part in rollout.sampling_mask:
        digest.update(f"{part.first} {part.offsets.digest} {part.ids.digest}".encode())
    return digest.hexdigest()


def check_scores(scores: RefScores, rollout: Rollout, roles: Mapping[str, str]) -> None:
    """Raises RecordError (`ref_scores_...`) unless roles, length and numbers fit the rollout."""
    name = rollout.rollout_id
    if set(scores.logprobs) != set(roles):
        raise RecordError(
            "ref_scores_roles", f"{name}: scores of {sorted(scores.logprobs)}, want {sorted(roles)}"
        )
    for role, values in scores.logprobs.items():
        if values.dtype != np.float32 or values.shape != (rollout.num_sampled,):
            raise RecordError(
                "ref_scores_length",
                f"{name}: {role} gives {values.dtype} of shape {values.shape} for "
                f"{rollout.num_sampled} sampled tokens",
            )
        if not np.isfinite(values).all():
            raise RecordError(
                "ref_scores_finite", f"{name}: a {role} log-probability is not finite"
            )


def received(plan: BatchPlan, config: Config) -> dict[str, list[Array]]:
    """Role -> log-probabilities by row of the plan, as received with it.

    Raises RecordError (`ref_scores_...`) for a row without scores, or with scores of another row.
    """
    roles, basis = ref_models_of(config), basis_of(config)
    check_teachers(plan, config)
    if not roles:  # the ranks are there for reward models alone
        return {}
    if len(plan.ref_models) != len(plan.rows):
        raise RecordError(
            "ref_scores_rows",
            f"step {plan.step}: scores of {len(plan.ref_models)} rows, "
            f"the plan has {len(plan.rows)}",
        )
    for rollout, scores in zip(plan.rollouts(), plan.ref_models, strict=True):
        want = record_digest(rollout, basis)
        if (scores.rollout_id, scores.record) != (rollout.rollout_id, want):
            raise RecordError(
                "ref_scores_record",
                f"{rollout.rollout_id} {want}: scores are of {scores.rollout_id} {scores.record}; "
                "ids, temperature, sampling masks and models must be the scored ones",
            )
        check_scores(scores, rollout, roles)
        if scores.teachers != plan.teachers:
            raise RecordError(
                "ref_scores_version",
                f"{rollout.rollout_id}: scores of {named(scores.teachers)}, step {plan.step} has "
                f"{named(plan.teachers)}",
            )
    return {role: [scores.logprobs[role] for scores in plan.ref_models] for role in roles}


def check_teachers(plan: BatchPlan, config: Config) -> None:
    """Raises RecordError (`ref_scores_version`) unless the plan has the step's version of each
    teacher that follows the policy."""
    found = {name: version.step for name, version in plan.teachers.items()}
    followers = followers_of(config.algorithm)
    want = {name: teacher_step(teacher, plan.step) for name, teacher in followers.items()}
    if found != want:
        raise RecordError(
            "ref_scores_version", f"step {plan.step}: teachers of versions {found}, want {want}"
        )


def named(teachers: Mapping[str, object]) -> str:
    """For messages: `slow 0.4, fast 0.6`."""
    return ", ".join(f"{name} {version}" for name, version in sorted(teachers.items())) or "none"

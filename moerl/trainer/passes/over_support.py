"""Terms of the loss over entries of the vocabulary: which are wanted, and their sums per token.

Score centering needs the engine's log-probabilities, which the microbatch has; distillation over a
support needs the teacher's, from its forward pass before the first optimizer step.

Legend: N sampled tokens of the data-parallel rank, M of them on this rank, Z entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moerl.algorithms.device_copies import to_host, upload
from moerl.algorithms.head_logprob import SamplingMask, Scores, top_logprobs
from moerl.algorithms.support_losses import Support, centering, forward_kl, reverse_kl
from moerl.config.algorithms import RatioRule
from moerl.config.schema import AlgorithmConfig
from moerl.data.packing import Microbatch
from moerl.trainer.model.gpt import Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode
from moerl.trainer.passes import forward
from moerl.trainer.passes.schedule import Batches, values_of


@dataclass(frozen=True, slots=True, eq=False)
class TeacherSupport:
    """The teacher's log-probabilities of the entries of one microbatch."""

    entries: SamplingMask  # of M tokens, on the host
    logprobs: Tensor  # [Z]
    weight: Tensor | None = None  # [M] of the token's term, on the host


def teacher_supports(
    model: Model, algorithm: AlgorithmConfig, batches: Batches
) -> dict[int, TeacherSupport]:
    """By microbatch, on the last stage: over the recorded masks, or of the teacher's likeliest."""
    parallel = batches.parallel

    def over_mask(hidden: Tensor, batch: Microbatch) -> TeacherSupport:
        entries = _mask_of(batch)
        scores = forward.sampled_logprobs(model, hidden, batch, parallel, support=entries)
        assert scores.support is not None, "the support was asked for"
        return TeacherSupport(entries, scores.support)

    def likeliest(hidden: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor]:
        head = model.head(parallel.tp)
        k = min(algorithm.distill_top_k, head.vocab_size)
        tau = upload(batch.temperature[batch.held], hidden.device)
        return top_logprobs(hidden[0], head, k, temperature_S=tau)

    if algorithm.distill_over == "support":
        return values_of(over_mask, model, batches, Mode.OFF)
    found = values_of(likeliest, model, batches, Mode.OFF)
    ids = to_host({number: of_batch for number, (of_batch, _) in found.items()})
    return {
        number: TeacherSupport(_rows(ids[number]), logprobs.flatten())
        for number, (_, logprobs) in found.items()
    }


def of_tasks(
    every: Sequence[TeacherSupport], weights_N: Sequence[Tensor], held: Tensor
) -> TeacherSupport:
    """For each token the teacher of its task, with its weight.

    weights_N: [N] by teacher, at most one above 0.  held: [M], the rank's tokens.
    """
    weight_TM = torch.stack([weight_N[held] for weight_N in weights_N])
    first, owner_M = every[0], weight_TM.argmax(0)
    if len(every) == 1:
        return replace(first, weight=weight_TM[0])
    offsets = first.entries.offsets  # masks are the record's, and each teacher has as many ids
    owner_Z = owner_M.repeat_interleave(offsets.diff())[None]
    ids = torch.stack([one.entries.ids for one in every]).gather(0, owner_Z)[0]
    logprobs = torch.stack([one.logprobs for one in every])
    logprobs = logprobs.gather(0, upload(owner_Z, logprobs.device))[0]
    return TeacherSupport(SamplingMask(offsets, ids), logprobs, weight_TM.sum(0))


def wanted_entries(batch: Microbatch, teacher: TeacherSupport | None) -> SamplingMask | None:
    """Entries of the M tokens whose log-probabilities the loss needs."""
    if batch.support is not None:
        return SamplingMask(batch.support.offsets, batch.support.ids)
    return None if teacher is None else teacher.entries


def support_terms(
    algorithm: AlgorithmConfig,
    batch: Microbatch,
    scores: Scores,
    teacher: TeacherSupport | None,
    parallel: Parallel,
) -> dict[str, Tensor]:
    """The fields `centering` and `teacher_kl` of Tokens, [N] each, equal on all tp and cp ranks.

    scores: with the log-probabilities of `wanted_entries`; without them no term is wanted.
    """
    entries = wanted_entries(batch, teacher)
    if entries is None or scores.support is None:
        return {}
    device = scores.support.device
    lengths_M = upload(entries.offsets.diff(), device)
    is_whole = batch.mask_offsets is not None
    if batch.support is None:
        assert teacher is not None, "its entries are wanted"
        assert teacher.weight is not None, "teachers are weighed"
        kl = forward_kl if algorithm.distill_kl == "forward" else reverse_kl
        support = Support(scores.support, teacher.logprobs, lengths_M, is_whole)
        term = {"teacher_kl": upload(teacher.weight, device) * kl(support)}
    else:
        rule = RatioRule.of(algorithm)
        assert rule is not None, "algorithm.centering is checked when a run starts"
        engine = upload(batch.support.logprobs, device)
        advantage_M = upload(batch.advantage[batch.held], device)
        support = Support(scores.support, engine, lengths_M, is_whole)
        term = {"centering": centering(support, advantage_M, rule)}
    return {
        name: forward.gather_context_parallel(values_M, batch, parallel)
        for name, values_M in term.items()
    }


def _rows(ids_MK: Tensor) -> SamplingMask:
    num, k = ids_MK.shape
    return SamplingMask(torch.arange(num + 1) * k, ids_MK.flatten())


def _mask_of(batch: Microbatch) -> SamplingMask:
    if batch.mask_offsets is None or batch.mask_ids is None:  # a microbatch of padding
        return SamplingMask(torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.int32))
    return SamplingMask(batch.mask_offsets, batch.mask_ids)

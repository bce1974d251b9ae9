"""Sums of a training pass on each rank, joined over the trainer once, and their metrics.

Each token and each row is counted by one rank: where several ranks compute the same (tensor
parallel peers, or context parallel peers after the join of log-probabilities), the first counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.algorithms.device_copies import Download
from moerl.algorithms.head_logprob import Scores
from moerl.algorithms.loss import SUM_NAMES
from moerl.algorithms.mismatch import MismatchSums
from moerl.algorithms.tokens import Sequences
from moerl.core.step_counts import ratios
from moerl.core.types import Array
from moerl.data.packing import Microbatch
from moerl.trainer.passes.probe import exact_sums

_COUNTS = (
    "fed",  # fed-in tokens without padding, shared tokens once
    "shared",  # fed-in tokens that were forwarded in another rollout
    "forwarded",  # fed-in tokens with padding
    "fed_rows",  # fed-in tokens that this rank routes x its MoE layers
    "replayed_rows",  # recorded (token, layer) rows that routers consumed
    "routing_bytes",
    "fed_index_rows",  # fed-in tokens x layers whose sparse attention replays positions
    "indexer_rows",  # recorded (token, layer) rows that it consumed
    "indexer_bytes",
    "sampled",
    "sampled_truncated",  # sampled under a truncating recipe
    "masked",  # sampled tokens with a recorded sampling mask
    "kept",  # entries of all sampling masks
    "kept_singleton",
    "mask_bytes",
    "supported",  # sampled tokens with the engine's log-probabilities of a support
    "support_bytes",
    "entropy",
    "entropy_full",  # entropy over the whole vocabulary
    "sampled_full",  # tokens of entropy_full
    "router_z",  # weighted terms as added to the loss
    "router_balance",
)


def no_loss(device: torch.device = torch.device("cpu")) -> Tensor:
    """Zeros for `StepSums.loss`."""
    return torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class SampledScores:
    """Scores of one microbatch on their way to the host, to be counted after the pass."""

    batch: Microbatch
    proximal: Download  # [N]
    entropy: Download
    full_entropy: Download | None

    @classmethod
    def of(cls, batch: Microbatch, proximal_N: Tensor, scores: Scores) -> SampledScores:
        full = scores.full_entropy
        return cls(
            batch,
            Download(proximal_N),
            Download(scores.entropy),
            None if full is None else Download(full),
        )

    def wait(self) -> None:
        """Wait for these scores and all before."""
        (self.entropy if self.full_entropy is None else self.full_entropy).wait()


@dataclass(slots=True)
class StepSums:
    """Sums of one rank over the microbatches of an optimizer step."""

    loss: Tensor = field(default_factory=no_loss)  # on the device until it is joined
    mismatch: MismatchSums = field(default_factory=MismatchSums.zero)
    exact: MismatchSums = field(default_factory=MismatchSums.zero)  # see moerl.trainer.passes.probe
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0.0))
    kept_max: float = 0.0
    # [MoE layers of the model, experts]: (token, slot) pairs that the record sends to an expert
    load: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    scored: list[SampledScores] = field(default_factory=list)  # not counted yet
    # of this rank: (microbatch, its loss on the device)
    losses: list[tuple[int, Tensor]] = field(default_factory=list)

    def join(self, group: dist.ProcessGroup) -> StepSums:
        """Sums over the ranks of a gloo group."""
        loss = self.loss.cpu()
        packed = torch.cat([loss, torch.tensor(list(self.counts.values()), dtype=torch.float64)])
        dist.all_reduce(packed, group=group)
        peak = torch.tensor(self.kept_max, dtype=torch.float64)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        counts = dict(zip(self.counts, packed[len(SUM_NAMES) :].tolist(), strict=True))
        load = self.load.clone()
        dist.all_reduce(load, group=group)
        return StepSums(
            packed[: len(SUM_NAMES)],
            self.mismatch.all_reduce(group),
            self.exact.all_reduce(group),
            counts,
            float(peak),
            load,
            losses=self.losses,
        )

    def __iadd__(self, other: StepSums) -> StepSums:
        """Add the next optimizer step of the same batch."""
        self.loss = self.loss + other.loss
        self.mismatch += other.mismatch
        self.exact += other.exact
        self.counts = {name: count + other.counts[name] for name, count in self.counts.items()}
        self.kept_max = max(self.kept_max, other.kept_max)
        self.load = self.load + other.load if self.load.numel() else other.load
        return self

    def bad_losses(self) -> list[int]:
        """This rank's microbatches whose loss is not finite; waits for the device."""
        return [number for number, loss in self.losses if not bool(loss.isfinite())]

    def count_experts(self, layers: Sequence[int], counts_by_layer: Mapping[int, Array]) -> None:
        """Add the recorded tokens per expert of a microbatch.  layers: of the rows of `load`."""
        for layer, counts in counts_by_layer.items():
            self.load[layers.index(layer), : len(counts)] += torch.from_numpy(counts)

    def count_held(self, batch: Microbatch) -> None:
        """Count tokens and masks, which are split over context-parallel ranks."""
        counts = self.counts
        counts["fed"] += batch.num_fed
        counts["shared"] += batch.num_shared
        counts["forwarded"] += batch.tokens.numel()
        if batch.mask_offsets is not None:
            sizes = batch.mask_offsets.diff()
            counts["masked"] += len(sizes)
            counts["kept"] += float(sizes.sum())
            counts["kept_singleton"] += float((sizes == 1).sum())
            counts["mask_bytes"] += batch.read.mask
            if len(sizes):
                self.kept_max = max(self.kept_max, float(sizes.max()))
        if batch.support is not None:
            counts["supported"] += len(batch.support.offsets) - 1
            counts["support_bytes"] += batch.read.support

    def count_scored(self) -> None:
        """Count the scores of all microbatches, in their order: one wait for the whole pass."""
        if self.scored:
            self.scored[-1].wait()
        for scored in self.scored:
            batch, proximal_N = scored.batch, scored.proximal.get()
            sequences = Sequences(batch.seq, max(len(batch.rollouts), 1))
            self.mismatch += MismatchSums.of(
                proximal_N, batch.old_logprob, batch.lag, sequences, batch.joined
            )
            self.exact += exact_sums(batch, proximal_N)
            self._count_sampled(batch, scored)
        self.scored.clear()

    def _count_sampled(self, batch: Microbatch, scored: SampledScores) -> None:
        """Count sampled tokens and entropies, which are equal on context-parallel ranks."""
        self.counts["sampled"] += len(batch.sampled)
        self.counts["entropy"] += float(scored.entropy.get().sum())
        if scored.full_entropy is not None:
            self.counts["entropy_full"] += float(scored.full_entropy.get().sum())
            self.counts["sampled_full"] += len(batch.sampled)
        self.counts["sampled_truncated"] += sum(
            rollout.num_sampled for rollout in batch.rollouts if rollout.sampling.truncates
        )


def describe(sums: StepSums, *, shares: bool) -> dict[str, float]:
    """Coverage and payload metrics; metrics that could not be computed are absent."""
    counts = sums.counts
    metrics = ratios({name: count for name, count in counts.items() if count})
    metrics["perf/padding_frac"] = 1.0 - counts["fed"] / counts["forwarded"]
    if shares:
        metrics["perf/shared_frac"] = counts["shared"] / (counts["fed"] + counts["shared"])
    if counts["fed_rows"]:
        metrics["routing/fallback_rows"] = counts["fed_rows"] - counts["replayed_rows"]
        metrics["routing/bytes_per_token"] = counts["routing_bytes"] / counts["fed"]
    if counts["fed_index_rows"]:
        metrics["indexer/bytes_per_token"] = counts["indexer_bytes"] / counts["fed"]
    if counts["masked"]:
        metrics["keep/size_max"] = sums.kept_max
    return metrics


def load_metrics(load: Tensor, layers: Sequence[int]) -> dict[str, float]:
    """How evenly a step's tokens use the experts; empty when no recorded routes were read.

    load: joined `StepSums.load`; layers: the global numbers of its rows.
    """
    if not load.numel() or not bool((load.sum(1) > 0).all()):
        return {}
    share = load / load.sum(1, keepdim=True)
    even = math.log(load.shape[1]) if load.shape[1] > 1 else 1.0
    entropy = torch.special.entr(share).sum(1) / even
    dead = (load == 0).sum(1).double()
    metrics = {
        "routing/load_entropy_frac_mean": float(entropy.mean()),
        "routing/load_entropy_frac_min": float(entropy.min()),
        "routing/load_max_over_mean": float((share.amax(1) * load.shape[1]).max()),
        "routing/dead_experts": float(dead.sum()),
    }
    for layer, its_entropy, its_dead in zip(layers, entropy.tolist(), dead.tolist(), strict=True):
        metrics[f"routing/load_entropy_frac/layer_{layer}"] = its_entropy
        metrics[f"routing/dead_experts/layer_{layer}"] = its_dead
    return metrics

"""The consistency probe: checks on a sample, during training, that records and model agree.

1. exact, in every step without another forward: tokens at lag 0 before any change of weights in
their row must have the engine's log-probability up to rounding (behind one, the prefix rows are of
older weights, so these tokens differ legitimately).

Every `replay.probe` steps, before the step trains, one microbatch goes through the model twice
without gradients: once with its recorded routes, once with the live router.

2. routes: on inputs that no earlier difference has changed, the live router must agree with the
record on most tokens;
3. worth: recorded routes must not explain the engine much worse than live routes do.

Checks 2 and 3 hold at any lag and precision, so they also cover a pipeline that never trains at
lag 0.  A failed check is an alert, a number `alert/NAME` of 1 in the metrics of the step; `moerl
mismatch` then gives the details.  Rejected: ending the run (this is a statistic; records that break
their contract are refused on arrival), a copy of older weights (the segment audit has it).

Every layout is covered: the two forwards are passes of Megatron's schedule, and the differences of
a rank's routers are joined over tensor, context and pipeline parallel ranks (one byte per token and
layer of the microbatch), because a difference affects later positions and layers on other ranks.

Agreement of two choices of experts for the same tokens; differences count at their origin.

A layer reads the outputs of lower layers at its own and at earlier positions, so one near tie in a
prompt causes many differences; only the first is two routers disagreeing about one input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.algorithms.device_copies import upload
from moerl.algorithms.mismatch import MismatchSums
from moerl.config.schema import Config
from moerl.core.types import BatchPlan
from moerl.data.packing import Microbatch
from moerl.records.blob_store import RecordReads
from moerl.trainer.model.gpt import Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode, RouteReplay
from moerl.trainer.passes import forward
from moerl.trainer.passes.proximal import recorded_positions, recorded_routes
from moerl.trainer.passes.schedule import Batches, ScheduledPass, score


@dataclass(slots=True)
class RouteAgreement:
    """Counts of (token, layer) pairs; they add over microbatches and ranks."""

    pairs: float = 0.0
    agree: float = 0.0
    clean: float = 0.0  # pairs whose inputs no earlier difference has changed
    roots: float = 0.0  # clean pairs that differ

    @classmethod
    def of(
        cls, differs: Mapping[int, Tensor], real: Tensor, *, rows_per_position: int
    ) -> RouteAgreement:
        """Agreement of two routings.

        differs: layer -> [S * B] bool, position-major, of all layers and positions; real: not
        padding.
        """
        touched = downstream(differs, rows=rows_per_position)
        result = cls()
        for layer, differ in differs.items():
            clean = real & ~touched[layer]
            result.pairs += float(real.sum())
            result.agree += float((real & ~differ).sum())
            result.clean += float(clean.sum())
            result.roots += float((clean & differ).sum())
        return result

    def counts(self) -> list[float]:
        return [self.pairs, self.agree, self.clean, self.roots]

    @classmethod
    def of_counts(cls, counts: list[float]) -> RouteAgreement:
        return cls(*counts)

    @property
    def agree_frac(self) -> float:
        return self.agree / self.pairs

    @property
    def same_input_frac(self) -> float:
        return 1.0 - self.roots / self.clean


def downstream(differs: Mapping[int, Tensor], *, rows: int) -> dict[int, Tensor]:
    """Which router inputs an earlier difference has changed: layer -> [S * rows] bool.

    differs: layer -> [S * rows] bool, router order (row = s * rows + b), causal attention.
    """
    touched: dict[int, Tensor] = {}
    seen = torch.zeros_like(next(iter(differs.values()))).view(-1, rows)
    for layer in sorted(differs):
        touched[layer] = seen.reshape(-1)
        seen = seen | differs[layer].view(-1, rows).cummax(0).values
    return touched


# Nats.  fp32 on both sides: the largest, which measures 1e-5 and less.  bf16 rounds, and of a
# million tokens some differ by more than any limit, so 99 of 100 are judged: 0.03 and less are
# measured with both replays on a tiny model, above 0.3 with rows of other tokens.
# Weights that an engine rounded to fp8 blocks alone move tokens by more than that: no limit then.
EXACT_FP32, EXACT_BF16_P99 = 1e-3, 0.25
# Share of tokens.  Right records: 0.98 and more at lag 0, 0.85 to 0.95 one large step later and
# falling with age; rows of other tokens: near 0.
AGREE_FRESH, AGREE_STALE = 0.8, 0.3
WORSE_MAX, K3_FLOOR = 3.0, 1e-5  # k3 with the record against k3 of the live router; nats
MIN_TOKENS = 32  # fewer sampled tokens say nothing about a mean


@dataclass(slots=True)
class Findings:
    """Sums of one rank; joined over ranks by `join`."""

    replayed: MismatchSums = field(default_factory=MismatchSums.zero)
    live: MismatchSums = field(default_factory=MismatchSums.zero)
    exact: MismatchSums = field(default_factory=MismatchSums.zero)
    routes: RouteAgreement = field(default_factory=RouteAgreement)
    # MoE layer -> (pairs, agreeing pairs); the same layers on all ranks
    layers: dict[int, tuple[float, float]] = field(default_factory=dict)

    def join(self, parallel: Parallel) -> Findings:
        """Sum over ranks; of ranks with equal values the first counts."""
        group = parallel.control
        counts = torch.tensor(self.routes.counts(), dtype=torch.float64)
        dist.all_reduce(counts, group=group)
        by_layer = torch.tensor(list(self.layers.values()), dtype=torch.float64)
        dist.all_reduce(by_layer, group=group)
        pairs: list[list[float]] = by_layer.tolist()
        return Findings(
            self.replayed.all_reduce(group),
            self.live.all_reduce(group),
            self.exact.all_reduce(group),
            RouteAgreement.of_counts(counts.tolist()),
            {layer: (n, agree) for layer, (n, agree) in zip(self.layers, pairs, strict=True)},
        )


def due(config: Config, step: int) -> bool:
    """Whether this step is probed; the same on all ranks."""
    every = config.replay.probe
    return every > 0 and config.replay.routing == "R3" and step % every == 0


def probe(
    model: Model, plan: BatchPlan, config: Config, parallel: Parallel, store: RecordReads
) -> dict[str, float]:
    """Metrics `probe/*` and `alert/*` of one microbatch; all ranks call it together.

    Empty without routers.  Leaves no routes loaded.
    """
    if not model.spec.moe_layers or model.replay is None:
        return {}
    index = plan.step // config.replay.probe % plan.num_microbatches
    batches = Batches(plan, config, parallel, store, only=index)
    batch = batches.pack(0)
    own = _OwnRoutes(model.replay, batch, parallel)
    # routers run live over the recorded positions, so that any difference is of routing
    live = score(model, batches, Mode.RECORD, load=recorded_positions(model), after=own.compare)
    load = recorded_routes(model, parallel)
    replayed = score(model, batches, Mode.REPLAY, load=load)
    routes, layers = own.agreement(model.spec.moe_layers)
    found = Findings(routes=routes, layers=layers)
    if parallel.is_last_stage and parallel.tp_rank == parallel.cp_rank == 0:
        found.live, found.replayed = _sums(live[0], batch), _sums(replayed[0], batch)
        found.exact = exact_sums(batch, replayed[0])
    joined = found.join(parallel)
    return exact_metrics(joined.exact, config) | judge(joined)


class _OwnRoutes:
    """Differences between this rank's live routers and the record."""

    def __init__(self, replay: RouteReplay, batch: Microbatch, parallel: Parallel) -> None:
        self._replay, self._batch, self._parallel = replay, batch, parallel
        self._span = forward.routed_slots(batch, parallel)
        longest = max((rollout.num_tokens - 1 for rollout in batch.rollouts), default=0)
        self._shape = longest, len(batch.rollouts)
        self._differs: dict[int, Tensor] = {}  # layer -> [positions, rollouts] u8

    def compare(self, turn: ScheduledPass) -> None:
        """After the live forward of one chunk."""
        live = self._replay.take_live(turn.microbatch, turn.chunk.index)
        if turn.microbatch:  # padding that the interleaved schedule asks for
            return
        recorded = self._batch.routes(self._replay.chunks[turn.chunk.index], self._span)
        if not live:
            return
        every = torch.stack([choice.ids for choice in live.values()]).cpu()
        for key, ids in zip(live, every, strict=True):
            want = recorded[key.layer].long().sort(1).values
            other = (ids.sort(1).values != want).any(1)
            self._differs[key.layer] = self._by_position(other)

    def _by_position(self, rows: Tensor) -> Tensor:
        """[slots * B] bool in router order -> [positions, rollouts] u8, 0 on other ranks."""
        grid = rows.view(self._span[1] - self._span[0], -1)
        result = torch.zeros(self._shape, dtype=torch.uint8)
        pieces = self._batch.uses(*self._span)
        row, slot = pieces.places()
        result[pieces.positions(), pieces.rollout.repeat(pieces.num)] = grid[
            slot - self._span[0], row
        ].to(torch.uint8)
        return result

    def agreement(
        self, layers: Sequence[int]
    ) -> tuple[RouteAgreement, dict[int, tuple[float, float]]]:
        """Over all layers and positions of this data-parallel rank, and (pairs, agreeing) of each
        layer; counted by its first rank.
        """
        ranks, nothing = self._parallel, torch.zeros(self._shape, dtype=torch.uint8)
        none = RouteAgreement(), dict.fromkeys(layers, (0.0, 0.0))
        if not nothing.numel():
            return none
        every = torch.stack([self._differs.get(layer, nothing) for layer in layers])
        every = upload(every, ranks.device)
        for group in (ranks.tp, ranks.cp, ranks.pp):
            dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
        if ranks.tp_rank or ranks.cp_rank or ranks.pp_rank:
            return none
        fed = torch.tensor([rollout.num_tokens - 1 for rollout in self._batch.rollouts])
        real = (torch.arange(self._shape[0])[:, None] < fed).reshape(-1)
        flat = every.cpu().bool().flatten(1)
        differs = dict(zip(layers, flat, strict=True))
        pairs = float(real.sum())
        each = {layer: (pairs, float((real & ~other).sum())) for layer, other in differs.items()}
        return RouteAgreement.of(differs, real, rows_per_position=len(fed)), each


def _sums(logprob: Tensor, batch: Microbatch) -> MismatchSums:
    return MismatchSums.of(logprob.cpu(), batch.old_logprob, batch.lag)


def fresh_tokens(batch: Microbatch) -> Tensor:
    """[N] bool: sampled by the weights of this step, before any update in the row; with routes."""
    routed = torch.tensor([bool(rollout.routing) for rollout in batch.rollouts] or [False])
    return (batch.lag == 0) & ~batch.joined & routed[batch.seq]


def exact_sums(batch: Microbatch, logprob_N: Tensor) -> MismatchSums:
    """Sums over fresh tokens; logprob_N [N] of a microbatch, replayed under the step's weights."""
    fresh = fresh_tokens(batch)
    return MismatchSums.of(
        logprob_N.detach().cpu()[fresh], batch.old_logprob[fresh], batch.lag[fresh]
    )


def exact_metrics(exact: MismatchSums, config: Config) -> dict[str, float]:
    """Check 1, from joined sums; empty without fresh tokens or without both replays."""
    if config.replay.routing != "R3" or not config.replay.sampling_mask:
        return {}
    values = exact.metrics()
    if not values:
        return {}
    both_fp32 = config.trainer.dtype == "fp32" and config.engine.dtype == "float32"
    largest, most = values["mismatch/abs_dlogp_max"], values["mismatch/abs_dlogp_p99"]
    metrics = {
        "probe/exact_tokens": values["mismatch/tokens"],
        "probe/exact_abs_dlogp_max": largest,
        "probe/exact_abs_dlogp_p99": most,
    }
    if config.engine.args.get("quantization") is None:
        wrong = largest > EXACT_FP32 if both_fp32 else most > EXACT_BF16_P99
        metrics["alert/replay_exact"] = float(wrong)
    return metrics


def judge(findings: Findings) -> dict[str, float]:
    """Checks 2 and 3: metrics of joined findings, an alert (1 or 0) for each."""
    metrics: dict[str, float] = {}
    replayed, live, exact = (
        {name.removeprefix("mismatch/"): value for name, value in sums.metrics().items()}
        for sums in (findings.replayed, findings.live, findings.exact)
    )
    if findings.routes.clean:
        metrics["probe/live_agree_frac"] = findings.routes.agree_frac
        metrics["probe/live_agree_same_input_frac"] = findings.routes.same_input_frac
        fresh = exact.get("tokens", 0) == replayed.get("tokens")
        least = AGREE_FRESH if fresh else AGREE_STALE
        metrics["alert/replay_routes"] = float(findings.routes.same_input_frac < least)
    for layer, (pairs, agree) in findings.layers.items():
        if pairs:
            metrics[f"probe/live_agree_frac/layer_{layer}"] = agree / pairs
    if replayed.get("tokens", 0) >= MIN_TOKENS:
        metrics["probe/k3_replay"], metrics["probe/k3_live"] = replayed["k3"], live["k3"]
        limit = WORSE_MAX * live["k3"] + K3_FLOOR
        metrics["alert/replay_worth"] = float(replayed["k3"] > limit)
    return metrics

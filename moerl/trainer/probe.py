"""The consistency probe: do the records and the model still agree?  A sample, during training.

1. exact, in every step and for free: tokens at lag 0 of rollouts that no update interrupted must
   have the engine's log-probability up to rounding (a resumed rollout carries prefix rows of older
   weights, so its newest tokens differ honestly).

Every `replay.probe` steps, before the step trains, one microbatch goes through the model twice
without gradients: once with its recorded routes, once with the live router.

2. routes: on inputs that no earlier difference has touched, the live router must agree with the
   record on most tokens;
3. worth: recorded routes must not explain the engine much worse than live ones do.

The second and third hold at any lag and precision, so they also watch a pipeline that never trains
at lag 0.  What fails is an alert, a number `alert/NAME` of 1 in the metrics of the step: it is for
a person, who can look closer with `moerl mismatch`.  Rejected: ending the run (a record that breaks
its contract is refused at the door already; this is a statistic), keeping older weights to score
old tokens exactly (a copy of the model; the segment audit does it after the run).

With pipeline stages or context parallelism a rank alone has no log-probabilities, and only the
first question is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.algorithms.mismatch import MismatchSums
from moerl.blob.store import BlobStore
from moerl.config.schema import Config
from moerl.data.packing import Microbatch, pack_microbatch
from moerl.trainer import forward
from moerl.trainer.agreement import RouteAgreement
from moerl.trainer.model import Model
from moerl.trainer.parallel import Parallel
from moerl.trainer.replay import Mode
from moerl.types import BatchPlan

# Nats.  fp32 on both sides measures 1e-5 and less, bf16 0.1 and less; missing rows show above 0.3.
EXACT_FP32, EXACT_BF16 = 1e-3, 0.5
# Share of tokens.  Right records: 0.98 and more at lag 0, 0.85 to 0.95 one large step later and
# falling with age; rows of other tokens: a chance hit or two.
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

    def join(self, parallel: Parallel) -> Findings:
        """Tokens differ between data-parallel ranks, routed rows between all."""
        dp = parallel.dp_gloo
        counts = torch.tensor(self.routes.counts(), dtype=torch.float64)
        dist.all_reduce(counts, group=parallel.control)
        return Findings(
            self.replayed.all_reduce(dp),
            self.live.all_reduce(dp),
            self.exact.all_reduce(dp),
            RouteAgreement.of_counts(counts.tolist()),
        )


def due(config: Config, step: int) -> bool:
    """Whether this step is probed; the same on all ranks."""
    every = config.replay.probe
    return every > 0 and config.replay.routing == "R3" and step % every == 0


def probe(
    model: Model, plan: BatchPlan, config: Config, parallel: Parallel, store: BlobStore
) -> dict[str, float]:
    """Metrics `probe/*` and `alert/*` of one microbatch; all ranks call it together.

    Empty with pipeline stages, context parallelism or without routers.  Leaves no routes loaded.
    """
    sizes = parallel.sizes
    if model.replay is None or not model.replay.layers or sizes.pp > 1 or sizes.cp > 1:
        return {}
    index = plan.step // config.replay.probe % plan.num_microbatches
    batch = pack_microbatch(
        plan,
        parallel.dp_rank,
        index,
        store,
        read_mask=config.replay.sampling_mask,
        grid=forward.grid_of(parallel, packed=False),
    )
    found = Findings()
    was_training = model.module.training
    model.module.eval()
    try:
        with torch.no_grad():
            _forward(model, batch, index, parallel, found)
    finally:
        model.module.train(was_training)
        model.replay.clear()
    joined = found.join(parallel)
    return exact_metrics(joined.exact, config) | judge(joined)


def _forward(
    model: Model, batch: Microbatch, index: int, parallel: Parallel, found: Findings
) -> None:
    assert model.replay is not None
    recorded = forward.local_rows(batch.routes(model.replay.layers), parallel)
    live = forward.logits(model, model.module, batch, index, Mode.RECORD)
    rows = {layer: model.replay.live(index, layer).ids.cpu() for layer in recorded}
    real = forward.local_rows({-1: fed_rows(batch)[:, None]}, parallel)[-1][:, 0].cpu()
    found.routes = RouteAgreement.of(
        rows,
        {layer: ids.long() for layer, ids in recorded.items()},
        real,
        rows_per_position=len(batch.tokens),
    )
    model.replay.clear()
    found.live = _sums(forward.sampled_logprobs(model, live, batch, parallel)[0].cpu(), batch)
    model.replay.load(index, recorded)
    logits = forward.logits(model, model.module, batch, index, Mode.REPLAY)
    logprob = forward.sampled_logprobs(model, logits, batch, parallel)[0].cpu()
    found.replayed, found.exact = _sums(logprob, batch), exact_sums(batch, logprob)


def _sums(logprob: Tensor, batch: Microbatch) -> MismatchSums:
    return MismatchSums.of(logprob, batch.old_logprob, batch.lag)


def fed_rows(batch: Microbatch) -> Tensor:
    """[S * B] bool, router order: rows that are fed-in tokens, not padding."""
    length = batch.tokens.shape[1]
    fed = torch.zeros(len(batch.tokens), dtype=torch.long)
    for row, rollout in enumerate(batch.rollouts):
        fed[row] = rollout.num_tokens - 1
    return (torch.arange(length)[:, None] < fed[None]).reshape(-1)


def fresh_tokens(batch: Microbatch) -> Tensor:
    """[N] bool: sampled by the weights of this step, in a rollout that no update interrupted."""
    whole = torch.zeros(max(len(batch.rollouts), 1), dtype=torch.bool)
    for row, rollout in enumerate(batch.rollouts):
        one_version = len({part.version for part in rollout.routing}) == 1
        whole[row] = one_version and not any(span.kept_kv for span in rollout.versions)
    return (batch.lag == 0) & whole[batch.seq]


def exact_sums(batch: Microbatch, logprob_N: Tensor) -> MismatchSums:
    """Sums over fresh tokens; logprob_N [N] of a microbatch, replayed under the step's weights."""
    fresh = fresh_tokens(batch)
    return MismatchSums.of(
        logprob_N.detach().cpu()[fresh], batch.old_logprob[fresh], batch.lag[fresh]
    )


def exact_metrics(exact: MismatchSums, config: Config) -> dict[str, float]:
    """The first question, from joined sums; empty without fresh tokens or without both replays."""
    if config.replay.routing != "R3" or not config.replay.sampling_mask:
        return {}
    values = exact.metrics()
    if not values:
        return {}
    both_fp32 = config.trainer.dtype == "fp32" and config.engine.dtype == "float32"
    largest = values["mismatch/abs_dlogp_max"]
    return {
        "probe/exact_tokens": values["mismatch/tokens"],
        "probe/exact_abs_dlogp_max": largest,
        "alert/replay_exact": float(largest > (EXACT_FP32 if both_fp32 else EXACT_BF16)),
    }


def judge(found: Findings) -> dict[str, float]:
    """The second and third question: metrics of joined findings, an alert (1 or 0) for each."""
    metrics: dict[str, float] = {}
    replayed, live, exact = (
        {name.removeprefix("mismatch/"): value for name, value in sums.metrics().items()}
        for sums in (found.replayed, found.live, found.exact)
    )
    if found.routes.clean:
        metrics["probe/live_agree_frac"] = found.routes.agree_frac
        metrics["probe/live_agree_same_input_frac"] = found.routes.same_input_frac
        fresh = exact.get("tokens", 0) == replayed.get("tokens")
        least = AGREE_FRESH if fresh else AGREE_STALE
        metrics["alert/replay_routes"] = float(found.routes.same_input_frac < least)
    if replayed.get("tokens", 0) >= MIN_TOKENS:
        metrics["probe/k3_replay"], metrics["probe/k3_live"] = replayed["k3"], live["k3"]
        limit = WORSE_MAX * live["k3"] + K3_FLOOR
        metrics["alert/replay_worth"] = float(replayed["k3"] > limit)
    return metrics

"""The consistency probe: do the records and the model still agree?  A sample, during training.

Every `replay.probe` steps, before the step trains, one microbatch goes through the model twice
without gradients: once with its recorded routes, once with the live router.  Three questions:

1. exact: tokens at lag 0 of rollouts that no update interrupted must have the engine's
   log-probability up to rounding (a resumed rollout carries prefix rows of older weights);
2. routes: on inputs that no earlier difference has touched, the live router must agree with the
   record on most tokens;
3. worth: recorded routes must not explain the engine much worse than live ones do.

The second and third hold at any lag and precision, so they also watch a pipeline that never trains
at lag 0.  What fails is an alert, a number `alert/NAME` of 1 in the metrics of the step: it is for
a person, who can look closer with `moerl mismatch`.  Rejected: ending the run (a record that breaks
its contract is refused at the door already; this is a statistic), keeping older weights to score
old tokens exactly (a copy of the model; the segment audit does it after the run).

With pipeline stages there is no probe: a stage alone has no log-probabilities.  Nor is there with
context parallelism: where a difference began cannot be told from a part of the positions.
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
    both_fp32 = config.trainer.dtype == "fp32" and config.engine.dtype == "float32"
    return judge(found.join(parallel), EXACT_FP32 if both_fp32 else EXACT_BF16)


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
    found.live = _sums(model, live, batch, parallel)
    model.replay.load(index, recorded)
    logits = forward.logits(model, model.module, batch, index, Mode.REPLAY)
    found.replayed = _sums(model, logits, batch, parallel)
    found.exact = _sums(model, logits, batch, parallel, fresh_tokens(batch))


def _sums(
    model: Model,
    logits: Tensor,
    batch: Microbatch,
    parallel: Parallel,
    which: Tensor | None = None,
) -> MismatchSums:
    logprob = forward.sampled_logprobs(model, logits, batch, parallel)[0].cpu()
    take = slice(None) if which is None else which
    return MismatchSums.of(logprob[take], batch.old_logprob[take], batch.lag[take])


def fed_rows(batch: Microbatch) -> Tensor:
    """[S * B] bool, router order: rows that are fed-in tokens, not padding."""
    length = batch.tokens.shape[1]
    fed = torch.zeros(len(batch.tokens), dtype=torch.long)
    for row, rollout in enumerate(batch.rollouts):
        fed[row] = rollout.num_tokens - 1
    return (torch.arange(length)[:, None] < fed[None]).reshape(-1)


def fresh_tokens(batch: Microbatch) -> Tensor:
    """[N] bool: sampled by the weights of this step, in a rollout that no update interrupted."""
    whole = torch.zeros(max(len(batch.tokens), 1), dtype=torch.bool)
    for row, rollout in enumerate(batch.rollouts):
        whole[row] = len({part.version for part in rollout.routing}) == 1
    return (batch.lag == 0) & whole[batch.seq]


def judge(found: Findings, exact_max: float) -> dict[str, float]:
    """Metrics of joined findings, and an alert (1 or 0) for each question that has an answer."""
    metrics: dict[str, float] = {}
    replayed, live, exact = (
        {name.removeprefix("mismatch/"): value for name, value in sums.metrics().items()}
        for sums in (found.replayed, found.live, found.exact)
    )
    if exact:
        metrics["probe/exact_tokens"] = exact["tokens"]
        metrics["probe/exact_abs_dlogp_max"] = exact["abs_dlogp_max"]
        metrics["alert/replay_exact"] = float(exact["abs_dlogp_max"] > exact_max)
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

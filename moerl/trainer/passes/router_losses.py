"""Router z loss and sequence-wise balance loss with replayed routes, equal in every layout.

    z         coeff / T x sum over tokens of logsumexp(router logits)^2  (ST-MoE 2202.08906 eq. 5)
    balance   coeff / R x sum over rollouts of sum_i f_i P_i,  f_i = E c_i / (K t),  P_i = mean p_i
              (DeepSeek-V3 2412.19437 eq. 17-20; `seq_aux_loss` of megatron-core)

of each MoE layer, over the T fed-in tokens and R rollouts (of t tokens) of an optimizer step,
padding excluded.  c_i counts the tokens whose REPLAYED choice names expert i, as computed;
megatron-core 0.19.2 counts a live top-k instead, without expert bias and groups.  p_i are the live
probabilities over all experts (sigmoid scores normalised), so the gradient reaches the router.

The denominators count the plan, where megatron-core divides by tokens of a rank and a
microbatch, and counts of a rollout are added over the ranks that hold its positions.  Losses over
a microbatch (`aux_loss`) or a running mean over them (`global_aux_loss`) depend on the split by
definition: refused.  The gradient is attached where megatron-core attaches its own, once per row:
in the forward pass, or in its recompute.

A row of a token that several rollouts share counts in each of them.

Legend: N rows of one rank and microbatch in router order, U uses of them by rollouts (none of
padding), E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from moerl.algorithms.device_copies import upload
from moerl.config.schema import TrainerConfig
from moerl.core.types import BatchPlan
from moerl.data.packing import Microbatch
from moerl.trainer.model.gpt import Chunk, Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Key
from moerl.trainer.passes import forward

NAMES = ("router_z", "router_balance")
_SETTINGS = ("moe_z_loss_coeff", "moe_aux_loss_coeff", "moe_router_load_balancing_type")


def without_router_losses(trainer: TrainerConfig) -> TrainerConfig:
    """The same settings for a model that is not trained by router losses."""
    kept = {name: value for name, value in trainer.megatron.items() if name not in _SETTINGS}
    return replace(trainer, megatron=kept)


class RouterLosses:
    """Both losses of one rank's routers, in place of megatron-core's own."""

    def __init__(self, model: Model, parallel: Parallel) -> None:
        assert model.replay is not None, "router losses count replayed choices"
        self.replay, self.parallel = model.replay, parallel
        self.z_coeff = float(model.config.moe_z_loss_coeff or 0.0)
        self.balance_coeff = float(model.config.moe_aux_loss_coeff or 0.0)
        self._sums = self._zeros()
        self._tokens = self._rollouts = 0
        self._lengths: dict[int, Tensor] = {}  # microbatch -> [rollouts] fed-in tokens
        # microbatch -> ([U] row, [U] rollout) of each use
        self._uses: dict[int, tuple[Tensor, Tensor]] = {}
        self._counts: dict[Key, Tensor] = {}  # [rollouts, E] f32
        for chunk in model.chunks:
            for layer in chunk.gpt.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    number, router = layer.layer_number - 1, layer.mlp.router
                    router.apply_z_loss = partial(self._z, number)
                    router._apply_seq_aux_loss = partial(self._balance, number)

    @property
    def values(self) -> dict[str, float]:
        """Of this rank's rows since `begin`, as added to the loss; the host waits for them once."""
        return dict(zip(NAMES, self._sums.tolist(), strict=True))

    def _zeros(self) -> Tensor:
        return torch.zeros(len(NAMES), dtype=torch.float64, device=self.parallel.device)

    def begin(self, plan: BatchPlan) -> None:
        """Call before the training pass of an optimizer step."""
        turns = [turn for group in plan.groups for turn in group.rollouts()]
        self._tokens, self._rollouts = sum(r.num_tokens - 1 for r in turns), len(turns)
        self._sums = self._zeros()
        for kept in (self._lengths, self._uses, self._counts):
            kept.clear()

    def prepare(self, batch: Microbatch, microbatch: int, chunk: Chunk) -> None:
        """Record the rows of a pass after its routes were loaded: their rollouts and expert counts.

        Collective over tensor and context parallel ranks, which run passes in the same order.
        """
        first, last = forward.routed_slots(batch, self.parallel)
        pieces, device = batch.uses(first, last), self.parallel.device
        row, slot = pieces.places()
        row_U = torch.from_numpy((slot - first) * len(batch.tokens) + row)
        seq_U = torch.from_numpy(pieces.rollout.repeat(pieces.num))
        self._uses[microbatch] = upload(row_U, device), upload(seq_U, device)
        fed = [rollout.num_tokens - 1 for rollout in batch.rollouts]
        self._lengths[microbatch] = upload(torch.tensor(fed, dtype=torch.float32), device)
        layers = self.replay.chunks[chunk.index]
        if not (self.balance_coeff and layers and fed):
            return
        keys = [Key(microbatch, chunk.index, layer) for layer in layers]
        counts = torch.stack([self._count(key, row_U, seq_U, len(fed)) for key in keys])
        counts = upload(counts, device)
        for group in (self.parallel.tp, self.parallel.cp):
            dist.all_reduce(counts, group=group)
        self._counts |= dict(zip(keys, counts, strict=True))

    def _count(self, key: Key, row_U: Tensor, seq_U: Tensor, rollouts: int) -> Tensor:
        """[rollouts, E]: uses on this rank that name an expert."""
        ids = self.replay.rows(key)[row_U].long()
        cells = (seq_U[:, None] * self.replay.num_experts + ids).flatten()
        counts = torch.bincount(cells, minlength=rollouts * self.replay.num_experts)
        return counts.view(rollouts, self.replay.num_experts).float()

    def _z(self, layer: int, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Replaces `TopKRouter.apply_z_loss`.  logits: [N, E]."""
        if not (self.z_coeff and torch.is_grad_enabled()):
            return logits
        row_U, _ = self._uses[self.replay.serves(layer).microbatch]
        loss = z_loss(logits, row_U) * (self.z_coeff / self._tokens)
        return self._attach("router_z", logits, loss)

    def _balance(
        self, layer: int, probs: Tensor, scores_NE: Tensor, *_live: Any, **_unused: Any
    ) -> Tensor:
        """Replaces `TopKRouter._apply_seq_aux_loss`.  scores: live probabilities."""
        key = self.replay.serves(layer)
        if not (self.balance_coeff and torch.is_grad_enabled() and key in self._counts):
            return probs
        loss = balance_loss(
            scores_NE,
            *self._uses[key.microbatch],
            self._counts.pop(key),
            self._lengths[key.microbatch],
            self.replay.top_k,
        )
        return self._attach("router_balance", probs, loss * (self.balance_coeff / self._rollouts))

    def _attach(self, name: str, through: Tensor, loss: Tensor) -> Tensor:
        self._sums[NAMES.index(name)] += loss.detach().double()
        result: Tensor = MoEAuxLossAutoScaler.apply(through, loss)
        return result


def z_loss(logits_NE: Tensor, row_U: Tensor) -> Tensor:
    """Sum over uses of rows of logsumexp^2: a scalar."""
    return logits_NE.logsumexp(-1).square()[row_U].sum()


def balance_loss(
    scores_NE: Tensor,
    row_U: Tensor,
    seq_U: Tensor,
    counts_QE: Tensor,
    length_Q: Tensor,
    top_k: int,
) -> Tensor:
    """Sum over rollouts of this rank's share of sum_i f_i P_i: a scalar.

    counts_QE, length_Q: of whole rollouts, wherever their positions are.
    """
    experts = scores_NE.shape[1]
    weight_QE = counts_QE * (experts / top_k) / length_Q.square()[:, None]
    return (weight_QE.to(scores_NE.dtype)[seq_U] * scores_NE[row_U]).sum()

"""Random ragged batches, as the published implementations see them and as we do.

Theirs are [B, T] with a mask, ours are flat.  Inputs stay inside every clamp of either side.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moerl.algorithms.loss import policy_loss
from moerl.algorithms.registry import choose
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import AGGREGATIONS
from moerl.config.schema import AlgorithmConfig


@dataclass
class Ragged:
    """lp current (a leaf), old, mu, ref, value: [B, T]; A [B]; tokens past lengths are garbage."""

    mask: Tensor
    lp: Tensor
    old: Tensor
    mu: Tensor
    ref: Tensor
    A: Tensor

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.mask.sum(1)]

    @property
    def adv(self) -> Tensor:
        return self.A[:, None].expand_as(self.lp)

    def flat(self, values: Tensor) -> Tensor:
        return values[self.mask.bool()]

    def tokens(self, engine: Tensor, proximal: Tensor | None = None) -> Tokens:
        """Ours: `engine` is what the ratio is taken against, unless proximal is given."""
        of = torch.arange(len(self.mask))[:, None].expand_as(self.mask)
        of = of[self.mask.bool()]
        return Tokens(
            self.flat(self.lp),
            self.flat(engine),
            self.flat(self.adv),
            Sequences(of, len(self.mask)),
            torch.zeros_like(of),
            proximal=None if proximal is None else self.flat(proximal),
            reference=self.flat(self.ref),
        )


def ragged(seed: int, dtype: torch.dtype, batch: int = 6, width: int = 11) -> Ragged:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (batch,), generator=g)
    lengths[0] = width
    mask = (torch.arange(width)[None] < lengths[:, None]).to(dtype)
    lp = -torch.rand(batch, width, generator=g, dtype=torch.float64) * 3
    old = (lp + 0.4 * normal(batch, width)).clamp(max=-1e-3)
    mu = (old + 0.2 * normal(batch, width)).clamp(max=-1e-3)
    ref = (lp + 0.3 * normal(batch, width)).clamp(max=-1e-3)
    batch_ = Ragged(mask, lp, old, mu, ref, normal(batch))
    cast = {f.name: getattr(batch_, f.name).to(dtype) for f in fields(batch_)}
    result = replace(batch_, **cast)
    result.lp.requires_grad_()
    return result


def weights(config: AlgorithmConfig, data: Ragged, more: float = 0.0) -> Tensor:
    """Aggregation weight of each token, for one sequence per episode; `more`: added to lengths."""
    function = choose("algorithm.aggregation", config.aggregation, AGGREGATIONS)
    lengths = [length + more for length in data.lengths]
    per_seq = torch.tensor(function(lengths, config), dtype=data.lp.dtype)
    return data.flat(per_seq[:, None].expand_as(data.lp))


def ours(config: AlgorithmConfig, data: Ragged, tokens: Tokens, more: float = 0.0) -> Tensor:
    return policy_loss(config, tokens, weights(config, data, more)).loss


def differences(theirs: Tensor, mine: Tensor, leaf: Tensor) -> tuple[float, float]:
    """(value, largest gradient entry)."""
    grads = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (theirs, mine)]
    assert grads[0].abs().max() > 1e-4, "control: there is a gradient to compare"
    return abs(theirs.item() - mine.item()), float((grads[0] - grads[1]).abs().max())

"""LoRA next to unchanged weights, as engines with adapter slots compute it: y = W0 x + s B (A x).

The weights stay W0, so nothing is rounded and the reference pass only turns the sum off.  The
forward pass pays two thin products for each adapted layer.  Gradients reach the factors and the
layer's input through the sum; shards and communication are as in `Adapters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.trainer.model.adapted_layers import Factors, GradientHook, Linear
from moerl.trainer.model.lora import Adapters, Changes


class ServedAdapters(Adapters):
    """Adapters whose product is added to the output of their layer."""

    def __init__(self, lora: LoraConfig) -> None:
        super().__init__(lora)
        self.is_on = True
        self._before: list[Tensor] = []  # factors after the last `merge`

    def hook(self, linear: Linear, factors: tuple[Factors, ...]) -> GradientHook:
        return _SumHook(linear, factors, self)

    def keep_base(self) -> None:
        """The weights are W0 and stay so."""
        self.merge()

    def unmerge(self) -> None:
        """Compute with W0 alone until the next `merge`."""
        self.is_on = False

    @torch.no_grad()
    def merge(self) -> Changes:
        """Add the products again; counts elements of the factors, as no weight changes."""
        self.is_on, changes = True, Changes()
        now = [factor.detach().clone() for factor in self.parameters()]
        for old, new in zip(self._before, now, strict=False):
            changes.weights += new.numel()
            changes.changed += (old != new).sum()
        self._before = now
        return changes

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within it the weights are W0 + s B A, as a model folder has them; W0 is at lora.base."""
        super().keep_base()
        super().merge()
        try:
            yield
        finally:
            super().unmerge()
            self.drop_base()


class _SumHook(GradientHook):
    """After a frozen linear layer: its output plus the products of its factors."""

    def __init__(
        self, linear: Linear, factors: tuple[Factors, ...], adapters: ServedAdapters
    ) -> None:
        super().__init__(linear, factors, adapters.scale)
        self._adapters = adapters

    @property
    def is_on(self) -> bool:
        return self._adapters.is_on

    def through(self, x: Tensor, y: Tensor) -> Tensor:
        """y plus s B (A x), each part of a fused layer in its own rows."""
        parts = self.low_rank(x.to(y.dtype)).split([one.b.shape[1] for one in self._factors], -1)
        for one, h_TR in zip(self._factors, parts, strict=True):
            product = self._adapters.scale * torch.nn.functional.linear(h_TR, one.b.to(y.dtype))
            y = y + product if one.index is None else y.index_add(-1, one.index, product)
        return y

"""Agreement of two choices of experts for the same tokens; differences count at their origin.

A layer reads the outputs of lower layers at its own and at earlier positions, so one near tie in a
prompt causes many differences; only the first is two routers disagreeing about one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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

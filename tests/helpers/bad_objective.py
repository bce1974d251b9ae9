"""An objective of a user that is not finite for one microbatch, when it is told to.

`arm` chooses the microbatch by its place; the same microbatch is bad again when it is computed
again, as one with a bad record would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moerl.algorithms.objectives import TokenLoss, ppo_clip
from moerl.algorithms.tokens import Tokens
from moerl.config.schema import AlgorithmConfig

KINDS = ("loss", "gradient", "raises")
_state: dict[str, Any] = {"kind": "", "left": 0, "bad": None}


def arm(kind: str, number: int = 0, *, repeats: bool = True) -> None:
    """kind: of KINDS, "" for none.  number: calls before the bad one.  repeats: later calls too."""
    _state.update(kind=kind, left=number, bad=None, repeats=repeats)


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(grad, float("inf"))


def objective(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    found = ppo_clip(t, old, s)
    if not _state["kind"] or not _is_bad(t.engine):
        return found
    if _state["kind"] == "raises":
        raise ValueError("the objective does not like these tokens")
    loss = found.loss * float("nan") if _state["kind"] == "loss" else _BadGradient.apply(found.loss)
    return TokenLoss(loss, found.low, found.high, found.dual)


def _is_bad(engine: Tensor) -> bool:
    if not len(engine):  # a row of padding
        return False
    if _state["bad"] is not None:
        return bool(_state["repeats"]) and torch.equal(engine, _state["bad"])
    _state["left"] -= 1
    if _state["left"] >= 0:
        return False
    _state["bad"] = engine.clone()
    return True

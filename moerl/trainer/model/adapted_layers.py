"""Linear layers that can have adapters, and the hooks that send gradients to their factors.

The layers belong to megatron-core's local spec, and to Transformer Engine where it is installed:

    a norm in front of the projection   it gives out the normalised input, which A multiplies, when
    (TELayerNormColumnParallelLinear)   `return_layernorm_output` is set; the hook takes it off
    all experts of a rank in one call   rows of expert e follow those of e - 1, `m_splits` counts
    (TEGroupedLinear)                   them; each expert's rows meet its own factors

Both communicate in the same way: the input of a column-parallel layer is this rank's part of the
positions, gathered inside, the output of a row-parallel layer is scattered inside, and experts
leave it to their dispatcher.  The loop over experts costs some small kernels for each; no copy of
their rows is made.

Source of the flag: NeMo.  Legend: T tokens (and batch), R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.autograd import Function

from moerl.layout.adapters import Projection
from moerl.trainer.model.family_modules import DuplicatedLinear

# without Transformer Engine its layers are no classes
_GROUPED: tuple[type, ...] = (te.TEGroupedLinear,) if te.HAVE_TE else ()
_NORMED: tuple[type, ...] = (te.TELayerNormColumnParallelLinear,) if te.HAVE_TE else ()
_TE: tuple[type, ...] = (te.TELinear, *_NORMED, *_GROUPED) if te.HAVE_TE else ()
LAYERS: tuple[type[torch.nn.Module], ...] = (
    ColumnParallelLinear, RowParallelLinear, DuplicatedLinear, TopKRouter, *_TE,
)  # fmt: skip
Linear: TypeAlias = torch.nn.Module
"""One of LAYERS."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A and B of one Hugging Face weight on this rank."""

    projection: Projection
    a: torch.nn.Parameter  # [rank, cols]
    b: torch.nn.Parameter  # [rows, rank]
    index: Tensor | None  # rows of the local weight in the order of B; None: all of them


def has_experts(linear: Linear) -> bool:
    """Whether it is of routed experts."""
    return bool(getattr(linear, "is_expert", False)) or isinstance(linear, _GROUPED)


def is_grouped(linear: Linear) -> bool:
    """Whether it has one weight for each expert of this rank: `weight0`, `weight1`, ..."""
    return isinstance(linear, _GROUPED)


def tensor_group(linear: Linear) -> dist.ProcessGroup | None:
    """Ranks that cut this layer; None: it is whole on each rank."""
    found: dist.ProcessGroup | None = getattr(
        linear, "_tp_group" if isinstance(linear, _TE) else "tp_group", None
    )
    return found


def exchange(linear: Linear) -> Literal["", "gather", "scatter"]:
    """Handling of the sequence inside a layer: gather its input, scatter its output, neither.

    Experts do neither, nor do layers that are whole on each rank.
    """
    layer: Any = linear
    if isinstance(linear, _TE):
        column, row = (layer.parallel_mode == mode for mode in ("column", "row"))
        is_cut = layer.tp_size > 1
    else:
        column = isinstance(linear, ColumnParallelLinear)
        row = isinstance(linear, RowParallelLinear)
        is_cut = (column or row) and not layer.explicit_expert_comm and layer.tp_group.size() > 1
    if not is_cut or not (column or row):
        return ""
    assert layer.sequence_parallel, "tensor parallelism comes with sequence parallelism"
    return "gather" if column else "scatter"


class GradientHook:
    """After a frozen linear layer: the same output, with a way for gradients to its factors."""

    def __init__(self, linear: Linear, factors: tuple[Factors, ...], scale: float) -> None:
        self._factors, self._scale = factors, scale
        self._group, self._exchange = tensor_group(linear), exchange(linear)
        self._is_normed = isinstance(linear, _NORMED)
        if self._is_normed:
            setattr(linear, "return_layernorm_output", True)  # noqa: B010

    def __call__(self, linear: Linear, args: tuple[Tensor, ...], output: Any) -> tuple[Tensor, Any]:
        y, bias = output
        (x, *_) = args
        if self._is_normed:
            y, x = y
        return (self.through(x, y) if self.is_on else y), bias

    @property
    def is_on(self) -> bool:
        """Whether a call needs `through`."""
        return torch.is_grad_enabled()

    def through(self, x: Tensor, y: Tensor) -> Tensor:
        """y, with a way for its gradient to the factors; x: of the layer.  Routers widen theirs."""
        h_TR = self.low_rank(x.detach().to(y.dtype))
        return _straight_through(y, self._scale, [_Rows(slice(None), h_TR, self._factors)])

    def through_weight(self, weight: Tensor) -> Tensor:
        """The frozen weight [N, K] of an expert, with a way for its gradient to the factors."""
        pairs = [factor for one in self._factors for factor in (one.a, one.b)]
        indices = [one.index for one in self._factors]
        made: Tensor = _ThroughWeight.apply(weight, self._scale, indices, *pairs)  # type: ignore[no-untyped-call]
        return made

    def low_rank(self, x: Tensor) -> Tensor:
        """[..., ranks of all factors] product of x and every A, for the positions of the output."""
        h_TR = _products(x, self._factors)
        if self._exchange == "gather":
            h_TR = gather_from_sequence_parallel_region(h_TR, group=self._group)
        if self._exchange == "scatter":
            h_TR = reduce_scatter_to_sequence_parallel_region(h_TR, group=self._group)
        return h_TR


class GroupedHook:
    """After the experts of a rank in one layer: a `GradientHook` of each, for its own rows."""

    def __init__(self, experts: Mapping[int, tuple[Factors, ...]], scale: float) -> None:
        self._experts, self._scale = experts, scale  # by the expert's number on this rank

    def __call__(
        self, linear: Linear, args: tuple[Tensor, Sequence[int]], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any] | None:
        if not torch.is_grad_enabled():
            return None
        y, bias = output
        x, counts = args
        rows = list(self._rows(x.detach().to(y.dtype), counts))
        return _straight_through(y, self._scale, rows), bias

    def _rows(self, x: Tensor, counts: Sequence[int]) -> Iterator[_Rows]:
        """Of each expert that has factors; those without tokens too, for a gradient of zeros."""
        ends = list(accumulate(counts, initial=0))
        assert ends[-1] == len(x), f"{ends[-1]} rows of experts, {len(x)} rows of the input"
        for expert, (start, stop) in enumerate(pairwise(ends)):
            if factors := self._experts.get(expert):
                own = slice(start, stop)
                yield _Rows(own, _products(x[own], factors), factors)


@dataclass(frozen=True, slots=True, eq=False)
class Gating:
    """A router's `gating`: logits, with a way for their gradient to its factors."""

    plain: Callable[[Tensor], Tensor]
    hook: GradientHook

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.plain(x)
        return self.hook.through(x, logits) if torch.is_grad_enabled() else logits


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of an output that have the same factors, and their products with every A."""

    place: slice
    h: Tensor  # [..., R]
    factors: tuple[Factors, ...]


def _products(x: Tensor, factors: Sequence[Factors]) -> Tensor:
    a_all = torch.cat([one.a for one in factors]).to(x.dtype)
    return torch.nn.functional.linear(x, a_all)


def _straight_through(y: Tensor, scale: float, rows: Sequence[_Rows]) -> Tensor:
    places = [(part.place, [one.index for one in part.factors]) for part in rows]
    tensors = [tensor for part in rows for tensor in (part.h, *(one.b for one in part.factors))]
    made: Tensor = _StraightThrough.apply(y, scale, places, *tensors)  # type: ignore[no-untyped-call]
    return made


class _StraightThrough(Function):
    """y unchanged; backward: as if s (h B') were a part of it, in the rows of each h."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: float, places: Any, *tensors: Tensor) -> Tensor:
        """Return y and keep h and B for backward.

        places: rows of y and indices of each B; tensors: for each place its h, then its Bs.
        """
        ctx.save_for_backward(*tensors)
        ctx.scale, ctx.places = scale, places
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        flat, tensors, found = dy.flatten(0, -2), iter(ctx.saved_tensors), []
        for place, indices in ctx.places:
            h, bs = next(tensors), [next(tensors) for _ in indices]
            found += _factor_gradients(ctx.scale, flat[place], h, bs, indices)
        return dy, None, None, *found


class _ThroughWeight(Function):
    """W unchanged; backward: as if s B A were a part of its rows at each index."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float, indices: Any, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        ctx.scale, ctx.indices = scale, indices
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dw,), pairs, found = grads, iter(ctx.saved_tensors), []
        for index in ctx.indices:
            a, b = next(pairs), next(pairs)
            own = dw if index is None else dw.index_select(0, index)
            found += [
                (ctx.scale * (b.to(own.dtype).T @ own)).to(a.dtype),
                (ctx.scale * (own @ a.to(own.dtype).T)).to(b.dtype),
            ]
        return None, None, None, *found


def _factor_gradients(
    scale: float, dy: Tensor, h: Tensor, bs: Sequence[Tensor], indices: Sequence[Tensor | None]
) -> list[Tensor]:
    """dh, then dB of each factor."""
    dhs, dbs = [], []
    parts = h.flatten(0, -2).split([b.shape[1] for b in bs], -1)
    for index, b, part in zip(indices, bs, parts, strict=True):
        own = dy if index is None else dy.index_select(-1, index)
        dhs.append(scale * (own @ b.to(own.dtype)))
        dbs.append((scale * (own.T @ part)).to(b.dtype))
    return [torch.cat(dhs, -1).view_as(h), *dbs]

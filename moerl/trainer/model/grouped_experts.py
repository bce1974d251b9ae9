"""The experts of a rank as grouped products on a GPU, in place of a loop over small ones.

megatron-core's local experts are called one by one, with counts that the host waits for.  Here
`torch.nn.functional.grouped_mm` reads the ends of the experts' rows on the device.  Parameters stay
as they were, one for each expert, so names, checkpoints, adapters and optimizer do not change: a
product stacks them, and its backward pass stacks them again, so that no copy is kept.

grouped_mm has a kernel for bf16 on compute capability 9.0 and 10.0 whose strides are multiples of
16 bytes, with any number of rows for an expert; elsewhere torch itself loops.  It refuses other
strides (torch 2.14.1, GroupedMMUtils.h), and on Blackwell gradients of experts without rows are not
zero (pytorch issue 172439).  `why_one_by_one` says for which models the loop stays.

Legend: T rows of tokens, E experts of this rank, K width of the input, N of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import grouped_mm

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import TrainerConfig
from moerl.layout.spec import ModelSpec
from moerl.trainer.model.adapted_layers import GradientHook, Linear
from moerl.trainer.model.platform import Platform

_ALIGNED = 16  # bytes


def why_one_by_one(
    spec: ModelSpec, trainer: TrainerConfig, platform: Platform, lora: LoraConfig | None
) -> str:
    """The reason that experts of local layers are called one by one; "" = grouped products."""
    if not platform.grouped:
        return f"trainer.platform={platform.name}"
    if trainer.dtype != "bf16" and platform.name == "cuda":
        return f"trainer.dtype={trainer.dtype} has no grouped kernel"
    widths = (spec.hidden, spec.moe_ffn // trainer.parallel.etp)
    size = 2 if trainer.dtype == "bf16" else 4
    if any(width * size % _ALIGNED for width in widths):
        return f"rows of {widths[0]} and {widths[1]} numbers are not multiples of {_ALIGNED} bytes"
    if lora and lora.rank and lora.serves_adapters:
        return "lora.delivery=adapter adds products to each expert's output"
    return ""


def group_experts(layer: ModuleSpec) -> None:
    """Put grouped experts into a layer spec, in place; a layer without experts stays as it is."""
    parts = layer.submodules.mlp.keywords["submodules"]
    if isinstance(parts, MoESubmodules):
        parts.experts = partial(GroupedExperts, **parts.experts.keywords)
        layer.submodules.mlp = partial(_Layer, **layer.submodules.mlp.keywords)


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # untyped
    """The same parameters and results; tokens_per_expert stays on the device."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """[T, K] rows in the order of the experts, [E] their numbers, [T] weights -> [T, K]."""
        x, weights_T1 = permuted_local_hidden_states, permuted_probs[:, None]
        if self.config.moe_apply_probs_on_input:
            x, weights_T1 = (weights_T1 * x).to(x.dtype), torch.ones_like(weights_T1)
        ends = tokens_per_expert.to(x.device).cumsum(0, dtype=torch.int32)
        first, second = (
            [getattr(expert, name) for expert in self.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        inside = _grouped(x, ends, first)
        if (bias := _biases(first, ends, len(x))) is not None:
            inside = inside + bias
        inside = (self._glu(inside) * weights_T1).to(inside.dtype)
        output = _grouped(inside, ends, second)
        if (bias := _biases(second, ends, len(x))) is not None:
            output = (output + bias * weights_T1).to(output.dtype)
        return output, None

    def _glu(self, inside: Tensor) -> Tensor:
        """As megatron-core's MLP without its fusions."""
        gate, linear = inside.chunk(2, dim=-1)
        if (most := self.config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=most), linear.clamp(-most, most)
        product: Tensor = self.config.activation_func(gate) * (
            linear + self.config.glu_linear_offset
        )
        return product


class _Layer(MoELayer):  # type: ignore[misc]  # untyped
    """Around `GroupedExperts`; megatron-core's layer makes its dispatcher by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.token_dispatcher.__class__ = _DeviceCounts


class _DeviceCounts(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]  # untyped
    """Keeps the experts' counts on the device.

    Ranks that exchange tokens copy the sizes of their pieces to the host, as before; with all
    experts on one rank nothing is copied, and rows are in the experts' order already.
    """

    tokens_per_expert: Tensor | None

    @property
    def _sends(self) -> bool:
        return bool(self.ep_size * self.tp_size > 1)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        if self._sends:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> Any:
        if self._sends:
            return super().dispatch_postprocess(tokens, probs)
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return tokens, counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        rows: Tensor = hidden_states
        return super().combine_preprocess(rows) if self._sends else rows


def _grouped(x: Tensor, ends: Tensor, linears: Sequence[Linear]) -> Tensor:
    """Each expert's rows by its own weight; its hooks, which a call would run, are run here."""
    _wait(linears)
    product: Tensor = _Product.apply(x, ends, *map(_weight, linears))  # type: ignore[no-untyped-call]
    return product


def _wait(linears: Sequence[Linear]) -> None:
    """For their weights, where `trainer.ddp.overlap_param_gather` gathers them before a call."""
    for linear in linears:
        for hook in linear._forward_pre_hooks.values():
            hook(linear, ())


def _weight(linear: Linear) -> Tensor:
    weight: Tensor = linear.get_parameter("weight")
    for hook in linear._forward_hooks.values():
        assert isinstance(hook, GradientHook), f"{hook} was not compared with grouped products"
        weight = hook.through_weight(weight) if hook.is_on else weight
    return weight


def _biases(linears: Sequence[Linear], ends: Tensor, rows: int) -> Tensor | None:
    """[T, N] bias of each row's expert; by a product, whose backward pass sums in a fixed order."""
    if linears[0].bias is None:
        return None
    biases_EN = torch.stack([linear.get_parameter("bias") for linear in linears])
    own = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    expert = torch.searchsorted(ends, own, right=True)[:, None]
    chosen_TE = expert == torch.arange(len(linears), device=ends.device)
    return chosen_TE.to(biases_EN.dtype) @ biases_EN


class _Product(Function):
    """y = x W', each row with the weight of its expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """[T, K] by E weights [N, K] -> [T, N]; ends [E] i32: of each expert's rows."""
        x = x.contiguous()
        ctx.save_for_backward(x, ends, *weights)
        return _by_row(x, torch.stack(weights).transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        dy, (of_x, _, *of_weights) = grads[0].contiguous(), ctx.needs_input_grad
        dx = _by_row(dy, torch.stack(weights), ends) if of_x else None
        dws = _by_expert(dy, x, ends).unbind() if any(of_weights) else of_weights
        return dx, None, *(dw if of else None for dw, of in zip(dws, of_weights, strict=True))


def _by_row(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[T, K] by [E, K, N] -> [T, N]."""
    return grouped_mm(x, weights, offs=ends) if len(x) else x.new_zeros(0, weights.shape[2])


def _by_expert(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """[T, N] and [T, K] -> [E, N, K] products over each expert's rows."""
    if not len(x):
        return x.new_zeros(len(ends), dy.shape[1], x.shape[1])
    products = grouped_mm(dy.t(), x, offs=ends)
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return products.masked_fill_(empty[:, None, None], 0)

"""One number per token in place of logits: the head of the critic and of reward models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from moerl.layout.spec import ModelSpec


class ValueHead(torch.nn.Module):
    """Replaces GPTModel's output layer: [S, B, H] -> [S, B, 1] fp32.

    Under sequence parallelism a tensor-parallel rank has the hidden states of a run of positions.
    It computes their values, which are gathered: one number per position instead of H.  All of
    these ranks then compute one loss, so the backward pass takes a rank's own positions out of it,
    and Megatron sums the head's gradient over them (`sequence_parallel` of a parameter).
    """

    bias: torch.nn.Parameter | None

    def __init__(self, hidden: int, *, bias: bool, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)) if bias else None)
        for part in self.parameters():
            setattr(part, "sequence_parallel", sequence_parallel)  # noqa: B010
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden_SBH: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """Called with the output layer's arguments; the second result is its bias."""
        bias = None if self.bias is None else self.bias.float()
        value_SB1 = torch.nn.functional.linear(hidden_SBH.float(), self.weight.float(), bias)
        if self.sequence_parallel:
            value_SB1 = gather_from_sequence_parallel_region(
                value_SB1, tensor_parallel_output_grad=False
            )
        return value_SB1, None


def with_value_head(spec: ModelSpec, *, bias: bool = False) -> ModelSpec:
    """The model with a value head in place of the language model's."""
    return spec if spec.values else replace(spec, values=1, value_bias=bias, tied=False)

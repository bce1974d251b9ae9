"""Layers of fp8 blocks on a plain CPU: SGLang's kernels for them are for GPUs and for AMX.

The weights stay in fp8, as loaded and as published.  Each call dequantises them to the dtype of the
activations and then computes what an unquantised layer computes.  It serves small models in tests:
a call reads every weight of the layer.  Activations are not quantised, as in SGLang's own CPU
kernels (FP8_W8A16); kernels for GPUs quantise them too.  So activations may have any dtype; with
float32 the log-probabilities of engine and trainer agree to rounding.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear


def dtypes(supported: list[torch.dtype], _config: type) -> list[torch.dtype]:
    """AFTER Fp8Config.get_supported_act_dtypes: adds float32 to the dtypes of the GPU kernels."""
    return [*supported, torch.float32]


def linear(
    _original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """AROUND Fp8LinearMethod.apply: x [T, H]."""
    return plain_linear(x, _plain(method, layer.weight, layer.weight_scale_inv, x), bias)


def experts(_original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """AROUND Fp8MoEMethod.apply: hidden states [T, H] and the experts of every token."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_plain(method, layer.w13_weight, layer.w13_weight_scale_inv, x),
        w2_weight=_plain(method, layer.w2_weight, layer.w2_weight_scale_inv, x),
    )
    output = moe_forward_native(plain, x, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def _plain(method: Any, weight: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    found: Tensor = block_quant_dequant(weight, scale, method.weight_block_size, like.dtype)
    return found

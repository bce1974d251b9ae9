"""The two layers megatron-core's local spec lacks on a machine without Transformer Engine.

RMSNorm: the stock one refuses sequence parallelism, although marking the weight is all that is
missing (gradient finalisation sums marked parameters over the tensor-parallel group).
CausalAttention: the stock one materialises scores and repeats the key/value heads; batches here are
right-padded, so a causal mask alone keeps every real token from seeing padding.

Legend: S sequence, B batch, H query heads and G key/value heads on this rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.errors import ConfigError


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that may be sequence parallel; in bf16 normalised in fp32, cast, then scaled.

    The order of the cast is that of transformers' Qwen3, so bf16 logits agree with it.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.epsilon = eps
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return super().forward(x)
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * y.to(x.dtype)


class CausalAttention(MegatronModule):
    """Causal attention with grouped queries through torch's fused CPU kernel."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigError("trainer.megatron.attention_dropout", dropout, "must be 0 on the CPU")
        if config.window_size is not None:
            raise ConfigError(
                "trainer.megatron.window_size", config.window_size, "not supported on the CPU"
            )
        if config.softmax_type != "vanilla":
            raise ConfigError(
                "trainer.megatron.softmax_type", config.softmax_type, "must be vanilla on the CPU"
            )
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        """query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H * D]."""
        assert kwargs.get("packed_seq_params") is None, "packed sequences need Transformer Engine"
        length, batch = query.shape[:2]
        out_BHSD = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out_BHSD.permute(2, 0, 1, 3).reshape(length, batch, -1)

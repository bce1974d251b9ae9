"""The two layers megatron-core's local spec lacks on a machine without Transformer Engine.

RMSNorm: the stock one refuses sequence parallelism; only the mark on the weight is missing
(gradient finalisation sums marked parameters over the tensor-parallel group).
CausalAttention: the stock one materialises scores, repeats the key/value heads and has neither
packed sequences nor context parallelism.  Here padded batches need no mask but the causal one;
packed rollouts are attended one by one; with context parallelism keys and values are gathered and
put in order (simple, and O(sequence) memory per rank, where Transformer Engine passes them round a
ring), queries stay where they are.

Legend: S local and L whole sequence, B batch, H query heads and G key/value heads on this rank,
D head size, T tokens of a packed row on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.core.errors import ConfigError
from moerl.trainer.model.packed_rows import lengths

_QUERY_BLOCK = 1024
_NEEDED = {"attention_dropout": 0, "window_size": None, "softmax_type": "vanilla"}


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that may be sequence parallel; in bf16 normalised in fp32, cast, then scaled.

    The cast is placed as in transformers' Qwen3, so bf16 logits agree with it; where norms scale by
    1 + weight it is placed as in Qwen3-Next, at the end.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.epsilon, self.around_one = eps, config.layernorm_zero_centered_gamma
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        if self.around_one:
            y = torch.nn.functional.rms_norm(
                x.float(), self.normalized_shape, 1 + self.weight.float(), self.epsilon
            )
            return y.to(x.dtype)
        if x.dtype == torch.float32:
            return super().forward(x)
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * y.to(x.dtype)


def check_attention(fields: Mapping[str, Any]) -> None:
    """Refuse fields of trainer.megatron that `CausalAttention` lacks.  Raises ConfigError."""
    for name, needed in _NEEDED.items():
        if (fields.get(name, needed) or None) != (needed or None):
            reason = f"must be {needed} with local layers and with trainer.share_prompts"
            raise ConfigError(f"trainer.megatron.{name}", fields[name], reason)


class CausalAttention(MegatronModule):  # type: ignore[misc]  # untyped
    """Causal attention with grouped queries through torch's fused CPU kernel."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        found = {name: getattr(config, name) for name in _NEEDED}
        check_attention(found | {"attention_dropout": dropout})
        self.scale = softmax_scale
        self.cp_group = None if config.context_parallel_size == 1 else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **_more: Any,
    ) -> Tensor:
        """query [S, B, H, D], key and value [S, B, G, D] -> [S, B, H * D]; packed: without B."""
        if self.cp_group is not None:
            # [cp * S, ...]; its backward sums the gradients of all ranks' queries
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        cp = 1 if self.cp_group is None else self.cp_group.size()
        sizes = [length // cp for length in lengths(packed_seq_params)]
        assert sum(sizes) == len(query), f"{sum(sizes)} packed tokens, {len(query)} queries"
        outputs, at = [], 0
        by_rank_k, by_rank_v = (x.unflatten(0, (cp, len(query))) for x in (key, value))
        for length in sizes:
            part = slice(at, at + length)
            k, v = (x[:, part].flatten(0, 1)[:, None] for x in (by_rank_k, by_rank_v))
            outputs.append(self._attend(query[part, None], k, v)[:, 0])
            at += length
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One padded batch or one packed rollout: [S, B, H, D] of keys [cp * S, B, G, D]."""
        if self.cp_group is None:
            return self._sdpa(query, key, value)
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        size = len(query) // 2
        order = [slot for r in range(cp) for slot in (r, 2 * cp - 1 - r)]  # piece in each half rank
        place = sorted(range(2 * cp), key=order.__getitem__)
        # one by one: a list as an index would be copied to the device
        key, value = (torch.cat([x.split(size)[piece] for piece in place]) for x in (key, value))
        halves = [
            self._sdpa(part, key[: (piece + 1) * size], value[: (piece + 1) * size])
            for part, piece in zip(query.split(size), (rank, 2 * cp - 1 - rank), strict=True)
        ]
        return torch.cat(halves)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of the last queries of a sequence; blocks keep the mask small."""
        before = len(key) - len(query)
        if not before:
            return self._fused(query, key, value, None)
        outputs = []
        for first in range(0, len(query), _QUERY_BLOCK):
            part = query[first : first + _QUERY_BLOCK]
            seen = before + first + len(part)
            positions = torch.arange(seen, device=query.device)
            mask = positions[None] <= positions[before + first :, None]
            outputs.append(self._fused(part, key[:seen], value[:seen], mask))
        return torch.cat(outputs)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out_BHSD = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out_BHSD.permute(2, 0, 1, 3)

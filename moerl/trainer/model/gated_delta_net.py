"""The layers of Qwen3-Next: gated attention in some, a gated delta net in the others.

The delta net is megatron-core's.  On the CPU it runs its torch code, which takes no packed rows: a
row is taken apart, one rollout after another, as `local_modules.CausalAttention` does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.trainer.model.packed_rows import lengths


class OutputNorm(torch.nn.RMSNorm):
    """The norm before the gate of a delta net; it scales by its weight, where others add one."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # every tensor-parallel rank norms its own heads: gradients are summed when finalised
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        return self.weight * y.to(x.dtype)


class DeltaNet(GatedDeltaNet):  # type: ignore[misc]  # untyped
    """megatron-core's gated delta net, over the rollouts of a packed row one by one on the CPU."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if packed_seq_params is None or not self.config.deterministic_mode:
            found: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, packed_seq_params=packed_seq_params, **kwargs
            )
            return found
        sizes = lengths(packed_seq_params)
        assert sum(sizes) == len(hidden_states), f"{sizes} of {len(hidden_states)} tokens"
        parts = [
            super(DeltaNet, self).forward(part, None, **kwargs)[0]
            for part in hidden_states.split(sizes)
        ]
        return torch.cat(parts), None

    def _compute_g_and_beta(
        self, a_log: Tensor, dt_bias: Tensor, decay: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log of the decay and step size, in fp32 as in SGLang.

        megatron-core rounds the rate and the step size to bf16 where the model is in bf16.
        """
        rate = torch.nn.functional.softplus(decay.float() + dt_bias.float())
        return -a_log.float().exp() * rate, step.float().sigmoid()


class DeltaOrAttention:
    """`self_attention` of a layer: a gated delta net, or attention."""

    def __new__(
        cls,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        linear_layers: tuple[int, ...],
        **kwargs: Any,
    ) -> Any:
        """Make a layer's module.  layer_number: global, from 1.  kwargs: SelfAttention's own."""
        if layer_number - 1 not in linear_layers:
            return SelfAttention(config, submodules, layer_number, **kwargs)
        own = GatedDeltaNetSubmodules(
            in_proj=submodules.linear_qkv, out_norm=OutputNorm, out_proj=submodules.linear_proj
        )
        kept = {name: kwargs[name] for name in ("pg_collection", "name") if name in kwargs}
        return DeltaNet(config, own, layer_number, **kept)

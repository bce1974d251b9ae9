"""Modules some model families need and megatron-core 0.19.2 lacks, put into its layer specs.

OLMoE normalises queries and keys over all heads at once; megatron-core builds one norm of head
size.  gpt-oss gives each head a learned logit that takes attention (a sink) and slides a window on
every second layer: megatron-core's own attention does both, the fused CPU attention does neither.
Its experts have biases, which megatron-core adds in a way that cannot be differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.core.errors import TrainerError
from moerl.layout.spec import ModelSpec
from moerl.trainer.model.gated_delta_net import DeltaOrAttention
from moerl.trainer.model.packed_rows import RotaryOnHostEnds


class AllHeadsNorm(torch.nn.RMSNorm):
    """RMSNorm over every head of a token; weight [heads * D].  Legend: D head size."""

    def __init__(self, config: TransformerConfig, num_heads: int, hidden_size: int, eps: float):
        super().__init__(num_heads * hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        """x [..., heads, D]; statistics in fp32, cast, then scaled, as transformers does."""
        flat = x.flatten(-2).float()
        assert self.eps is not None, "eps is given at construction"
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * flat.to(x.dtype)).view_as(x)


class QueryNorm(AllHeadsNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(AllHeadsNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        groups = config.num_query_groups
        assert groups is not None, "the model's config names its key heads"
        super().__init__(config, groups, hidden_size, eps)


class DuplicatedLinear(torch.nn.Linear):
    """A projection that every tensor-parallel rank holds whole, as Transformer Engine's is.

    The down projections of latent attention need it: column-parallel projections of the local spec
    are gathered without summing the gradient of the shared rotary key, so its gradient is wrong
    with tensor parallelism (0.16.1; at tp 2 off by up to 22 % of the model's largest gradient).
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        assert kwargs.get("parallel_mode") == "duplicated", "it is not cut"
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        # ranks see different positions: their gradients are summed when finalised
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class ExpertRowLinear(RowParallelLinear):  # type: ignore[misc]  # untyped
    """An expert's second projection where it has a bias.

    megatron-core adds that bias in place (mlp.py), which autograd forbids on the output of a
    collective, and sums its gradient over the tensor-parallel ranks, which hold other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self.bias, "sequence_parallel", False)  # noqa: B010
        setattr(self.bias, "tensor_model_parallel", True)  # noqa: B010  # or the norm skips it

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


class SinkAttention(DotProductAttention):  # type: ignore[misc]  # untyped
    """megatron-core's attention; its sinks, cut over heads, count in every rank's gradient norm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self.softmax_offset, "tensor_model_parallel", True)  # noqa: B010


class LatentAttention(RotaryOnHostEnds, MLASelfAttention):  # type: ignore[misc]  # untyped
    """Latent attention of a model that compresses its queries."""


class UncompressedQueryAttention(LatentAttention):
    """Latent attention of a model that does not compress its queries.

    It has no norm of queries.  megatron-core 0.19 asks for a norm of keys and queries by
    one flag (`mla_qk_norm_config.py`) and fuses one before the query projection: without
    Transformer Engine that is an error, with it a second norm that the checkpoint does not have.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        classes: dict[str, Any] = _PlainQuery(self.config, submodules).resolve()
        return classes


class _PlainQuery(QKNormConfigResolver):  # type: ignore[misc]  # untyped
    def _mla_fused_linear_or_default(self, module: Any, name: str) -> Any:
        if name == "linear_q_proj":
            return self._non_fused_or_default(module, name)
        return super()._mla_fused_linear_or_default(module, name)


class PartlyRotaryAttention(SelfAttention):  # type: ignore[misc]  # untyped
    """Llama-4's attention: layers without a rotary embedding have no query/key norm either.

    megatron-core norms before it rotates and Llama-4 after; a norm without a weight commutes with a
    rotation.  Beyond `longest` tokens Llama-4 attends in chunks and scales queries, this does not.
    """

    def __init__(self, config: TransformerConfig, *args: Any, longest: int, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.longest = longest
        if config.no_rope_freq[self.layer_number - 1]:
            self.q_layernorm = self.k_layernorm = None

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        config = self.config
        cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
        length = len(hidden_states) * cut * config.context_parallel_size
        if packed_seq_params is not None:
            length = int(packed_seq_params.max_seqlen_q)
        if length > self.longest:
            raise TrainerError(
                f"a sequence of {length} tokens is longer than {self.longest}, up to which Llama-4 "
                "attends to all of it; longer ones are not supported"
            )
        return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)


class SoftmaxBiasRouter(TopKRouter):  # type: ignore[misc]  # untyped
    """A router that chooses by softmax probability plus a bias, and weighs without the bias.

    megatron-core 0.19.2 adds a bias to sigmoid scores only.  ERNIE-4.5 keeps it as one row [1, E].
    """

    router_replay: Any  # set by megatron-core, and by `replay.attach`

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(1, config.num_moe_experts))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        replay = self.router_replay
        self.router_replay = BiasedChoice(self.expert_bias, replay)
        try:
            found: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
            return found
        finally:
            self.router_replay = replay


@dataclass(frozen=True, slots=True)
class BiasedChoice:
    """The `router_replay` of a SoftmaxBiasRouter during a call: the choice, replayed or live.

    Legend: N tokens, E experts, K experts per token.
    """

    bias: Tensor  # [1, E] f32
    replay: Any  # put on the router by `replay.attach`; None: live

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose by biased scores: logits [N, E] -> (logits of the chosen [N, K], ids [N, K])."""
        biased = scores.softmax(-1, dtype=torch.float32) + self.bias
        if self.replay is None:
            _, ids = default_compute_topk(biased, topk, num_groups, group_topk)
        else:
            rest = (num_groups, group_topk, default_compute_topk)
            _, ids = self.replay.get_replay_topk(biased, topk, *rest)
        return scores.gather(1, ids), ids


def adapt(layer: ModuleSpec, spec: ModelSpec, *, on_cpu: bool) -> None:
    """Put a family's own modules into a layer spec, in place."""
    attention = layer.submodules.self_attention.submodules
    if spec.qk_norm_all_heads:
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    feed_forward = layer.submodules.mlp.keywords["submodules"]
    routes = isinstance(feed_forward, MoESubmodules)
    if routes and spec.expert_bias and spec.score == "softmax":
        feed_forward.router = SoftmaxBiasRouter
    if spec.linear_layers:
        layer.submodules.self_attention.module = DeltaOrAttention
        layer.submodules.self_attention.params["linear_layers"] = spec.linear_layers
    if spec.nope_layers:
        layer.submodules.self_attention.module = PartlyRotaryAttention
        layer.submodules.self_attention.params["longest"] = spec.longest
        if spec.qk_l2_norm:
            attention.q_layernorm = attention.k_layernorm = L2Norm
    if spec.kv_lora and spec.q_lora:
        layer.submodules.self_attention.module = LatentAttention
    elif spec.kv_lora:
        layer.submodules.self_attention.module = UncompressedQueryAttention
        attention.q_layernorm = IdentityOp  # an unused argument is refused
    if spec.kv_lora and on_cpu:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    if spec.sinks and on_cpu:
        attention.core_attention = SinkAttention
        feed_forward.experts.keywords["submodules"].linear_fc2 = ExpertRowLinear

"""Keep Indexer: sparse attention of DeepSeek-V3.2 over recorded positions.

In megatron-core a layer's indexer chooses, per token, the positions that attention reads.  With few
index heads many scores are exactly equal (a sum of ReLUs is often 0), so the choice cannot be
computed again, even on one machine: it is recorded by the engine and given to attention here.

megatron-core lets a layer take its positions from an earlier layer ("index share").  That is the
one interface used: a layer with a record shares, for one call, and reads the record where it would
read the other layer's choice.  So the indexer does not run, and attention, its kernels, context
parallelism and packing are megatron-core's own.  Source of the interface: megatron-core 0.19.2
`transformer/experimental_attention_variant/dsa.py`.
Rejected: a patch of the top-k in the indexer (the fused kernels choose and attend in one call).

The indexer gets no gradient from the policy loss (its input is detached and a choice has none), so
it is frozen: otherwise weight decay alone would move it.

Legend: B rows, S slots of this context-parallel rank, K positions of a token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    _get_backend_spec_provider,
    get_dsa_module_spec_for_backend,
)
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.layout.spec import ModelSpec
from moerl.trainer.model.family_modules import DuplicatedLinear
from moerl.trainer.model.local_modules import RMSNorm


class PositionSource(Protocol):
    """Where a layer asks for the positions of its call."""

    def take(self, layer: int) -> Tensor | None:
        """[B, S, K] key numbers, -1 = none; None = the indexer chooses."""
        ...


class RecordedSparseAttention(DSAttention):  # type: ignore[misc]  # untyped
    """DSAttention that reads recorded positions where records have them."""

    choice: PositionSource | None = None  # set by `indexer_replay.attach_indexers`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: Tensor | None = None
        for weight in self.indexer.parameters():
            weight.requires_grad_(False)

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = self.choice.take(self.layer_number - 1) if self.choice is not None else None
        self._given = None if given is None else given.to(query.device).long()
        self.skip_topk = self.index_share = given is not None
        try:
            output: Tensor = super().forward(query, *args, **kwargs)
        finally:
            self._given = None
        return output

    def _get_index_share_topk_holder(self, *_args: Any) -> dict[int, Tensor]:
        """The choice that earlier layers would have left, by layer number."""
        assert self._given is not None, "asked for by a layer that shares"
        return {self.source_layer: self._given}

    def _get_index_share_topk_length_holder(self, *_args: Any) -> dict[int, Tensor]:
        return {}


class IndexerNorm(torch.nn.LayerNorm):
    """LayerNorm of the indexer's key; Megatron's builders pass their config."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class _LocalSpecs(LocalSpecProvider):  # type: ignore[misc]  # untyped
    """The local modules of sparse attention, without Transformer Engine."""

    def linear(self) -> type:
        return DuplicatedLinear

    def layer_norm(self, rms_norm: bool = False, **_: Any) -> type:
        return RMSNorm if rms_norm else IndexerNorm


def sparse_attention(config: TransformerConfig, *, on_cpu: bool) -> ModuleSpec:
    """Attention of a layer whose indexer chooses positions."""
    backend = _LocalSpecs() if on_cpu else _get_backend_spec_provider(config)
    spec = get_dsa_module_spec_for_backend(config, backend)
    spec.submodules.core_attention.module = RecordedSparseAttention
    return spec


def sparse_fields(spec: ModelSpec) -> dict[str, Any]:
    """Fields of megatron-core's config for a model with indexers."""
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": spec.index_heads,
        "dsa_indexer_head_dim": spec.index_dim,
        "dsa_indexer_topk": spec.index_topk,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        # a rotation of queries and keys alike: it changes only how fp8 scores round
        "dsa_indexer_rotate_activation": False,
        "apply_rope_fusion": False,
        "cp_comm_type": "allgather",  # the only one it has
    }

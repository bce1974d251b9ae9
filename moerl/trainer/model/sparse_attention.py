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

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    _get_backend_spec_provider,
    get_dsa_module_spec_for_backend,
)
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
)
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moerl.layout.spec import ModelSpec
from moerl.trainer.model.family_modules import DuplicatedLinear
from moerl.trainer.model.local_modules import RMSNorm
from moerl.trainer.model.packed_rows import RotaryOnHostEnds
from moerl.trainer.model.replay import Key, LayerCalls, Mode

Read = Callable[[int], Tensor]  # layer -> [B, S, K] key numbers, -1 = none


class RecordedSparseAttention(DSAttention):  # type: ignore[misc]  # untyped
    """DSAttention that reads recorded positions where records have them."""

    choice: IndexerReplay | None = None  # set by `attach_indexers`

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


class SparseLatentAttention(RotaryOnHostEnds, AbsorbedMLASelfAttention):  # type: ignore[misc]
    """Around `RecordedSparseAttention`."""


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
    spec.module = SparseLatentAttention
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
        # an equal rotation of queries and keys: it changes only how fp8 scores round
        "dsa_indexer_rotate_activation": False,
        "apply_rope_fusion": False,
        "cp_comm_type": "allgather",  # the only one it has
    }


class IndexerReplay(LayerCalls):
    """Positions of one step, for the sparse attention of all model chunks of one rank.

    Rules as for routes (`replay.py`): keyed by (microbatch, model chunk, layer), each used once per
    pass, and a record that is missing, unused or read twice ends the step.  Unlike routes they are
    not loaded: of 200,000 tokens of DeepSeek-V3.2 one layer holds 1 GB.  A layer's record is read
    when the layer runs, forward or recompute, and dropped after it.
    """

    reason = "indexer_rows"
    what = "positions"

    def __init__(self, *chunks: tuple[int, ...]) -> None:
        super().__init__(*chunks)
        self.always_live = False  # a control: indexers choose where routes are replayed
        self._reads: dict[tuple[int, int], Read] = {}  # by microbatch and chunk

    def load(self, microbatch: int, read: Read, num_tokens: int, chunk: int = 0) -> None:
        """Register the records of one microbatch.

        num_tokens: fed-in tokens without padding, which each layer's record covers.
        """
        for layer in self.chunks[chunk]:
            self._add(Key(microbatch, chunk, layer), num_tokens)
        self._reads[microbatch, chunk] = read

    def mode(self, asked: Mode, microbatch: int, chunk: int) -> Mode:
        """Where routers run live, the positions that were loaded are replayed too."""
        if self.always_live:
            return Mode.OFF
        if asked is Mode.REPLAY:
            return asked
        return Mode.REPLAY if (microbatch, chunk) in self._reads else Mode.OFF

    def take(self, layer: int) -> Tensor | None:
        """Called by the attention of `layer`: [B, S, K] key numbers; None = its indexer chooses."""
        running = self._running(layer)
        if running is None:
            if self._chunk_of[layer] not in self._gradient_of:
                return None
            key = self._take_again(layer)
        elif running.mode is Mode.OFF:
            return None
        else:
            key = self._take_first(self.serves(layer), running)
        return self._reads[key.microbatch, key.chunk](layer)

    def clear(self) -> None:
        super().clear()
        self._reads.clear()


def attach_indexers(*chunks: Any) -> IndexerReplay:
    """Give the sparse attention of the chunks' decoders one owner of their records; returns it."""
    found = [
        {
            layer.layer_number - 1: layer.self_attention.core_attention
            for layer in chunk.decoder.layers
        }
        for chunk in chunks
    ]
    replay = IndexerReplay(*(tuple(sorted(layers)) for layers in found))
    for layers in found:
        for attention in layers.values():
            assert isinstance(attention, RecordedSparseAttention), type(attention)
            attention.choice = replay
    return replay

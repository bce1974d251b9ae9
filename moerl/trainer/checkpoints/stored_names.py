"""Names of a model's tensors in a `torch_dist` checkpoint, from their names in a live module.

megatron-core stores tensors whole, in coordinates that do not depend on the layout.  Only names
differ between live modules: a norm is called after the projection it is fused into by Transformer
Engine, experts are one tensor with an expert dim, and equal layers can be one tensor with a layer
dim.
Read at megatron-core 0.19.2: transformer_block.py, gpt_layer_specs.py, moe/experts.py,
ssm/gated_delta_net/common.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from moerl.config.schema import ParallelConfig
from moerl.layout import LayerSpec, Local, ModelSpec, megatron_tiles

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Stored with padding rows, whose number depends on the layout that wrote them."""
SPLIT_PARTS = ("query", "key", "value", "z", "beta", "alpha")
"""Suffixes of the parts in which a fused projection of linear attention is stored, in its order."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERTS = (  # of a sequential MLP, and of Transformer Engine's grouped one
    re.compile(r"(.*mlp\.experts\.)local_experts\.(?P<e>\d+)\.(linear_fc\d\.\w+)"),
    re.compile(r"(.*mlp\.experts\.)(linear_fc\d\.[a-z]+)(?P<e>\d+)"),
)
_LOCAL_KEYS = {  # the local layer spec stores these norms as if they were fused
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class StoredKey(NamedTuple):
    """A tensor of the checkpoint; `lead`: the entry of its layer dim, expert dim, or both."""

    key: str
    lead: tuple[int, ...]


class ModelTensor(NamedTuple):
    """A tensor of the whole model by its live names, with its tiles."""

    local_name: str
    te_name: str
    tensor: Local

    def candidates(self) -> Iterator[StoredKey]:
        """Where a checkpoint may have it, the likeliest first."""
        names = dict.fromkeys((self.te_name, _fused(self.local_name), self.local_name))
        for stored in map(_with_expert_dim, names):
            yield stored
            if match := _LAYER.fullmatch(stored.key):
                yield StoredKey(f"decoder.layers.{match[2]}", (int(match[1]), *stored.lead))


def model_tensors(spec: ModelSpec) -> list[ModelTensor]:
    """Every tensor of the model, whole and without padding rows."""
    layout = ParallelConfig(vocab_divisible_by=1)
    local = megatron_tiles(spec, layout, 0, "local")
    te = megatron_tiles(spec, layout, 0, "te")
    pairs = zip(local.items(), te, strict=True)  # both follow the same tables
    return [ModelTensor(name, te_name, tensor) for (name, tensor), te_name in pairs]


def stored_as(tensor: ModelTensor, spec: ModelSpec, layer_spec: LayerSpec) -> StoredKey:
    """The name under which a trainer with this layer spec stores a tensor."""
    if layer_spec == "te":
        return _with_expert_dim(tensor.te_name)
    # the local spec of latent attention renames nothing
    return _with_expert_dim(tensor.local_name if spec.kv_lora else _fused(tensor.local_name))


def stored_parts(tensor: ModelTensor, spec: ModelSpec) -> Iterator[tuple[str, range]]:
    """Suffixes of the parts in which a tensor is stored, and the rows of each; one part: ""."""
    rows = range(tensor.tensor.shape[0])
    keys, values, steps = spec.delta_keys, spec.delta_values, spec.linear_value_heads
    sizes: tuple[int, ...] = ()
    if tensor.local_name.endswith(".self_attention.in_proj.weight"):
        sizes = (keys, keys, values, values, steps, steps)
    elif tensor.local_name.endswith(".self_attention.conv1d.weight"):
        sizes = (keys, keys, values)
    first = 0
    for part, size in zip(SPLIT_PARTS, sizes, strict=False):
        yield f".{part}", rows[first : first + size]
        first += size
    if not sizes:
        yield "", rows


def _fused(local_name: str) -> str:
    for norm, fused in _LOCAL_KEYS.items():
        if f".{norm}" in local_name:
            return local_name.replace(norm, fused)
    return local_name


def _with_expert_dim(name: str) -> StoredKey:
    for pattern in _EXPERTS:
        if match := pattern.fullmatch(name):
            rest = match[3] if pattern is _EXPERTS[0] else match[2]
            return StoredKey(f"{match[1]}experts.{rest}", (int(match["e"]),))
    return StoredKey(name, ())

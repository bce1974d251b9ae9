"""Every tensor, on a trainer rank or an engine rank, as tiles in Hugging Face coordinates.

Pure Python.  `model_spec` reads a config, `megatron_tiles` and `sglang_tiles` list the tiles of a
rank, `join` plans the copies between two sides, `check_covers` refuses a live module that the
tables do not describe exactly.
"""

from moerl.layout.families import FAMILIES, model_spec
from moerl.layout.rules import (
    Part,
    Rule,
    Shard,
    columns,
    concat,
    concat_heads,
    copy,
    deinterleave,
    each,
    first,
    flat,
    qkv_grouped,
    whole,
)
from moerl.layout.shards import (
    SGLANG_SHARES_HEAD,
    Coords,
    LayerSpec,
    check_parallel,
    chunk_layers,
    coords_of,
    hf_shapes,
    hf_tiles,
    is_repeated,
    layers_of,
    megatron_tiles,
    mtp_copies,
    sglang_tiles,
    stacked_aliases,
    stacked_forms,
    transposed_stacks,
)
from moerl.layout.spec import ModelSpec, padded_vocab
from moerl.layout.tiles import Box, Local, Named, Op, Tile, at, check_covers, join, num_elements

__all__ = [
    "FAMILIES",
    "SGLANG_SHARES_HEAD",
    "Box",
    "Coords",
    "LayerSpec",
    "Local",
    "ModelSpec",
    "Named",
    "Op",
    "Part",
    "Rule",
    "Shard",
    "Tile",
    "at",
    "check_covers",
    "check_parallel",
    "chunk_layers",
    "columns",
    "concat",
    "concat_heads",
    "coords_of",
    "copy",
    "deinterleave",
    "each",
    "first",
    "flat",
    "hf_shapes",
    "hf_tiles",
    "is_repeated",
    "join",
    "layers_of",
    "megatron_tiles",
    "model_spec",
    "mtp_copies",
    "num_elements",
    "padded_vocab",
    "qkv_grouped",
    "sglang_tiles",
    "stacked_aliases",
    "stacked_forms",
    "transposed_stacks",
    "whole",
]

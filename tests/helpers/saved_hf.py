"""Whole Hugging Face tensors of one process, saved as a trainer's ranks save theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from moerl.core.json_files import read_json
from moerl.layout import hf_tiles, model_spec
from moerl.trainer.hf_io.hf_shards import SHARD_BYTES, HfShards, RankGroup


def save_hf(
    folder: Path,
    tensors: Mapping[str, Tensor],
    source: Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder; config and tokenizer are those of `source`."""
    held = {0: hf_tiles(model_spec(read_json(source / "config.json")))}
    ranks = RankGroup(0, None)
    HfShards(lambda: tensors, held, ranks, source, max_shard_bytes=max_shard_bytes).save(folder)

"""The folder of one version of the policy that is a teacher: a model folder, or an adapter folder.

It appears under its name when it is whole.  TEACHER_FILE has the digest of the weights, which is
equal under every layout: a reader of the folder compares it with the loaded weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.atomic import publish_folder
from moerl.core.errors import ModelError
from moerl.core.json_files import read_json
from moerl.layout import ModelSpec, Named, hf_shapes
from moerl.layout.adapters import adapter_shapes, adapter_tiles
from moerl.trainer.hf_io.content_digest import content_digest
from moerl.trainer.hf_io.hf_save import write_json

TEACHER_FILE = "teacher.json"


def publish_teacher(fresh: Path, folder: Path, digest: str) -> None:
    """Give a written folder its digest and its name.  Raises OSError."""
    write_json(fresh / TEACHER_FILE, {"weights": digest})
    publish_folder(fresh, folder)


def check_digest(folder: Path, found: str) -> None:
    """Raises ModelError unless loaded weights have the digest of the folder."""
    told = read_json(folder / TEACHER_FILE).get("weights")
    if found != told:
        raise ModelError(
            f"{folder}: the loaded weights have digest {found}, the trainer wrote {told}"
        )


def factors_digest(
    factors: Mapping[str, Tensor],
    spec: ModelSpec,
    lora: LoraConfig,
    layout: ParallelConfig,
    group: dist.ProcessGroup,
) -> str:
    """`content_digest` of adapters.  factors: this rank's parts, by Hugging Face name."""
    rank, shared = dist.get_rank(group), lora.shares
    tiles: Named = adapter_tiles(spec, layout, rank, lora.rank_of, shared=shared)
    shapes = adapter_shapes(hf_shapes(spec), lora.rank_of, shared=shared)
    return content_digest(factors, tiles, shapes, group)

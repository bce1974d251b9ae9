"""Conversion between Hugging Face folders and Megatron checkpoints, tensor by tensor.

    convert_to_megatron   HF folder -> a `torch_dist` checkpoint without optimizer state
    convert_to_hf         any `torch_dist` checkpoint -> HF folder

A checkpoint is in global coordinates: any layout loads it, and no layout is an input.  A tensor is
made in pieces of CHUNK_BYTES, written and dropped; on the way back it is made whole, because
safetensors files hold it so.  Peak memory is the largest tensor of the result plus a constant.
Idea of one stream per file: the loaders of Megatron-Bridge stream too, but need live modules
and collectives.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moerl.core.errors import ConfigError, ModelError
from moerl.layout import LayerSpec, Local, at, hf_shapes
from moerl.layout.tiles import full_box, hf_box, meet
from moerl.trainer.checkpoints.checkpoint_files import MANIFEST, damage, sums_of
from moerl.trainer.checkpoints.convert_output import (
    ConversionProgress,
    ConversionRanks,
    Output,
    Written,
    write_output,
)
from moerl.trainer.checkpoints.find_checkpoint import METADATA_FILE
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from moerl.trainer.checkpoints.stored_names import (
    ModelTensor,
    StoredKey,
    model_tensors,
    stored_as,
    stored_parts,
)
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import (
    assemble,
    copy_small_files,
    file_form,
    file_parts,
    pinned,
    saved_config,
    shard_names,
    write_index,
    write_json,
)
from moerl.trainer.hf_io.safetensors_files import Planned

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHUNK_BYTES = 32 * 2**20  # of a stored tensor; larger tensors are cut into bands of rows
FILE_BYTES = 4 * 2**30
_COMMON, _FORMAT = "common.pt", "metadata.json"

Source = HfFolder | MegatronFolder


class _Piece(NamedTuple):
    """Consecutive rows of a tensor of the model, stored as one chunk."""

    stored: StoredKey
    tensor: Local
    rows: range
    dtype: torch.dtype
    begin: int = 0  # row of the tensor with which the stored one begins

    @property
    def shape(self) -> tuple[int, ...]:
        return (*(1 for _ in self.stored.lead), len(self.rows), *self.tensor.shape[1:])

    @property
    def offsets(self) -> tuple[int, ...]:
        first = self.rows.start - self.begin
        return (*self.stored.lead, first, *(0 for _ in self.tensor.shape[1:]))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def convert_to_megatron(
    source: HfFolder,
    target: str | Path,
    ranks: ConversionRanks,
    progress: ConversionProgress,
    *,
    layer_spec: LayerSpec = "local",
    dtype: torch.dtype | None = None,
    max_file_bytes: int = FILE_BYTES,
    replace: bool = False,
) -> None:
    """Write a checkpoint that a run starts from.  Collective over the conversion ranks.

    layer_spec: whose names of tensors, megatron-core's own or Transformer Engine's.
    dtype: of the parameters; None keeps the source's.  Tensors whose dtype the layout pins (the
    float32 expert bias) keep it.
    Raises ModelError for a source that cannot be read or a target that cannot be written.
    """
    pieces = _all_pieces(source, layer_spec, dtype)
    parts = file_parts(pieces, lambda piece: piece.nbytes, max_file_bytes)
    files = {f"__{i}_0.distcp": held for i, held in enumerate(parts)}

    def finish(folder: Path, written: Mapping[str, Written]) -> None:
        copy_small_files(source.path, folder)
        dtypes = _hf_dtypes(source, dtype)
        write_json(folder / "config.json", saved_config(source.config, source.spec, dtypes))
        _finish_checkpoint(folder, files, written)

    plans = {file: partial(_planned, pieces, source) for file, pieces in files.items()}
    write_output(Output(Path(target).absolute(), plans, finish, replace), ranks, progress)


def convert_to_hf(
    source: MegatronFolder,
    target: str | Path,
    ranks: ConversionRanks,
    progress: ConversionProgress,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = FILE_BYTES,
    replace: bool = False,
) -> None:
    """Write a folder that transformers and SGLang open.  Collective over the conversion ranks.

    The files of the checkpoint are compared with their digests first, where it has them.
    dtype: None gives every tensor the dtype in which it is stored.
    """
    _refuse_damaged(source, ranks)
    dtypes = _hf_dtypes(source, dtype)
    form = file_form(source.spec)
    dtype_of = {name: dtypes[next(iter(tensor.parts))] for name, tensor in form.items()}
    nbytes = {
        name: torch.Size(tensor.shape).numel() * dtype_of[name].itemsize
        for name, tensor in form.items()
    }
    shards = shard_names(nbytes, max_shard_bytes)

    def plan(names: Sequence[str]) -> list[Planned]:
        return [
            Planned(
                name,
                form[name].shape,
                dtype_of[name],
                partial(assemble, form[name], dtype_of[name], source.read),
            )
            for name in names
        ]

    def finish(folder: Path, _written: Mapping[str, Written]) -> None:
        write_index(folder, shards, sum(nbytes.values()))
        write_json(folder / "config.json", saved_config(source.config, source.spec, dtypes))
        copy_small_files(source.model, folder)

    plans = {file: partial(plan, names) for file, names in shards.items()}
    write_output(Output(Path(target).absolute(), plans, finish, replace), ranks, progress)


# --- pieces of a checkpoint ----------------------------------------------------------------------
def _all_pieces(
    source: HfFolder, layer_spec: LayerSpec, dtype: torch.dtype | None
) -> Iterator[_Piece]:
    for tensor in model_tensors(source.spec):
        stored = stored_as(tensor, source.spec, layer_spec)
        kind = _stored_dtype(tensor, source, dtype)
        row_bytes = torch.Size(tensor.tensor.shape[1:]).numel() * kind.itemsize
        step = max(1, CHUNK_BYTES // row_bytes)
        for suffix, rows in stored_parts(tensor, source.spec):
            part = stored._replace(key=stored.key + suffix)
            for first in range(0, len(rows), step):
                band = rows[first : first + step]
                yield _Piece(part, tensor.tensor, band, kind, rows.start)


def _planned(pieces: Sequence[_Piece], source: HfFolder) -> list[Planned]:
    return [
        Planned(piece.stored.key, piece.shape, piece.dtype, partial(_make, piece, source))
        for piece in pieces
    ]


def _make(piece: _Piece, source: HfFolder) -> Tensor:
    """The rows of one chunk, read from the Hugging Face tensors that they are made of."""
    rows = (piece.rows, *full_box(piece.tensor.shape[1:]))
    tensor = torch.empty((len(piece.rows), *piece.tensor.shape[1:]), dtype=piece.dtype)
    for tile in piece.tensor.tiles:
        part = meet(tile.box, rows)
        if part is not None:
            inside = (range(part[0].start - rows[0].start, part[0].stop - rows[0].start), *part[1:])
            tensor[at(inside)] = source.read(tile.hf, hf_box(tile, part))
    return tensor.view(piece.shape)


def _stored_dtype(tensor: ModelTensor, source: Source, dtype: torch.dtype | None) -> torch.dtype:
    if tensor.tensor.dtype:
        return DTYPE_NAMES[tensor.tensor.dtype]
    if dtype is not None:
        return dtype
    found = {source.dtype(tile.hf) for tile in tensor.tensor.tiles}
    if len(found) > 1:
        kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in found))
        raise ConfigError("--dtype", None, f"{tensor.local_name} is made of {kinds}; choose one")
    return found.pop()


def _finish_checkpoint(
    folder: Path, files: Mapping[str, Sequence[_Piece]], written: Mapping[str, Written]
) -> None:
    """Write the files that describe the others; the manifest with all digests comes last."""
    chunks: dict[str, list[_Piece]] = defaultdict(list)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file, pieces in files.items():
        for piece, (begin, length) in zip(pieces, written[file].places, strict=True):
            chunks[piece.stored.key].append(piece)
            index = MetadataIndex(piece.stored.key, torch.Size(piece.offsets))
            storage[index] = _StorageInfo(file, begin, length)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: _described(pieces) for key, pieces in chunks.items()
    }
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Metadata(described, None, storage)))
    # Megatron-LM reads from it how layers and experts are stored
    content = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    torch.save({"content_metadata": content}, folder / _COMMON)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / _FORMAT).write_text(json.dumps(backend), encoding="utf-8")
    sums = sums_of(folder, {name: file.sum for name, file in written.items()})
    write_json(folder / MANIFEST, {"step": 0, "files": sums})


def _described(pieces: Sequence[_Piece]) -> TensorStorageMetadata:
    ends = (
        tuple(o + n for o, n in zip(piece.offsets, piece.shape, strict=True)) for piece in pieces
    )
    return TensorStorageMetadata(
        TensorProperties(dtype=pieces[0].dtype),
        torch.Size(map(max, zip(*ends, strict=True))),
        [
            ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
            for piece in pieces
        ],
    )


# --- both directions -----------------------------------------------------------------------------
def _refuse_damaged(source: MegatronFolder, ranks: ConversionRanks) -> None:
    """Compare the files with their digests; each process reads its share."""
    with ranks.together():
        names = source.summed_files[ranks.rank :: ranks.size]
        if names and (cause := damage(source.path, names)):
            raise ModelError(f"{source.path}: damaged: {cause}")


def _hf_dtypes(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Dtype of every Hugging Face tensor after conversion; pinned tensors are not cast."""
    shapes = hf_shapes(source.spec)
    if dtype is None:
        return {name: source.dtype(name) for name in shapes}
    fixed = pinned(source.spec)
    return {name: source.dtype(name) if name in fixed else dtype for name in shapes}

"""Conversion between Hugging Face folders and Megatron-side checkpoints, tile by tile.

    convert_to_megatron   HF folder, or a checkpoint of another layout -> one file per rank
    convert_to_hf         checkpoint -> HF folder
    MegatronFolder        reads a checkpoint in Hugging Face coordinates, whatever its layout

A checkpoint is a folder:

    manifest.json                     family, layout, layer spec, vocabulary rows, dtypes, HF config
    rank-00003/model.safetensors      the rank's tensors under their local Megatron names
    rank-00003/checksums.json         per tensor: xxh3-64 of its bytes, and of each of its tiles

Ranks are those of the smallest trainer with the layout's axes; a data-parallel or context-parallel
replica loads the file of the rank that shares its (tp, pp, ep, etp).  A tensor is made from tiles,
written and dropped, so peak memory is the largest local tensor plus FILL_BYTES and what the
source maps, whatever the size of the model.
Idea of one streamed job per rank: the loaders of Megatron-Bridge stream too, but need live modules
and collectives.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moerl.config.json_files import read_json
from moerl.config.mesh import check_mesh
from moerl.config.schema import ParallelConfig
from moerl.errors import ConfigError, LayoutError, ModelError
from moerl.layout import (
    Box,
    LayerSpec,
    Local,
    ModelSpec,
    Named,
    Op,
    Tile,
    at,
    check_covers,
    hf_shapes,
    join,
    megatron_tiles,
    model_spec,
    padded_vocab,
)
from moerl.trainer.hf_io.convert_job import (
    ConversionProgress,
    ConversionRanks,
    Job,
    Planned,
    Sums,
    Unit,
    digest,
    memory,
    read_sums,
    run_job,
)
from moerl.trainer.hf_io.hf_folder import HfFolder, config_dtype, fill
from moerl.trainer.hf_io.hf_save import (
    assemble,
    copy_tokenizer,
    file_form,
    shard_names,
    with_dtype,
    write_index,
    write_json,
)
from moerl.trainer.hf_io.mapped_files import MappedFiles

FORMAT = "moerl-megatron-2"  # 1 called the layer spec `flavor`
MANIFEST, WEIGHTS, CHECKSUMS = "manifest.json", "model.safetensors", "checksums.json"
DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MegatronFolder:
    """A Megatron-side checkpoint, read by Hugging Face name and box.

    Raises ModelError for a folder that is incomplete, of another format, or whose files do not
    have the tensors of its layout; `read` refuses a tile whose bytes do not match its checksum or
    whose replicas differ.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / MANIFEST).exists():
            raise ModelError(f"{self.path}: no {MANIFEST}, so no finished checkpoint")
        manifest = read_json(self.path / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise ModelError(
                f"{self.path}: format = {manifest.get('format')!r} is not readable; {FORMAT} is"
            )
        self.config: dict[str, Any] = manifest["hf_config"]
        self.spec: ModelSpec = model_spec(self.config)
        self.layout = ParallelConfig(**manifest["layout"])
        check_mesh(self.layout)
        self.layer_spec: LayerSpec = manifest["layer_spec"]
        self._dtype, self._dtype_of = manifest["dtype"], manifest["dtype_of"]
        self._shapes = hf_shapes(self.spec)
        self._files = MappedFiles(self.path)
        self._sums: list[dict[str, Sums]] = []
        self._ref_counts: dict[str, dict[int, Named]] = defaultdict(dict)
        for rank in range(self.layout.world_size):
            self._add_rank(rank)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the Hugging Face tensor; a rank may hold it in a wider one."""
        return DTYPE_NAMES[self._dtype_of.get(name, self._dtype)]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One tensor, or a box of it, assembled from the ranks' tiles."""
        if name not in self._shapes:
            raise ModelError(f"{self.path}: has no tensor {name}")
        box = box if box is not None else tuple(range(n) for n in self._shapes[name])
        shape = tuple(map(len, box))
        wanted = Local(shape, (Tile(name, box, tuple(map(range, shape))),))
        whole: Tensor | None = None
        self._check_replicas(name)
        for op in join(self._ref_counts[name], {0: {name: wanted}}):
            piece = self._piece(op, self._ref_counts[name][op.src][op.src_name])
            if whole is None:
                whole = torch.empty(shape, dtype=piece.dtype)
            whole[at(op.dst_box)] = piece
        assert whole is not None, f"{name}: {box} is empty"
        return whole

    def _add_rank(self, rank: int) -> None:
        file = rank_file(rank)
        shapes = {name: self._files.shape(file, name) for name in self._files.names(file)}
        tiles = megatron_tiles(self.spec, self.layout, rank, self.layer_spec)
        try:
            check_covers(tiles, shapes)
        except LayoutError as error:
            raise ModelError(f"{self.path / file}: {error}") from error
        self._sums.append(read_sums(self.path / file.replace(WEIGHTS, CHECKSUMS)))
        for name, local in tiles.items():
            for tile in local.tiles:
                self._ref_counts[tile.hf].setdefault(rank, {})[name] = local

    def _check_replicas(self, name: str) -> None:
        """Equal boxes have equal checksums on every rank that holds them."""
        seen: dict[Box, tuple[int, str]] = {}
        for rank, named in self._ref_counts[name].items():
            for local_name, local in named.items():
                sums = self._tile_sums(rank, local_name)
                for tile, found in zip(local.tiles, sums, strict=True):
                    if tile.hf != name:
                        continue
                    first, want = seen.setdefault(tile.hf_box, (rank, found))
                    if found != want:
                        raise ModelError(
                            f"{self.path}: ranks {first} and {rank} hold different values of {name}"
                        )

    def _piece(self, op: Op, local: Local) -> Tensor:
        """The data that an op copies; a whole tile is compared with its checksum."""
        piece = self._files.read(rank_file(op.src), op.src_name, op.src_box)
        lead = len(op.src_box) - len(op.dst_box)
        for tile, want in zip(local.tiles, self._tile_sums(op.src, op.src_name), strict=True):
            if tile.box == op.src_box and digest(memory(piece)) != want:
                raise ModelError(
                    f"{self.path / rank_file(op.src)}: tensor {op.src_name} is damaged: "
                    f"its part of {tile.hf} does not match the checksum"
                )
        return piece[(0,) * lead] if lead else piece

    def _tile_sums(self, rank: int, local_name: str) -> tuple[str, ...]:
        sums = self._sums[rank].get(local_name)
        if sums is None:
            raise ModelError(f"{self.path}: rank {rank} has no checksums of {local_name}")
        return sums.tiles


Source = HfFolder | MegatronFolder


def open_source(path: str | Path) -> Source:
    """A checkpoint if the folder has a manifest, else a Hugging Face folder."""
    return MegatronFolder(path) if (Path(path) / MANIFEST).exists() else HfFolder(path)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}/{WEIGHTS}"


def convert_to_megatron(
    source: Source,
    target: str | Path,
    layout: ParallelConfig,
    layer_spec: LayerSpec,
    ranks: ConversionRanks,
    progress: ConversionProgress,
    *,
    dtype: torch.dtype | None = None,
    replace: bool = False,
) -> None:
    """Write a checkpoint of `layout`.  Collective over the conversion ranks.

    dtype: of the parameters; None keeps the source's.  Tensors whose dtype the layout pins (the
    float32 expert bias) keep it.
    Raises ConfigError or LayoutError when the model does not divide, ModelError for a source that
    cannot be read or a target that cannot be written.
    """
    spec = source.spec
    units = []
    for rank in range(layout.world_size):
        file = rank_file(rank)
        plan = partial(_rank_plan, source, layout, rank, layer_spec, dtype)
        units.append(Unit(file, file.replace(WEIGHTS, CHECKSUMS), plan))
    units[0].plan()  # sizes that do not divide are refused before anything is written
    identity = {
        "kind": FORMAT,
        "source": _fingerprint(source.path),
        "layout": asdict(layout),
        "layer_spec": layer_spec,
        "dtype": str(dtype),
    }

    def finish(folder: Path) -> None:
        dtypes = _hf_dtypes(source, dtype)
        common = Counter(dtypes.values()).most_common(1)[0][0]
        manifest = {
            "format": FORMAT,
            "family": spec.family,
            "layout": asdict(layout),
            "layer_spec": layer_spec,
            "vocab_rows": padded_vocab(spec, layout.tp, layout.vocab_divisible_by),
            "dtype": _name(common),
            "dtype_of": {name: _name(kind) for name, kind in dtypes.items() if kind != common},
            "hf_config": _config(source, dtype, dtypes),
        }
        copy_tokenizer(source.path, folder)
        write_json(folder / MANIFEST, manifest)

    run_job(Job(Path(target).absolute(), tuple(units), identity, finish, replace), ranks, progress)


def convert_to_hf(
    source: MegatronFolder,
    target: str | Path,
    ranks: ConversionRanks,
    progress: ConversionProgress,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 * 2**30,
    replace: bool = False,
) -> None:
    """Write a folder that transformers and SGLang open.  Collective over the conversion ranks.

    dtype: None gives every tensor the dtype it had before it became a checkpoint.
    """
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

    units = tuple(
        Unit(file, f".checksums/{file}.json", partial(plan, names))
        for file, names in shards.items()
    )

    def finish(folder: Path) -> None:
        write_index(folder, shards, sum(nbytes.values()))
        write_json(folder / "config.json", _config(source, dtype, dtypes))
        copy_tokenizer(source.path, folder)
        shutil.rmtree(folder / ".checksums")

    identity = {
        "kind": "hf",
        "source": _fingerprint(source.path),
        "dtype": str(dtype),
        "shards": list(shards),
    }
    run_job(Job(Path(target).absolute(), units, identity, finish, replace), ranks, progress)


def _rank_plan(
    source: Source,
    layout: ParallelConfig,
    rank: int,
    layer_spec: LayerSpec,
    dtype: torch.dtype | None,
) -> list[Planned]:
    plan = []
    for name, local in megatron_tiles(source.spec, layout, rank, layer_spec).items():
        kind = _local_dtype(name, local, source, dtype)
        boxes = tuple(tile.box for tile in local.tiles)
        plan.append(Planned(name, local.shape, kind, partial(_make, local, kind, source), boxes))
    return plan


def _make(local: Local, dtype: torch.dtype, source: Source) -> Tensor:
    tensor = torch.zeros(local.shape, dtype=dtype)
    fill(tensor, local, source)
    return tensor


def _local_dtype(name: str, local: Local, source: Source, dtype: torch.dtype | None) -> torch.dtype:
    if local.dtype:
        return DTYPE_NAMES[local.dtype]
    if dtype is not None:
        return dtype
    found = {source.dtype(tile.hf) for tile in local.tiles} or {config_dtype(source.config)}
    if len(found) > 1:
        kinds = ", ".join(sorted(map(_name, found)))
        raise ConfigError("--dtype", None, f"{name} is made of {kinds}; choose one")
    return found.pop()


def _hf_dtypes(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Dtype of every Hugging Face tensor after conversion; pinned tensors are not cast."""
    shapes = hf_shapes(source.spec)
    if dtype is None:
        return {name: source.dtype(name) for name in shapes}
    everything = megatron_tiles(source.spec, ParallelConfig(), 0)
    pinned = {tile.hf for local in everything.values() if local.dtype for tile in local.tiles}
    return {name: source.dtype(name) if name in pinned else dtype for name in shapes}


def _config(
    source: Source, dtype: torch.dtype | None, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """The model's config; its dtype is the requested one, else its own, else that of the tensors.

    Pinned tensors do not count: transformers always keeps the expert bias in float32.
    """
    if dtype is not None:
        return with_dtype(source.config, [dtype])
    named = "dtype" in source.config or "torch_dtype" in source.config
    return with_dtype(source.config, [config_dtype(source.config)] if named else dtypes.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fingerprint(folder: Path) -> Mapping[str, Any]:
    """Names, sizes and times of the source's files; changes when a file changes."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    stats = ((str(path.relative_to(folder)), path.stat()) for path in files)
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats}

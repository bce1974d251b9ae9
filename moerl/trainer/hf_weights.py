"""Hugging Face folders and live parameters: read what a rank holds, gather on rank 0, save.

All three run on the tiles of `moerl.layout`, so no tensor name or cut is written here:

    load_hf    folder -> this rank's parameters, reading only the bytes the rank holds
    HfGather   every rank's parameters -> whole HF tensors on rank 0
    save_hf    HF tensors -> a folder that transformers and SGLang open as it is

Rejected: building a transformers model to read or write (it holds the whole model in memory on
every rank), and one message per tensor in the gather (thousands of small sends; here each source
rank packs what rank 0 lacks into one message per dtype).
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moerl.errors import LayoutError, ModelError
from moerl.layout import (
    Box,
    Flavor,
    ModelSpec,
    Named,
    Op,
    ParallelLayout,
    at,
    check_covers,
    hf_shapes,
    hf_tiles,
    join,
    megatron_tiles,
    model_spec,
    num_elements,
    stacked_aliases,
)

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
READABLE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class _Place(NamedTuple):
    """Where a Hugging Face tensor is in the files; `inside` = its box when the file stacks it."""

    file: str
    tensor: str
    inside: Box | None


class HfFolder:
    """A model folder: config.json and one or several safetensors files.

    Names and shapes are those of `hf_shapes`, one expert per tensor, also when the files keep the
    experts stacked.  The whole folder is checked on opening: raises ModelError for a missing folder
    or config, an unknown family, and a tensor that is missing, unknown, truncated, of another shape
    or quantised (a bare cast of FP8 gives plausible noise).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"{self.path}: no such model folder")
        self.config: dict[str, Any] = _read_json(self.path / "config.json")
        self._open: dict[str, Any] = {}
        files = self._tensor_files()
        found = {name: self._file_shape(name, file) for name, file in files.items()}
        try:
            self.spec = model_spec(self.config)
            aliases = stacked_aliases(self.spec, found)
        except LayoutError as error:
            raise ModelError(f"{self.path}: {error}") from error
        self._shapes = hf_shapes(self.spec)
        self._places = {name: _Place(file, name, None) for name, file in files.items()}
        self._places |= {
            name: _Place(files[tensor], tensor, box) for name, (tensor, box) in aliases.items()
        }
        stacked = {tensor for tensor, _ in aliases.values()}
        self._check(found, stacked)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelError(f"{self.path}: has no tensor {name}")
        return self._shapes[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One tensor, or a box of it, in the file's dtype on the CPU; reads no other bytes."""
        shape = self.shape(name)
        box = box if box is not None else tuple(range(n) for n in shape)
        if len(box) != len(shape) or any(r.stop > n for r, n in zip(box, shape, strict=True)):
            raise ModelError(f"{self.path}: {name} has shape {shape}, no box {box}")
        file, tensor, inside = self._places[name]
        if inside is None:
            return self._slice(file, tensor)[at(box)]
        expert, rows, _ = inside
        moved = range(rows.start + box[0].start, rows.start + box[0].stop)
        return self._slice(file, tensor)[at((expert, moved, box[1]))][0]

    def _tensor_files(self) -> dict[str, str]:
        if (self.path / INDEX_FILE).exists():
            index = _read_json(self.path / INDEX_FILE)
            if not isinstance(index.get("weight_map"), dict):
                raise ModelError(f"{self.path / INDEX_FILE}: has no weight_map")
            return dict(index["weight_map"])
        if not (self.path / SINGLE_FILE).exists():
            raise ModelError(f"{self.path}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{self.path / file}: missing, truncated or not safetensors: {error}"
                ) from error
        return self._open[file]

    def _slice(self, file: str, tensor: str) -> Any:
        try:
            return self._handle(file).get_slice(tensor)
        except SafetensorError as error:
            raise ModelError(f"{self.path / file}: has no tensor {tensor}") from error

    def _file_shape(self, name: str, file: str) -> tuple[int, ...]:
        part = self._slice(file, name)
        if part.get_dtype() not in READABLE:
            raise ModelError(
                f"{self.path}: {name} is stored as {part.get_dtype()}; readable: "
                f"{', '.join(READABLE)}"
            )
        return tuple(part.get_shape())

    def _check(self, found: Mapping[str, tuple[int, ...]], stacked: set[str]) -> None:
        for name, shape in self._shapes.items():
            if name not in self._places:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            if self._places[name].inside is None and found[name] != shape:
                raise ModelError(
                    f"{self.path}: {name} has shape {found[name]}, the config says {shape}"
                )
        # a tied checkpoint may repeat its head, an old one its rotary table: neither is state
        ignored = {"lm_head.weight"} if self.spec.tied else set()
        for name in found.keys() - self._shapes.keys() - stacked - ignored:
            if not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"{self.path}: {name} is not a tensor of {self.spec.family}")


@torch.no_grad()
def load_hf(params: Mapping[str, Tensor], tiles: Named, folder: HfFolder) -> None:
    """Fill this rank's parameters in place, cast to their dtype; padding rows become 0.

    tiles: `megatron_tiles(folder.spec, ...)` of this rank.  Raises LayoutError when they do not
    cover `params` exactly, ModelError when the folder cannot give a tile.
    """
    check_covers(tiles, {name: tuple(param.shape) for name, param in params.items()})
    for name, local in tiles.items():
        param = params[name]
        for tile in local.tiles:
            param[at(tile.box)] = folder.read(tile.hf, tile.hf_box).to(param.device, param.dtype)
        if local.pad_rows:
            param[-local.pad_rows :] = 0


class HfGather:
    """Whole Hugging Face tensors on rank 0, from the parameters of all ranks.

    params: returns this rank's live parameters by local name, called at every gather.
    rank, group: group ranks equal layout ranks 0..world_size-1; group is unused with one rank.
    The plan is made once.  Construction and `gather` are collective over the group.
    Raises LayoutError when the live parameters are not those the layout describes.
    """

    def __init__(
        self,
        params: Callable[[], Mapping[str, Tensor]],
        spec: ModelSpec,
        layout: ParallelLayout,
        rank: int,
        flavor: Flavor,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._params, self._rank, self._group = params, rank, group
        world = layout.world_size
        sources = {r: megatron_tiles(spec, layout, r, flavor) for r in range(world)}
        live = params()
        check_covers(sources[rank], {name: tuple(param.shape) for name, param in live.items()})
        self._dtypes = self._exchange({name: param.dtype for name, param in live.items()}, world)
        self._shapes = hf_shapes(spec)
        self._plan: dict[int, list[Op]] = defaultdict(list)
        for op in join(sources, {0: hf_tiles(spec)}, same_ranks=True):
            self._plan[op.src].append(op)
        self._device = _message_device(live, group) if world > 1 else torch.device("cpu")
        self._flat: dict[torch.dtype, Tensor] = {}
        self._whole: dict[str, Tensor] = {}

    @torch.no_grad()
    def gather(self, dtype: torch.dtype | None = None) -> dict[str, Tensor] | None:
        """HF tensors on the CPU in checkpoint order on rank 0, None on the other ranks.

        dtype: cast before sending; None keeps the parameters' own.  The tensors are reused: they
        stay valid until the next gather.
        """
        params = self._params()
        if self._rank != 0:
            for wire_dtype, ops in self._messages(self._rank, dtype):
                flat = self._buffer(wire_dtype, ops)
                for op, piece in _pieces(flat, ops):
                    piece.copy_(params[op.src_name][at(op.src_box)])
                dist.send(flat.view(torch.uint8), group=self._group, group_dst=0)
            return None
        self._allocate(dtype)
        for op in self._plan[0]:
            self._whole[op.dst_name][at(op.dst_box)] = params[op.src_name][at(op.src_box)].to(
                "cpu", self._whole[op.dst_name].dtype
            )
        for src in sorted(self._plan.keys() - {0}):
            for wire_dtype, ops in self._messages(src, dtype):
                flat = self._buffer(wire_dtype, ops)
                dist.recv(flat.view(torch.uint8), group=self._group, group_src=src)
                for op, piece in _pieces(flat.cpu(), ops):
                    self._whole[op.dst_name][at(op.dst_box)] = piece
        return dict(self._whole)

    def _exchange(self, mine: dict[str, torch.dtype], world: int) -> list[dict[str, torch.dtype]]:
        """Dtypes of every rank's parameters: rank 0 must know how to read a message."""
        if world == 1:
            return [mine]
        every: list[Any] = [None] * world
        dist.all_gather_object(every, mine, group=self._group)
        return every

    def _messages(
        self, src: int, dtype: torch.dtype | None
    ) -> Iterable[tuple[torch.dtype, list[Op]]]:
        """The ops of one source by wire dtype, in an order both ends compute alike."""
        by_dtype: dict[torch.dtype, list[Op]] = defaultdict(list)
        for op in self._plan[src]:
            by_dtype[dtype or self._dtypes[src][op.src_name]].append(op)
        return sorted(by_dtype.items(), key=lambda item: str(item[0]))

    def _buffer(self, dtype: torch.dtype, ops: list[Op]) -> Tensor:
        """A flat message of the ops' elements; one allocation per dtype, grown to the largest."""
        size = sum(num_elements(op.src_box) for op in ops)
        if dtype not in self._flat or self._flat[dtype].numel() < size:
            self._flat[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._flat[dtype][:size]

    def _allocate(self, dtype: torch.dtype | None) -> None:
        found: dict[str, torch.dtype] = {}
        for src, ops in self._plan.items():
            for op in ops:
                have = dtype or self._dtypes[src][op.src_name]
                if found.setdefault(op.dst_name, have) != have:
                    raise LayoutError(
                        f"{op.dst_name}: rank {src} holds it as {have}, "
                        f"another rank as {found[op.dst_name]}"
                    )
        for name, shape in self._shapes.items():
            if name not in self._whole or self._whole[name].dtype != found[name]:
                self._whole[name] = torch.empty(shape, dtype=found[name])


def save_hf(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    source_model_path: str | Path,
    *,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a model folder that transformers and SGLang open as it is.

    tensors: every tensor of the model, by Hugging Face name.  Config and tokenizer come from
    `source_model_path`; the config's dtype is set to that of the tensors.  Everything is written
    and flushed to a sibling folder first; a folder of the same name is replaced only then.
    Raises ModelError when a tensor is missing, unknown or of another shape.
    """
    target, source = Path(folder).absolute(), Path(source_model_path)
    config = _read_json(source / "config.json")
    _check_tensors(tensors, config, source)
    config = _with_dtype(config, tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for pattern in TOKENIZER_FILES:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, fresh / path.name)
    _write_json(fresh / "config.json", config)
    _write_shards(fresh, tensors, max_shard_bytes)
    for path in (*fresh.iterdir(), fresh):
        _flush(path)
    _replace(target, fresh)


def _check_tensors(tensors: Mapping[str, Tensor], config: dict[str, Any], source: Path) -> None:
    try:
        want = hf_shapes(model_spec(config))
    except LayoutError as error:
        raise ModelError(f"{source}: {error}") from error
    for name in want.keys() ^ tensors.keys():
        state = "missing" if name in want else "not a tensor of the model"
        raise ModelError(f"{name} is {state} and cannot be saved with the config of {source}")
    for name, shape in want.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")


def _with_dtype(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """transformers loads in the dtype the config names, whatever the files hold."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    # with several, the widest: a float32 router must not be rounded by the loader
    dtype = "float32" if "float32" in dtypes else min(dtypes)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return config | dict.fromkeys(keys, dtype)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        _save_shard(shards[0], folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _save_shard(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / INDEX_FILE, index)


def _save_shard(shard: Mapping[str, Tensor], path: Path) -> None:
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
    save_file(ready, path, metadata={"format": "pt"})  # transformers asks for the format


def _replace(target: Path, fresh: Path) -> None:
    """Put `fresh` in the place of `target`; a crash in between leaves both under hidden names."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: missing or not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _pieces(flat: Tensor, ops: Iterable[Op]) -> Iterable[tuple[Op, Tensor]]:
    """The part of a flat message that belongs to each op, in the shape of its boxes."""
    first = 0
    for op in ops:
        shape = [len(r) for r in op.src_box]
        size = num_elements(op.src_box)
        yield op, flat[first : first + size].view(shape)
        first += size


def _message_device(params: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """NCCL moves device memory, gloo host memory."""
    if "nccl" in dist.get_backend(group):
        return next(iter(params.values())).device
    return torch.device("cpu")

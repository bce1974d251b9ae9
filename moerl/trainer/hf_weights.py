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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from moerl.errors import LayoutError, ModelError
from moerl.layout import (
    Box,
    Flavor,
    Local,
    ModelSpec,
    Named,
    Op,
    ParallelLayout,
    Tile,
    at,
    check_covers,
    hf_shapes,
    hf_tiles,
    join,
    megatron_tiles,
    model_spec,
    mtp_copies,
    num_elements,
    stacked_aliases,
    stacked_forms,
    transposed_stacks,
)
from moerl.trainer.dequantize import MXFP4_GROUP, Fp8Block, Mxfp4
from moerl.trainer.mapped_files import DTYPES, MappedFiles

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
READABLE = ("F32", "BF16", "F16")
FILL_BYTES = 64 * 2**20  # a tile is copied in bands of rows no larger than this


class TensorSource(Protocol):
    """Where Hugging Face tensors come from: a folder of theirs, or a Megatron-side checkpoint."""

    @property
    def spec(self) -> ModelSpec: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, box: Box | None = None) -> Tensor: ...


class _Stored(NamedTuple):
    """A tensor of the files, after dequantisation."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], Tensor]


class _Place(NamedTuple):
    """Where a Hugging Face tensor is in the files; `inside` = its box when the file stacks it."""

    tensor: str
    inside: Box | None


class HfFolder:
    """A model folder: config.json and one or several safetensors files.

    Names and shapes are those of `hf_shapes`, one expert per tensor, also when the files keep the
    experts stacked.  FP8-block and MXFP4 tensors are dequantised while they are read.  The whole
    folder is checked on opening: raises ModelError for a missing folder or config, an unknown
    family, and a tensor that is missing, unknown, truncated, of another shape or quantised without
    scales.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"{self.path}: no such model folder")
        self.config: dict[str, Any] = read_json(self.path / "config.json")
        self._files = MappedFiles(self.path)
        try:
            self.spec = model_spec(self.config)
            self._swap = transposed_stacks(self.spec)
            self._stored = self._find_stored(self._tensor_files())
            found = {name: stored.shape for name, stored in self._stored.items()}
            aliases = stacked_aliases(self.spec, found)
        except LayoutError as error:
            raise ModelError(f"{self.path}: {error}") from error
        self._shapes = hf_shapes(self.spec)
        self._places = {name: _Place(name, None) for name in found}
        self._places |= {name: _Place(*place) for name, place in aliases.items()}
        self._check(found, {tensor for tensor, _ in aliases.values()})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelError(f"{self.path}: has no tensor {name}")
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The file's dtype; for a quantised tensor the one the config names."""
        self.shape(name)
        return self._stored[self._places[name].tensor].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One tensor, or a box of it, on the CPU; reads no other bytes.

        In the file's dtype; float32 where the file is quantised, so that the caller rounds once.
        """
        shape = self.shape(name)
        box = box if box is not None else tuple(range(n) for n in shape)
        if len(box) != len(shape) or any(r and r[-1] >= n for r, n in zip(box, shape, strict=True)):
            raise ModelError(f"{self.path}: {name} has shape {shape}, no box {box}")
        tensor, inside = self._places[name]
        if inside is None:
            return self._stored[tensor].read(box)
        expert, *outer = inside
        box = box[::-1] if self._swap else box
        moved = (
            range(r.start + first.start, r.stop + first.start, r.step)
            for r, first in zip(box, outer, strict=True)
        )
        value = self._stored[tensor].read((expert, *moved))[0]
        return value.T if self._swap and len(box) == 2 else value

    def _tensor_files(self) -> dict[str, str]:
        if (self.path / INDEX_FILE).exists():
            index = read_json(self.path / INDEX_FILE)
            if not isinstance(index.get("weight_map"), dict):
                raise ModelError(f"{self.path / INDEX_FILE}: has no weight_map")
            return dict(index["weight_map"])
        if not (self.path / SINGLE_FILE).exists():
            raise ModelError(f"{self.path}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return dict.fromkeys(self._files.names(SINGLE_FILE), SINGLE_FILE)

    def _find_stored(self, files: Mapping[str, str]) -> dict[str, _Stored]:
        stored: dict[str, _Stored] = {}
        for name, file in files.items():
            scaled, packed = name.removesuffix("_scale_inv"), name.removesuffix("_blocks")
            if scaled != name and scaled in files:
                continue
            if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in files:
                continue
            if f"{name}_scale_inv" in files:
                stored[name] = self._fp8(name, files)
            elif packed != name and f"{packed}_scales" in files:
                stored[packed] = self._mxfp4(packed, files)
            else:
                stored[name] = self._plain(name, file)
        return stored

    def _plain(self, name: str, file: str) -> _Stored:
        dtype = self._files.dtype(file, name)
        if dtype not in READABLE:
            raise ModelError(
                f"{self.path}: {name} is stored as {dtype}; readable: "
                f"{', '.join(READABLE)}, and FP8 or MXFP4 with its scales"
            )
        read = partial(self._files.read, file, name)
        return _Stored(self._files.shape(file, name), DTYPES[dtype], read)

    def _fp8(self, name: str, files: Mapping[str, str]) -> _Stored:
        scale_name = f"{name}_scale_inv"
        shape = self._files.shape(files[name], name)
        quantised = self.config.get("quantization_config") or {}
        rows, cols = quantised.get("weight_block_size") or (128, 128)
        want = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))
        found = self._files.shape(files[scale_name], scale_name)
        if found != want:
            raise ModelError(
                f"{self.path}: {scale_name} has shape {found}, blocks of {rows} x {cols} on "
                f"{name} {shape} need {want}"
            )
        weight = partial(self._files.read, files[name], name)
        scale = partial(self._files.read, files[scale_name], scale_name)
        return _Stored(shape, config_dtype(self.config), Fp8Block(weight, scale, (rows, cols)))

    def _mxfp4(self, name: str, files: Mapping[str, str]) -> _Stored:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        found = self._files.shape(files[scales], scales)
        if self._files.shape(files[blocks], blocks) != (*found, MXFP4_GROUP // 2):
            raise ModelError(
                f"{self.path}: {blocks} must have the shape of {scales} {found} and 16 bytes each"
            )
        read = Mxfp4(
            partial(self._files.read, files[blocks], blocks),
            partial(self._files.read, files[scales], scales),
        )
        shape = (*found[:-1], found[-1] * MXFP4_GROUP)
        if self._swap:  # packed files keep [E, rows, cols] where plain ones are transposed
            *lead, rows, cols = shape
            return _Stored((*lead, cols, rows), config_dtype(self.config), partial(_swapped, read))
        return _Stored(shape, config_dtype(self.config), read)

    def _check(self, found: Mapping[str, tuple[int, ...]], stacked: set[str]) -> None:
        for name, shape in self._shapes.items():
            if name not in self._places:
                raise ModelError(f"{self.path}: tensor {name} is missing")
            if self._places[name].inside is None and found[name] != shape:
                raise ModelError(
                    f"{self.path}: {name} has shape {found[name]}, the config says {shape}"
                )
        # a tied checkpoint may repeat its head, an old one its rotary table: neither is state
        ignored = set(mtp_copies(self.spec)) | ({"lm_head.weight"} if self.spec.tied else set())
        for name in found.keys() - self._shapes.keys() - stacked - ignored:
            if not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"{self.path}: {name} is not a tensor of {self.spec.family}")


def _swapped(read: Callable[[Box], Tensor], box: Box) -> Tensor:
    *lead, rows, cols = box
    return read((*lead, cols, rows)).mT


class FileTensor(NamedTuple):
    """A tensor as a folder of the family holds it: the box of each Hugging Face tensor in it."""

    shape: tuple[int, ...]
    parts: dict[str, Box]


def file_form(spec: ModelSpec) -> dict[str, FileTensor]:
    """What a saved folder holds: one tensor per expert, except in a family that knows only stacks.

    Prediction layers repeat the embedding and the head.
    """
    shapes = hf_shapes(spec)
    form = {
        name: FileTensor(shape, {name: tuple(map(range, shape))}) for name, shape in shapes.items()
    }
    for name, (shape, boxes) in stacked_forms(spec).items() if transposed_stacks(spec) else ():
        form = {other: tensor for other, tensor in form.items() if other not in boxes}
        form[name] = FileTensor(shape, boxes)
    copies = mtp_copies(spec)
    return form | {copy: form[name] for copy, name in copies.items() if name in form}


def assemble(tensor: FileTensor, dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
    """The content of a file's tensor from whole Hugging Face tensors."""
    first = next(iter(tensor.parts))
    if len(tensor.parts) == 1 and len(tensor.parts[first]) < 3:  # no stack: no second copy
        return read(first).to(dtype).reshape(tensor.shape)
    whole = torch.empty(tensor.shape, dtype=dtype)
    for name, box in tensor.parts.items():
        value = read(name)
        # only families with transposed stacks are written stacked
        whole[at(box)] = value.T if len(box) == 3 else value
    return whole


@torch.no_grad()
def load_hf(params: Mapping[str, Tensor], tiles: Named, folder: HfFolder) -> None:
    """Fill this rank's parameters in place, cast to their dtype; padding rows become 0.

    tiles: `megatron_tiles(folder.spec, ...)` of this rank.  Raises LayoutError when they do not
    cover `params` exactly, ModelError when the folder cannot give a tile.
    """
    check_covers(tiles, {name: tuple(param.shape) for name, param in params.items()})
    for name, local in tiles.items():
        fill(params[name], local, folder)


def fill(tensor: Tensor, local: Local, source: TensorSource) -> None:
    """Write all of one local tensor, cast to its dtype; padding rows become 0.

    Peak memory beyond the tensor: FILL_BYTES of float32 and what the source maps.
    """
    for tile in local.tiles:
        for hf_box, box in _bands(tile):
            tensor[at(box)] = source.read(tile.hf, hf_box).to(tensor.device)
    if local.pad_rows:
        tensor[-local.pad_rows :] = 0


def _bands(tile: Tile) -> Iterator[tuple[Box, Box]]:
    """(hf box, local box) of consecutive bands of the tile's rows."""
    rows, *rest = tile.hf_box
    lead, local_rows = len(tile.box) - len(tile.hf_box), tile.box[-len(tile.hf_box)]
    step = max(1, FILL_BYTES * len(rows) // (4 * max(1, num_elements(tile.hf_box))))
    for first in range(0, len(rows), step):
        band = slice(first, first + step)
        yield (rows[band], *rest), (*tile.box[:lead], local_rows[band], *tile.box[lead + 1 :])


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
    config = read_json(source / "config.json")
    spec = _check_tensors(tensors, config, source)
    config = with_dtype(config, (tensor.dtype for tensor in tensors.values()))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    copy_tokenizer(source, fresh)
    write_json(fresh / "config.json", config)
    _write_shards(fresh, _in_file_form(tensors, spec), max_shard_bytes)
    for path in (*fresh.iterdir(), fresh):
        flush(path)
    replace_folder(target, fresh)


def _in_file_form(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors as the family's folders hold them; what is not stacked is not copied."""
    return {
        name: tensors[name]
        if name in tensors
        # a clone: safetensors refuses the copies in prediction layers if they share memory
        else assemble(form, tensors[next(iter(form.parts))].dtype, tensors.__getitem__).clone()
        for name, form in file_form(spec).items()
    }


def _check_tensors(
    tensors: Mapping[str, Tensor], config: dict[str, Any], source: Path
) -> ModelSpec:
    try:
        spec = model_spec(config)
        want = hf_shapes(spec)
    except LayoutError as error:
        raise ModelError(f"{source}: {error}") from error
    for name in want.keys() ^ tensors.keys():
        state = "missing" if name in want else "not a tensor of the model"
        raise ModelError(f"{name} is {state} and cannot be saved with the config of {source}")
    for name, shape in want.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensors[name].shape)}, not {shape}")
    return spec


def with_dtype(config: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """transformers loads in the dtype the config names, whatever the files hold."""
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    # with several, the widest: a float32 router must not be rounded by the loader
    dtype = "float32" if "float32" in names else min(names)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return plain | dict.fromkeys(keys, dtype)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy what a model folder holds beside config and weights."""
    for pattern in TOKENIZER_FILES:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, target / path.name)


def shard_names(nbytes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> the tensors it holds, in order; at most max_bytes unless a tensor is larger."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in nbytes.items():
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{i:05d}-of-{len(shards):05d}.safetensors": names
        for i, names in enumerate(shards, start=1)
    }


def write_index(folder: Path, shards: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """The index of several shards; one shard needs none."""
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int) -> None:
    nbytes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shards = shard_names(nbytes, max_bytes)
    for file, names in shards.items():
        ready = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(ready, folder / file, metadata={"format": "pt"})  # transformers asks for it
    write_index(folder, shards, sum(nbytes.values()))


def replace_folder(target: Path, fresh: Path) -> None:
    """Put `fresh` in the place of `target`; a crash in between leaves both under hidden names."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype a config names; bfloat16 where it names none that weights can have."""
    name = config.get("dtype") or config.get("torch_dtype")
    return {"float32": torch.float32, "float16": torch.float16}.get(str(name), torch.bfloat16)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: missing or not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
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

"""Parts of a folder that transformers and SGLang open: tensors, files, config, tokenizer."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.atomic import flush_tree, publish_folder
from moerl.layout import (
    Box,
    ModelSpec,
    at,
    hf_shapes,
    megatron_tiles,
    mtp_copies,
    num_elements,
    stacked_forms,
    transposed_stacks,
)
from moerl.layout.model_files import INDEX_FILE, SINGLE_FILE
from moerl.trainer.hf_io.hf_folder import FILL_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
SMALL_BYTES = 128 * 2**20  # a tokenizer.json has tens of MiB
# Weights, which are written again, and files that describe the weights of the source alone
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"),
    *("*.index.json", "config.json"),
    *("*.distcp", "metadata.json", "manifest.json", "common.pt*"),  # of a checkpoint
)
_OF_SOURCE = ("*quant*_config.json", "adapter_config.json")
_SUBFOLDERS = ("additional_chat_templates",)  # of transformers


class FileTensor(NamedTuple):
    """A tensor as a folder of the family holds it: the box of each Hugging Face tensor in it."""

    shape: tuple[int, ...]
    parts: dict[str, Box]
    stacks: bool = False  # the boxes have an expert dim, and [cols, rows] of a matrix

    def bands(self) -> Iterator[tuple[str, Box, Box]]:
        """(Hugging Face tensor, box of it, box here) of pieces of FILL_BYTES in float32."""
        for name, box in self.parts.items():
            rows, *rest = box[:0:-1] if self.stacks else box
            step = max(1, FILL_BYTES // (4 * max(1, num_elements(tuple(rest)))))
            for first in range(0, len(rows), step):
                band = (rows[first : first + step], *rest)
                own = tuple(
                    range(r.start - f.start, r.stop - f.start)
                    for r, f in zip(band, (rows, *rest), strict=True)
                )
                yield name, own, (box[0], *band[::-1]) if self.stacks else band


def file_form(spec: ModelSpec) -> dict[str, FileTensor]:
    """Tensors of a saved folder: one per expert, except in families that only have stacks.

    Prediction layers repeat the embedding and the head.
    """
    shapes = hf_shapes(spec)
    form = {
        name: FileTensor(shape, {name: tuple(map(range, shape))}) for name, shape in shapes.items()
    }
    for name, (shape, boxes) in stacked_forms(spec).items() if transposed_stacks(spec) else ():
        form = {other: tensor for other, tensor in form.items() if other not in boxes}
        form[name] = FileTensor(shape, boxes, stacks=True)
    copies = mtp_copies(spec)
    return form | {copy: form[name] for copy, name in copies.items() if name in form}


def assemble(tensor: FileTensor, dtype: torch.dtype, read: Callable[[str, Box], Tensor]) -> Tensor:
    """The content of a file's tensor, filled in bands; read: a box of a Hugging Face tensor."""
    whole = torch.empty(tensor.shape, dtype=dtype)
    for name, box, place in tensor.bands():
        value = read(name, box)
        whole[at(place)] = value.mT if tensor.stacks and value.ndim == 2 else value
    return whole


def saved_config(
    config: Mapping[str, Any], spec: ModelSpec, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """The config of a folder with these tensors: transformers loads all of them in its dtype.

    Pinned tensors do not count: transformers always keeps the expert bias in float32.
    """
    fixed = pinned(spec)
    return with_dtype(config, (dtype for name, dtype in dtypes.items() if name not in fixed))


def value_config(config: Mapping[str, Any], loss: Literal["bce", "mse"]) -> dict[str, Any]:
    """The config of a model with a trained value head, as transformers reads it."""
    names = [
        name.replace("ForCausalLM", "ForTokenClassification") for name in config["architectures"]
    ]
    kind = {"bce": "multi_label_classification", "mse": "regression"}[loss]
    labels = {"id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}, "problem_type": kind}
    return {**config, "architectures": names, **labels}


def pinned(spec: ModelSpec) -> set[str]:
    """Hugging Face tensors whose dtype the layout pins."""
    everything = megatron_tiles(spec, ParallelConfig(), 0).values()
    return {tile.hf for local in everything if local.dtype for tile in local.tiles}


def with_dtype(config: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Set the config's dtype: transformers loads in that dtype, whatever the files hold."""
    dtypes = tuple(dtypes)
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    # with several, the widest: a float32 router must not be rounded by the loader
    dtype = "float32" if "float32" in names else min(names)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(inner := plain.get("text_config"), Mapping):
        plain["text_config"] = with_dtype(inner, dtypes)
    return plain | dict.fromkeys(keys, dtype)


def copy_small_files(source: Path, target: Path) -> list[str]:
    """Copy licence, tokenizer, preprocessor and all other small files that are no weights.

    Returns the names of files and folders that were left out, weights apart.  Raises OSError.
    """
    left_out = []
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or any(map(path.match, _WEIGHTS)):
            continue
        if path.is_dir() and path.name in _SUBFOLDERS:
            shutil.copytree(path, target / path.name, copy_function=shutil.copyfile)
        elif path.is_dir() or any(map(path.match, _OF_SOURCE)):
            left_out.append(f"{path.name}/" if path.is_dir() else path.name)
        elif path.is_file():
            if path.stat().st_size > SMALL_BYTES:
                left_out.append(path.name)
            else:
                shutil.copyfile(path, target / path.name)
    if left_out:
        log.warning("%s: left out of the model folder: %s", source, ", ".join(left_out))
    return left_out


def file_parts(items: Iterable[T], size: Callable[[T], int], max_bytes: int) -> list[list[T]]:
    """The items of each file, in order; at most max_bytes unless a single item is larger."""
    files: list[list[T]] = [[]]
    used = 0
    for item in items:
        if files[-1] and used + size(item) > max_bytes:
            files.append([])
            used = 0
        files[-1].append(item)
        used += size(item)
    return files


def shard_names(nbytes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> the tensors it holds, in order; at most max_bytes unless a tensor is larger."""
    shards = file_parts(nbytes, nbytes.__getitem__, max_bytes)
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


def replace_folder(target: Path, fresh: Path) -> None:
    """Flush `fresh` and move it to `target`; a crash in between leaves both under hidden names."""
    flush_tree(fresh)
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    publish_folder(fresh, target)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

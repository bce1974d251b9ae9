"""Hugging Face tensors -> a folder that transformers and SGLang can open.

Everything is written to a sibling folder and moved to the target at the end, so a killed save
leaves no folder that looks complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from moerl.atomic import flush_tree, publish_folder
from moerl.config.json_files import read_json
from moerl.errors import LayoutError, ModelError
from moerl.layout import (
    Box,
    ModelSpec,
    at,
    hf_shapes,
    model_spec,
    mtp_copies,
    stacked_forms,
    transposed_stacks,
)
from moerl.trainer.hf_io.hf_folder import INDEX_FILE, SINGLE_FILE

TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


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
    for dead in target.parent.glob(f".{target.name}.new-*"):  # a partial one can fill the disk
        shutil.rmtree(dead, ignore_errors=True)
    fresh = target.with_name(f".{target.name}.new-{os.getpid()}")
    try:
        fresh.mkdir()
        copy_tokenizer(source, fresh)
        write_json(fresh / "config.json", config)
        _write_shards(fresh, _in_file_form(tensors, spec), max_shard_bytes)
        replace_folder(target, fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


_NEVER_STACKED = ".conv1d.weight"  # has three dimensions of its own


class FileTensor(NamedTuple):
    """A tensor as a folder of the family holds it: the box of each Hugging Face tensor in it."""

    shape: tuple[int, ...]
    parts: dict[str, Box]


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
        form[name] = FileTensor(shape, boxes)
    copies = mtp_copies(spec)
    return form | {copy: form[name] for copy, name in copies.items() if name in form}


def assemble(tensor: FileTensor, dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
    """The content of a file's tensor from whole Hugging Face tensors."""
    first = next(iter(tensor.parts))
    if first.endswith(_NEVER_STACKED) or (len(tensor.parts) == 1 and len(tensor.shape) < 3):
        return read(first).to(dtype).reshape(tensor.shape)  # no stack: no second copy
    whole = torch.empty(tensor.shape, dtype=dtype)
    for name, box in tensor.parts.items():
        value = read(name)
        # only families with transposed stacks are written stacked
        whole[at(box)] = value.T if len(box) == 3 else value
    return whole


def _in_file_form(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors in the form of the family's folders; tensors that are not stacked are not copied."""
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


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy everything in a model folder apart from config and weights."""
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
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        save_file(ready, path, metadata={"format": "pt"})  # transformers requires it
        path.chmod(mode)  # safetensors writes files that only the owner can read
    write_index(folder, shards, sum(nbytes.values()))


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

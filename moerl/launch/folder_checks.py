"""One check of every model folder that a run will load, by headers and small files.

It needs neither torch nor transformers, so a dry run and the command line make it at once; the
root process makes it again for the folders that it wrote itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moerl.config import Config
from moerl.config.algorithms import ref_field, ref_models_of
from moerl.config.checks import missing_folder
from moerl.config.task_mixture import entries_of
from moerl.core.errors import ConfigError, ModelError
from moerl.core.json_files import read_json, refuse_pointer
from moerl.core.types import Array
from moerl.layout.common_parts import EMBED, HEAD
from moerl.layout.model_files import ModelFiles, Stored, read_header

VOCABULARIES = (  # files of which one turns text into ids
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model"),
    *("vocab.json", "vocab.txt"),
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROUNDED = 2.0**-8  # of a number that another dtype keeps
_CHUNK = 1 << 22  # numbers


class CheckedFolder(NamedTuple):
    """A model folder of a run; `field` names it, `has_text`: its tokenizer is read."""

    field: str
    folder: str
    has_text: bool


def check_folders(config: Config, *, starts: bool = True) -> list[str]:
    """Check each folder of the settings; returns a sentence for each without weights.

    starts: weights are needed; a dry run may have a config.json alone.
    Raises ConfigError naming the setting, the file and the tensor.
    """
    lines = []
    for field, folder, has_text in dict.fromkeys(_folders(config)):
        is_made_later = field == "model.path" and bool(config.checkpoint.start)
        if has_weights(Path(folder)) or (starts and not is_made_later):
            check_folder(field, folder, has_text=has_text)
        else:
            lines.append(f"{field}: {folder} has no weights here, so its files are not checked")
    if config.lora.start:
        _check_adapter(config.lora.start)
    return lines


def has_weights(folder: Path) -> bool:
    """Whether a folder holds more than a config.json, complete or not."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def check_folder(field: str, folder: str, *, has_text: bool = False) -> ModelFiles:
    """Check one folder.  Raises ConfigError."""
    if not Path(folder).is_dir():
        raise ConfigError(field, folder, missing_folder(folder))
    try:
        held = ModelFiles(Path(folder))
        _check_ids(held)
        if has_text:
            _check_tokenizer(held)
        _check_tied_head(held)
    except ModelError as error:
        raise ConfigError(field, folder, str(error)) from error
    return held


def _folders(config: Config) -> Iterator[CheckedFolder]:
    if config.model.path:
        yield CheckedFolder("model.path", config.model.path, has_text=True)
    for role, folder in ref_models_of(config).items():
        if folder:
            yield CheckedFolder(ref_field(role), folder, has_text=False)
    for task in entries_of(config):
        for term in task.terms:
            if term.where in ("judge", "model"):
                name = f"tasks.{task.label}" if config.tasks else "task"
                yield CheckedFolder(f"{name}.rewards.{term.name}.model", term.model, has_text=True)


def _check_adapter(folder: str) -> None:
    try:
        if not Path(folder).is_dir():
            raise ModelError("there is no such folder")
        read_json(Path(folder) / ADAPTER_FILES[0])
        read_header(Path(folder) / ADAPTER_FILES[1])
    except ModelError as error:
        raise ConfigError("lora.start", folder, str(error)) from error


# --- ids ------------------------------------------------------------------------------------------
def _check_ids(held: ModelFiles) -> None:
    """The special ids of both config files are rows of the embedding.  Raises ModelError."""
    generation = held.path / "generation_config.json"
    files = {"config.json": held.config.get("text_config") or held.config}
    files |= {generation.name: read_json(generation)} if generation.is_file() else {}
    rows = held.spec.vocab_size
    for file, settings in files.items():
        for name in _IDS:
            value = settings.get(name)
            ids = value if isinstance(value, list) else [value or 0]
            if not all(isinstance(one, int) and one < rows for one in ids):
                raise ModelError(
                    f"{held.path / file}: {name} = {value} is no row of the embedding, which has "
                    f"{rows} (vocab_size)"
                )


def _check_tokenizer(held: ModelFiles) -> None:
    """There is a tokenizer, and its ids are rows of the embedding.  Raises ModelError."""
    found = [name for name in VOCABULARIES if (held.path / name).is_file()]
    if not found:
        raise ModelError(
            f"{held.path}: it has no tokenizer, which turns text into ids ({VOCABULARIES[0]} or "
            f"{VOCABULARIES[1]}); copy its files from the source of the model"
        )
    for name in found:
        refuse_pointer(held.path / name)
    if found[0] != "tokenizer.json":
        return
    ids = tokenizer_ids(read_json(held.path / found[0]))
    token = max(ids, key=ids.__getitem__, default="")
    if not ids or ids[token] >= held.spec.vocab_size:
        found_ids = f"gives {token!r} the id {ids[token]}" if ids else "has no token"
        raise ModelError(
            f"{held.path / 'tokenizer.json'}: it {found_ids}, the embedding has "
            f"{held.spec.vocab_size} rows (vocab_size)"
        )


def tokenizer_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    """Id of each token of a tokenizer.json."""
    model = fields.get("model") or {}
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: pairs of token and score
        vocabulary = {pair[0]: place for place, pair in enumerate(vocabulary)}
    added = {one["content"]: one["id"] for one in fields.get("added_tokens") or ()}
    return {**vocabulary, **added}


# --- a stored head with a tied embedding ---------------------------------------------------------
def _check_tied_head(held: ModelFiles) -> None:
    """Raises ModelError where a tied model stores a head of its own, which nothing would read."""
    head, embedding = (held.tensors.get(held.spec.root + name) for name in (HEAD, EMBED))
    if not (held.spec.tied and head and embedding):
        return
    if head.shape != embedding.shape:
        difference = f"its shape is {head.shape}"
    elif largest := _difference(held.path, head, embedding):
        difference = f"by up to {largest:.3g}"
    else:
        return
    raise ModelError(
        f"{held.path / head.file}: {HEAD} differs from {EMBED} ({difference}), and "
        "tie_word_embeddings = true leaves it out: set that to false in config.json to train the "
        "stored head, or remove the tensor"
    )


def _difference(folder: Path, one: Stored, other: Stored) -> float:
    """Largest difference of two tensors of one shape, beyond the rounding of another dtype."""
    largest, rounded = 0.0, 0.0 if one.dtype == other.dtype else _ROUNDED
    for first in range(0, math.prod(one.shape), _CHUNK):
        a, b = (_numbers(folder, each, first) for each in (one, other))
        beyond = np.abs(a - b)
        beyond[beyond <= rounded * np.abs(b)] = 0.0
        largest = max(largest, float(np.nan_to_num(beyond, nan=np.inf).max()))
    return largest


def _numbers(folder: Path, stored: Stored, first: int) -> Array:
    """Up to _CHUNK numbers as float32."""
    kind = np.dtype({"F32": np.float32, "F16": np.float16}.get(stored.dtype, np.uint16))
    count = min(_CHUNK, math.prod(stored.shape) - first)
    at = stored.begin + first * kind.itemsize
    part = np.fromfile(folder / stored.file, kind, count, offset=at)
    if stored.dtype == "BF16":
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.float32)

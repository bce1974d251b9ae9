"""Reads recorded rollouts of any system, from JSONL or npz, as records that the trainer can score.

The schema is docs/formats.md.  Dumps are not trusted: every field is checked, and a bad one is
refused with its name and its line (JSONL) or rollout (npz).  Nothing is repaired, because an audit
must see faults such as one routing row too many.
"""

from __future__ import annotations

import math
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from moerl.core.errors import ConfigError, RecordError
from moerl.core.json_files import read_model_config
from moerl.core.types import (
    Array,
    Finish,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    Rollout,
    RoutingBlob,
    SamplingParams,
    VersionSpan,
)
from moerl.data.plain_values import FieldError
from moerl.data.prompt_files import parsed
from moerl.layout import ModelSpec, model_spec
from moerl.records.blob_store import BlobStore
from moerl.records.header_check import check, moved_to_node
from moerl.records.routing import check_ids, id_dtype
from moerl.records.sampling_mask import check_csr
from moerl.records.stream_files import groups_in

DUMPS = (".jsonl", ".npz", ".step")  # endings; the last one: a trained step of a stream
NEWEST = PolicyVersion(0, 1_000_000)  # for the scoring weights: a token of lag n is n older
_FIELDS = {
    "id", "token_ids", "loss_mask", "prompt_len", "logprobs", "routing", "sampling_mask", "lag",
    "temperature", "top_p", "top_k", "min_p",
}  # fmt: skip
_ARRAYS = {
    "id", "num_tokens", "token_ids", "loss_mask", "logprobs", "routing", "mask_offsets", "mask_ids",
    "lag", "temperature", "top_p", "top_k", "min_p",
}  # fmt: skip
_SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
_BOUNDS = {
    "temperature": (1e-6, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "min_p": (0.0, 1.0),
}
# Arrays of a file have 64 MiB, or this multiple of the file: routes pack well, but not so well.
_UNPACKED, _TIMES_PACKED = 64 << 20, 100


@dataclass(slots=True)
class _Raw:
    """One rollout as the arrays of the file."""

    where: str  # for messages: FILE line N, or FILE rollout N
    name: str
    token_ids: Array
    loss_mask: Array
    logprobs: Array
    routing: Array  # [T - 1, L, K]
    mask: tuple[Array, Array] | None  # offsets, ids
    lag: Array  # [S]
    settings: dict[str, float]


def model_shape(spec: ModelSpec) -> ModelShape:
    """Model facts that records need."""
    return ModelShape(
        spec.vocab_size, spec.layers, spec.moe_layers, spec.experts, spec.experts_per_token
    )


def read_dump(path: Path, store: BlobStore, shape: ModelShape) -> list[Rollout]:
    """Read FILE.jsonl, FILE.npz or FILE.step, seal its arrays, return checked records.

    Raises RecordError `dump` for a file or field that breaks the schema.
    """
    if path.suffix not in DUMPS:
        _refuse(str(path), "name", f"it must end in {', '.join(DUMPS)}")
    if not path.is_file():
        _refuse(str(path), "file", "it does not exist")
    if path.suffix == ".step":
        return _of_stream(path, store, shape)
    raws = _jsonl(path) if path.suffix == ".jsonl" else _npz(path)
    rollouts = [_rollout(raw, index, store, shape) for index, raw in enumerate(raws)]
    if not rollouts:
        _refuse(str(path), "file", "it holds no rollout")
    return rollouts


def _of_stream(path: Path, store: BlobStore, shape: ModelShape) -> list[Rollout]:
    """Rollouts of a trained step; a token's lag is counted from the weights that the step had."""
    step = int(path.name.split(".")[1])
    found = []
    for content in groups_in(path):
        for uri, data in content.blobs.items():
            store.put_back(moved_to_node(uri, store.node), data)
        for rollout in moved_to_node(content.group, store.node).rollouts():
            check(rollout, shape)
            spans = [replace(span, version=_aged(span.version, step)) for span in rollout.versions]
            found.append(replace(rollout, versions=tuple(spans)))
    return found


def _aged(version: PolicyVersion, step: int) -> PolicyVersion:
    return replace(NEWEST, step=NEWEST.step - (step - version.step))


def summary(dump: Path, model: Path) -> str:
    """Summary of a file that fits a model; needs no torch.

    model: its folder, or a config.json.  Raises MoerlError naming line and field that do not fit.
    """
    if not (model.is_dir() or model.name == "config.json"):
        raise ConfigError("MODEL", str(model), "a model folder or its config.json is needed")
    shape = model_shape(model_spec(read_model_config(model)))
    with tempfile.TemporaryDirectory(prefix="moerl-dump-") as folder:
        return describe(read_dump(dump, BlobStore(Path(folder), "dump"), shape), shape)


def describe(rollouts: list[Rollout], shape: ModelShape) -> str:
    """Summary of a dump, in two lines."""
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    sampled = sum(rollout.num_sampled for rollout in rollouts)
    lags = [NEWEST.step - version.step for r in rollouts for version in r.version_of_tokens()]
    kept = "for each sampled token" if rollouts[0].sampling_mask else "none, no setting truncates"
    return (
        f"good: {len(rollouts):,} rollouts, {tokens:,} tokens, {sampled:,} of them sampled, "
        f"lag {min(lags)} to {max(lags)}\n"
        f"routes of {len(shape.moe_layers)} MoE layers, {shape.top_k} of {shape.num_experts} "
        f"experts for each token fed in; sampling masks: {kept}"
    )


# --- JSONL -----------------------------------------------------------------------------------
def _jsonl(path: Path) -> Iterator[_Raw]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path.name} line {number}"
            try:
                row = parsed(line)
            except FieldError as error:
                _refuse(where, "line", str(error))
            if not isinstance(row, dict):
                _refuse(where, "line", "an object is needed")
            for name in sorted(row.keys() - _FIELDS):
                _refuse(where, name, f"unknown; known are {', '.join(sorted(_FIELDS))}")
            yield _parse(row, where, number)


def _parse(row: dict[str, Any], where: str, number: int) -> _Raw:
    tokens = _array(row, "token_ids", where, np.int64, 1)
    if ("loss_mask" in row) == ("prompt_len" in row):
        _refuse(where, "loss_mask", "give either loss_mask or prompt_len")
    if "loss_mask" in row:
        loss_mask = _array(row, "loss_mask", where, np.int64, 1)
    else:
        length = row["prompt_len"]
        if not isinstance(length, int) or not 1 <= length < max(len(tokens), 2):
            _refuse(
                where, "prompt_len", f"{length!r}; an integer in 1..{len(tokens) - 1} is needed"
            )
        loss_mask = (np.arange(len(tokens)) >= length).astype(np.int64)
    num_sampled = int((loss_mask == 1).sum())
    mask = None
    if row.get("sampling_mask") is not None:
        kept = row["sampling_mask"]
        if not isinstance(kept, list) or not all(isinstance(ids, list) for ids in kept):
            _refuse(where, "sampling_mask", "a list of lists of token ids is needed")
        sets = [sorted(_array({"ids": ids}, "ids", where, np.int64, 1).tolist()) for ids in kept]
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in sets])]).astype(np.int64)
        mask = (offsets, np.array([token for ids in sets for token in ids], np.int64))
    lag = np.zeros(num_sampled, np.int64)
    if row.get("lag") is not None:
        lag = (
            np.broadcast_to(_array(row, "lag", where, np.int64, None), (num_sampled,))
            if not isinstance(row["lag"], list)
            else _array(row, "lag", where, np.int64, 1)
        )
    return _Raw(
        where,
        str(row.get("id", number)),
        tokens,
        loss_mask,
        _array(row, "logprobs", where, np.float64, 1),
        _array(row, "routing", where, np.int64, 3),
        mask,
        lag,
        {name: row.get(name, default) for name, default in _SETTINGS.items()},
    )


def _array(
    row: dict[str, Any], name: str, where: str, dtype: type[np.generic], dims: int | None
) -> Array:
    if row.get(name) is None:
        _refuse(where, name, "it is missing")
    try:
        values = np.asarray(row[name])
    except ValueError:
        _refuse(where, name, "its lists have different lengths")
    kinds = "iub" if np.issubdtype(dtype, np.integer) else "iuf"
    if values.size and values.dtype.kind not in kinds:
        what = "integers" if kinds == "iub" else "numbers"
        _refuse(where, name, f"{what} are needed, got {values.dtype}")
    if dims is not None and values.ndim != dims:
        _refuse(where, name, f"{dims} dimensions are needed, got shape {values.shape}")
    return values.astype(dtype)


# --- npz -------------------------------------------------------------------------------------
def _npz(path: Path) -> Iterator[_Raw]:
    arrays = _arrays_in(path)
    values = _check_npz(arrays, path.name)
    token = sampled = 0
    for index, count in enumerate(values["num_tokens"].tolist()):
        end = token + count
        num = int((values["loss_mask"][token:end] == 1).sum())
        mask = None
        if "mask_ids" in values:
            part = values["mask_offsets"][sampled : sampled + num + 1]
            mask = (part - part[0], values["mask_ids"][part[0] : part[-1]])
        yield _Raw(
            f"{path.name} rollout {index}",
            str(arrays["id"][index]) if "id" in arrays else str(index),
            values["token_ids"][token:end],
            values["loss_mask"][token:end],
            values["logprobs"][sampled : sampled + num],
            values["routing"][token - index : end - index - 1],
            mask,
            values["lag"][sampled : sampled + num],
            {
                name: _setting(arrays, name, index, default, path.name)
                for name, default in _SETTINGS.items()
            },
        )
        token, sampled = end, sampled + num


def _arrays_in(path: Path) -> dict[str, Array]:
    """Names and sizes are checked before anything is unpacked or allocated."""
    arrays: dict[str, Array] = {}
    name = "file"
    try:
        with zipfile.ZipFile(path) as file:
            members = _members(file, path)
            for name, member in members.items():
                with file.open(member) as stream:
                    _check_head(stream, member.file_size)
                with file.open(member) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    except RecordError:
        raise
    except Exception as error:  # a damaged archive raises nearly anything
        _refuse(path.name, name, f"not readable without pickle: {_one_line(error)}")
    return arrays


def _members(file: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    size, most = 0, max(_UNPACKED, _TIMES_PACKED * path.stat().st_size)
    for member in file.infolist():
        name = member.filename.removesuffix(".npy")
        if name not in _ARRAYS or name in found:
            known = ", ".join(sorted(_ARRAYS))
            _refuse(path.name, ascii(name), f"unknown or repeated; known are {known}")
        found[name] = member
        size += member.file_size
        if size > most:
            _refuse(path.name, name, f"{size} bytes with the arrays before it; {most} are allowed")
    return found


def _check_head(stream: IO[bytes], size: int) -> None:
    """Raises ValueError where an array is not as long as its bytes."""
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError(f"npy version {version}; allowed are 1.0 and 2.0")
    shape, _, dtype = read[version](stream)
    if math.prod(shape) * dtype.itemsize != size - stream.tell():
        raise ValueError(f"{dtype} of shape {shape} in {size - stream.tell()} bytes")


def _one_line(error: Exception) -> str:
    return ascii(f"{type(error).__name__}: {error}")[:300]


def _check_npz(arrays: dict[str, Array], where: str) -> dict[str, Array]:
    """The arrays over all rollouts, in the dtypes of records, with lengths checked."""
    values = {
        name: _array(arrays, name, where, np.int64, 1)
        for name in ("num_tokens", "token_ids", "loss_mask")
    }
    values["logprobs"] = _array(arrays, "logprobs", where, np.float64, 1)
    values["routing"] = _array(arrays, "routing", where, np.int64, 3)
    counts = values["num_tokens"]
    if (counts < 2).any() or counts.sum() != len(values["token_ids"]):
        _refuse(where, "num_tokens", "each at least 2, and their sum the length of token_ids")
    num_sampled = int((values["loss_mask"] == 1).sum())
    for name, size, unit in (
        ("loss_mask", counts.sum(), "entries"),
        ("logprobs", num_sampled, "entries"),
        ("routing", (counts - 1).sum(), "rows"),
    ):
        if len(values[name]) != size:
            _refuse(where, name, f"{len(values[name])} {unit}, {size} are needed")
    if "id" in arrays and arrays["id"].shape != counts.shape:
        _refuse(where, "id", f"shape {arrays['id'].shape}, {counts.shape} is needed")
    values |= _check_npz_mask(arrays, where, num_sampled)
    values["lag"] = np.zeros(num_sampled, np.int64)
    if "lag" in arrays:
        values["lag"] = _array(arrays, "lag", where, np.int64, 1)
        if len(values["lag"]) != num_sampled:
            _refuse(where, "lag", f"{len(values['lag'])} entries, {num_sampled} are needed")
    return values


def _check_npz_mask(arrays: dict[str, Array], where: str, num_sampled: int) -> dict[str, Array]:
    """mask_offsets and mask_ids; empty when the dump has no masks."""
    if ("mask_offsets" in arrays) != ("mask_ids" in arrays):
        _refuse(where, "mask_offsets", "give mask_offsets and mask_ids, or neither")
    if "mask_ids" not in arrays:
        return {}
    offsets = _array(arrays, "mask_offsets", where, np.int64, 1)
    ids = _array(arrays, "mask_ids", where, np.int64, 1)
    if len(offsets) != num_sampled + 1 or offsets[-1] != len(ids):
        _refuse(where, "mask_offsets", "one more than logprobs, ending at len(mask_ids)")
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        _refuse(where, "mask_offsets", "they must begin at 0 and never fall")
    return {"mask_offsets": offsets, "mask_ids": ids}


def _setting(arrays: dict[str, Array], name: str, index: int, default: float, where: str) -> float:
    """One number for all rollouts, or one per rollout."""
    values = np.asarray(arrays.get(name, default))
    if values.ndim > 1 or values.dtype.kind not in "iuf":
        _refuse(where, name, "a number, or one for each rollout, is needed")
    if values.ndim and index >= len(values):
        _refuse(where, name, f"{len(values)} entries, one for each rollout is needed")
    return float(values[index] if values.ndim else values)


# --- records ---------------------------------------------------------------------------------
def _rollout(raw: _Raw, index: int, store: BlobStore, shape: ModelShape) -> Rollout:
    sampled = _check_lengths(raw, shape)
    name = f"dump-{index}"  # ids of a dump are not used as file names
    ids = raw.routing.transpose(1, 0, 2)
    try:
        check_ids(ids, shape.num_experts)
        if raw.mask is not None:
            offsets, kept = raw.mask[0], raw.mask[1]
            check_csr(offsets, kept, sampled, vocab_size=shape.vocab_size)
            kept = kept.astype(np.int32)
    except RecordError as error:
        field = "routing" if error.reason.startswith("routing") else "sampling_mask"
        _refuse(raw.where, field, str(error))
    arrays: list[Array] = [np.ascontiguousarray(ids.astype(id_dtype(shape.num_experts)))]
    if raw.mask is not None:
        arrays += [offsets, kept]
    refs = store.seal(name, arrays)
    with np.errstate(over="ignore"):  # then it is not finite, and refused
        logprobs = raw.logprobs.astype(np.float32)
    versions = _versions(raw)
    rollout = Rollout(
        rollout_id=f"{index}:{raw.name}",
        token_ids=raw.token_ids.astype(np.int32),
        loss_mask=raw.loss_mask.astype(np.bool_),
        logprobs=logprobs,
        versions=versions,
        routing=(
            RoutingBlob(
                refs[0],
                0,
                len(raw.routing),
                versions[-1].version,
                shape.moe_layers,
                shape.num_experts,
            ),
        ),
        sampling_mask=(MaskBlob(refs[1], refs[2], 0, len(sampled)),) if raw.mask else (),
        finish=Finish.STOP,
        sampling=_sampling(raw),
        engine=0,
    )
    try:
        check(rollout, shape)
    except RecordError as error:
        _refuse(raw.where, error.reason, str(error))
    return rollout


def _check_lengths(raw: _Raw, shape: ModelShape) -> Array:
    """Returns the sampled tokens."""
    num_tokens = len(raw.token_ids)
    if num_tokens < 2:
        _refuse(raw.where, "token_ids", f"{num_tokens} tokens; a prompt and an answer are needed")
    if int(raw.token_ids.min()) < 0 or int(raw.token_ids.max()) >= shape.vocab_size:
        _refuse(raw.where, "token_ids", f"they must lie in 0..{shape.vocab_size - 1}")
    if len(raw.loss_mask) != num_tokens or not np.isin(raw.loss_mask, (0, 1)).all():
        _refuse(raw.where, "loss_mask", f"{num_tokens} entries of 0 or 1 are needed")
    sampled = raw.token_ids[raw.loss_mask == 1]
    if not len(sampled):
        _refuse(raw.where, "loss_mask", "no token is sampled")
    for name, values in (("logprobs", raw.logprobs), ("lag", raw.lag)):
        if len(values) != len(sampled):
            _refuse(raw.where, name, f"{len(values)} entries, {len(sampled)} sampled tokens")
    most = NEWEST.step
    if (raw.lag < 0).any() or (raw.lag > most).any() or (np.diff(raw.lag) > 0).any():
        _refuse(raw.where, "lag", f"it must lie in 0..{most} and never grow along a rollout")
    want = (num_tokens - 1, len(shape.moe_layers), shape.top_k)
    if raw.routing.shape != want:
        _refuse(
            raw.where,
            "routing",
            f"shape {raw.routing.shape}; [tokens - 1, MoE layers, experts per token] = {want} "
            "is needed",
        )
    if raw.mask is not None and len(raw.mask[0]) != len(sampled) + 1:
        _refuse(
            raw.where,
            "sampling_mask",
            f"{len(raw.mask[0]) - 1} sets, {len(sampled)} sampled tokens",
        )
    ids: Array = sampled.astype(np.int32)
    return ids


def _sampling(raw: _Raw) -> SamplingParams:
    values = raw.settings
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        least, most = _BOUNDS[name]
        if not is_number or not least <= value <= most or (name == "top_k" and value % 1):
            kind = "a whole number" if name == "top_k" else "a number"
            allowed = f"{kind} in {least:g}..{most:g} is needed"
            _refuse(raw.where, name, f"{ascii(value)[:99]}; {allowed}")
    sampling = SamplingParams(
        max_new_tokens=len(raw.token_ids),
        temperature=float(values["temperature"]),
        top_p=float(values["top_p"]),
        top_k=int(values["top_k"]),
        min_p=float(values["min_p"]),
    )
    if sampling.truncates and raw.mask is None:
        _refuse(raw.where, "sampling_mask", "it is missing, and top_p, top_k or min_p truncates")
    if raw.mask is not None and not sampling.truncates:
        _refuse(raw.where, "sampling_mask", "given, but no setting truncates; set top_p or top_k")
    return sampling


def _versions(raw: _Raw) -> tuple[VersionSpan, ...]:
    starts = [0, *(np.flatnonzero(np.diff(raw.lag)) + 1).tolist()]
    return tuple(
        VersionSpan(first, PolicyVersion(0, NEWEST.step - int(raw.lag[first]))) for first in starts
    )


def _refuse(where: str, field: str, why: str) -> NoReturn:
    raise RecordError("dump", f"{where}: {field}: {why}")

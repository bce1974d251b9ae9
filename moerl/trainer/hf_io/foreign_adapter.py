"""Adapters of others: any folder of peft whose targets are weights that we know, with its scales.

Read are factors of linear layers, of experts as modules of their own (`mlp.experts.3.up_proj`), and
of stacked experts (`target_parameters`), where gate and up share A, or one is 0 in the part of the
other.  Ranks, alphas and rsLoRA are those of the folder.  Anything else is refused by name.
Read at peft 0.21.2, tuners/lora/model.py and layer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from moerl.core.errors import ModelError
from moerl.core.json_files import read_json
from moerl.layout import ModelSpec, hf_shapes
from moerl.layout.adapters import module_of
from moerl.layout.shards import stacked_forms, transposed_stacks

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.(?:default\.)?weight")
_UNKNOWN = ("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "alora_invocation_tokens")


class LowRank(NamedTuple):
    """What a weight gets: scale * b @ a."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


def read_foreign(folder: Path, spec: ModelSpec) -> dict[str, LowRank]:
    """By Hugging Face module.  Raises ModelError, naming what is not known."""
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
        config = read_json(folder / "adapter_config.json")
    except OSError as error:
        raise ModelError(f"{folder}: not an adapter of peft: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{folder}: peft_type = {config.get('peft_type')!r}; LORA is supported")
    for name in _UNKNOWN:
        if config.get(name):
            raise ModelError(f"{folder}: {name} = {config[name]} is not supported")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{folder}: bias = {config['bias']!r} is not supported; none is")
    found: dict[str, LowRank] = {}
    for path, pair in _pairs(folder, tensors).items():
        found |= _of(folder, path, pair, spec, config)
    return found


def _pairs(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """A and B by the path of their layer."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (key := _KEY.fullmatch(name)) is None:
            raise ModelError(f"{folder}: {name} is no factor of a linear layer or of experts")
        pairs.setdefault(key[1], {})[key[2]] = tensor
    for path, pair in pairs.items():
        if missing := {"A", "B"} - pair.keys():
            raise ModelError(f"{folder}: {path} has no lora_{missing.pop()}")
    return pairs


def _of(
    folder: Path,
    path: str,
    pair: Mapping[str, Tensor],
    spec: ModelSpec,
    config: Mapping[str, Any],
) -> dict[str, LowRank]:
    shapes, a, b = hf_shapes(spec), pair["A"], pair["B"]
    weight = next((name for name in (f"{path}.weight", path) if name in shapes), "")
    if weight:
        if (b.shape[0], a.shape[1]) != shapes[weight] or a.shape[0] != b.shape[1]:
            raise ModelError(
                f"{folder}: {path} has factors {tuple(a.shape)} and {tuple(b.shape)}, its weight "
                f"is {shapes[weight]}"
            )
        return {module_of(weight): LowRank(a, b, _scale(config, (path, weight), len(a)))}
    block = path.removesuffix(".base_layer")
    for name, (stack, places) in stacked_forms(spec).items():
        experts, rows, cols = stack
        fits = (b.shape[0], a.shape[1]) == (rows, cols) and not len(a) % experts
        if name.rpartition(".")[0] == block and fits and not transposed_stacks(spec):
            scale = _scale(config, (name,), len(a) // experts)
            return dict(_unpacked(places, pair, experts, scale))
    raise ModelError(
        f"{folder}: {path} with factors {tuple(a.shape)} and {tuple(b.shape)} is no weight of "
        f"{spec.family}"
    )


def _unpacked(
    places: Mapping[str, tuple[range, ...]],
    pair: Mapping[str, Tensor],
    experts: int,
    scale: float,
) -> Iterator[tuple[str, LowRank]]:
    """A has the expert slowest, B has it fastest."""
    every_a, every_b = pair["A"].unflatten(0, (experts, -1)), pair["B"].unflatten(1, (-1, experts))
    for name, (expert, rows, _) in places.items():
        b = every_b[rows.start : rows.stop, :, expert.start]
        yield module_of(name), LowRank(every_a[expert.start], b, scale)


def _scale(config: Mapping[str, Any], names: tuple[str, ...], rank: int) -> float:
    """Of a layer; patterns are matched at the end of its name, as peft does."""
    alpha = _by_pattern(config.get("alpha_pattern") or {}, names, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, float], names: tuple[str, ...], other: float) -> float:
    for pattern, value in patterns.items():
        if any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) for name in names):
            return value
    return other

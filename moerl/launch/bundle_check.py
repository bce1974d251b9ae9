"""Settings that need what a bundle of `tools/gpu-bundle` left out of this environment.

A joined environment says in `gpu-bundle.json` which packages and kernels it lacks.  An import would
fail in the middle of a run; kernels of FlashAttention 3 that are zeros fail in the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.clusters import placement, starts_on_cuda
from moerl.config.task_mixture import entries_of
from moerl.core.errors import ConfigError
from moerl.core.json_files import read_json
from moerl.layout import model_spec

FILE = "gpu-bundle.json"  # in the environment's folder
_CUT_BACKENDS = (None, "fa3")  # None: SGLang takes fa3 where the card has it


def check_bundle(config: Config, shapes: Mapping[str, Any]) -> None:
    """Raises ConfigError, with the option of `tools/gpu-bundle make` that brings the missing part.

    shapes: the model's config.json.
    """
    file = Path(sys.prefix, FILE)
    if not file.is_file():
        return
    about, placed = read_json(file), placement(config)
    on_gpus = any(slot.devices for slot in placed.trainers)
    for row in about["left_out"]:
        for setting in row["settings"]:
            field, _, value = setting.partition("=")
            if value in _values(config, field) and (on_gpus or not field.startswith("trainer.")):
                raise ConfigError(field, value, row["sentence"])
    if about["attention"] and starts_on_cuda(config, placed):
        _check_attention(config, shapes, about["attention"])


def _values(config: Config, field: str) -> Iterator[object]:
    """Values of a setting; of `task`, in every entry of `tasks`."""
    section, _, name = field.partition(".")
    holders = entries_of(config) if section == "task" else [getattr(config, section)]
    return (getattr(holder, name, None) for holder in holders)


def _check_attention(config: Config, shapes: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Kernels that were kept have one dtype and some widths of a head."""
    args, spec = config.engine.args, model_spec(shapes)
    names = ("prefill_attention_backend", "decode_attention_backend", "attention_backend")
    chosen = {args.get(name) or args.get("attention_backend") for name in names[:2]}
    if chosen.isdisjoint(_CUT_BACKENDS):
        return
    why = kept["sentence"]
    if config.engine.dtype != kept["dtype"]:
        raise ConfigError("engine.dtype", config.engine.dtype, why)
    if spec.kv_lora or spec.head_dim not in kept["widths"]:
        raise ConfigError("model.path", config.model.path, f"its heads are {spec.head_dim}: {why}")
    if str(args.get("kv_cache_dtype", "auto")) not in ("auto", "bfloat16", "bf16"):
        raise ConfigError("engine.args.kv_cache_dtype", args["kv_cache_dtype"], why)

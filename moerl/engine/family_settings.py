"""Server arguments and environment that a model family needs on a plain CPU, by `model_type`.

Without them the functions of `moerl.engine.plugin.cpu_kernels` would not run, or not in the dtype
that is served.  This table loads without torch: dry runs print it on login nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moerl.core.errors import ConfigError
from moerl.core.json_files import read_json

# Environment variables of a server, which the plug-in reads.
MODEL_FOLDER = "MOERL_ENGINE_MODEL"  # the folder of its model
DP_ATTENTION = "MOERL_DP_ATTENTION"  # set with data-parallel attention


@dataclass(frozen=True, slots=True)
class FamilySettings:
    """What a server of one family is started with."""

    args: Mapping[str, bool | str]  # server arguments
    environment: Mapping[str, str]


_SETTINGS = {
    "gpt_oss": FamilySettings(
        # torch_native writes the cache of window layers at slots other than those it reads
        args={"disable_hybrid_swa_memory": True},
        # SGLang compiles the activation of its experts: 26 s at the first request, 0.2 s without
        environment={"TORCHDYNAMO_DISABLE": "1"},
    ),
    "llama4": FamilySettings(
        # the language model alone; attention in chunks keeps its cache as windows do
        args={"enable_multimodal": False, "disable_hybrid_swa_memory": True},
        environment={"TORCHDYNAMO_DISABLE": "1"},  # SGLang compiles its router
    ),
    "qwen3_next": FamilySettings(
        # the plain CPU has no snapshots of states, which the other strategy shares between requests
        args={"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
        # inputs of the convolution would be kept in bf16, whatever dtype is served
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
}
_NOTHING = FamilySettings({}, {})


def model_type_of(folder: Path) -> str:
    """`model_type` of a model folder; empty where there is no config.json yet."""
    file = folder / "config.json"
    return str(read_json(file).get("model_type", "")) if file.is_file() else ""


def environment_of(model_type: str) -> dict[str, str]:
    return dict(_SETTINGS.get(model_type, _NOTHING).environment)


def arguments_of(model_type: str, chosen: Mapping[str, object]) -> dict[str, bool | str]:
    """Server arguments that a family needs on a plain CPU.

    chosen: `engine.args`.  Raises ConfigError where they hold another value.
    """
    needed = dict(_SETTINGS.get(model_type, _NOTHING).args)
    for name, value in needed.items():
        if chosen.get(name, value) != value:
            raise ConfigError(
                f"engine.args.{name}",
                chosen[name],
                f"without CUDA an engine of {model_type} needs {value!r}; leave it out",
            )
    return needed

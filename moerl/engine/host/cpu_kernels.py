"""Models that an engine serves without CUDA, and the server arguments that they need.

SGLang has no path for a plain CPU for some modules of some families, for weights in fp8 blocks and
for data-parallel attention.  Another distribution can bring kernels for them: it names them by
entry points of the group GROUP, and registers its hooks as a further plug-in of SGLang
(`moerl.engine.plugin.entry_points.register`).  A checkout of moerl has one in tests/cpu_sglang.

Loads without torch: dry runs call it on login nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from moerl.config.schema import EngineConfig
from moerl.core.errors import ConfigError

GROUP = "moerl.cpu_kernels"
FP8, ATTENTION_DP = "fp8", "attention_dp"
FAMILIES = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "gpt_oss", "llama4")
    + ("minimax_m2", "qwen2_moe", "qwen3_next")
)
"""Values of `model_type` that SGLang does not serve on a plain CPU by itself."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """Server arguments and environment variables that a set of kernels needs."""

    args: Mapping[str, bool | str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def check_kernels(engine: EngineConfig, model: Mapping[str, Any]) -> None:
    """Raises ConfigError without CUDA and the kernels of the model (its config.json)."""
    family = str(model.get("model_type") or "")
    quantized = (model.get("quantization_config") or {}).get("quant_method") == "fp8"
    needed = {family: family} if family in FAMILIES else {}
    needed |= {FP8: "weights in fp8 blocks"} if quantized else {}
    needed |= {ATTENTION_DP: "data-parallel attention"} if engine.attention_dp > 1 else {}
    missing = [said for name, said in needed.items() if _kernels_of(name) is None]
    if missing:
        raise ConfigError(
            "engine.platform",
            engine.platform,
            f"without CUDA SGLang has no kernels for {' and '.join(missing)}; use GPUs, or in "
            "a checkout of moerl set PYTHONPATH=$PWD/tests/cpu_sglang for the kernels of its tests",
        )


def arguments_of(model_type: str, chosen: Mapping[str, object]) -> dict[str, bool | str]:
    """Server arguments that a family needs on a plain CPU.

    chosen: `engine.args`.  Raises ConfigError where they hold another value.
    """
    needed = dict(_of_family(model_type).args)
    for name, value in needed.items():
        if chosen.get(name, value) != value:
            raise ConfigError(
                f"engine.args.{name}",
                chosen[name],
                f"without CUDA an engine of {model_type} needs {value!r}; leave it out",
            )
    return needed


def environment_of(model_type: str) -> dict[str, str]:
    """Environment variables that a family needs on a plain CPU."""
    return dict(_of_family(model_type).environment)


def _of_family(model_type: str) -> CpuKernels:
    found = _kernels_of(model_type) if model_type in FAMILIES else None
    return found or CpuKernels()


def _kernels_of(name: str) -> CpuKernels | None:
    """Kernels of a family, FP8 or ATTENTION_DP; None where no distribution has them."""
    for entry in entry_points(group=GROUP, name=name):
        found: CpuKernels = entry.load()
        return found
    return None

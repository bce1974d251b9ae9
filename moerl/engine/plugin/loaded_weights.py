"""The check of the weights that a scheduler process has loaded: they keep the canonical layout.

Covers choices of a release of SGLang that no server argument shows.
Read at sglang 0.5.23: srt/layers/quantization/unquant.py, srt/layers/quantization/fp8.py,
srt/layers/moe/fused_moe_triton/layer.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from moerl.core.errors import LayoutError
from moerl.engine.weight_layout import BLOCK_SHAPE, MODULES_CHECKED, asks_fp32_head, check_head

# Attributes of live modules -> their effect on weights.
_PLAIN_METHODS = (
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
)
_BLOCK_METHODS = ("Fp8LinearMethod", "Fp8MoEMethod")
_CACHE_METHOD = "Fp8KVCacheMethod"  # of every attention layer in a checkpoint of fp8 blocks
_METHOD_FLAGS = {
    "use_flashinfer_cutlass": "keeps w13 as [up; gate]",
    "use_triton_kernels": "keeps expert weights transposed",
    "use_flashinfer_trtllm_moe": "packs expert weights into blocks",
    "w13_swiglu_interleaved": "interleaves gate and up rows",
    "_aiter_runner": "shuffles expert weights",
    "use_marlin": "packs weights for a kernel that reads 8 bits and computes in 16",
    "use_mxfp8": "scales runs of 32 values",
    "block_fp8_as_mxfp8": "keeps a second form for another kernel",
    "is_fp4_expert": "keeps experts in 4 bits",
}
_WEIGHT_FLAGS = {
    "format_ue8m0": "are quantised again, to scales that are powers of two",
    "is_shuffled": "are shuffled in place",
}


def check_loaded(_result: None, runner: Any) -> None:
    """AFTER ModelRunner.load_model, in each scheduler process: check the modules and log it.

    The precision of the head, too: a model's config.json can change it without a server argument.
    The log line shows that the hook ran: SGLang only logs a hook that it could not install.
    """
    modules = list(runner.model.named_modules())
    check_modules(modules)
    asked = asks_fp32_head(runner.server_args.resolved_dict())
    heads = [module for _, module in modules if hasattr(module, "use_fp32_lm_head")]
    for head in heads:
        check_head(head.use_fp32_lm_head or head.use_fp32_lm_head_output, trainer_fp32=asked)
    if not heads:
        check_head(False, trainer_fp32=asked)
    sys.stdout.write(f"{MODULES_CHECKED}\n")  # one write: ranks share the log


def check_modules(modules: Iterable[tuple[str, Any]]) -> None:
    """Check the loaded modules of SGLang (`model.named_modules()`).

    Raises LayoutError naming the first module whose weights are not in the canonical layout.
    Covers choices of a release that no server argument shows.
    """
    for name, module in modules:
        if getattr(module, "use_intel_amx_backend", False):
            raise LayoutError(f"{name}: SGLang packs its weights for AMX")
        if getattr(module, "num_fused_shared_experts", 0):
            raise LayoutError(f"{name}: SGLang stores its shared experts among the routed ones")
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        kind = type(method).__name__
        if kind in _BLOCK_METHODS:
            _check_block_weights(name, module, kind)
        elif kind == _CACHE_METHOD:
            if (module.k_scale_float, module.v_scale_float) != (1.0, 1.0):
                raise LayoutError(f"{name}: the checkpoint scales its cache; training would not")
        elif kind not in _PLAIN_METHODS:
            raise LayoutError(
                f"{name}: weights of {kind} have no layout; use unquantised ones or fp8 blocks"
            )
        for flag, effect in _METHOD_FLAGS.items():
            if getattr(method, flag, None):
                raise LayoutError(f"{name}: {flag} of {kind} {effect}")


def _check_block_weights(name: str, module: Any, kind: str) -> None:
    """Raises LayoutError unless a layer keeps its fp8 blocks as loaded."""
    shape = getattr(module.quant_method, "weight_block_size", None)
    if shape != BLOCK_SHAPE:
        raise LayoutError(f"{name}: blocks of {kind} are {shape}, known are {BLOCK_SHAPE}")
    for parameter_name, parameter in module.named_parameters(recurse=False):
        for flag, effect in _WEIGHT_FLAGS.items():
            if getattr(parameter, flag, False):
                raise LayoutError(f"{name}.{parameter_name}: {flag}, its values {effect}")

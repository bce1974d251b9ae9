"""Multi-head latent attention on a plain CPU: both forms that SGLang chooses need something else.

For an attention backend that it does not know, SGLang computes a prefill without prefix as plain
multi-head attention, from keys that it does not write to the cache; `torch_native` reads the cache.
The absorbed form writes and reads latents, in prefill and in decode.

Rejected: plain multi-head attention that writes its keys (the cache holds latents only).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def absorbed(original: Callable[..., Any], attention: Any, forward_batch: Any) -> Any:
    """AROUND DeepseekV2AttentionMLA.dispatch_attn_forward_method: always through the latents."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    original(attention, forward_batch)  # it also notes the backend of this pass
    return AttnForwardMethod.MLA


def any_rope(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    *args: Any,
    **options: Any,
) -> Any:
    """AROUND get_rope_cpu: it has YaRN only, SGLang's own factory has the other kinds.

    args: is_neox_style, rope_scaling, dtype, partial_rotary_factor, device.
    """
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    scaling = args[1] if len(args) > 1 else options.get("rope_scaling")
    if scaling is not None and scaling.get("rope_type") == "deepseek_yarn":
        return original(head_size, rotary_dim, max_position, base, *args, **options)
    options.pop("device", None)
    return get_rope(head_size, rotary_dim, max_position, base, *args[:4], **options)

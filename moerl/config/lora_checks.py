"""Checks of `lora`: its own settings, and settings that cannot run beside adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.config.lora_settings import SLOT_TARGETS
from moerl.config.schema import Config
from moerl.core.errors import ConfigError

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_LOSSES = "routers are frozen with lora, a loss of theirs was not tried; use 0"
_FROZEN = "frozen weights have no gradient to delay; not with lora"
_QUANTIZED = "adapters were not compared with its products; not with lora"
_NOT_WITH_ADAPTERS = {  # fields of trainer.megatron
    "moe_aux_loss_coeff": _LOSSES,
    "moe_z_loss_coeff": _LOSSES,
    "moe_shared_expert_overlap": "its experts would communicate where their adapters do; not with "
    "lora",
    "use_transformer_engine_op_fuser": "it computes a block without calling its linear layers, "
    "whose inputs adapters need; not with lora",
    "fine_grained_activation_offloading": "it releases inputs that adapters need; not with lora",
    "delay_wgrad_compute": _FROZEN,
    "overlap_dispatch_backward_with_experts_wgrad": _FROZEN,
    "fp8": _QUANTIZED,
    "fp4": _QUANTIZED,
}
# Of trainer.megatron.recompute_modules: outputs that are released, and made again for backward.
_RELEASED = {"layernorm", "moe_act", "mla_up_proj"}


def check_lora(config: Config) -> None:
    """Raises ConfigError."""
    lora = config.lora
    if not lora.rank:
        if lora.start:
            raise ConfigError("lora.start", lora.start, "lora.rank is 0: no weight has an adapter")
        return
    made = Path(config.run.root) / config.run.name / "start"  # of checkpoint.start, on a resume
    if lora.start and config.checkpoint.start and Path(lora.start) != made:
        raise ConfigError(
            "lora.start", lora.start, "checkpoint.start names adapters, too; set one of them"
        )
    if lora.dropout:
        raise ConfigError(
            "lora.dropout", lora.dropout, "merged weights cannot drop a part of a token; use 0"
        )
    if not lora.targets:
        raise ConfigError("lora.targets", lora.targets, "name at least one pattern, such as *_proj")
    for pattern, rank in lora.ranks.items():
        if rank < 1:
            raise ConfigError(f"lora.ranks.{pattern}", rank, "a rank of at least 1 is needed")
    if config.algorithm.advantage == "gae":
        raise ConfigError(
            "lora.rank", lora.rank, "a critic (algorithm.advantage = gae) was not tried; use 0"
        )
    for name, reason in _NOT_WITH_ADAPTERS.items():
        if value := config.trainer.megatron.get(name):
            raise ConfigError(f"trainer.megatron.{name}", value, reason)
    if found := _RELEASED & set(config.trainer.megatron.get("recompute_modules") or ()):
        raise ConfigError(
            "trainer.megatron.recompute_modules",
            sorted(found),
            "they release inputs that adapters need; not with lora, "
            "recompute_granularity = full is possible",
        )
    if lora.serves_adapters:
        _check_slots(config)
    if lora.sends_factors and config.engine.count:
        _check_sending(config)


def check_quantised_base(config: Config, model: Mapping[str, Any]) -> None:
    """Refuse a quantised model folder under engines that would merge factors, or serve adapters.

    model: config.json of the folder that engines load.  Raises ConfigError.
    """
    stored = (model.get("quantization_config") or {}).get("quant_method")
    if stored and config.lora.sends_factors and config.engine.count:
        other = "lora.delivery=merged lora.send=weights"
        raise ConfigError(
            "lora.send",
            "factors",
            f"engines keep the {stored} weights of {config.model.path} and cannot add factors to "
            f"them; set {other if config.lora.serves_adapters else 'lora.send=weights'}, or "
            "model.path to a folder with the weights in bf16",
        )


def _check_slots(config: Config) -> None:
    """Check that SGLang's adapter slots can serve the adapters and their changes of version."""
    lora = config.lora
    others = [name for name in lora.targets if re.split(r"[.*]", name)[-1] not in SLOT_TARGETS]
    if others:
        raise ConfigError(
            "lora.targets",
            others,
            f"engines serve adapters of {', '.join(SLOT_TARGETS)} alone; name these, such as "
            "*.q_proj, or use lora.delivery = merged",
        )
    in_flight = config.rollout.in_flight_mode
    refused = (
        (
            lora.send != "factors",
            f"lora.send = {lora.send}: an adapter is its factors; use factors",
        ),
        (
            in_flight in ("in_place", "retract"),
            f"rollout.in_flight_mode = {in_flight}: a request ends under the adapter that it began "
            "with; use abort_resume or drain",
        ),
        (config.engine.nodes > 1, "engine.nodes above 1 was not tried with adapters; use 1"),
        (
            config.engine.attention_dp > 1,
            "engine.args.attn_dp_size above 1 was not tried with adapters; leave it out",
        ),
    )
    for holds, reason in refused:
        if holds:
            raise ConfigError("lora.delivery", "adapter", f"{reason}, or set it to merged")


def _check_sending(config: Config) -> None:
    """Each engine rank uses the factors for itself, next to the weights that it loaded."""
    slots = config.lora.serves_adapters
    wanted = _DTYPES[config.trainer.dtype]
    refused = (
        (
            config.engine.dtype != wanted,
            f"engines in {config.engine.dtype} round another sum than a trainer in {wanted}; set "
            "engine.dtype to that",
        ),
        (config.sync.delta, "sync.delta was not tried with factors, which are small; set it false"),
        (
            config.sync.direct > 0,
            "sync.direct was not tried with factors, which are small; set it to 0",
        ),
        (
            "quantization" in config.engine.args,
            "quantised weights were not tried below adapters"
            if slots
            else "engines with quantised weights cannot merge factors",
        ),
    )
    for holds, reason in refused:
        if holds:
            other = f"set lora.{'delivery = merged' if slots else 'send = weights'}"
            raise ConfigError("lora.send", config.lora.send, f"{reason}, or {other}")

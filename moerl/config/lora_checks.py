"""Checks of `lora`: its own settings, and settings that cannot run beside adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.config.lora_settings import SLOT_TARGETS
from moerl.config.rules import Reasons, Rows, refuse
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
    refuse(config, _adapters(config) if config.lora.rank else _without(config))


def _without(config: Config) -> Rows:
    if config.lora.start:
        yield "lora.start", "lora.rank is 0: no weight has an adapter"


def _adapters(config: Config) -> Rows:
    lora, megatron = config.lora, config.trainer.megatron
    made = Path(config.run.root) / config.run.name / "start"  # of checkpoint.start, on a resume
    if lora.start and config.checkpoint.start and Path(lora.start) != made:
        yield "lora.start", "checkpoint.start names adapters, too; set one of them"
    if lora.dropout:
        yield "lora.dropout", "merged weights cannot drop a part of a token; use 0"
    if not lora.targets:
        yield "lora.targets", "name at least one pattern, such as *_proj"
    for pattern, rank in lora.ranks.items():
        if rank < 1:
            yield f"lora.ranks.{pattern}", rank, "a rank of at least 1 is needed"
    if config.algorithm.advantage == "gae":
        yield "lora.rank", "a critic (algorithm.advantage = gae) was not tried; use 0"
    for name, reason in _NOT_WITH_ADAPTERS.items():
        if megatron.get(name):
            yield f"trainer.megatron.{name}", reason
    if found := _RELEASED & set(megatron.get("recompute_modules") or ()):
        yield (
            "trainer.megatron.recompute_modules",
            sorted(found),
            "they release inputs that adapters need; not with lora, "
            "recompute_granularity = full is possible",
        )
    if lora.serves_adapters:
        yield from _slots(config)
    if lora.sends_factors and config.engine.count:
        other = f"set lora.{'delivery = merged' if lora.serves_adapters else 'send = weights'}"
        for reason in _against_factors(config):
            yield "lora.send", f"{reason}, or {other}"


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


def _slots(config: Config) -> Rows:
    """Whether SGLang's adapter slots can serve the adapters and their changes of version."""
    targets = config.lora.targets
    if others := [name for name in targets if re.split(r"[.*]", name)[-1] not in SLOT_TARGETS]:
        yield (
            "lora.targets",
            others,
            f"engines serve adapters of {', '.join(SLOT_TARGETS)} alone; name these, such as "
            "*.q_proj, or use lora.delivery = merged",
        )
    for reason in _against_slots(config):
        yield "lora.delivery", f"{reason}, or set it to merged"


def _against_slots(config: Config) -> Reasons:
    send, mode = config.lora.send, config.rollout.in_flight_mode
    if send != "factors":
        yield f"lora.send = {send}: an adapter is its factors; use factors"
    if mode in ("in_place", "retract"):
        yield (
            f"rollout.in_flight_mode = {mode}: a request ends under the adapter that it began "
            "with; use abort_resume or drain"
        )
    if config.engine.nodes > 1:
        yield "engine.nodes above 1 was not tried with adapters; use 1"
    if config.engine.attention_dp > 1:
        yield "engine.args.attn_dp_size above 1 was not tried with adapters; leave it out"


def _against_factors(config: Config) -> Reasons:
    """Each engine rank uses the factors for itself, next to the weights that it loaded."""
    engine, wanted = config.engine, _DTYPES[config.trainer.dtype]
    if engine.dtype != wanted:
        yield (
            f"engines in {engine.dtype} round another sum than a trainer in {wanted}; set "
            "engine.dtype to that"
        )
    if config.sync.delta:
        yield "sync.delta was not tried with factors, which are small; set it false"
    if config.sync.direct > 0:
        yield "sync.direct was not tried with factors, which are small; set it to 0"
    if "quantization" in engine.args and config.lora.serves_adapters:
        yield "quantised weights were not tried below adapters"
    elif "quantization" in engine.args:
        yield "engines with quantised weights cannot merge factors"

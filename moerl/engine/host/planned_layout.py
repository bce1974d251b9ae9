"""Would an engine of these settings be refused for its weight layout after it has started?

The same checks as those of a running server, from the arguments that it would get: before a start,
and in a dry run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.config.schema import EngineConfig
from moerl.engine import feature_table
from moerl.engine.host.cpu_kernels import check_kernels
from moerl.engine.host.server_args import arguments
from moerl.engine.weight_layout import LiveWeightLayout, check_model, layout_of_arguments


def check_planned_layout(
    config: EngineConfig, model: Mapping[str, Any], *, cuda: bool, routing: bool
) -> LiveWeightLayout:
    """Layout of an engine that would be started.  Raises ConfigError as a start would.

    model: its config.json; routing: routes are recorded.
    """
    check_model(model)
    if not cuda:
        check_kernels(config, model)
    stored = (model.get("quantization_config") or {}).get("quant_method")
    feature_table.check("quantization", stored, replay=routing)
    stated = arguments(
        config,
        Path(),
        routing=routing,
        version="",
        port=0,
        nccl_port=0,
        cuda=cuda,
        model_type=str(model.get("model_type") or ""),
    )
    return layout_of_arguments(stated, model)

"""What SGLang and Transformer Engine choose by themselves on a GPU, from a table in configs/.

`tools/gpu_choices.py` makes the table without a GPU, of the recipes as they are shipped: it asks
SGLang's own server arguments and Transformer Engine's own function.  A row is found by all that its
choice follows from, so a run with other settings than a recipe has no row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.clusters import Placement, engine_of, starts_on_cuda, takes_turns
from moerl.config.schema import NodeGroup
from moerl.core.json_files import read_json
from moerl.engine.host.adapter_slots import slot_arguments
from moerl.engine.host.server_args import SLEEPS, arguments
from moerl.engine.node_span import NodeSpan
from moerl.launch.cluster.node_commands import host_of
from moerl.layout import model_spec
from moerl.runtime.resources import resource_folder

FILE = resource_folder("configs") / "gpu_choices.json"
CARDS = {80: "H100", 141: "H200", 192: "B200"}  # by memory in GB
_CHANGES_NOTHING = {"model_path", "host", "port", "nccl_port", "weight_version", "dist_init_addr"}


def lines(config: Config, placed: Placement, shapes: Mapping[str, Any]) -> list[str]:
    """A line for engines of each size on GPUs, and one for trainer ranks on GPUs.

    shapes: the model's config.json.
    """
    table, found = read_json(FILE), []
    about = f"{table['about']}; made without a GPU, not resolved here"
    for tp in sorted(set(config.engine.sizes.values())) if starts_on_cuda(config, placed) else ():
        card = card_of(placed.engines[0].node.group)
        args = engine_arguments(config, placed, tp, Path(), shapes)
        chosen = table["engines"].get(engine_key(card, args, shapes))
        found.append(f"an engine of tp {tp} on {card}: {_said(chosen, 'choices')}")
    if any(slot.devices for slot in placed.trainers):
        card = card_of(placed.trainers[0].node.group)
        chosen = table["trainers"].get(trainer_key(card, config, shapes))
        found.append(f"attention of a trainer rank on {card}: {_said(chosen, 'backend')}")
    return [*found, f"({about})"] if found else []


def _said(row: Mapping[str, Any] | None, what: str) -> str:
    if row is None:
        return "not in the table of shipped recipes, so known when it starts"
    chosen = row[what]
    if isinstance(chosen, str):
        return chosen
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def card_of(group: NodeGroup) -> str:
    return CARDS.get(round(group.device_gb), "H100")


def engine_arguments(
    config: Config, placed: Placement, tp: int, folder: Path, shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """Server arguments of an engine of this size; ports are chosen on its node.

    folder: of the model.
    """
    args = arguments(
        engine_of(config, tp),
        folder,
        routing=config.replay.routing == "R3" and bool(model_spec(shapes).moe_layers),
        version="0.0",
        port="FREE",
        nccl_port="FREE",
        cuda=starts_on_cuda(config, placed),
        model_type=str(shapes.get("model_type") or ""),
    )
    args |= slot_arguments(config.lora, args) | (SLEEPS if takes_turns(config.cluster) else {})
    head = host_of(placed.engines[0].node)
    return args | NodeSpan(0, config.engine.nodes, f"{head}:FREE").arguments()


def engine_key(card: str, args: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in args.items() if name not in _CHANGES_NOTHING}
    return _digest(card, kept, shapes)


def trainer_key(card: str, config: Config, shapes: Mapping[str, Any]) -> str:
    trainer, sizes = config.trainer, config.trainer.parallel
    return _digest(card, [trainer.dtype, trainer.packing, sizes.tp, sizes.cp], shapes)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

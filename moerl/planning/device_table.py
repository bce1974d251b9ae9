"""The GPUs of each process, as `moerl train --dry-run` prints them.

The variables come from the function that a start uses (`moerl.config.clusters`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby

from moerl.config import Config
from moerl.config.clusters import (
    VISIBLE,
    Node,
    Placement,
    TrainerSlot,
    engine_gpus,
    is_local,
    mapped_gpus,
    visible_devices,
)


def device_lines(config: Config, placed: Placement) -> list[str]:
    """One line per engine, and per kind of rank and node; none without GPUs."""
    if is_local(config.cluster):
        environment: Mapping[str, str] = os.environ
        engines = [
            f"  engine {slot.engine}: {visible_devices(slot.devices)[VISIBLE]}"
            for slot in placed.engines
            if slot.devices
        ]
    else:
        environment, engines = {}, _dealt(placed)
    jobs = (("trainer", placed.trainers), ("reference", placed.ref_models))
    ranks = [line for job, slots in jobs for line in _ranks(job, slots, environment)]
    ranks += _mapped(config, placed, environment)
    return [f"devices, as {VISIBLE}:", *engines, *ranks] if engines or ranks else []


def _dealt(placed: Placement) -> list[str]:
    """On a cluster Ray chooses the node of an engine, and which of its GPUs it gets."""
    each = " or ".join(map(str, sorted({len(slot.devices) for slot in placed.engines})))
    nodes = [node for node in placed.nodes if engine_gpus(placed, node)]
    return [
        f"  engines on {_label(list(alike))}: {','.join(map(str, gpus))}; each gets {each} of them "
        "from Ray"
        for gpus, alike in groupby(nodes, key=lambda node: engine_gpus(placed, node))
    ]


def _ranks(job: str, slots: Sequence[TrainerSlot], environment: Mapping[str, str]) -> list[str]:
    """Lines of the ranks of one job.  environment: of the process that starts them."""
    lines = []
    for gpus, alike in groupby(slots, key=lambda slot: slot.devices):
        if gpus:
            label = _label([slot.node for slot in alike])
            named = visible_devices(gpus, environment)[VISIBLE]
            lines.append(f"  {job} ranks on {label}: {named}; local rank 0 has the first")
    return lines


def _mapped(config: Config, placed: Placement, environment: Mapping[str, str]) -> list[str]:
    """GPUs behind a rank's own GPUs in its variable; it computes on its own GPUs only."""
    slot = placed.trainers[0]
    others = mapped_gpus(config, placed, slot)
    if not others:
        return []
    every = visible_devices((*slot.devices, *others), environment)[VISIBLE].split(",")
    behind = ",".join(every[len(slot.devices) :])
    return [f"  trainer ranks also see {behind} behind their own, to write weights into (cuda_ipc)"]


def _label(nodes: Sequence[Node]) -> str:
    return nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} .. {nodes[-1].name}"

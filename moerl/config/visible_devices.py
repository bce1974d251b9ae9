"""From the GPUs of a place in the printed table to the environment of the process that gets it.

The table counts the GPUs of a node from 0.  Where the process that starts others has
CUDA_VISIBLE_DEVICES itself (a scheduler or a person set it), the table counts in that list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from moerl.core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(
    devices: Sequence[int], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of a process on these GPUs of its node; none for a process without GPUs.

    environment: of the process that starts it.  Raises ConfigError when that one sees too few.
    """
    if not devices:
        return {}
    inherited = environment.get(VISIBLE)
    if inherited is None:
        named = [str(device) for device in devices]
    else:
        seen = [entry for entry in inherited.split(",") if entry]
        if len(seen) <= max(devices):
            raise ConfigError(
                VISIBLE,
                inherited,
                f"GPU {max(devices)} of the node is needed, counted from 0 in this list; unset it, "
                "or set cluster.nodes.*.devices to the number of GPUs in it",
            )
        named = [seen[device] for device in devices]
    # nvidia-smi counts in this order too; CUDA's own puts the fastest GPU first
    return {VISIBLE: ",".join(named), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

"""CPU cores near a GPU: a process of one GPU, or of several, runs on the cores of their NUMA nodes.

nvidia-smi names the PCI address of each GPU; Linux names the NUMA node of that address, and the
cores of that node.  Threads get the cores by sched_setaffinity, and pages follow their threads,
since Linux allocates on the node of the first touch.  Nothing is bound on a machine of one node.
SGLang binds each rank to the node of its own GPU where the numactl program is installed; that
narrows the binding of this module.

Rejected: torchrun's --numa-binding (torch 2.13 ends the job where numactl is not installed).
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_ANSWER_S = 30.0  # the first question to an idle driver takes seconds


def bind(visible: Iterable[str], sys: Path = Path("/sys")) -> frozenset[int]:
    """Bind all threads of this process to the cores near these GPUs; returns the cores.

    visible: entries of CUDA_VISIBLE_DEVICES.  No core is returned, and nothing is bound, on a
    machine of one NUMA node and where a GPU or its node is not known.
    """
    if len(list((sys / "devices/system/node").glob("node[0-9]*"))) < 2:
        return frozenset()
    cores = near(list(visible), _addresses(), sys) & os.sched_getaffinity(0)
    if cores:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
    log.info("this process is bound to %d cores near its GPUs", len(cores))
    return cores


def of_rank(local_rank: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The entry of CUDA_VISIBLE_DEVICES that is device `local_rank`."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    entries = named.split(",") if named else [str(index) for index in range(local_rank + 1)]
    return entries[local_rank : local_rank + 1]


def near(visible: Iterable[str], addresses: Mapping[str, str], sys: Path) -> frozenset[int]:
    """Cores of the NUMA nodes of these GPUs; none if any of them is not known.

    addresses: PCI address by index and by UUID.
    """
    cores: set[int] = set()
    for entry in visible:
        node = _node_of(addresses.get(entry, ""), sys)
        if node is None:
            return frozenset()
        cores |= _cores(sys / f"devices/system/node/node{node}/cpulist")
    return frozenset(cores)


def _node_of(address: str, sys: Path) -> int | None:
    """None where Linux does not know it: it then writes -1."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _cores(file: Path) -> set[int]:
    """Cores of a list such as 0-15,32-47."""
    cores: set[int] = set()
    for part in file.read_text("ascii").strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _addresses() -> dict[str, str]:
    """PCI address of each GPU, by its index and by its UUID; empty without nvidia-smi."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no core is bound: %s", error)
        return {}
    found: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        index, uuid, bus = (field.strip() for field in line.split(","))
        domain, _, rest = bus.lower().partition(":")  # /sys writes four digits of the domain
        found[index] = found[uuid] = f"{domain[-4:]}:{rest}"
    return found

"""Ray over the nodes of a cluster: the head on the controller's node, one node per engine node.

`moerl train` starts the head as its child, so that it ends with the run; engine nodes join it with
`python -m moerl.launch.nodes.engine_node RUN_DIR` (tools/launch/engine_node.sh) and read its
address and token from the run's endpoints folder.  With KubeRay, `cluster.ray` names the cluster to
join instead.  Every node offers `engine` slots; trainer nodes have no Ray.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moerl.config import Config
from moerl.config.clusters import (
    Node,
    engine_gpus,
    is_local,
    own_address,
    placement,
    visible_devices,
)
from moerl.config.task_mixture import entries_of
from moerl.runtime.process_tree import end_descendants
from moerl.runtime.run_dir import RunDir

log = logging.getLogger(__name__)

ENGINE_SLOT = "engine"  # custom Ray resource: one slot per engine of a node
_ATTEMPTS = 4
_GRACE_S = 2.0
_OBJECTS = 80 * 2**20  # bytes of the object store; only messages pass through Ray


def start_ray(config: Config, run: RunDir, scratch: Path) -> None:
    """Start this run's own Ray, or join the cluster that `cluster.ray` names."""
    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if config.cluster.ray:
        ray.init(address=config.cluster.ray, **common)
        return
    common |= {
        "address": "local",  # never another run's cluster
        "num_cpus": _cores(config),
        "include_dashboard": False,
        "object_store_memory": _OBJECTS,
        "_temp_dir": str(scratch / "ray"),
    }
    if is_local(config.cluster):
        _patiently(common)
        return
    address, port = own_address(config.cluster), config.cluster.ports.ray
    os.environ["RAY_GCS_SERVER_PORT"] = str(port)
    node = placement(config).controller
    offered = engine_gpus(placement(config), node)
    os.environ |= visible_devices(offered)
    own: dict[str, Any] = {"_node_ip_address": address, "resources": slots(config, node)}
    own["num_gpus"] = len(offered)
    _patiently(common | own)
    run.endpoints.post_ray(f"{address}:{port}", os.environ["RAY_AUTH_TOKEN"])


def _cores(config: Config) -> int:
    """Cores that scorers reserve; all other actors reserve none."""
    terms = (term for entry in entries_of(config) for term in entry.terms)
    return math.ceil(sum(term.cpus * term.workers for term in terms))


def _patiently(options: dict[str, Any]) -> None:
    """Start Ray, with retries: a loaded machine can exceed its fixed 30 s for a raylet.

    Source: ray/_private/node.py, raylet_start_wait_time_s (2.60.0).
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if attempt == _ATTEMPTS or "timed out during startup" not in str(error):
                raise
            log.warning("Ray did not start, attempt %d: %s", attempt, error)
            ray.shutdown()
            end_descendants(_GRACE_S)  # no other child of this run exists yet


def slots(config: Config, node: Node) -> dict[str, float]:
    """Ray resources of a node: the number of engines planned for it."""
    count = sum(slot.node.name == node.name for slot in placement(config).engines)
    return {ENGINE_SLOT: float(count)} if count else {}


def this_node() -> NodeAffinitySchedulingStrategy:
    """Scheduling strategy for actors on the supervisor's node: controller and scorer."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class RayDaemons:
    """Ray's own processes on this machine.  Without them calls to actors hang for minutes."""

    _NAMES = ("gcs_server", "raylet")

    def __init__(self) -> None:
        self._found: list[tuple[str, psutil.Process]] = []

    def find(self) -> None:
        """Note the daemons that this process started; none for a cluster that it joined."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (name := process.name()) in self._NAMES:
                    self._found.append((name, process))

    def death(self) -> str:
        """Which one died; "" while all live."""
        for name, process in self._found:
            if not _lives(process):
                return f"Ray's {name} (process {process.pid}) died"
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

#!/usr/bin/env bash
# One trainer node of a run: torchrun with this cluster's rendezvous, devices and network cards.
#
# usage: tools/launch/torchrun.sh RUN_DIR INDEX [JOB]
#   INDEX: this node among those of the job; JOB: trainer (default), or ref_models: reference and
#   teacher on ranks of their own
#
# The run directory is on a file system that all nodes mount.  Everything else (nodes, ranks, ports,
# interface, RDMA cards, restarts) comes from its config.yaml; the controller's address and the run's
# token from its endpoints folder, so neither is on a command line.  Ranks are started again when one ends or a
# node comes back; this script ends when the trainer is done or the run is over, and ends only what it
# started (moerl/launch/nodes/trainer_node.py).  Ranks are bound to the cores near their GPU
# (moerl/distributed/numa.py) and to the node's RDMA cards (cluster.nodes.*.rdma).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${MOERL_PYTHON:-.venv/bin/python}
exec "$python" -m moerl.launch.nodes.trainer_node "$@"

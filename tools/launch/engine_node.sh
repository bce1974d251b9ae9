#!/usr/bin/env bash
# One more engine node of a run: joins the Ray head that the run's endpoints folder names, until the run ends.
# usage: tools/launch/engine_node.sh RUN_DIR INDEX      (INDEX: this node among the engine nodes)
#        tools/launch/engine_node.sh RUN_DIR --slots N [--gpus G]     a node that is not among them:
#            N more engines join the run that goes on; told to stop, the node lets them leave first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${MOERL_PYTHON:-.venv/bin/python}
exec "$python" -m moerl.launch.nodes.engine_node "$@"

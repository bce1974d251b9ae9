#!/usr/bin/env bash
# One more engine node of a run: joins the Ray head that the run's board names, until the run ends.
# usage: tools/launch/engine_node.sh RUN_DIR INDEX      (INDEX: this node among the engine nodes)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${MOERL_PYTHON:-.venv/bin/python}
exec "$python" -m moerl.launch.engine_node "$@"

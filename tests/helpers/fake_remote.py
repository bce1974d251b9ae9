"""Stands for `ssh HOST`: runs the command here, with the faults that FAULTS names for the host.

    python fake_remote.py HOST PYTHON -m MODULE ...

FAULTS is a JSON file {host: {fault: value}}.  The probe itself is the real one.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    host, _, _, module, *rest = sys.argv[1:]
    faults = json.loads(Path(os.environ["FAULTS"]).read_text()).get(host, {})
    if faults.get("unreachable"):
        raise SystemExit("ssh: connect to host: No route to host")
    from moerl.launch.cluster import node_facts

    if skew := faults.get("skew"):
        real = time.time
        node_facts.time.time = lambda: real() + skew  # type: ignore[attr-defined]
    if release := faults.get("sglang"):
        versions = node_facts.versions
        node_facts.versions = lambda: versions() | {"sglang": release}
    if kind := faults.get("file_system"):
        found = node_facts.file_system
        node_facts.file_system = lambda folder: kind if "journal" in str(folder) else found(folder)
    if "free" in faults:
        node_facts.psutil.disk_usage = lambda _path: type("Usage", (), {"free": faults["free"]})
    sys.argv = [module, *rest]
    if module == "moerl.launch.cluster.node_facts":
        node_facts.main()
    else:
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()

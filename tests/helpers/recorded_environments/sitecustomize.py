"""In the place of engine servers and trainer ranks: a process that writes its environment.

Python imports a module of this name at its start when its folder is on PYTHONPATH.  The folder
`MOERL_TEST_ENVIRONMENTS` gets one file per process, KIND-PID.json, and the process then waits to
be ended by the one that started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

_KINDS = {"moerl.engine.plugin.server_process": "engine", "moerl.trainer.main": "trainer"}


def _record(folder: Path, kind: str) -> None:
    job = json.load(sys.stdin) if kind == "engine" else {}
    found = {"environment": dict(os.environ), "job": job, "parent": os.getppid()}
    file = folder / f"{kind}-{os.getpid()}.part"
    file.write_text(json.dumps(found), encoding="utf-8")
    file.rename(file.with_suffix(".json"))
    time.sleep(600.0)


# torchrun has the name of the rank's module among its arguments, the rank has it after -m
_program = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else ""
if _program in _KINDS and "MOERL_TEST_ENVIRONMENTS" in os.environ:
    _record(Path(os.environ["MOERL_TEST_ENVIRONMENTS"]), _KINDS[_program])

"""Stand-in for a cluster's trainer: `python -m moerl.launch.nodes.trainer_watch`.

Trainer nodes start torchrun themselves and have no Ray.  This process runs on the controller's
node: it writes the controller's endpoint and token to the endpoints folder, exits 0 when the
trainer has written its done file, and exits 1 with a cause when the trainer nodes failed.  The
supervisor treats it like a local torchrun.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from moerl.runtime.run_dir import RunDir

_LOOK_S = 0.5


def main() -> int:
    """Exit status: 0 when the trainer is done, 1 when the trainer nodes failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--controller", required=True, help="tcp://HOST:PORT")
    args = parser.parse_args()
    endpoints = RunDir(args.run_dir).endpoints
    signal.signal(signal.SIGTERM, _leave)
    try:
        endpoints.open(args.controller, os.environ.pop("MOERL_TOKEN", ""))
        while True:
            if endpoints.is_done():
                return 0
            if cause := endpoints.given_up():
                print(f"TrainerError: {cause}", file=sys.stderr, flush=True)
                return 1
            time.sleep(_LOOK_S)
    finally:
        endpoints.close()


def _leave(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

"""The server process: one JSON job on standard input, read by this module run as a program.

The job is {"parent": pid, "args": {ServerArgs field: value}, "token": str}.  It comes by standard
input so that the token is neither in the command line nor in the environment, and so that every
server argument keeps its type.  The process dies with its parent (SIGKILL of the host leaves no
server behind), and SGLang's own processes die with this process in the same way.

Rejected: `python -m sglang.launch_server` (token on the command line, no import shim).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

from moerl.distributed import numa
from moerl.engine import torchvision_fix
from moerl.engine.plugin import entry_points
from moerl.engine.protocol import MODEL_FOLDER
from moerl.runtime.stack_dump import write_on_request

# at import: each process that SGLang spawns imports this module again
torchvision_fix.arm()
write_on_request()
if __name__ in ("__main__", "__mp_main__"):
    # SGLang's dumper of tensors imports Megatron where it is installed: a second per server.
    sys.modules["megatron"] = cast(ModuleType, None)

_PR_SET_PDEATHSIG = 1


class Secret(str):
    """Compares, formats and pickles as the string; its repr is masked, because SGLang logs its
    whole configuration at start."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def main() -> None:
    job = json.load(sys.stdin)
    die_with(job["parent"])
    bind_near_gpus(job["args"])
    serve(job["args"], Secret(job["token"]))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends.

    Linux sends the signal when the parent's THREAD ends, so start servers from a thread that stays.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def bind_near_gpus(args: Mapping[str, Any]) -> None:
    """Before the server has threads: its processes inherit the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and args.get("device") != "cpu":
        numa.bind(visible.split(","))


def serve(args: dict[str, Any], token: Secret) -> None:
    """Run one HTTP server until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    os.environ[MODEL_FOLDER] = args["model_path"]
    load_plugins()
    entry_points.check_installed()
    try:
        run_server(ServerArgs(**args, api_key=token, admin_api_key=token))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()

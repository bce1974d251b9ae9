"""Access to SGLang's server: which routes need the run's token, and sockets as private files.

Routes: SGLang opens every path that begins with `/health`, `/ready` or `/metrics`, so that probes
need no secret.  `/health_generate` samples a token, so any process that connects could keep an
engine busy.  `decide` opens the three whole names only.

Sockets: without data-parallel attention the sockets between SGLang's processes are files in the
server's private folder.  With it SGLang listens on ports of loopback, where every user of the
machine could connect, and unpickles messages that carry no token.  `use_files` and `bind_file`
turn the same ports into names of files.  An engine on several nodes keeps the ports.

Read at sglang 0.5.23: srt/server_args.py (PortArgs), srt/utils/network.py, srt/utils/auth.py,
srt/managers/data_parallel_controller.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moerl.weight_sync.receiver_names import SCRATCH

_OPEN = ("/health", "/ready", "/metrics")
_LOOPBACK = "tcp://127.0.0.1:"
_ADDRESSES = (
    "tokenizer_ipc_name",
    "scheduler_input_ipc_name",
    "detokenizer_ipc_name",
    "rpc_ipc_name",
    "metrics_ipc_name",
    "load_collector_ipc_name",
)


def decide(original: Callable[..., object], *, path: str, **request: object) -> object:
    """AROUND decide_request_auth: a path is open by its whole name only."""
    begins_alike = path.startswith(_OPEN) and path not in _OPEN
    return original(path=f"/closed{path}" if begins_alike else path, **request)


def use_files(original: Callable[..., Any], *args: object, **fields: object) -> Any:
    """AROUND PortArgs.init_new: the addresses of all processes of the server."""
    ports = original(*args, **fields)
    return replace(ports, **{name: _private(getattr(ports, name)) for name in _ADDRESSES})


def bind_file(
    original: Callable[..., tuple[int, Any]], *args: object, **fields: object
) -> tuple[int, Any]:
    """AROUND get_zmq_socket_on_host: a socket to one scheduler, and its port."""
    port, socket = original(*args, **fields)
    address = f"{_LOOPBACK}{port}"
    if _private(address) != address:
        socket.unbind(socket.last_endpoint)
        socket.bind(_private(address))
    return port, socket


def _private(address: str) -> str:
    folder = Path(tempfile.gettempdir())
    if not folder.name.startswith(SCRATCH) or not address.startswith(_LOOPBACK):
        return address
    return f"ipc://{folder}/port-{address.removeprefix(_LOOPBACK)}"

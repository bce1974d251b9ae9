"""SGLang's sockets between its processes, as files in the server's private folder.

Without data-parallel attention they are files already.  With it SGLang listens on ports of
loopback, where every user of the machine could connect, and unpickles what arrives without a
token.  Here the same ports become names of files.  An engine on several nodes keeps the
ports.

Read at sglang 0.5.23: srt/server_args.py (PortArgs), srt/utils/network.py,
srt/managers/data_parallel_controller.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moerl.weight_sync.receiver_names import SCRATCH

_LOOPBACK = "tcp://127.0.0.1:"
_ADDRESSES = (
    "tokenizer_ipc_name",
    "scheduler_input_ipc_name",
    "detokenizer_ipc_name",
    "rpc_ipc_name",
    "metrics_ipc_name",
    "load_collector_ipc_name",
)


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

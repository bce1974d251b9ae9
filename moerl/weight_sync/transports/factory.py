"""Transports by their name in `sync.transport`; a module is imported when it is chosen."""

from __future__ import annotations

from importlib import import_module

from moerl.core.errors import ConfigError
from moerl.weight_sync.transports.base import Transport

_MODULES = {
    "shm": "shm",
    "gloo": "process_group",
    "nccl": "process_group",
    "mooncake": "mooncake",
    "disk": "disk",
    "cuda_ipc": "cuda_ipc",
}
NAMES = tuple(_MODULES)


def make(name: str, *, address: str, folder: str = "") -> Transport:
    """The transport called `name`.

    address: of the interface that trainer and engines share; folder: root of `disk`'s files.
    Raises ConfigError for an unknown name, TransportError (missing) for a missing library.
    """
    if name not in _MODULES:
        raise ConfigError("sync.transport", name, f"use one of {NAMES}")
    module = import_module(f"moerl.weight_sync.transports.{_MODULES[name]}")
    if _MODULES[name] == "process_group":
        transport: Transport = module.GroupTransport(address, backend=name)
    else:
        transport = module.make(folder if name == "disk" else address)
    return transport

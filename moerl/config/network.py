"""This node's own address, where the configuration of a cluster leaves it open."""

from __future__ import annotations

import socket
from dataclasses import replace

import psutil

from moerl.config.schema import ClusterConfig, Config
from moerl.core.errors import ConfigError


def own_address(cluster: ClusterConfig) -> str:
    """`cluster.address`, else this node's IPv4 address on `cluster.interface`.

    Raises ConfigError when there is no such interface, or none with an address.
    """
    if cluster.address:
        return cluster.address
    found = psutil.net_if_addrs()
    for entry in found.get(cluster.interface, ()):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ConfigError(
        "cluster.interface",
        cluster.interface,
        f"this node has no IPv4 address there; its interfaces are {', '.join(sorted(found))}",
    )


def bind_node_address(config: Config) -> Config:
    """The configuration as this node's processes use it: bound to its own address."""
    if config.cluster.address:
        return config
    address = own_address(config.cluster)
    return replace(
        config,
        cluster=replace(config.cluster, address=address),
        engine=replace(config.engine, host=address),
    )

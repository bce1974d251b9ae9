"""Engines that span several nodes: which part of an engine a node has, and where its ranks meet.

SGLang starts a server on every node; node 0 answers HTTP and sends each request and each weight
update to all ranks.  torch's own store would listen on every interface without asking who calls, so
the ranks meet in the authenticated store of the engine's host (`moerl.distributed.store_server`),
through a rendezvous scheme that the plug-in registers in each of SGLang's processes.

Read at sglang 0.5.23: srt/distributed/bootstrap.py, srt/entrypoints/engine.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol
from urllib.parse import parse_qs, urlparse

import msgspec

from moerl.core.messages import Message
from moerl.core.types import PolicyVersion
from moerl.distributed.token_server import ServerAddress

_VARIABLE = "MOERL_ENGINE_STORE"
_SCHEME = "moerl"
_MEET = timedelta(minutes=30)  # torch's own limit


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Node `node` of the `nodes` of an engine.  head: HOST:PORT on node 0, which nothing binds."""

    node: int = 0
    nodes: int = 1
    head: str = ""
    store: ServerAddress | None = None
    # Variables that name the GPUs of this node's ranks; empty: inherited, as Ray sets them
    devices: Mapping[str, str] = field(default_factory=dict)

    def ranks(self, tp: int) -> range:
        """Ranks on this node."""
        each = tp // self.nodes
        return range(self.node * each, (self.node + 1) * each)

    def arguments(self) -> dict[str, str | int]:
        if self.nodes == 1:
            return {}
        return {"nnodes": self.nodes, "node_rank": self.node, "dist_init_addr": self.head}

    def environment(self) -> dict[str, str]:
        if self.store is None:
            return dict(self.devices)
        return dict(self.devices) | {
            _VARIABLE: json.dumps(msgspec.to_builtins(self.store)),
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"{_SCHEME}://ranks",
            # its queues to other nodes unpickle messages; gloo takes their place
            "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        }


ALONE = NodeSpan()


def register(environment: Mapping[str, str] = os.environ) -> None:
    """Let the ranks of this process meet in the store that the environment names, if any."""
    if _VARIABLE not in environment:
        return
    from torch.distributed import PrefixStore, register_rendezvous_handler

    from moerl.distributed.token_store import TokenStore

    address = msgspec.convert(json.loads(environment[_VARIABLE]), ServerAddress)

    def meet(
        url: str, timeout: timedelta = _MEET, **_options: object
    ) -> Iterator[tuple[PrefixStore, int, int]]:
        place = parse_qs(urlparse(url).query)
        store = TokenStore(address, timeout)
        _STORES.append(store)
        yield PrefixStore("ranks", store), int(place["rank"][0]), int(place["world_size"][0])

    register_rendezvous_handler(_SCHEME, meet)


_STORES: list[object] = []  # torch's wrappers of a store do not keep its Python part alive


class Follower(Protocol):
    """A further node of an engine, as the host on node 0 sees it.  Raises EngineError."""

    async def start(self, version: PolicyVersion, span: NodeSpan) -> None:
        """Start this node's server; it is ready when all nodes have theirs."""
        ...

    async def receive(self, message: Message) -> list[Message]:
        """Answers of this node's receivers, by rank."""
        ...

    async def watch(self) -> None:
        """Never returns; raises when the server dies."""
        ...

    async def stop(self) -> None: ...

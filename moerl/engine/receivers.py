"""The weight receivers of all ranks of an engine: here, and on its other nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from moerl.engine.node_span import NodeSpan
from moerl.engine.sglang_server import EngineServer
from moerl.errors import EngineError
from moerl.messages import Message
from moerl.rpc import Keys, ask
from moerl.types import PolicyVersion


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


async def ask_receivers(server: EngineServer, message: Message) -> list[Message]:
    """Answers of the receivers of one node, by rank."""
    asking = [
        asyncio.ensure_future(_ask(path, server.receiver_keys, message))
        for path in server.receiver_sockets
    ]
    try:
        return await asyncio.gather(*asking)
    finally:  # if one fails the others may hang with open sockets
        for one in asking:
            one.cancel()


async def _ask(path: Path, keys: Keys, message: Message) -> Message:
    if not path.exists():
        raise EngineError(
            f"the engine has no receiver at {path}: SGLang did not load the plug-in of moerl"
        )
    return await ask(f"ipc://{path}", keys, message)

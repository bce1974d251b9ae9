"""A further node of an engine: its part of the server, and the receivers of its ranks.

The engine's host (`moerl.engine.host.host`) is on node 0 and asks one follower per other node,
over Ray. A follower has no requests and no records: SGLang sends both through node 0.
"""

from __future__ import annotations

import asyncio

from moerl.config.schema import EngineConfig
from moerl.core.errors import EngineError
from moerl.core.messages import Message
from moerl.core.types import PolicyVersion
from moerl.engine.host.health import WATCH_S
from moerl.engine.host.host import EngineContext
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.host.weight_updates import WeightUpdater
from moerl.engine.node_span import NodeSpan


class EngineFollower:
    """Implements `moerl.engine.node_span.Follower` on its node."""

    def __init__(self, index: int, config: EngineConfig, context: EngineContext) -> None:
        self._index, self._config, self._context = index, config, context
        self._server: EngineServer | None = None

    async def start(self, version: PolicyVersion, span: NodeSpan) -> None:
        await self.stop()
        context = self._context
        server = self._server = EngineServer(
            self._config,
            context.model_path,
            routing=context.routing,
            version=str(version),
            token=context.token,
            log=context.run.logs / f"engine{self._index}-node{span.node}.log",
            span=span,
        )
        client = EngineClient(server.url)
        try:
            await server.start(client)
        finally:
            await client.close()

    async def receive(self, message: Message) -> list[Message]:
        return await WeightUpdater.ask_receivers(self._alive(), message)

    async def watch(self) -> None:
        server = self._alive()
        while (cause := server.death()) is None:
            await asyncio.sleep(WATCH_S)
        raise EngineError(f"on node {server.span.node}: {cause}\n{server.log_tail()}")

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    def _alive(self) -> EngineServer:
        if self._server is None:
            raise EngineError(f"engine {self._index}: a node of it has no server")
        return self._server

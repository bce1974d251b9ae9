"""Environments at a WebSocket, as OpenEnv's servers have it, and what a server does wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeEnvironment,
    EpisodeStart,
    Observation,
    PolicyAnswer,
)
from moerl.agents.environments.http_environment import ServerError
from moerl.agents.environments.ready_environments import environment_class

START = [{"role": "user", "content": "p"}]


@dataclass
class SocketServer:
    """As OpenEnv's: a connection is an episode.  An action may name a fault."""

    closed: list[str] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers.get("Authorization"))
        if request.path == "/away/ws":
            raise web.HTTPFound("/ws")
        if request.path == "/closed/ws":
            return web.Response(status=403)
        socket = web.WebSocketResponse(heartbeat=0.2)  # pings, and closes if none is answered
        await socket.prepare(request)
        if request.path == "/full/ws":
            await self.tell(socket, "error", message="all taken", code="CAPACITY_REACHED")
            await socket.close()
            return socket
        left, episode = 3, ""
        async for message in socket:
            given = json.loads(message.data)
            if given["type"] == "close":
                self.closed.append(episode)
                break
            if given["type"] == "reset":
                episode = given["data"]["episode_id"]
                await self.state(socket, left, None)
            elif not await self.fault(socket, given["data"]["message"]):
                left -= 1
                await self.state(socket, left, 0.5)
        return socket

    async def fault(self, socket: web.WebSocketResponse, name: str) -> bool:
        if name == "error":
            await self.tell(socket, "error", message="no such move", code="EXECUTION_ERROR")
        elif name == "long":
            await socket.send_str("x" * 10**6)
        elif name == "text":
            await socket.send_str("hello")
        elif name == "bytes":
            await socket.send_bytes(b"{}")
        elif name == "kind":
            await self.tell(socket, "state")
        elif name == "ends":
            await socket.close(code=1011)
        elif name == "hangs":
            await asyncio.sleep(1000)
        else:
            return False
        return True

    async def state(self, socket: web.WebSocketResponse, left: int, reward: float | None) -> None:
        seen = {"text": f"{left} left"}
        await self.tell(socket, "observation", observation=seen, reward=reward, done=not left)

    async def tell(self, socket: web.WebSocketResponse, kind: str, **data: Any) -> None:
        await socket.send_str(json.dumps({"type": kind, "data": data}))


SOCKET_FAULTS = {
    "error": "answered with the error EXECUTION_ERROR: no such move",
    "long": "exceeds limit 262144",
    "text": "answered what is no state",
    "bytes": "answered with bytes",
    "kind": "answered with a message of type 'state'",
    "ends": "closed the connection with code 1011",
    "hangs": "raised TimeoutError",
}
REFUSED = {
    "away": "answered with status 302",
    "closed": "answered with status 403",
    "full": "answered with the error CAPACITY_REACHED: all taken",
}


def test_an_environment_at_a_websocket_and_what_its_server_does_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, said = SocketServer(), dict[str, str]()
    monkeypatch.setenv("ENV_TOKEN", "sesame")

    def environment(url: str) -> EpisodeEnvironment:
        options: Any = {"observation_field": "text", "request_s": 1.0}
        return environment_class("http")(url=url, token_variable="ENV_TOKEN", **options)

    async def body() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"ws://127.0.0.1:{runner.addresses[0][1]}"
        try:
            await plays(environment(f"{url}/"))
            for fault in SOCKET_FAULTS:
                said[fault] = await fails(environment(f"{url}/ws"), fault)
            for place in REFUSED:
                said[place] = await fails(environment(f"{url}/{place}"), "down")
        finally:
            await runner.cleanup()

    async def plays(one: EpisodeEnvironment) -> None:
        seen = await one.reset(start_of("0.0"))
        assert seen.messages == [{"role": "user", "content": "p\n\n3 left"}]
        await asyncio.sleep(0.6)  # the policy thinks, and pings are answered
        for left in (2, 1):
            step = await one.step(PolicyAnswer("down"))
            assert step == Observation([{"role": "user", "content": f"{left} left"}], reward=0.5)
        assert await one.step(PolicyAnswer("down")) == EpisodeEnd(0.5)
        await one.close()
        await asyncio.sleep(0.05)
        assert server.closed == ["0.0"]

    async def fails(one: EpisodeEnvironment, fault: str) -> str:
        async def both() -> None:
            await one.reset(start_of(fault))
            await one.step(PolicyAnswer(fault))

        with pytest.raises((ServerError, TimeoutError)) as error:
            await both()
        await one.close()
        await one.close()
        return f"raised {error.type.__name__}: {error.value}"

    asyncio.run(body())
    for fault, sentence in (SOCKET_FAULTS | REFUSED).items():
        assert sentence in said[fault]
    assert set(server.headers) == {"Bearer sesame"}
    assert len(server.headers) == 1 + len(SOCKET_FAULTS) + len(REFUSED), "no redirect is followed"


def start_of(name: str) -> EpisodeStart:
    return EpisodeStart(name, "p", list(START), None, {}, NoTools())


class NoTools:
    schemas: Sequence[Any] = ()

    async def call(self, name: str, arguments: str) -> str:
        raise AssertionError(f"{name}: there are none")

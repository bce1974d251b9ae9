"""The environment `http` at a ws:// or wss:// address: a WebSocket is an episode.

    {"type": "reset", "data": {"episode_id", "prompt", "answer", "extra"}}
    {"type": "step", "data": {"message": text}}
    {"type": "close"}

The first two are answered by {"type": "observation", "data": {"observation", "reward", "done"}} or
{"type": "error", "data": {"message", "code"}}.  Source of the form: OpenEnv 0.3, `/ws`.

A server pings while the policy thinks, and closes a connection that does not answer.  aiohttp
answers while it receives, so the next message is always being received.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.http_environment import (
    SHOWN,
    HttpEnvironment,
    ServerError,
    State,
    connected,
)
from moerl.agents.environments.http_environment import session as shared_session

_CLOSE_S = 2.0  # for the server's part of closing


class _Reply(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _Failure(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""


class SocketEnvironment(HttpEnvironment):
    """One episode, with the options of HTTP."""

    _socket: aiohttp.ClientWebSocketResponse | None = None
    _next: asyncio.Task[aiohttp.WSMessage]

    async def close(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.send_str('{"type":"close"}')
        self._next.cancel()
        await self._socket.close()

    async def _ask(self, route: str, given: Json) -> State:
        """Send a message and return its reply.  route: reset or step."""
        data = given["action"] if route == "step" else {"episode_id": self._episode, **given}
        message = msgspec.json.encode({"type": route, "data": data}).decode()
        async with asyncio.timeout(self._request_s):
            if self._socket is None:
                self._socket = await connected(self._connect)
                self._next = asyncio.create_task(self._socket.receive())
            reply = await self._exchange(self._socket, route, message)
        return self._decoded(route, reply, State)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        url = self._url if self._url.endswith("/ws") else f"{self._url}/ws"
        try:
            return await shared_session().ws_connect(
                url,
                headers=self._headers,
                max_msg_size=self._most,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise ServerError(f"{url} answered with status {error.status}") from None

    async def _exchange(
        self, socket: aiohttp.ClientWebSocketResponse, route: str, message: str
    ) -> msgspec.Raw:
        """The data of an observation.  A full server sends an error before the request."""
        was_silent = not self._next.done()
        with contextlib.suppress(
            aiohttp.ClientConnectionError
        ):  # its earlier messages are still to be read
            await socket.send_str(message)
        reply = self._decoded(route, self._text_of(await self._next), _Reply)
        self._next = asyncio.create_task(socket.receive())
        if reply.type == "error":
            failure = self._decoded(route, reply.data, _Failure)
            said = f"{failure.code}: {failure.message}"[:SHOWN]
            raise ServerError(f"{self._url} answered with the error {said}")
        if reply.type != "observation" or not was_silent:
            when = "" if was_silent else "before it was asked "
            raise ServerError(f"{self._url} answered {when}with a message of type {reply.type!r}")
        return reply.data

    def _text_of(self, frame: aiohttp.WSMessage) -> str:
        if frame.type is aiohttp.WSMsgType.TEXT:
            return str(frame.data)
        if isinstance(frame.data, aiohttp.WebSocketError):
            raise ServerError(f"{self._url} broke the connection: {frame.data}")
        if frame.type is aiohttp.WSMsgType.BINARY:
            raise ServerError(f"{self._url} answered with bytes, not with text")
        code = self._socket.close_code if self._socket else None
        raise ServerError(f"{self._url} closed the connection with code {code}")

"""The environment `http`: a server that speaks OpenEnv's or a Gym's form over HTTP.

    POST URL/reset  {"episode_id", "prompt", "answer", "extra", "held_out"}
                                            -> {"observation", "reward", "done"}
    POST URL/step   {"episode_id", "action": {"message": text}} -> the same
    POST URL/close  {"episode_id"}                              -> anything; 404 is taken, too

`done` may be `terminated` or `truncated`, as in Gymnasium.  An observation is text or an object, of
which one field is text, else the policy reads it as JSON.  A server holds many episodes, so it
tells them apart by `episode_id`.  Source of the form: OpenEnv's `/reset` and `/step`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TypeVar
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeStart,
    Observation,
    PolicyAnswer,
)

_CONNECTS = 3  # tries to connect: a request that was sent is never sent again
_PAUSE_S = 0.5  # before the second of them, twice as long before the third
_OWN_FILES = 64  # descriptors of a worker that are no connections
SHOWN = 200  # bytes, or characters, of a server's words in an error
T = TypeVar("T")
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


class ServerError(Exception):
    """A server's failure to answer."""


class State(msgspec.Struct, frozen=True):
    """A server's answer; further fields are ignored."""

    observation: str | Json | list[object] | None = None
    reward: float | None = None
    done: bool = False
    terminated: bool = False
    truncated: bool = False

    @property
    def is_over(self) -> bool:
        return self.done or self.terminated or self.truncated


class HttpEnvironment:
    """One episode on the server."""

    def __init__(
        self,
        url: str,
        action_field: str = "message",
        observation_field: str = "",
        request_s: float = 60.0,
        reply_bytes: int = 262_144,
        token_variable: str = "",
    ) -> None:
        """Set the address and the fields.

        action_field: receives the policy's text.  observation_field: has the text for the policy;
        empty: the whole observation.  token_variable: environment variable with a bearer token
        (`task.pass_environment`).
        """
        self._url, self._action_field, self._shown = (
            url.rstrip("/"),
            action_field,
            observation_field,
        )
        self._request_s, self._most = request_s, reply_bytes
        token = os.environ.get(token_variable, "") if token_variable else ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._episode = ""

    async def reset(self, start: EpisodeStart) -> Observation:
        self._episode = start.episode
        given: Json = {
            "prompt": start.prompt,
            "answer": start.answer,
            "extra": dict(start.extra),
            "held_out": start.held_out,
        }
        state = await self._ask("reset", given)
        if state.is_over:
            raise ServerError(f"{self._url}/reset answered that the episode is over")
        messages = _with_text(list(start.messages), self._text(state))
        return Observation(messages, reward=state.reward or 0.0)

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        state = await self._ask("step", {"action": {self._action_field: answer.text}})
        if state.is_over:
            return EpisodeEnd(state.reward or 0.0)
        return Observation(
            [{"role": "user", "content": self._text(state)}], reward=state.reward or 0.0
        )

    async def close(self) -> None:
        """A server may have no such route."""
        if self._episode:
            with contextlib.suppress(ServerError, TimeoutError, aiohttp.ClientError):
                await self._post("close", {})

    async def _ask(self, route: str, given: Json) -> State:
        return self._decoded(route, await self._post(route, given), State)

    def _decoded(self, route: str, data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ServerError(f"{self._url}/{route} answered what is no state: {error}") from None

    async def _post(self, route: str, given: Json) -> bytes:
        """Raises ServerError, TimeoutError, aiohttp.ClientError."""
        body = msgspec.json.encode({"episode_id": self._episode, **given})
        headers = {"Content-Type": "application/json", **self._headers}
        async with asyncio.timeout(self._request_s):
            return await connected(lambda: self._once(f"{self._url}/{route}", body, headers))

    async def _once(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        post = session().post(url, data=body, headers=headers, allow_redirects=False)
        async with post as reply:
            data = b""
            async for part in reply.content.iter_chunked(1 << 16):
                data += part
                if len(data) > self._most:
                    raise ServerError(f"{url} answered with more than {self._most} bytes")
            if reply.status != 200:
                said = data[:SHOWN].decode(errors="replace")
                raise ServerError(f"{url} answered with status {reply.status}: {said}")
            return data

    def _text(self, state: State) -> str:
        seen = state.observation
        if isinstance(seen, dict) and self._shown:
            if self._shown not in seen:
                raise ServerError(f"{self._url}: the observation has no field {self._shown!r}")
            seen = seen[self._shown]  # type: ignore[assignment]
        if seen is None:
            return ""
        return seen if isinstance(seen, str) else msgspec.json.encode(seen).decode()


async def connected(send: Callable[[], Awaitable[T]]) -> T:
    """A request, tried again where there was no connection: then nothing was sent."""
    for tries in range(_CONNECTS - 1):
        with contextlib.suppress(aiohttp.ClientConnectorError):
            return await send()
        await asyncio.sleep(_PAUSE_S * 2**tries)
    return await send()


def session() -> aiohttp.ClientSession:
    """Of this worker: connections are shared by its episodes, each of which waits most of the time.

    As many as it may have open, so that no episode waits for the connection of another.
    """
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connector = aiohttp.TCPConnector(limit=max(1, files - _OWN_FILES))
        timeout = aiohttp.ClientTimeout(total=None)
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        _sessions[loop] = aiohttp.ClientSession(
            connector=connector, timeout=timeout, trace_configs=[trace]
        )
    return _sessions[loop]


async def _refuse_redirect(
    _session: aiohttp.ClientSession,
    _context: SimpleNamespace,
    redirect: aiohttp.TraceRequestRedirectParams,
) -> None:
    """A token must not follow it, and a WebSocket has no other way to refuse."""
    raise ServerError(f"{redirect.url} answered with status {redirect.response.status}")


def _with_text(messages: list[Json], text: str) -> list[Json]:
    """The prompt, its last message with the first observation: roles must alternate."""
    if not text:
        return messages
    if messages and isinstance(said := messages[-1].get("content"), str) and said:
        return [*messages[:-1], {**messages[-1], "content": f"{said}\n\n{text}"}]
    return [*messages[:-1], {"role": "user", "content": text}]

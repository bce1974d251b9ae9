"""Calls of an agent to models that are not trained: judges, simulated users, older versions.

    client --"model": NAME--> Gateway --POST base_url/chat/completions--> endpoint

A request is passed on with another model's name and key, and asks for `max_tokens` of its model at
most; everything else in it, sampling too, is the client's.  The answer goes back as it came, when
it is complete, also where it is a stream.

Its tokens are not known and never in a row as the policy's own: where a client puts its text into a
message to the policy, it is context as any other text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp import web

from moerl.agents.chat_messages import Json
from moerl.agents.environments.http_environment import SHOWN, connected
from moerl.agents.gateway.api_errors import ApiError
from moerl.config.secret_values import HIDDEN
from moerl.config.task_programs import OtherModelConfig
from moerl.core.types import base_role

_CONNECTIONS = 256  # of all models; further calls wait
_CLIENTS_FAULT = (400, 413, 422)  # of an endpoint: the same request would fail again
_STREAM = "text/event-stream"


class _Named(msgspec.Struct):
    model: str | None = None


_Amount = Annotated[int, msgspec.Meta(ge=1)]


class _Amounts(msgspec.Struct):
    """Fields of a request that multiply its price."""

    n: _Amount | None = None
    best_of: _Amount | None = None
    max_tokens: _Amount | None = None
    max_completion_tokens: _Amount | None = None
    prompt: Any = ""

    @property
    def prompts(self) -> int:
        """A list of texts, or of lists of tokens, is answered each by each."""
        given = self.prompt if isinstance(self.prompt, list) else []
        return 1 if any(isinstance(one, int) for one in given) else max(1, len(given))


class _Reply(msgspec.Struct):
    choices: list[Json]


class OtherModels:
    """Used from one event loop."""

    def __init__(self, models: Mapping[str, OtherModelConfig], roles: Collection[str] = ()) -> None:
        """roles: of the policy, which clients name as POLICY/ROLE or POLICY/ROLE.NUMBER."""
        self._models, self._roles = dict(models), frozenset(roles)
        self._session: aiohttp.ClientSession | None = None

    @property
    def names(self) -> list[str]:
        return list(self._models)

    async def start(self) -> None:
        if self._models:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def asked(self, data: bytes, policy: str) -> str:
        """The other model that a request names; empty: the policy, whose name is `policy`.

        A request without a name is for the policy.  Where a run has neither other models nor roles
        any name is: agents send the names that they know.  Raises ApiError.
        """
        name = _name_in(data) if self._models or self._roles else ""
        if name in self._models or name in ("", policy) or self.role(data, policy):
            return name if name in self._models else ""
        roles = [f"{policy}/{role}" for role in sorted(self._roles)]
        allowed = ", ".join((policy, *roles, *self._models))
        message = f"there is no model {name[:SHOWN]!r}; allowed are {allowed}"
        raise ApiError(404, "model_not_found", message, retry=False)

    def role(self, data: bytes, policy: str) -> str:
        """The role of the policy that a request names; empty: none."""
        name = _name_in(data) if self._roles else ""
        role = name.removeprefix(f"{policy}/")
        return role if role != name and base_role(role) in self._roles else ""

    async def ask(self, name: str, route: str, data: bytes) -> web.Response:
        """The endpoint's answer to a request.  Raises ApiError."""
        model = self._models[name]
        url = f"{model.base_url.rstrip('/')}/{route}"
        body = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        body |= _bounded(name, data, model.max_tokens)
        body["model"] = msgspec.Raw(msgspec.json.encode(model.model or name))
        try:
            return await connected(lambda: self._once(name, url, msgspec.json.encode(body)))
        except TimeoutError as error:
            setting = f"task.agent.models.{name}.timeout_s = {model.timeout_s:g}"
            raise _failed(name, f"has not answered within {setting}", 504) from error
        except aiohttp.ClientError as error:
            raise _failed(name, f"cannot be reached: {self._said(name, str(error))}") from error

    async def _once(self, name: str, url: str, body: bytes) -> web.Response:
        assert self._session is not None, "start comes first"
        model = self._models[name]
        headers = {"Content-Type": "application/json"}
        if model.api_key:
            headers["Authorization"] = f"Bearer {model.api_key}"
        timeout = aiohttp.ClientTimeout(total=model.timeout_s)
        post = self._session.post(
            url, data=body, headers=headers, allow_redirects=False, timeout=timeout
        )
        async with post as reply:
            answer = await self._body(name, reply)
            if reply.status != 200:
                raise self._refused(name, reply.status, answer)
            if reply.content_type != _STREAM:
                _check_reply(name, answer)
            return web.Response(body=answer, content_type=reply.content_type)

    async def _body(self, name: str, reply: aiohttp.ClientResponse) -> bytes:
        most, data = self._models[name].reply_kb * 1024, bytearray()
        async for part in reply.content.iter_chunked(1 << 16):
            data += part
            if len(data) > most:
                raise _failed(name, f"answered with more than {most} bytes")
        return bytes(data)

    def _refused(self, name: str, status: int, answer: bytes) -> ApiError:
        said = self._said(name, answer[: 4 * SHOWN].decode(errors="replace"))
        own = 400 if status in _CLIENTS_FAULT else 502
        return _failed(name, f"answered with status {status}: {said}", own)

    def _said(self, name: str, text: str) -> str:
        """Words of an endpoint or a library, without the key: some quote it."""
        key = self._models[name].api_key
        return (text.replace(key, HIDDEN) if key else text)[:SHOWN]


def _name_in(data: bytes) -> str:
    """Of the model.  A body that cannot be read is left to the form of the request."""
    try:
        return msgspec.json.decode(data, type=_Named).model or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _bounded(name: str, data: bytes, most: int) -> dict[str, msgspec.Raw]:
    """Fields to add, so that all answers have `most` tokens at most.  Raises ApiError."""
    try:
        asked = msgspec.json.decode(data, type=_Amounts)
    except msgspec.ValidationError as error:
        raise ApiError(400, "invalid_request", f"the body cannot be read: {error}") from error
    answers = max(asked.n or 1, asked.best_of or 1) * asked.prompts
    each = max(asked.max_tokens or 0, asked.max_completion_tokens or 0)
    if answers * max(each, 1) > most:
        message = (
            f"the model {name}: {answers} answers of {each or 1} tokens; "
            f"task.agent.models.{name}.max_tokens = {most} is allowed for all"
        )
        raise ApiError(400, "token_limit_exceeded", message, retry=False)
    return {} if each else {"max_tokens": msgspec.Raw(b"%d" % (most // answers))}


def _check_reply(name: str, answer: bytes) -> None:
    try:
        msgspec.json.decode(answer, type=_Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _failed(name, f"answered with what is no completion: {error}") from error


def _failed(name: str, why: str, status: int = 502) -> ApiError:
    return ApiError(status, "other_model_failed", f"the model {name} {why}", retry=status != 400)

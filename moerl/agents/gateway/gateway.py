"""The HTTP server in front of the policy, with a base URL and a key for each episode.

    client --/episodes/NAME/v1/...--> Gateway --GenerateRequest--> engine hosts
                                         |
                                  ChatTurns: turns --> OpenEpisode

Clients of OpenAI's chat completions and responses and of Anthropic's messages work without change.
It stands in front of engine hosts, not of SGLang: records stay on their node, and an update of the
weights is not seen by clients.

Episodes are opened and ended by the program that holds the gateway.  An unknown name and a wrong
key give the same answer; after its end an episode answers 410 to its own key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from moerl.agents.chat_messages import Json
from moerl.agents.chat_turns import ChatTurns
from moerl.agents.cross_loop_episode import CrossLoopEpisode
from moerl.agents.episode_types import EpisodeLimits, Policy, Tell, TurnAnswer
from moerl.agents.gateway import anthropic_messages, event_streams
from moerl.agents.gateway.anthropic_messages import MessagesEvents, MessagesReply, MessagesRequest
from moerl.agents.gateway.api_errors import ApiError
from moerl.agents.gateway.event_streams import EventForm, EventWriter, NewestPartials, Reply, stream
from moerl.agents.gateway.open_requests import OpenRequests
from moerl.agents.gateway.openai_replies import ChatEvents, CompletionEvents, OpenaiReply, Shown
from moerl.agents.gateway.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Known,
    TokenRequest,
    check_chat,
    forced_call,
    read_request,
)
from moerl.agents.gateway.openai_responses import ResponsesEvents, ResponsesReply, ResponsesRequest
from moerl.agents.gateway.other_models import OtherModels
from moerl.config.task_programs import POLICY
from moerl.core.errors import ConfigError

log = logging.getLogger(__name__)

_REMEMBERED = 10_000  # episodes that have ended
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ALLOWED = "must be letters, digits, `.`, `_` and `-`, begin with one of the first two, and be new"

_MESSAGES = "/messages"  # Anthropic's form
_BODY = "moerl_body"  # key of a request
Translated = TypeVar("Translated", ResponsesReply, MessagesReply)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a gateway, and limits of a request."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 = any free one
    socket: str = ""  # path of a Unix socket instead, which clients reach as this host and port
    model: str = POLICY  # name that clients see
    body_bytes: int = 8 << 20  # of a body, and of those of an episode that are not answered
    body_s: float = 60.0
    awaits_retries: bool = False  # a turn whose client has left goes on for a while


class Gateway:
    """Used from one event loop."""

    def __init__(
        self,
        policy: Policy,
        endpoint: Endpoint,
        others: OtherModels | None = None,
        routes: Sequence[web.RouteDef] = (),
    ) -> None:
        """others: models that clients may call besides the policy.  routes: of remote workers."""
        self._routes = routes
        self._policy, self._endpoint = policy, endpoint
        self._others = others or OtherModels({})
        self._episodes: dict[str, ChatTurns] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # keys by name
        self._held: Counter[str] = Counter()  # bytes of bodies, by episode
        self._open = OpenRequests(awaits_retries=endpoint.awaits_retries)
        self._nobody = secrets.token_urlsafe(24)  # key of episodes that do not exist
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(
            client_max_size=self._endpoint.body_bytes,
            middlewares=[_errors_in_the_form, self._release_body],
        )
        base = "/episodes/{episode}/v1"
        app.router.add_post(f"{base}/chat/completions", self._chat)
        app.router.add_post(f"{base}/completions", self._completions)
        app.router.add_post(f"{base}/responses", self._responses)
        app.router.add_post(f"{base}{_MESSAGES}", self._messages)
        app.router.add_post(f"{base}/generate", self._tokens)
        app.router.add_get(f"{base}/models", self._models)
        app.router.add_routes(self._routes)
        await self._others.start()
        # A client that hangs up cancels its handler, which ends the engine's request.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        if path := self._endpoint.socket:
            await web.UnixSite(self._runner, path).start()
            os.chmod(path, 0o666)  # for the users of sandboxes; its folder keeps others out
        else:
            await web.TCPSite(self._runner, self._endpoint.host, self._endpoint.port).start()

    async def stop(self) -> None:
        """End all episodes and close the port."""
        await asyncio.gather(*map(self.end_episode, list(self._episodes)))
        await self._others.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open_episode(self, episode: CrossLoopEpisode, limits: EpisodeLimits) -> ChatTurns:
        """The episode's name is unique in a run; it names the rollouts and their blobs."""
        name = episode.name
        if name in self._episodes or name in self._ended or not _NAMES.fullmatch(name):
            raise ConfigError("episode", name, _ALLOWED)
        self._episodes[name] = ChatTurns(episode, self._policy, limits)
        return self._episodes[name]

    def base_url(self, name: str) -> str:
        """For OPENAI_BASE_URL; the key is the episode's."""
        assert self._runner is not None, "the gateway is not started"
        host, port = self._endpoint.host, self._endpoint.port
        if not self._endpoint.socket:
            host, port = self._runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/episodes/{name}/v1"

    async def end_episode(self, name: str) -> None:
        """Turns that run are dropped."""
        episode = self._episodes.pop(name)
        self._ended[name] = episode.key
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        await episode.end()

    # --- routes -----------------------------------------------------------------------------------
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        if other := await self._other_model(request):
            return await self._ask_other(request, episode, other)
        asked = await self._read(request, ChatRequest, episode)
        logprobs, role = self._check_logprobs(asked.logprobs), await self._role(request)

        def reply(tell: Tell | None) -> Coroutine[Any, Any, OpenaiReply]:
            # Log-probabilities are in the record, which is there when the answer is complete.
            turns = _turns(episode, asked, None if logprobs else tell, role)
            return self._reply(turns, logprobs=logprobs)

        events = ChatEvents(self._endpoint.model, usage=asked.wants_usage) if asked.stream else None
        return await self._answer(request, reply, OpenaiReply.chat, events)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        if other := await self._other_model(request):
            return await self._ask_other(request, episode, other)
        asked = await self._read(request, CompletionRequest, episode)
        logprobs = self._check_logprobs(asked.logprobs is not None)
        role = await self._role(request)

        def reply(tell: Tell | None) -> Coroutine[Any, Any, OpenaiReply]:
            tell = None if logprobs else tell
            turns = episode.complete(asked.prompt, asked.ends, asked.n or 1, tell, role)
            return self._reply(turns, logprobs=logprobs)

        model, usage = self._endpoint.model, asked.wants_usage
        events = CompletionEvents(model, usage=usage) if asked.stream else None
        return await self._answer(request, reply, OpenaiReply.completion, events)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        asked = await self._read(request, TokenRequest, episode)
        if asked.stream:
            raise ApiError(400, "unsupported_parameter", "stream: not for tokens; leave it out")
        logprobs, role = self._check_logprobs(asked.logprobs), await self._role(request)

        def reply(_: Tell | None) -> Coroutine[Any, Any, OpenaiReply]:
            turns = episode.complete(asked.prompt_token_ids, asked.ends, asked.n or 1, role=role)
            return self._reply(turns, logprobs=logprobs)

        return await self._answer(request, reply, OpenaiReply.tokens, None)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        asked = await self._read(request, ResponsesRequest, episode)
        model = self._endpoint.model
        form = partial(ResponsesReply, asked=asked, model=model)
        reply = partial(self._translated, episode, asked.chat(), form, await self._role(request))
        events = ResponsesEvents(model, asked) if asked.stream else None
        return await self._answer(
            request, reply, ResponsesReply.whole, events, event_streams.RESPONSES
        )

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        asked = await self._read(request, MessagesRequest, episode)
        model = self._endpoint.model
        form = partial(MessagesReply, model=model)
        reply = partial(self._translated, episode, asked.chat(), form, await self._role(request))
        events = MessagesEvents(model) if asked.stream else None
        return await self._answer(
            request, reply, MessagesReply.whole, events, event_streams.ANTHROPIC
        )

    async def _answer(
        self,
        request: web.Request,
        reply: Callable[[Tell | None], Coroutine[Any, Any, Reply]],
        body: Callable[[Reply], Json],
        events: EventWriter[Reply] | None,
        form: EventForm = event_streams.OPENAI,
    ) -> web.StreamResponse:
        """The response of a request, or of its original.  events: None: the answer comes whole."""
        name, data = request.match_info["episode"], await self._body(request)

        def start(partials: NewestPartials) -> asyncio.Task[Reply]:
            work = asyncio.create_task(reply(None if events is None else partials.tell))
            del request[_BODY]  # it is held as long as the work
            work.add_done_callback(lambda done: self._ended_work(name, len(data), done))
            return work

        key = blake2b(request.path.encode() + b"\n" + data, digest_size=16).digest()
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        with self._open.entered(key, start, retry=retry) as found:
            if events is None:
                return await event_streams.whole(request, found.work, body)
            return await stream(request, found.work, found.partials, events, form)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        model = {"id": self._endpoint.model, "object": "model", "created": 0, "owned_by": "moerl"}
        most = {"max_model_len": episode.limits.context_tokens}
        others = [model | {"id": name, "owned_by": "other"} for name in self._others.names]
        return json_answer({"object": "list", "data": [model | most, *others]})

    async def _other_model(self, request: web.Request) -> str:
        """The model that a request names; empty: the policy."""
        return self._others.asked(await self._body(request), self._endpoint.model)

    async def _role(self, request: web.Request) -> str:
        """The role of the policy that a request names; empty: none."""
        return self._others.role(await self._body(request), self._endpoint.model)

    async def _ask_other(
        self, request: web.Request, episode: ChatTurns, name: str
    ) -> web.StreamResponse:
        route, data = request.path.partition("/v1/")[2], await self._body(request)
        return await episode.ask_other(name, lambda: self._others.ask(name, route, data))

    # --- requests ---------------------------------------------------------------------------------
    def _episode(self, request: web.Request) -> ChatTurns:
        """The episode whose name and key the request has.  Raises ApiError."""
        name = request.match_info["episode"]
        given = given_key(request)
        found = self._episodes.get(name)
        key = found.key if found else self._ended.get(name, self._nobody)
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
            message = "there is no such episode, or this is not its key"
            raise ApiError(401, "invalid_api_key", message, retry=False)
        if found is None:
            raise ApiError(410, "episode_ended", "the episode has ended", retry=False)
        return found

    async def _read(self, request: web.Request, form: type[Known], episode: ChatTurns) -> Known:
        if other := await self._other_model(request):
            message = f"the model {other} is served by chat/completions and completions only"
            raise ApiError(404, "model_not_found", message, retry=False)
        data = await self._body(request)
        sampling = episode.sampling_of(await self._role(request))
        return read_request(data, form, sampling, episode.counts)

    async def _body(self, request: web.Request) -> bytes:
        """It is read once, and kept by the request.  Raises ApiError."""
        if _BODY in request:
            return cast(bytes, request[_BODY])
        seconds = self._endpoint.body_s
        self._check_size(request, request.content_length or 0)
        name, data = request.match_info["episode"], bytearray()
        request[_BODY] = data
        try:
            async with asyncio.timeout(seconds):
                async for part in request.content.iter_any():
                    self._check_size(request, len(data) + len(part))
                    data += part
                    self._held[name] += len(part)
        except TimeoutError as error:
            message = f"the body did not arrive within {seconds:g} s"
            raise ApiError(408, "request_too_slow", message, retry=False) from error
        request[_BODY] = bytes(data)
        return cast(bytes, request[_BODY])

    def _check_size(self, request: web.Request, size: int) -> None:
        """Refuse a long body.  size: of the body, as far as it is known.  Raises ApiError."""
        most = self._endpoint.body_bytes
        if size > most:
            message = f"the body has over {most} bytes"
            raise ApiError(413, "request_too_large", message, retry=False)
        others = self._held[request.match_info["episode"]] - len(request.get(_BODY, b""))
        if others + size > most:
            message = f"requests that are not answered hold {others} bytes; {most} are allowed"
            raise ApiError(429, "request_too_large", message)

    @web.middleware
    async def _release_body(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        finally:
            if _BODY in request:
                self._release(request.match_info["episode"], len(request[_BODY]))

    def _release(self, name: str, size: int) -> None:
        self._held[name] -= size
        if not self._held[name]:
            del self._held[name]

    def _ended_work(self, name: str, size: int, work: asyncio.Task[Any]) -> None:
        self._release(name, size)
        if not work.cancelled():
            work.exception()  # of a turn whose client has left; nobody else asks for it

    def _check_logprobs(self, wanted: bool | None) -> bool:
        if wanted and self._policy.logprobs is None:
            raise ApiError(
                400,
                "unsupported_parameter",
                "logprobs: this gateway cannot read them; leave it out",
                retry=False,
            )
        return bool(wanted)

    async def _translated(
        self,
        episode: ChatTurns,
        asked: ChatRequest,
        form: Callable[[TurnAnswer], Translated],
        role: str,
        tell: Tell | None,
    ) -> Translated:
        try:
            check_chat(asked)
        except msgspec.ValidationError as error:
            raise ApiError(400, "invalid_request", f"the body cannot be read: {error}") from error
        (answer,) = await _turns(episode, asked, tell, role)
        return form(answer)

    async def _reply(self, turns: Awaitable[list[TurnAnswer]], *, logprobs: bool) -> OpenaiReply:
        answers, read = await turns, self._policy.logprobs
        shown = [Shown(answer) for answer in answers]
        if logprobs and read is not None:
            values = [await asyncio.to_thread(read, one.turn.rollout) for one in answers]
            shown = [
                Shown(answer, [float(value) for value in found])
                for answer, found in zip(answers, values, strict=True)
            ]
        return OpenaiReply(shown, self._endpoint.model, self._policy.tokens.decode)


def _turns(
    episode: ChatTurns, asked: ChatRequest, tell: Tell | None, role: str
) -> Coroutine[None, None, list[TurnAnswer]]:
    forces = forced_call(asked.tool_choice)
    return episode.chat(
        asked.messages,
        asked.tools or [],
        replace(asked.ends, forces=forces),
        asked.n or 1,
        calls=asked.tool_choice != "none",
        tell=tell,
        role=role,
        switches=asked.switches,
    )


# --- answers -------------------------------------------------------------------------------------
@web.middleware
async def _errors_in_the_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        found = error
    except web.HTTPException as error:
        found = ApiError(error.status, "not_found", f"{request.path}: {error.reason}")
    except Exception:
        log.exception("a request failed: %s", request.path)
        found = ApiError(500, "internal_error", "the gateway failed", retry=False)
    is_anthropic = request.path.endswith(_MESSAGES)
    body = anthropic_messages.error_body(found) if is_anthropic else found.body
    return json_answer(body, found.status, found.headers)


def given_key(request: web.Request) -> str:
    """The key that a client has sent, in either form."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return (request.headers.get("x-api-key") or bearer).strip()


def json_answer(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )

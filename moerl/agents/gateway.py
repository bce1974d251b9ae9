"""The HTTP server in front of the policy, with a base URL and a key for each episode.

    client --/episodes/NAME/v1/...--> Gateway --GenerateRequest--> engine hosts
                                         |
                                  OpenEpisode: turns --> FinishedEpisode

Any client of OpenAI's chat completions, or of Anthropic's messages, works without change.  It
stands in front of engine hosts, not of SGLang: records stay on their node, and an update of the
weights is not seen by clients.

Episodes are opened and ended by the program that holds the gateway.  An unknown name and a wrong
key give the same answer; after its end an episode answers 410 to its own key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec
from aiohttp import web

from moerl.agents import anthropic_form, responses_form
from moerl.agents.api_errors import ApiError
from moerl.agents.chat_messages import Json
from moerl.agents.open_episode import EpisodeLimits, OpenEpisode, Policy, TurnAnswer
from moerl.agents.openai_replies import OpenaiReply, Shown
from moerl.agents.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Known,
    TokenRequest,
    read_request,
)
from moerl.agents.turn_forest import RecordedTurn
from moerl.errors import ConfigError
from moerl.types import Episode

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 10.0  # between two comments in a stream that waits
_REMEMBERED = 10_000  # episodes that have ended
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ALLOWED = "must be letters, digits, `.`, `_` and `-`, begin with one of the first two, and be new"

_MESSAGES = "messages"  # the last part of the path of Anthropic's form

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway listens, and what it reads of a request."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 = any free one
    model: str = "policy"  # name that clients see
    body_bytes: int = 64 << 20
    body_s: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class FinishedEpisode:
    """wasted: blobs to which no turn refers, for deletion."""

    episode: Episode
    turns: tuple[RecordedTurn, ...]
    counts: dict[str, int]
    wasted: frozenset[str]


class Gateway:
    """Used from one event loop."""

    def __init__(self, policy: Policy, endpoint: Endpoint) -> None:
        self._policy, self._endpoint = policy, endpoint
        self._episodes: dict[str, OpenEpisode] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # keys by name
        self._nobody = secrets.token_urlsafe(24)  # key of episodes that do not exist
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(
            client_max_size=self._endpoint.body_bytes, middlewares=[_errors_in_our_form]
        )
        base = "/episodes/{episode}/v1"
        app.router.add_post(f"{base}/chat/completions", self._chat)
        app.router.add_post(f"{base}/completions", self._completions)
        app.router.add_post(f"{base}/generate", self._tokens)
        app.router.add_post(f"{base}/responses", self._responses)
        app.router.add_post(f"{base}/{_MESSAGES}", self._messages)
        app.router.add_get(f"{base}/models", self._models)
        # A client that hangs up cancels its handler, which ends the engine's request.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._endpoint.host, self._endpoint.port).start()

    async def stop(self) -> None:
        """End all episodes and close the port."""
        await asyncio.gather(*map(self.end_episode, list(self._episodes)))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open_episode(self, name: str, limits: EpisodeLimits) -> OpenEpisode:
        """name: unique in a run; it names the rollouts and their blobs."""
        if name in self._episodes or name in self._ended or not _NAMES.fullmatch(name):
            raise ConfigError("episode", name, _ALLOWED)
        self._episodes[name] = OpenEpisode(name, self._policy, limits)
        return self._episodes[name]

    def base_url(self, name: str) -> str:
        """For OPENAI_BASE_URL; the key is the episode's."""
        assert self._runner is not None, "the gateway is not started"
        host, port = self._runner.addresses[0][:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/episodes/{name}/v1"

    async def end_episode(self, name: str) -> FinishedEpisode:
        """Turns that run are dropped."""
        episode = self._episodes.pop(name)
        self._ended[name] = episode.key
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        await episode.end()
        return FinishedEpisode(
            episode.forest.episode(name),
            tuple(episode.forest.turns),
            dict(episode.counts),
            frozenset(episode.wasted),
        )

    # --- routes -----------------------------------------------------------------------------------
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        asked = await self._read(request, ChatRequest, episode)
        self._check_logprobs(asked.logprobs)
        turns = episode.chat(
            asked.messages,
            asked.tools or [],
            asked.ends,
            asked.n or 1,
            calls=asked.tool_choice != "none",
        )
        reply = self._reply(turns, logprobs=bool(asked.logprobs))
        if not asked.stream:
            return _json((await reply).chat())
        form = _openai_stream(OpenaiReply.chat_chunks, usage=asked.wants_usage)
        return await _stream(request, reply, form)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        asked = await self._read(request, CompletionRequest, episode)
        self._check_logprobs(asked.logprobs is not None)
        turns = episode.complete(asked.prompt, asked.ends, asked.n or 1)
        reply = self._reply(turns, logprobs=asked.logprobs is not None)
        if not asked.stream:
            return _json((await reply).completion())
        form = _openai_stream(OpenaiReply.completion_chunks, usage=asked.wants_usage)
        return await _stream(request, reply, form)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        asked = await self._read(request, TokenRequest, episode)
        if asked.stream:
            raise ApiError(400, "unsupported_parameter", "stream: not for tokens; leave it out")
        self._check_logprobs(asked.logprobs)
        turns = episode.complete(asked.prompt_token_ids, asked.ends, asked.n or 1)
        return _json((await self._reply(turns, logprobs=bool(asked.logprobs))).tokens())

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        episode, model = self._episode(request), self._endpoint.model
        data = await self._body(request)
        asked = anthropic_form.read_messages(data, self._policy.sampling, episode.counts)
        messages, tools = asked.chat_messages(), asked.schemas()
        turns = episode.chat(messages, tools, asked.ends, calls=asked.takes_calls)
        if asked.stream:
            form = _named_events(partial(anthropic_form.events, model=model), _anthropic_error)
            return await _stream(request, turns, form)
        (answer,) = await turns
        return _json(anthropic_form.reply(answer, model))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        episode, model = self._episode(request), self._endpoint.model
        data = await self._body(request)
        asked = responses_form.read_responses(data, self._policy.sampling, episode.counts)
        messages, tools = asked.chat_messages(), asked.schemas()
        turns = episode.chat(messages, tools, asked.ends, calls=asked.tool_choice != "none")
        if asked.stream:
            form = _named_events(partial(responses_form.events, model=model), _openai_error)
            return await _stream(request, turns, form)
        (answer,) = await turns
        return _json(responses_form.reply(answer, model))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        episode = self._episode(request)
        model = {"id": self._endpoint.model, "object": "model", "created": 0, "owned_by": "moerl"}
        most = {"max_model_len": episode.limits.context_tokens}
        return _json({"object": "list", "data": [model | most]})

    # --- requests ---------------------------------------------------------------------------------
    def _episode(self, request: web.Request) -> OpenEpisode:
        """The episode whose name and key the request has.  Raises ApiError."""
        name = request.match_info["episode"]
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        given = given or request.headers.get("x-api-key", "")
        found = self._episodes.get(name)
        key = found.key if found else self._ended.get(name, self._nobody)
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
            message = "there is no such episode, or this is not its key"
            raise ApiError(401, "invalid_api_key", message, retry=False)
        if found is None:
            raise ApiError(410, "episode_ended", "the episode has ended", retry=False)
        return found

    async def _read(self, request: web.Request, form: type[Known], episode: OpenEpisode) -> Known:
        data = await self._body(request)
        return read_request(data, form, self._policy.sampling, episode.counts)

    async def _body(self, request: web.Request) -> bytes:
        most, seconds = self._endpoint.body_bytes, self._endpoint.body_s
        if (request.content_length or 0) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(seconds):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large(most) from error
        except TimeoutError as error:
            message = f"the body did not arrive within {seconds:g} s"
            raise ApiError(408, "request_too_slow", message, retry=False) from error

    def _check_logprobs(self, wanted: bool | None) -> None:
        if wanted and self._policy.logprobs is None:
            raise ApiError(
                400,
                "unsupported_parameter",
                "logprobs: this gateway cannot read them; leave it out",
                retry=False,
            )

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


# --- answers -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _StreamForm(Generic[R]):
    """Server-sent events of a reply, and of an error behind the first comment."""

    events: Callable[[R], Iterable[bytes]]
    failed: Callable[[ApiError], bytes]


def _openai_stream(
    chunks: Callable[[OpenaiReply], Iterable[Json]], *, usage: bool
) -> _StreamForm[OpenaiReply]:
    def events(reply: OpenaiReply) -> Iterable[bytes]:
        last: Json = {}
        for last in chunks(reply):
            yield _event(last)
        if usage:
            yield _event(last | {"choices": [], "usage": reply.usage()})
        yield b"data: [DONE]\n\n"

    return _StreamForm(events, _openai_error)


def _named_events(
    events: Callable[[TurnAnswer], Iterable[Json]], failed: Callable[[ApiError], bytes]
) -> _StreamForm[list[TurnAnswer]]:
    """Events that are called by their types."""

    def of_one(answers: list[TurnAnswer]) -> Iterable[bytes]:
        for event in events(answers[0]):
            yield _event(event, str(event["type"]))

    return _StreamForm(of_one, failed)


def _anthropic_error(error: ApiError) -> bytes:
    return _event(anthropic_form.error_body(error), "error")


def _openai_error(error: ApiError) -> bytes:
    return _event(error.body)


def _event(body: object, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _stream(
    request: web.Request, reply: Awaitable[R], form: _StreamForm[R]
) -> web.StreamResponse:
    """Comments keep the connection open while the turn is sampled.

    An error before the first comment has a status of its own, a later one is an event.
    """
    work = asyncio.ensure_future(reply)
    try:
        if await _done(work):
            work.result()  # raises before the stream begins
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        while not await _done(work):
            await response.write(b": waiting\n\n")
        for event in _events(work, form):
            await response.write(event)
        await response.write_eof()
        return response
    finally:
        work.cancel()


async def _done(work: asyncio.Future[R]) -> bool:
    await asyncio.wait({work}, timeout=_KEEP_ALIVE_S)
    return work.done()


def _events(work: asyncio.Future[R], form: _StreamForm[R]) -> Iterable[bytes]:
    try:
        return form.events(work.result())
    except ApiError as error:
        return [form.failed(error)]


@web.middleware
async def _errors_in_our_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """In the form of the route."""
    try:
        return await handler(request)
    except ApiError as error:
        found = error
    except web.HTTPException as error:
        found = ApiError(error.status, "not_found", f"{request.path}: {error.reason}")
    except Exception:
        log.exception("a request failed: %s", request.path)
        found = ApiError(500, "internal_error", "the gateway failed", retry=False)
    is_theirs = request.path.endswith(f"/{_MESSAGES}")
    body = anthropic_form.error_body(found) if is_theirs else found.body
    return _json(body, found.status, found.headers)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def _too_large(most: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body has over {most} bytes", retry=False)

"""HTTP client of one SGLang server: every call but `healthy` carries the run's token.

The token is set when the server that listens is known to be ours (`authenticate`): until then only
`healthy` can be called, which sends none.

Only reads (health, server_info, checksum) are repeated after a broken connection; a generation or
an update that failed half-way is reported, never sent twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from moerl.core.errors import AnswerError, EngineError
from moerl.weight_sync.receiver_names import COMMIT, MEMORY, Committed, MemoryMoved

_CONNECT_S = 5.0
_WHOLE = 1 << 30  # tokens between two events of a reply
_SHORT = 32  # tokens; at 4, a stream cost about a fifth more CPU
# Of SGLang's load report.  They stay equal while nothing is prefilled or decoded.
_COUNTERS = ("decode_moments", "total_prefill_uncached_tokens", "num_used_tokens")
T = TypeVar("T")
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class BadRequest(EngineError):
    """The server refused a request as malformed (HTTP 400); it produced no answer."""


class FailedRequest(BadRequest):
    """The server failed a batch of requests (HTTP 500), perhaps because of a single request."""


class EngineClient:
    """Make and close it inside one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._headers: dict[str, str] | None = None  # None: no caller is trusted yet
        self._session = aiohttp.ClientSession(
            base_url=url,
            connector=aiohttp.TCPConnector(limit=0),
            # No read timeout: a batch takes as long as its longest answer.  The host watches the
            # process and fails the call when it dies.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=False,
            json_serialize=lambda value: orjson.dumps(value).decode(),
        )

    async def close(self) -> None:
        await self._session.close()

    def authenticate(self, token: str) -> None:
        """Send the token from here on."""
        self._headers = {"Authorization": f"Bearer {token}"}

    async def healthy(self) -> bool:
        """One attempt, short and without the token: used to wait for readiness."""
        try:
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(2.0)) as reply:
                return reply.status == 200
        except _BROKEN:
            return False

    async def pulse(self) -> None:
        """Returns when the HTTP server and the scheduler of every rank have answered."""
        await self._request("GET", "/server_info", None)

    async def freeze_garbage(self) -> None:
        """Have the server's processes skip the objects that exist by now when they collect garbage.

        A full collection stopped the HTTP process for 320 ms, once in 2,500 short requests.
        """
        await self._post("/freeze_gc", None)

    async def generate(
        self, body: dict[str, Any], took: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """One batch (`input_ids` is a list of lists), streamed: each reply comes when it ended.

        Short answers end nearly together: they come in one piece, which costs the server less CPU.
        took(place, reply): receives each reply once, with the place of its request; before it, of a
        request that has a `stream_interval`, parts with the tokens so far (`is_part`).
        Raises BadRequest when the server refuses the batch, EngineError otherwise.
        """
        given = body["sampling_params"]
        if all(p["max_new_tokens"] <= _SHORT and "stream_interval" not in p for p in given):
            replies = await self._post("/generate", body)
            wanted = len(body["rid"])
            if not isinstance(replies, list) or len(replies) != wanted:
                kind = f"{len(replies)}" if isinstance(replies, list) else type(replies).__name__
                raise AnswerError(f"engine /generate: {kind} for {wanted} requests; want one each")
            for place, reply in enumerate(replies):
                took(place, reply)
            return
        left = set(range(len(body["rid"])))
        streamed = body | {
            "stream": True,  # of the whole batch: no pieces of a reply, but for its first token
            "sampling_params": [{"stream_interval": _WHOLE} | params for params in given],
        }
        try:
            async with self._ask_for("POST", "/generate", streamed) as answer:
                async for event in _events(answer.content):
                    place = _place(event, len(body["rid"]))
                    if place not in left:
                        continue
                    if not is_part(event):
                        left.discard(place)
                        took(place, event)
                    elif "stream_interval" in given[place]:
                        took(place, event)
        except _BROKEN as error:
            what = str(error) or type(error).__name__
            raise EngineError(f"engine /generate broke off: {what}") from error
        if left:
            raise AnswerError(
                f"engine /generate: the answer ended with {len(left)} of {len(body['rid'])} "
                "replies missing"
            )

    async def abort(self, name: str) -> None:
        """End one request; its partial output is its reply."""
        await self._post("/abort_request", {"rid": name})

    async def work_done(self) -> list[Any]:
        """Counters of every scheduler: another value than before means that it has worked."""
        told = await self._post("/v1/loads", None, "GET")
        loads = told.get("loads", []) if isinstance(told, dict) else []
        return [[load.get(name) for name in _COUNTERS] for load in loads]

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def commit(self, version: str, mode: str = "") -> Committed:
        """Serve the version that the receivers verified; mode: as in `engine.protocol`."""
        fields = {
            "serialized_named_tensors": [],
            "load_format": f"{COMMIT}.{mode}",
            "weight_version": version,
            "flush_cache": True,
        }
        reply = await self._succeed("/update_weights_from_tensor", fields)
        return read_record(str(reply.get("message")), Committed)

    async def move_memory(self, what: str, parts: Sequence[str]) -> MemoryMoved:
        """Release or resume parts of every rank's memory; names as in `engine.protocol`."""
        fields = {
            "serialized_named_tensors": [],
            "load_format": f"{MEMORY}.{what}.{'+'.join(parts)}",
            "flush_cache": False,
        }
        reply = await self._succeed("/update_weights_from_tensor", fields)
        return read_record(str(reply.get("message")), MemoryMoved)

    async def unload_adapter(self, name: str) -> None:
        """Returns when no request uses the adapter and all ranks have dropped it."""
        reply: dict[str, Any] = await self._post("/unload_lora_adapter", {"lora_name": name})
        if not reply.get("success"):
            raise EngineError(f"engine /unload_lora_adapter: {reply.get('error_message', reply)}")

    async def server_info(self) -> dict[str, Any]:
        """Resolved arguments of the server by ServerArgs field name, its `version`, its state."""
        info: dict[str, Any] = await self._ask("GET", "/server_info")
        return info

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(3),
            wait=wait_fixed(0.2),
            retry=retry_if_exception_type(_BROKEN),
            reraise=True,
        ):
            with attempt:
                return await self._request(method, path, body)

    async def _succeed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = await self._post(path, body)
        if not reply.get("success"):
            raise EngineError(f"engine {path}: {reply.get('message', reply)}")
        return reply

    async def _post(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
        try:
            return await self._request(method, path, body)
        except _BROKEN as error:
            what = str(error) or type(error).__name__
            raise EngineError(f"engine {path} broke off: {what}") from error

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        async with self._ask_for(method, path, body) as reply:
            data = await reply.read()
            return _json(path, data) if data[:1] in (b"{", b"[") else {}

    @contextlib.asynccontextmanager
    async def _ask_for(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200.  Raises BadRequest or EngineError for any other."""
        if self._headers is None:
            raise EngineError(f"engine {path}: nobody has checked who listens at {self.url}")
        async with self._session.request(method, path, json=body, headers=self._headers) as reply:
            if reply.status != 200:
                failed = FailedRequest if path == "/generate" else EngineError
                kind = BadRequest if reply.status == 400 else failed
                raise kind(f"engine {path}: HTTP {reply.status}: {_message(await reply.read())}")
            yield reply


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The events of a stream (`data: JSON`, an empty line); a reply may be megabytes long."""
    rest = bytearray()
    async for chunk in content.iter_any():
        seen = max(0, len(rest) - 1)  # the end of an event may lie across two chunks
        rest += chunk
        while (end := rest.find(b"\n\n", seen)) >= 0:
            line, seen = bytes(rest[:end]).removeprefix(b"data: "), 0
            del rest[: end + 2]
            if line != b"[DONE]":
                yield _json("/generate", line)
    if rest.strip():
        raise AnswerError(f"engine /generate: it ends within a reply: {bytes(rest[:100])!r}")


def is_part(reply: Any) -> bool:
    """Whether the request continues, and these are its tokens so far."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    return isinstance(meta, dict) and "finish_reason" in meta and meta["finish_reason"] is None


def _place(event: Any, count: int) -> int:
    """Place of the request.  Raises BadRequest when the server says that it refuses the batch."""
    if not isinstance(event, dict):
        raise AnswerError(f"engine /generate: an event is a {type(event).__name__}, want a reply")
    if "error" in event:
        raise BadRequest(f"engine /generate: {_message(orjson.dumps(event))}")
    place = event.get("index")
    if not isinstance(place, int) or not 0 <= place < count:
        raise AnswerError(f"engine /generate: a reply to request {place} of {count}")
    return place


def _json(path: str, data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise AnswerError(f"engine {path}: the answer is no JSON: {error}") from error


def read_record(message: str, type_: type[T]) -> T:
    """The record of a commit, sleep or wake: the first line; SGLang appends its own words.

    Raises EngineError when it is no such record.
    """
    try:
        return msgspec.json.decode(message.partition("\n")[0], type=type_)
    except msgspec.DecodeError as error:
        raise EngineError(f"the answer to an update is not readable: {error}: {message}") from error


def _message(data: bytes) -> str:
    """The server's error text, in any of its three error formats."""
    try:
        reply = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data[:300].decode(errors="replace")
    error = reply.get("error", reply.get("message", reply)) if isinstance(reply, dict) else reply
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]

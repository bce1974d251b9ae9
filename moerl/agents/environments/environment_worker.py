"""A worker process: it holds environments of many episodes on one event loop.

It is started below a reaper, as rewards are, with the same limits and variables; it ends with its
connection.  What an environment raises fails its own episode.  What blocks the loop, or ends the
process, costs all episodes of this worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.environment_messages import (
    Close,
    Reset,
    SetUp,
    Step,
    ToolCall,
    ToolResult,
    ToWorker,
    WorkerGone,
    WorkerReply,
    decode_from_worker,
    decode_to_worker,
    encode,
    read_frame,
)
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeEnvironment,
    EpisodeStart,
    Observation,
)
from moerl.agents.environments.ready_environments import environment_class
from moerl.runtime.frames import framed, own_connection
from moerl.scoring.worker import one_line

_MOST = 1 << 32  # bytes of a message to this process: what is sent was checked
_CLOSE_S = 5.0  # most seconds for an environment to close

Send = Callable[[WorkerReply | ToolCall], None]


class _Tools:
    """The `EpisodeTools` of one episode: its calls run on the other side."""

    def __init__(self, worker: _Worker, episode: str, schemas: Sequence[Json]) -> None:
        self._worker, self._episode, self._schemas = worker, episode, schemas

    @property
    def schemas(self) -> Sequence[Json]:
        return self._schemas

    async def call(self, name: str, arguments: str) -> str:
        return await self._worker.call_tool(self._episode, name, arguments)


class _Worker:
    def __init__(self, setup: SetUp, send: Send) -> None:
        """Raises ConfigError when there is no such class."""
        self._setup, self._send = setup, send
        self._make = environment_class(setup.environment)
        self._open: dict[str, EpisodeEnvironment] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  # reset or step, by episode
        self._closing: set[asyncio.Task[None]] = set()
        self._tools: dict[int, asyncio.Future[str]] = {}
        self._serials = count(1)

    def take(self, command: ToWorker) -> None:
        match command:
            case ToolResult(serial, text):
                if (waiting := self._tools.get(serial)) and not waiting.done():
                    waiting.set_result(text)
            case Reset(serial, start):
                self._spawn(start.episode, serial, self._reset(command))
            case Step(serial, episode):
                self._spawn(episode, serial, self._step(command))
            case Close(serial, episode):
                closing = asyncio.ensure_future(self._close(serial, episode))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            case SetUp():
                raise WorkerGone("was set up twice")

    async def call_tool(self, episode: str, name: str, arguments: str) -> str:
        serial = next(self._serials)
        self._tools[serial] = asyncio.get_running_loop().create_future()
        self._send(ToolCall(serial, episode, str(name), str(arguments)))
        try:
            return await self._tools[serial]
        finally:
            del self._tools[serial]

    def _spawn(self, episode: str, serial: int, work: Coroutine[Any, Any, object]) -> None:
        self._running[episode] = asyncio.ensure_future(self._answer(serial, work))

    async def _answer(self, serial: int, work: Coroutine[Any, Any, object]) -> None:
        """Send the result of a coroutine of the environment; it may raise or return anything."""
        try:
            self._send(_reply(serial, await work))
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # its episode is being closed
                raise
            self._send(WorkerReply(serial, failure=one_line(error)))

    async def _reset(self, reset: Reset) -> object:
        start = reset.start
        environment = self._make(**self._setup.options)
        self._open[start.episode] = environment
        tools = _Tools(self, start.episode, self._setup.tools)
        return await environment.reset(
            EpisodeStart(
                start.episode,
                start.prompt,
                start.messages,
                start.answer,
                start.extra,
                tools,
                start.held_out,
            )
        )

    async def _step(self, step: Step) -> object:
        return await self._open[step.episode].step(step.answer)

    async def _close(self, serial: int, episode: str) -> None:
        failure = ""
        if running := self._running.pop(episode, None):
            running.cancel()
            await asyncio.wait([running], timeout=_CLOSE_S)
        if environment := self._open.pop(episode, None):
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await environment.close()
            except BaseException as error:
                failure = one_line(error)
        self._send(WorkerReply(serial, failure=failure))


def _reply(serial: int, found: object) -> WorkerReply:
    if isinstance(found, Observation):
        return WorkerReply(serial, observation=found)
    if isinstance(found, EpisodeEnd):
        return WorkerReply(serial, ended=found)
    kind = type(found).__name__
    return WorkerReply(
        serial, failure=f"returned a {kind}, which is no Observation and not EpisodeEnd"
    )


async def serve(connection: socket.socket) -> None:
    """Answer until the connection is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    setup = decode_to_worker(await read_frame(reader, _MOST))
    assert isinstance(setup, SetUp), "the first message is the set-up"

    def send(message: WorkerReply | ToolCall) -> None:
        writer.write(framed(_encoded(message, setup.reply_bytes)))

    try:
        worker = _Worker(setup, send)
    except BaseException as error:
        send(WorkerReply(0, failure=one_line(error)))
        await writer.drain()
        return
    send(WorkerReply(0))
    with contextlib.suppress(WorkerGone):
        while True:
            worker.take(decode_to_worker(await read_frame(reader, _MOST)))


def _encoded(message: WorkerReply | ToolCall, most: int) -> bytes:
    """A message, or where it is too long or holds what msgpack cannot, what is wrong with it."""
    try:
        data = encode(message)
        decode_from_worker(data)  # what the other side cannot read would end this process
        problem = f"gave {len(data)} bytes, over task.limits.reply_kb" if len(data) > most else ""
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        data, problem = b"", f"returned what cannot be sent: {one_line(error)}"
    if not problem:
        return data
    if isinstance(message, ToolCall):  # the other side answers it as a call of an unknown tool
        return encode(ToolCall(message.serial, message.episode, "", ""))
    return encode(WorkerReply(message.serial, failure=problem))


def main() -> None:
    asyncio.run(serve(own_connection()))

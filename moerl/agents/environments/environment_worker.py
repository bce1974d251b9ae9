"""A worker process: it holds environments of many episodes on one event loop.

It is started below a reaper, as rewards are, with the same limits and variables; it ends with its
connection.  An exception of an environment fails its own episode.  The end of the process costs all
episodes of this worker.  A thread reports the episode whose environment blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.environment_messages import (
    Blocked,
    Close,
    FromWorker,
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

_MOST = 1 << 32  # bytes of a message to this process, which the sender checked
_CLOSE_S = 5.0  # most seconds for an environment to close
_BLOCKED_S = 1.0  # without an iteration of the loop, which is then reported
_SEND_S = 86400.0  # most seconds for the other side to read

Send = Callable[[FromWorker], None]
_EPISODE: ContextVar[str] = ContextVar("episode", default="")


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
                closing = _task_of(episode, self._close(serial, episode))
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
        self._running[episode] = _task_of(episode, self._answer(serial, work))

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


class _LoopWatch:
    """Reports the episode whose environment blocks the loop, from a thread of its own."""

    def __init__(self, send: Send) -> None:
        self._loop, self._send = asyncio.get_running_loop(), send
        # Of each task, also of tasks that an environment has started
        self._episodes: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        self._loop.set_task_factory(cast(Any, self._new_task))
        threading.Thread(target=self._watch, daemon=True).start()

    def _new_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any],
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context, **options)
        self._episodes[task] = (context or copy_context()).get(_EPISODE, "")
        return task

    def _watch(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the connection or the loop is closed
            while True:
                time.sleep(_BLOCKED_S)
                begin, beat = time.monotonic(), threading.Event()
                self._loop.call_soon_threadsafe(beat.set)
                self._wait(beat, begin)

    def _wait(self, beat: threading.Event, begin: float) -> None:
        reported: asyncio.Task[Any] | None = None
        while not beat.wait(_BLOCKED_S):
            task = asyncio.current_task(self._loop)
            if task is not None and task is not reported:
                blocked_s = time.monotonic() - begin
                self._send(Blocked(self._episodes.get(task, ""), blocked_s))
                reported = task
        if reported is not None:
            self._send(Blocked(""))


def _task_of(episode: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    context = copy_context()
    context.run(_EPISODE.set, episode)
    return asyncio.get_running_loop().create_task(work, context=context)


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
    writing, lock = connection.dup(), threading.Lock()
    reader, _ = await asyncio.open_connection(sock=connection)
    writing.settimeout(_SEND_S)  # its file stays non-blocking, for the reader
    setup = decode_to_worker(await read_frame(reader, _MOST))
    assert isinstance(setup, SetUp), "the first message is the set-up"

    def send(message: FromWorker) -> None:
        data = framed(_encoded(message, setup.reply_bytes))
        with lock:
            writing.sendall(data)

    try:
        worker = _Worker(setup, send)
    except BaseException as error:
        send(WorkerReply(0, failure=one_line(error)))
        return
    send(WorkerReply(0))
    _LoopWatch(send)
    with contextlib.suppress(WorkerGone, OSError):
        while True:
            worker.take(decode_to_worker(await read_frame(reader, _MOST)))


def _encoded(message: FromWorker, most: int) -> bytes:
    """A message, or the error of a message that is too long or that msgpack cannot encode."""
    try:
        data = encode(message)
        decode_from_worker(data)  # an unreadable message would end this process
        problem = f"gave {len(data)} bytes, over task.limits.reply_kb" if len(data) > most else ""
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        data, problem = b"", f"returned what cannot be sent: {one_line(error)}"
    if not problem:
        return data
    if isinstance(message, ToolCall):  # the other side answers it as a call of an unknown tool
        return encode(ToolCall(message.serial, message.episode, "", ""))
    assert isinstance(message, WorkerReply), "Blocked is short"
    return encode(WorkerReply(message.serial, failure=problem))


def main() -> None:
    asyncio.run(serve(own_connection()))

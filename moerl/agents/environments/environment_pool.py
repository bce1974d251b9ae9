"""Workers with the environments of open episodes, as the controller's process sees them.

An episode goes to the worker with the fewest episodes.  A worker that dies, or does not end an
episode on request, costs all its open episodes, which fail as `lost`; another worker is started for
later episodes.  Tools run on this side, because a worker in a sandbox can make no other sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.environment_episodes import EpisodeFailed, OpenEnvironment
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
    encode,
    read_frame,
)
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.agents.environments.sandbox_tools import SandboxTools, ToolSettings
from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.episodes.finished_episode import LOST
from moerl.runtime.frames import framed
from moerl.sandbox.isolation import Isolation, SandboxedProcess
from moerl.sandbox.limits import NoSandbox, import_paths, isolation_of
from moerl.sandbox.sandbox import SandboxFactory, SandboxPool

log = logging.getLogger(__name__)

_START_S = 120.0  # most seconds for a worker to import the environment
_CLOSE_S = 20.0  # most seconds for a worker to end an episode; its environment has fewer
_CALLS = 64  # tool calls at once; each waits in a thread
_WARM = 4  # started sandboxes that wait for an episode
_HEAD = 1 << 10  # bytes of a message besides what task.limits.reply_kb bounds
_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from moerl.agents.environments.environment_worker import main; main()"
)


class EnvironmentPool:
    """The `Environments` protocol over worker processes; used from the agent loop."""

    def __init__(self, task: TaskConfig) -> None:
        """Raises ConfigError where the machine cannot isolate workers, or tools."""
        self._task, self._isolation = task, isolation_of(task)
        self._sandbox = _sandbox(task)
        self._workers: list[EnvironmentProcess | None] = [None] * task.environment_workers
        self._tools: ToolHost | None = None
        self._lock = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the workers.  Raises ConfigError when the environment cannot be made."""
        task = self._task
        if self._sandbox is not None:
            settings = ToolSettings(names=tuple(task.tools), timeout_s=task.tool_s)
            self._tools = ToolHost(self._sandbox, settings)
        starts = (self._started() for _ in self._workers)
        found = await asyncio.gather(*starts, return_exceptions=True)
        self._workers = [one if isinstance(one, EnvironmentProcess) else None for one in found]
        for error in found:
            if isinstance(error, BaseException):
                await self.close()
                problem = f"its worker {error}"
                raise ConfigError("task.environment", task.environment, problem) from error

    async def open(self, name: str) -> OpenEnvironment:
        """Raises EpisodeFailed."""
        try:
            async with self._lock:
                worker = await self._least_busy()
        except WorkerGone as error:
            problem = f"has an environment whose worker {error}"
            raise EpisodeFailed("environment", problem) from error
        return worker.open(name)

    async def close(self) -> None:
        for worker in self._workers:
            self._end(worker)
        await asyncio.gather(*self._ending)
        if self._tools is not None:
            await asyncio.to_thread(self._tools.close)

    async def _least_busy(self) -> EnvironmentProcess:
        """A worker that lives; missing ones are started first."""
        for place, worker in enumerate(self._workers):
            if worker is None or worker.gone:
                self._end(worker)
                self._workers[place] = await self._started()
        return min(filter(None, self._workers), key=lambda worker: worker.num_open)

    async def _started(self) -> EnvironmentProcess:
        """Raises WorkerGone."""
        worker = EnvironmentProcess(self._task, self._isolation, self._tools)
        try:
            await worker.start()
        except (WorkerGone, TimeoutError, OSError) as error:
            self._end(worker)
            raise WorkerGone(str(error) or f"did not start in {_START_S:g} s") from error
        return worker

    def _end(self, worker: EnvironmentProcess | None) -> None:
        if worker is not None:
            ending = asyncio.ensure_future(worker.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


class ToolHost:
    """The sandbox tools of open episodes, and the threads in which they are called."""

    def __init__(self, factory: SandboxFactory, settings: ToolSettings) -> None:
        self.settings, self.sandboxes = settings, SandboxPool(factory, _WARM)
        self.threads = ThreadPoolExecutor(_CALLS, thread_name_prefix="tools")
        self.schemas = SandboxTools(self.sandboxes, settings).schemas

    def tools(self) -> SandboxTools:
        return SandboxTools(self.sandboxes, self.settings)

    def close(self) -> None:
        """End all sandboxes, also those in which a call runs."""
        self.sandboxes.close()
        self.threads.shutdown(cancel_futures=True)


class EnvironmentProcess:
    """One worker and the episodes that it holds."""

    def __init__(self, task: TaskConfig, isolation: Isolation, tools: ToolHost | None) -> None:
        self._task, self._isolation, self._tools = task, isolation, tools
        self._most = task.limits.reply_kb * 1024
        self.gone = ""  # why it has ended; continues "has an environment whose worker ..."
        self._kept: SandboxedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._open: dict[str, _Episode] = {}
        self._waiting: dict[int, asyncio.Future[WorkerReply]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._serials = count(1)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def pid(self) -> int:
        """Of the reaper."""
        assert self._kept is not None
        return self._kept.process.pid

    async def start(self) -> None:
        """Raises WorkerGone, TimeoutError, OSError."""
        python = [sys.executable, "-P", "-c", _WORKER, json.dumps(import_paths())]
        self._kept, data = await asyncio.to_thread(self._isolation.connect, python)
        reader, self._writer = await asyncio.open_connection(sock=data)
        task = self._task
        schemas: list[Json] = [] if self._tools is None else self._tools.schemas
        ready = self._expect(0)
        self._reading = asyncio.ensure_future(self._read(reader))
        self._send(SetUp(task.environment, task.environment_options, schemas, self._most))
        async with asyncio.timeout(_START_S):
            found = await ready
        if found.failure:
            raise WorkerGone(f"cannot be made: {found.failure}")

    def open(self, name: str) -> _Episode:
        tools = None if self._tools is None else self._tools.tools()
        self._open[name] = _Episode(name, self, tools)
        return self._open[name]

    def forget(self, name: str) -> None:
        self._open.pop(name, None)

    @property
    def answer_s(self) -> float:
        return self._task.environment_s

    async def ask(self, command: Reset | Step | Close, timeout_s: float) -> WorkerReply:
        """Raises WorkerGone, TimeoutError."""
        try:
            answer = self._expect(command.serial)
            self._send(command)
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiting.pop(command.serial, None)

    def serial(self) -> int:
        return next(self._serials)

    def lose(self, why: str) -> None:
        """Fail all open episodes.  It is not asked again."""
        if self.gone:
            return
        self.gone = why
        log.warning("a worker with %d open environments %s", len(self._open), why)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerGone(why))

    async def close(self) -> None:
        """End the process with everything that it started."""
        self.gone = self.gone or "was closed"
        for task in (self._reading, *self._calls):
            if task is not None:
                task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._kept is not None:
            await asyncio.to_thread(self._kept.end)

    async def end_sandbox(self, tools: SandboxTools | None) -> None:
        if self._tools is not None and tools is not None:
            with contextlib.suppress(RuntimeError):  # all tools are being closed
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._tools.threads, tools.close)

    def _expect(self, serial: int) -> asyncio.Future[WorkerReply]:
        if self.gone:
            raise WorkerGone(self.gone)
        self._waiting[serial] = asyncio.get_running_loop().create_future()
        return self._waiting[serial]

    def _send(self, command: ToWorker) -> None:
        assert self._writer is not None, "start comes first"
        self._writer.write(framed(encode(command)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(decode_from_worker(await read_frame(reader, self._most + _HEAD)))
        except WorkerGone as error:
            assert self._kept is not None
            closed = "closed its connection"
            why = str(error)
            self.lose(str(await asyncio.to_thread(self._kept.ending)) if why == closed else why)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.lose("sent bytes that are no message")

    def _take(self, message: WorkerReply | ToolCall) -> None:
        if isinstance(message, ToolCall):
            self._spawn(self._call(message))
        elif (answer := self._waiting.get(message.serial)) and not answer.done():
            answer.set_result(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, call: ToolCall) -> None:
        episode = self._open.get(call.episode)
        text = "error: there are no tools"
        if episode is not None and episode.tools is not None and self._tools is not None:
            with contextlib.suppress(RuntimeError):  # all tools are being closed
                text = await episode.tools.call_in(self._tools.threads, call.name, call.arguments)
        if not self.gone:
            self._send(ToolResult(call.serial, text))


class _Episode:
    """The `OpenEnvironment` protocol."""

    def __init__(self, name: str, worker: EnvironmentProcess, tools: SandboxTools | None) -> None:
        self._name, self._worker, self.tools = name, worker, tools
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, float]:
        used = {} if self.tools is None else dict(self.tools.counts)  # a thread may still count
        return {**self._counts, **{f"tool/{name}": float(n) for name, n in used.items()}}

    async def reset(self, start: StartFields) -> Observation:
        found = await self._answer(Reset(self._worker.serial(), start))
        if isinstance(found, EpisodeEnd):
            raise EpisodeFailed("environment", "has an environment whose reset is no Observation")
        return found

    async def step(self, answer: PolicyAnswer) -> Observation | EpisodeEnd:
        return await self._answer(Step(self._worker.serial(), self._name, answer))

    async def close(self) -> None:
        """A worker that does not answer is ended."""
        try:
            if not self._worker.gone:
                await self._worker.ask(Close(self._worker.serial(), self._name), _CLOSE_S)
        except (WorkerGone, TimeoutError):
            self._worker.lose(f"did not end an episode in {_CLOSE_S:g} s")
        finally:
            self._worker.forget(self._name)
            await self._worker.end_sandbox(self.tools)

    async def _answer(self, command: Reset | Step) -> Observation | EpisodeEnd:
        limit_s = self._worker.answer_s
        try:
            found = await self._worker.ask(command, limit_s)
        except WorkerGone as error:
            raise EpisodeFailed(LOST, f"has an environment whose worker {error}") from error
        except TimeoutError as error:
            problem = f"took longer than task.environment_s = {limit_s:g}"
            raise EpisodeFailed("timeout", f"has an environment that {problem}") from error
        answer = found.observation or found.ended
        if found.failure or answer is None:
            problem = found.failure or "did not answer"
            raise EpisodeFailed("environment", f"has an environment that {problem}")
        return answer


def _sandbox(task: TaskConfig) -> SandboxFactory | None:
    if not task.tools:
        return None
    try:
        return SandboxFactory(read_paths=task.read_paths)
    except NoSandbox as error:
        raise ConfigError("task.tools", task.tools, str(error)) from None

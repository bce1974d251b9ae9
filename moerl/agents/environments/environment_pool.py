"""Workers with the environments of open episodes, as the controller's process sees them.

An episode goes to the worker with the fewest episodes.  A worker that dies, or does not end an
episode on request, costs all its open episodes, which fail as `lost`; another worker is started for
later episodes.  An environment that blocks its worker fails alone: seconds in which it blocks do
not count for the others, and where it blocks too long, they are played again.  Tools run on this
side, because a worker in a sandbox can make no other sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.environment_episodes import EpisodeFailed, OpenEnvironment
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
from moerl.episodes.finished_episode import BLOCKED, LOST
from moerl.runtime.frames import framed
from moerl.sandbox.isolation import Isolation, SandboxedProcess
from moerl.sandbox.limits import NoSandbox, import_paths, isolation_of
from moerl.sandbox.sandbox import SandboxFactory, SandboxPool

log = logging.getLogger(__name__)

_LIMIT = "task.environment_s"
_START_S = 120.0  # most seconds for a worker to import the environment
_CLOSE_S = 20.0  # most seconds for a worker to end an episode; its environment has fewer
_CALLS = 64  # tool calls at once; each waits in a thread
_WARM = 4  # started sandboxes that wait for an episode
_HEAD = 1 << 10  # bytes of a message besides task.limits.reply_kb
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
        """A living worker; missing workers are started first."""
        for place, worker in enumerate(self._workers):
            if worker is None or worker.gone:
                self._end(worker)
                self._workers[place] = await self._started()
        found = filter(None, self._workers)
        return min(found, key=lambda worker: (bool(worker.blocker), worker.num_open))

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
        self.blocker = ""  # episode that blocks its loop
        self._blocked_at, self._moves = 0.0, asyncio.Event()  # of the last change of `blocker`
        self._blocked_s: defaultdict[str, float] = defaultdict(float)  # earlier ones, by episode
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

    async def ask(self, command: Reset | Step, episode: str) -> WorkerReply:
        """Raises WorkerGone, TimeoutError."""
        try:
            answer = self._expect(command.serial)
            self._send(command)
            begin, left = self._own_time(episode), self.answer_s
            while not (await asyncio.wait({answer}, timeout=max(0.0, left)))[0]:
                if self.blocker not in ("", episode):
                    await self._wait_for_blocker()
                elif left <= 0.0:
                    raise TimeoutError
                left = begin + self.answer_s - self._own_time(episode)
            return answer.result()
        finally:
            self._waiting.pop(command.serial, None)

    async def end_episode(self, command: Close) -> None:
        """An environment that another one blocks is closed later.  Raises WorkerGone."""
        try:
            answer = self._expect(command.serial)
            self._send(command)
            is_over = (await asyncio.wait({answer}, timeout=_CLOSE_S))[0]
            if not is_over and self.blocker in ("", command.episode):
                self.lose(f"did not end an episode in {_CLOSE_S:g} s")
        finally:
            self._waiting.pop(command.serial, None)

    def _own_time(self, episode: str) -> float:
        """A clock that stands while other episodes block the worker."""
        now = asyncio.get_running_loop().time()
        others = sum(self._blocked_s.values()) - self._blocked_s.get(episode, 0.0)
        return now - others - (now - self._blocked_at if self.blocker not in ("", episode) else 0.0)

    async def _wait_for_blocker(self) -> None:
        """Until the loop runs again; an episode that has blocked it too long ends the worker."""
        left = self._blocked_at + self.answer_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left):
                await self._moves.wait()
        except TimeoutError:
            self.lose(f"was blocked by episode {self.blocker} for {self.answer_s:g} s")

    def serial(self) -> int:
        return next(self._serials)

    def lose(self, why: str) -> None:
        """Fail all open episodes.  It gets no further request."""
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

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, ToolCall):
            self._spawn(self._call(message))
        elif isinstance(message, Blocked):
            self._is_blocked(message)
        elif (answer := self._waiting.get(message.serial)) and not answer.done():
            answer.set_result(message)

    def _is_blocked(self, message: Blocked) -> None:
        now = asyncio.get_running_loop().time()
        if self.blocker:
            self._blocked_s[self.blocker] += now - self._blocked_at
        self._moves.set()
        self.blocker, self._moves = message.episode, asyncio.Event()
        self._blocked_at = now - message.seconds

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
                await self._worker.end_episode(Close(self._worker.serial(), self._name))
        except WorkerGone:
            self._worker.lose("closed its connection")
        finally:
            self._worker.forget(self._name)
            await self._worker.end_sandbox(self.tools)

    async def _answer(self, command: Reset | Step) -> Observation | EpisodeEnd:
        worker, problem = self._worker, f"took longer than {_LIMIT} = {self._worker.answer_s:g}"
        blocks = f"blocked its worker; use await, or a thread ({_LIMIT} = {worker.answer_s:g})"
        try:
            found = await worker.ask(command, self._name)
        except WorkerGone as error:
            if worker.blocker == self._name:
                raise EpisodeFailed("timeout", f"has an environment that {blocks}") from error
            reason = BLOCKED if worker.blocker else LOST
            raise EpisodeFailed(reason, f"has an environment whose worker {error}") from error
        except TimeoutError as error:
            if worker.blocker == self._name:
                worker.lose(f"was blocked by episode {self._name} for {worker.answer_s:g} s")
                problem = blocks
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

"""Long-lived programs that play episodes, many side by side: `task.agent.workers` of them.

A worker reads a JSON line for each episode and prints one when the episode has ended:

    {"episode", "secret", "index", "held_out", "base_url", "api_key", "prompt", "messages", ...}
    {"episode", "secret", "reward"}  or  {"episode", "secret", "error"}

An interpreter and its imports are paid once.  The price is that episodes share a process: when a
worker ends, or prints a line that cannot be understood, its open episodes fail.  It is started
again, after a pause that grows until it has answered.  An episode that takes too long fails alone,
but its worker gets no further one and is started again when the others have ended: nothing tells a
slow episode from a worker that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moerl.agents.programs.agent_process import MOST_LINE, ProgramEnd, kept_program
from moerl.config.schema import TaskConfig
from moerl.sandbox.isolation import Isolation

_PAUSES_S = (0.5, 30.0)  # before a worker that has answered nothing is started again
_MOST_LOGGED_KB = 1 << 20  # of a worker's output in its life; the log itself rotates
_EXIT_S = 2.0  # most seconds from the end of a program's output to its own
_SHOWN = 200  # characters of a line in an error
_ALLOWED = '{"episode": NAME, "secret": TEXT, "reward": NUMBER}, or "error": TEXT for "reward"'


class _Answer(msgspec.Struct):
    """One line of a worker: its reward is read as the rewards of other programs are."""

    episode: str
    secret: str
    error: str | None = None


@dataclass(slots=True, eq=False)
class _OpenEpisode:
    line: bytes
    secret: str
    end: asyncio.Future[ProgramEnd]
    sent: bool = False


class AgentWorkers:
    """Used from one event loop."""

    def __init__(self, task: TaskConfig, log: logging.Logger) -> None:
        self._workers = [_Worker(f"worker {i}", task, log) for i in range(task.agent.workers)]
        self._running: list[asyncio.Task[None]] = []

    def start(self, isolation: Isolation) -> None:
        isolation = replace(isolation, limits=replace(isolation.limits, output_kb=_MOST_LOGGED_KB))
        self._running = [asyncio.create_task(one.run(isolation)) for one in self._workers]

    async def play(self, name: str, given: Mapping[str, object], end: asyncio.Event) -> ProgramEnd:
        """One episode, in the worker that plays the fewest.

        It ends when the worker has answered, when task.wall_s are over, or when `end` is set.
        """
        worker = min(self._workers, key=lambda one: (one.retires, len(one.open)))
        return await worker.play(name, given, end)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class _Worker:
    """A program, which is started again when it has ended."""

    def __init__(self, name: str, task: TaskConfig, log: logging.Logger) -> None:
        self._name, self._task, self._log = name, task, log
        self.open: dict[str, _OpenEpisode] = {}
        self.retires = False  # it gets no further episode
        self._unwanted: set[str] = set()  # episodes that ended before it has answered
        self._stdin: asyncio.StreamWriter | None = None
        self._changed = asyncio.Event()
        self._answered = False
        self._last_words = b""

    async def play(self, name: str, given: Mapping[str, object], end: asyncio.Event) -> ProgramEnd:
        wall_s = self._task.wall_limit_s
        line, ended = msgspec.json.encode(given) + b"\n", asyncio.get_running_loop().create_future()
        one = self.open[name] = _OpenEpisode(line, str(given["secret"]), ended)
        ending = asyncio.ensure_future(end.wait())
        either: tuple[asyncio.Future[Any], ...] = (one.end, ending)
        try:
            self._send(one)
            await asyncio.wait(either, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
            if one.end.done():
                return one.end.result()
            self.retires |= one.sent and not ending.done()
            return ProgramEnd(-1, b"", b"", "ended" if ending.done() else "timeout")
        finally:
            ending.cancel()
            del self.open[name]
            if one.sent and not one.end.done():
                self._unwanted.add(name)
            self._changed.set()

    async def run(self, isolation: Isolation) -> None:
        """Keep the program running."""
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            self._answered, self.retires = False, False
            self._unwanted.clear()
            why = await self._live(isolation)
            self._log.info("%s %s", self._name, why)
            self._lose_open(why)
            shortest, longest = _PAUSES_S
            calm = self._answered or self.retires
            pause_s = 0.0 if calm else min(longest, max(shortest, 2 * pause_s))

    def _lose_open(self, why: str) -> None:
        for one in self.open.values():
            if one.sent and not one.end.done():
                one.end.set_result(ProgramEnd(-1, b"", why.encode(), "lost"))

    async def _live(self, isolation: Isolation) -> str:
        """Start the program and hear it until it ends; the end of a sentence that says why."""
        try:
            async with kept_program(self._task, isolation, {}) as (process, control):
                assert process.stdout is not None
                assert process.stderr is not None
                self._stdin, self._last_words = process.stdin, b""
                for one in self.open.values():
                    self._send(one)
                hearing = asyncio.create_task(self._hear(process.stdout))
                printing = asyncio.create_task(self._log_lines(process.stderr))
                try:
                    why = await self._until_retired(hearing)
                    if not why:  # its output is closed before the reaper has its exit code
                        await _wait(process, _EXIT_S)
                    control.close()
                    await asyncio.wait([printing], timeout=_EXIT_S)
                finally:
                    self._stdin = None
                    await _cancel(hearing, printing)
            return why or f"ended with exit code {process.returncode}: {self._last_line()}"
        except OSError as error:
            return f"cannot be started: {error}"

    async def _until_retired(self, hearing: asyncio.Task[str]) -> str:
        while not (self.retires and not any(one.sent for one in self.open.values())):
            self._changed.clear()
            changing = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({hearing, changing}, return_when=asyncio.FIRST_COMPLETED)
            changing.cancel()
            if hearing.done():
                return hearing.result()
        return "was ended: an episode took longer than task.wall_s"

    def _send(self, one: _OpenEpisode) -> None:
        if self._stdin is None or self.retires or one.sent:
            return
        one.sent = True
        with contextlib.suppress(OSError):  # its end is seen where its output is read
            self._stdin.write(one.line)

    # --- its output -------------------------------------------------------------------------------
    async def _hear(self, out: asyncio.StreamReader) -> str:
        """Take answers until the end; returns why the stream ended, empty if as expected."""
        while True:
            try:
                line = await out.readuntil()
            except asyncio.IncompleteReadError as rest:
                return self._take(rest.partial) if rest.partial.strip() else ""
            except asyncio.LimitOverrunError:
                return f"printed a line of over {MOST_LINE} bytes on standard output"
            if why := self._take(line):
                return why

    def _take(self, line: bytes) -> str:
        """Give an answer to its episode; returns the fault of the line, or ""."""
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"{_printed(line)}: {error}; allowed is {_ALLOWED}"
        if answer.episode in self._unwanted:
            self._unwanted.discard(answer.episode)
            return ""
        one = self.open.get(answer.episode)
        if one is None or not one.sent or one.end.done():
            return f"{_printed(line)}: the episode is not open"
        if not hmac.compare_digest(answer.secret.encode(), one.secret.encode()):
            return f"{_printed(line)}: the secret is not the episode's"
        self._answered = True
        if answer.error is None:
            one.end.set_result(ProgramEnd(0, line, b"", "exit"))
        else:
            one.end.set_result(ProgramEnd(1, b"", answer.error.encode(), "error"))
        return ""

    async def _log_lines(self, err: asyncio.StreamReader) -> None:
        while data := await err.read(MOST_LINE):
            self._last_words = (self._last_words + data)[-4096:]
            self._log.info("%s printed\n%s", self._name, data.decode(errors="replace").rstrip())

    def _last_line(self) -> str:
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        return lines[-1][-_SHOWN:] if lines else "it has printed no error"


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _wait(process: asyncio.subprocess.Process, most_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await process.wait()


def _printed(line: bytes) -> str:
    shown = line.decode(errors="replace").strip()[:_SHOWN]
    return f"printed {shown!r} on standard output, which is for answers"

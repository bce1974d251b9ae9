"""One external program: started below a reaper, read to its end, and never left behind.

The reaper (`moerl.runtime.reaper`) ends everything that the program started as soon as the program
has ended or this process is gone, and applies `task.limits`.  With `task.isolation: bwrap` the
program is in a sandbox, and `moerl.agents.programs.box_relay` is its way to the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moerl.agents.programs import box_relay
from moerl.config.episode_checks import program_path
from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.sandbox.isolation import Isolation
from moerl.sandbox.limits import DOOR, absolute_command

_END_S = 15.0  # most seconds for a reaper to end its program
_LIMIT = 2**16  # bytes of one read
MOST_LINE = 2**20  # bytes of a line that is read as one
BOX_PORT = 4700  # of 127.0.0.1 in a sandbox, which has a network of its own: the gateway
_RELAY = str(Path(box_relay.__file__).resolve())


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """out, err: the last bytes that it printed.

    why: timeout, ended: it was killed; error, lost: an episode of a worker; failed: moerl could not
    start or serve it.  err says why.
    """

    code: int
    out: bytes
    err: bytes
    why: Literal["exit", "timeout", "ended", "error", "lost", "failed"]


def program_of(command: Sequence[str], *, boxed: bool = False) -> list[str]:
    """The command with the path of its program; `python` is moerl's own.  Raises ConfigError.

    boxed: it starts in a sandbox, in another folder, behind the relay to the gateway.
    """
    if (path := program_path(command[0])) is None:
        why = f"there is no program {command[0]!r} on PATH"
        raise ConfigError("task.agent.command", list(command), why)
    if not boxed:
        return [path, *command[1:]]
    relay = [sys.executable, "-I", "-S", _RELAY, str(BOX_PORT), DOOR]
    return [*relay, *absolute_command(command)]


async def run_program(
    task: TaskConfig,
    isolation: Isolation,
    variables: dict[str, str],
    given: bytes,
    end: asyncio.Event,
) -> ProgramEnd:
    """Run task.agent.command until it exits, its time is up, or `end` is set; then `end` is set.

    isolation: of the task; variables: added to its environment; given: on its standard input.
    Raises OSError when no process can be started.
    """
    async with kept_program(task, isolation, variables) as (process, control):
        return await _watch(process, control, given, end, task)


@contextlib.asynccontextmanager
async def kept_program(
    task: TaskConfig, isolation: Isolation, variables: dict[str, str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, socket.socket]]:
    """task.agent.command below its reaper; all that it started ends with the block.

    It ends earlier when the socket is closed.  Raises OSError when no process can be started.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            argv = program_of(task.agent.command, boxed=bool(isolation.wrapper))
            cgroup = isolation.new_cgroup()
            process = await asyncio.create_subprocess_exec(
                *isolation.command(argv, theirs.fileno(), cgroup),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(isolation.environment) | variables,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                limit=MOST_LINE,
            )
        try:
            yield process, ours
        finally:
            ours.close()  # the reaper ends everything
            await _reap(process)
            if cgroup is not None:
                await asyncio.to_thread(cgroup.end)


async def _watch(
    process: asyncio.subprocess.Process,
    control: socket.socket,
    given: bytes,
    end: asyncio.Event,
    task: TaskConfig,
) -> ProgramEnd:
    assert process.stdout is not None
    assert process.stderr is not None
    most = max(1, task.limits.output_kb) * 1024
    reading: asyncio.Future[tuple[bytes, bytes, int, None]] = asyncio.gather(
        _last_bytes(process.stdout, most),
        _last_bytes(process.stderr, most),
        process.wait(),
        _give(process, given),
    )
    reading.add_done_callback(lambda _: end.set())
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(task.wall_limit_s):
                await end.wait()
        why: Literal["exit", "timeout", "ended"] = "ended" if end.is_set() else "timeout"
        why = "exit" if reading.done() else why
        control.close()
        async with asyncio.timeout(_END_S):
            out, err, code, _ = await reading
        return ProgramEnd(code, out, err, why)
    except TimeoutError:  # a program with our user id has stopped its reaper
        return ProgramEnd(-1, b"", b"", "timeout")
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _last_bytes(stream: asyncio.StreamReader, most: int) -> bytes:
    """Everything is read, so that the program never waits; the last bytes are kept."""
    kept = b""
    while data := await stream.read(_LIMIT):
        kept = (kept + data)[-most:]
    return kept


async def _give(process: asyncio.subprocess.Process, given: bytes) -> None:
    """A program need not read its input."""
    assert process.stdin is not None
    try:
        with contextlib.suppress(OSError):
            process.stdin.write(given)
            await process.stdin.drain()
    finally:
        process.stdin.close()


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for the reaper, and read its pipes, since a full pipe keeps a process running."""
    reading = asyncio.gather(_drain(process.stdout), _drain(process.stderr))
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    await reading


async def _drain(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(_LIMIT):
        pass

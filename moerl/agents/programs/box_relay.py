"""The way out of a sandbox for an agent program: a port of the sandbox, relayed to a Unix socket.

    box_relay.py PORT SOCKET ARGV...    run ARGV, with SOCKET behind 127.0.0.1:PORT

A sandbox has a network of its own, without listeners; clients of HTTP want an address.

Run by path with `python -I -S`, because a short start matters: the standard library only.

The program is a child and leads a session of its own: the filter of system calls refuses signals to
this process, which `reaper.enter` became.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

_SIGNALLED = 128  # exit code of a program that a signal has ended, as bubblewrap passes it on
_READ = 1 << 16  # bytes of one read


async def relay(listener: socket.socket, door: str, child: int) -> int:
    """Serve connections until the child has ended; its exit code."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def look() -> None:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid and not ended.done():
            ended.set_result(status)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_unix_connection(door)
        except OSError:  # the gateway has closed
            return writer.close()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, there[1]))
                both.create_task(_pass_on(there[0], writer))
        except* OSError:  # one side has broken off
            pass
        finally:
            writer.close()
            there[1].close()

    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, look)
    look()  # it may have ended before
    await asyncio.start_server(connect, sock=listener)
    code = os.waitstatus_to_exitcode(await ended)
    return code if code >= 0 else _SIGNALLED - code


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def main() -> None:
    port, door, *argv = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.execv(argv[0], argv)
        finally:
            os._exit(127)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # only the program holds them: their end is seen
        os.dup2(nothing, standard)
    os._exit(asyncio.run(relay(listener, door, child)))


if __name__ == "__main__":
    main()

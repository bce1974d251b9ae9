"""First process of a sandbox for tools: starts programs in it and answers with their output.

Run by path with `python -S`, with the standard library only, as moerl.runtime.reaper is.  Requests
and replies are a length and bytes on standard input: a line of JSON, then data.  A program that a
request starts has no descriptor of this process, cannot signal or trace it, and ends with the
answer.  Only the interpreter of `Session` stays, stopped, until the next request for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

if TYPE_CHECKING or __package__:
    from moerl.runtime import frames, reaper
else:  # a sandbox shows these three files, and not the package
    sys.path.append(f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/runtime")
    import frames
    import reaper

_CHECK_S = 0.05  # between two looks at the memory of a sandbox
_INODE_BYTES = 1024  # of memory for a file without contents
_PAGE = resource.getpagesize()
_SOCKET = 3  # of the interpreter of a session


class SandboxRequest(TypedDict):
    """The line of JSON; bytes that follow are standard input, code, or contents of a file."""

    op: str  # run, session, read, write
    argv: list[str]  # of run; of session: the number to which _SESSION is added
    path: str  # of read and write
    timeout_s: float
    max_output: int  # bytes of each of both outputs


class ServerSettings(TypedDict):
    memory_bytes: int  # of all processes and files of the sandbox; 0 = no limit
    cpu_s: int  # of each process in one request; 0 = no limit


class Ended(NamedTuple):  # dataclasses would double the time of a start
    """How a program ended, and its output."""

    code: int
    why: str  # exit, timeout, output, memory
    out: bytes
    err: bytes
    lost: bool  # the interpreter of the session, and its variables

    def pack(self) -> bytes:
        head = {"code": self.code, "why": self.why, "lost": self.lost, "out": len(self.out)}
        return json.dumps(head).encode() + b"\n" + self.out + self.err


class Started(NamedTuple):
    """A child with pipes from its outputs; `ready` can be read when it has ended or answered."""

    pid: int
    out: int
    err: int
    ready: int


class SandboxServer:
    """Answers requests one after the other."""

    def __init__(self, connection: socket.socket, settings: ServerSettings) -> None:
        self._connection, self._settings = connection, settings
        self._home = os.getcwd()
        self._session: Started | None = None

    def serve(self) -> None:
        """Until the other end closes the connection."""
        while data := frames.receive(self._connection):
            line, _, rest = data.partition(b"\n")
            try:
                reply = self._answer(json.loads(line), rest).pack()
            except OSError as error:  # no process, descriptor or memory is left
                reply = self._without_session(error).pack()
            frames.send(self._connection, reply)

    def _answer(self, command: SandboxRequest, given: bytes) -> Ended:
        if command["op"] == "session":
            return self._in_session(command, given)
        acts: dict[str, Callable[[], None]] = {
            "run": lambda: _become(command["argv"]),
            "read": lambda: _print_file(self._home, command["path"], command["max_output"]),
            "write": lambda: _write_file(self._home, command["path"], given),
        }
        child = self._start(acts[command["op"]], given if command["op"] == "run" else b"")
        reading, why = self._read(child, command)
        code = _end(child.pid, at_once=why != "exit")
        self._end_others()
        return _ended(child, reading, why, code)

    def _in_session(self, command: SandboxRequest, code: bytes) -> Ended:
        """Run code in the interpreter that keeps its variables; a new one where it has ended."""
        session = self._continued(command["argv"])
        with socket.socket(fileno=os.dup(session.ready)) as line, contextlib.suppress(OSError):
            line.settimeout(command["timeout_s"])
            frames.send(line, code)
        reading, why = self._read(session, command)
        answer = b""
        if why == "exit":
            with contextlib.suppress(OSError):
                answer = os.read(session.ready, 1)
        if answer:
            os.kill(session.pid, signal.SIGSTOP)  # threads of it run during requests only
            self._end_others()
            reading.rest()
            if not select.select([session.ready], [], [], 0)[0]:
                return Ended(answer[0], reading.why or why, *reading.texts(), lost=False)
            # It has answered more than once, so the next answer would be an old one.
        self._session = None
        status = _end(session.pid, at_once=bool(answer) or why != "exit")
        self._end_others()
        return _ended(session, reading, why, status)._replace(lost=True)

    def _without_session(self, error: OSError) -> Ended:
        """An interpreter that is stopped may hold dead children, which count as processes."""
        session, self._session = self._session, None
        if session is not None:
            _end(session.pid, at_once=True)
            _close(session)
        self._end_others()
        text = f"the sandbox could not start it: {error.strerror}\n"
        return Ended(127, "exit", b"", text.encode(), lost=session is not None)

    def _continued(self, argv: list[str]) -> Started:
        if self._session is not None:
            os.kill(self._session.pid, signal.SIGCONT)
            return self._session
        ours, theirs = socket.socketpair()
        with theirs:
            child = self._start(lambda: _become([*argv, _SESSION]), b"", theirs.fileno())
        os.close(child.ready)
        self._session = child._replace(ready=ours.detach())
        return self._session

    def _read(self, child: Started, command: SandboxRequest) -> tuple[_Reading, str]:
        """Output of a child until it is ready, and why reading ended."""
        reading = _Reading(child, command["max_output"])
        return reading, reading.until(time.monotonic() + command["timeout_s"], self._has_memory)

    def _end_others(self) -> None:
        """End all that requests have started but the interpreter of the session."""
        spare = {self._session.pid} if self._session else ()
        if reaper.has_children():
            reaper.kill_descendants(spare)

    def _has_memory(self) -> bool:
        most = self._settings["memory_bytes"]
        return not most or _memory_of_sandbox(self._home) <= most

    def _start(self, act: Callable[[], None], given: bytes, answers: int = -1) -> Started:
        """A child in a session of its own; it ends when `act` returns."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            stdin, out, prints, err, complains = _descriptors(theirs, ours)
            with open(stdin, "wb", closefd=False) as file:
                file.write(given)
            os.lseek(stdin, 0, os.SEEK_SET)
            pid = os.fork()
            if pid == 0:
                self._be_child(act, (stdin, prints, complains, answers))
            ours.pop_all()
            return Started(pid, out, err, os.pidfd_open(pid))

    def _be_child(self, act: Callable[[], None], descriptors: tuple[int, ...]) -> None:
        code = 1
        try:
            os.setsid()
            reaper.hide_memory(False)
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(signum, signal.SIG_DFL)
            _place(descriptors)
            if self._settings["cpu_s"] and descriptors[-1] < 0:  # a session has its deadlines
                resource.setrlimit(resource.RLIMIT_CPU, (self._settings["cpu_s"],) * 2)
            act()
            code = 0
        except OSError as error:
            _complain(f"{error.strerror}: {error.filename}" if error.filename else str(error))
            code = 127
        except ValueError as error:
            _complain(str(error))
        finally:
            os._exit(code)


class _Reading:
    """Both outputs of a child, at most `most` bytes of each."""

    def __init__(self, child: Started, most: int) -> None:
        self._child, self._most = child, most
        self._texts = {child.out: bytearray(), child.err: bytearray()}
        self._open = set(self._texts)
        self.why = ""

    def until(self, deadline: float, has_memory: Callable[[], bool]) -> str:
        """Why reading ended."""
        watched = select.poll()  # descriptors may be above the limit of select
        for descriptor in (self._child.ready, *self._open):
            watched.register(descriptor, select.POLLIN)
        look_at = 0.0
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= look_at:
                if not has_memory():
                    return "memory"
                look_at = now + _CHECK_S
            ready = {found for found, _ in watched.poll(1000 * (min(deadline, look_at) - now))}
            for descriptor in ready & self._open:
                if not self._read(descriptor):
                    watched.unregister(descriptor)
            if self.why:
                return self.why
            if self._child.ready in ready:
                return "exit"

    def rest(self) -> None:
        """Read the bytes that are in the pipes already."""
        for descriptor in list(self._open):
            os.set_blocking(descriptor, False)
            with contextlib.suppress(BlockingIOError):
                while not self.why and self._read(descriptor):
                    pass
            os.set_blocking(descriptor, True)

    def texts(self) -> tuple[bytes, bytes]:
        out, err = (bytes(text[: self._most]) for text in self._texts.values())
        return out, err

    def _read(self, descriptor: int) -> bool:
        data = os.read(descriptor, 1 << 16)
        text = self._texts[descriptor]
        text += data
        if len(text) > self._most:
            self.why = "output"
        if not data:
            self._open.discard(descriptor)
        return bool(data)


def _become(argv: list[str]) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise OSError(error.errno, error.strerror, argv[0]) from None


def _print_file(home: str, path: str, most: int) -> None:
    """Print at most one byte more than `most`, so that the reader sees a longer file."""
    place = _inside(home, path)
    if stat.S_ISDIR(os.stat(place).st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
    if not stat.S_ISREG(os.stat(place).st_mode):
        raise OSError(errno.EINVAL, "Not a file", path)
    with open(place, "rb") as file:
        data = file.read(most + 1)
    with open(1, "wb", closefd=False) as out:
        out.write(data)


def _write_file(home: str, path: str, data: bytes) -> None:
    place = _inside(home, path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "wb", opener=_open_plain) as file:
        file.write(data)


def _open_plain(path: str, flags: int) -> int:
    """Without waiting for the reader of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)


def _inside(home: str, path: str) -> str:
    """A place in the workspace; links are followed, and may not lead out of it."""
    place = os.path.realpath(os.path.join(home, path))
    if os.path.commonpath((home, place)) != home:
        raise OSError(errno.EACCES, f"Not in the workspace {home}", path)
    return place


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _descriptors(
    theirs: contextlib.ExitStack, ours: contextlib.ExitStack
) -> tuple[int, int, int, int, int]:
    """Input, and both ends of two pipes; either stack closes its own.  Raises OSError."""
    found = []
    theirs.callback(os.close, stdin := os.memfd_create("stdin"))
    for _ in range(2):
        read, write = os.pipe()
        ours.callback(os.close, read)
        theirs.callback(os.close, write)
        found += [read, write]
    out, prints, err, complains = found
    return stdin, out, prints, err, complains


def _place(descriptors: tuple[int, ...]) -> None:
    """Make them 0, 1, ... and close all others; -1 is left out."""
    moved = [
        fcntl.fcntl(found, fcntl.F_DUPFD, len(descriptors)) for found in descriptors if found >= 0
    ]
    for place, descriptor in enumerate(moved):
        os.dup2(descriptor, place)
    os.closerange(len(moved), 1 << 20)


def _ended(child: Started, reading: _Reading, why: str, code: int) -> Ended:
    """The end of a child, whose pipes are closed."""
    reading.rest()
    _close(child)
    return Ended(code, reading.why or why, *reading.texts(), lost=False)


def _end(pid: int, *, at_once: bool) -> int:
    """The exit code of a child that has ended or is about to; negative: the signal."""
    for _ in range(0 if at_once else 40):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.005)
    else:
        os.kill(pid, signal.SIGKILL)  # not reaped yet: it is still this process
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _close(child: Started) -> None:
    for descriptor in (child.out, child.err, child.ready):
        os.close(descriptor)


def _memory_of_sandbox(home: str) -> int:
    """Resident bytes of all other processes, and bytes and inodes of files in memory."""
    disk = os.statvfs(home)
    total = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    total += (disk.f_files - disk.f_ffree) * _INODE_BYTES
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                resident, shared = (
                    Path("/proc", name, "statm").read_text(encoding="utf-8").split()[1:3]
                )
                total += (int(resident) - int(shared)) * _PAGE
    return total


# Program of the interpreter of a session: code comes on _SOCKET, and a byte goes back.
_SESSION = f"""
import os, site, socket, sys, traceback
def _serve(line, scope):
    while head := line.recv(8, socket.MSG_WAITALL):
        code = line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        failed = 0
        try:
            exec(compile(code, "<code>", "exec"), scope)
        except SystemExit as end:
            failed = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            failed = 1
            trace = error.__traceback__ and error.__traceback__.tb_next
            traceback.print_exception(type(error), error, trace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        line.sendall(bytes([failed & 255]))
os.set_inheritable({_SOCKET}, False)
site.setquit()
_serve(socket.socket(fileno={_SOCKET}), {{"__name__": "__main__"}})
"""


def main() -> None:
    connection = frames.own_connection()
    reaper.become_subreaper()
    reaper.hide_memory(True)
    with contextlib.suppress(OSError):  # the client has ended
        SandboxServer(connection, json.loads(sys.argv[1])).serve()


if __name__ == "__main__":
    main()

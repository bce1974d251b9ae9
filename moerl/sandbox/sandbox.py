"""Sandboxes for tools of agents: one per episode, never shared, with a pool of started sandboxes.

A sandbox of tools is made as the sandbox of a reward (`moerl.sandbox.limits`): bubblewrap, a user
of its own, limits, no network.  In it `moerl.sandbox.server` starts programs; nothing that they do
raises here.  `SandboxFactory` raises NoSandbox, and says why, where the machine can make none.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from moerl.config.task_programs import TaskLimits
from moerl.runtime import frames
from moerl.sandbox import server
from moerl.sandbox.isolation import IsolatedProgram, Isolation, SandboxError
from moerl.sandbox.limits import NoSandbox, make_sandboxed

TOOL_LIMITS = TaskLimits(memory_mb=1024, cpu_s=30, processes=32, file_mb=64, open_files=256)
_SERVER, _FRAMES = str(Path(server.__file__).resolve()), str(Path(frames.__file__).resolve())
_GRACE_S = 3.0  # for the server of a sandbox, which ends slow programs
_START_S = 60.0
_REQUEST_BYTES = 4 << 20  # of code, input or contents; the server holds it outside the limits
_PACKAGES = ("purelib", "platlib")
# Without `site`: start-up files of packages (*.pth) take longer than Python, and may import what a
# sandbox does not show.  The packages are in PYTHONPATH.
_INTERPRETER = os.path.abspath(getattr(sys, "_base_executable", sys.executable))
_PYTHON = (_INTERPRETER, "-s", "-S", "-c")
_ONCE = """
import site, sys
def _shown(kind, error, trace):
    sys.__excepthook__(kind, error.with_traceback(trace and trace.tb_next), None)
site.setquit()
sys.excepthook = _shown
exec(compile(sys.stdin.buffer.read(), "<code>", "exec"), {"__name__": "__main__"})
"""

Why = Literal["exit", "timeout", "output", "memory", "refused", "lost"]


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """How a program in a sandbox ended.

    why: exit: it ended with `code` (negative: the signal).  timeout, output, memory: at a limit, by
    force.  refused: not started, `err` says why.  lost: the sandbox has ended, with its files.
    """

    code: int
    out: bytes
    err: bytes
    why: Why
    lost_variables: bool = False  # the interpreter of a session has ended


class _ReplyHead(msgspec.Struct, frozen=True):
    code: int
    why: Literal["exit", "timeout", "output", "memory"]
    out: int
    lost: bool


class SandboxFactory:
    """Makes sandboxes; tries one on this machine first."""

    def __init__(self, limits: TaskLimits = TOOL_LIMITS, read_paths: Sequence[str] = ()) -> None:
        """Try whether this machine can make a sandbox that holds.

        read_paths: files and folders that programs see besides Python and /usr, read-only.

        `limits.memory_mb` holds for each process, and for all processes and files together.
        Raises NoSandbox where this machine cannot make a sandbox that holds.
        """
        for path in read_paths:
            if not os.path.exists(path):
                raise NoSandbox(f"read_paths has {path}: it must be an existing file or folder")
        environment = {
            "PATH": f"{os.path.dirname(_INTERPRETER)}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",  # threads count as processes
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(sysconfig.get_path, _PACKAGES))),
        }
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        self._settings: server.ServerSettings = {
            "memory_bytes": limits.memory_mb << 20,
            "cpu_s": limits.cpu_s,
        }
        made = make_sandboxed(limits, environment, (_SERVER, _FRAMES, *read_paths))
        # A reply holds both outputs; each request has their limits.
        self._isolation: Isolation = replace(
            made, limits=replace(limits, reply_kb=2 * limits.reply_kb + 64)
        )
        self._most = limits.reply_kb * 1024

    def open(self) -> Sandbox:
        """A sandbox with an empty workspace."""
        settings = msgspec.json.encode(self._settings).decode()
        return Sandbox(
            self._isolation.open([sys.executable, "-E", "-s", "-S", _SERVER, settings]), self._most
        )


class Sandbox:
    """One sandbox; its methods block, and return also when whatever runs in it misbehaves."""

    def __init__(self, program: IsolatedProgram, most: int) -> None:
        """Use the server of a sandbox.  most: bytes of each output that a request can ask for."""
        self._program, self._most = program, most
        self._lock = threading.Lock()  # one request at a time
        self.lost = ""  # why the sandbox has ended

    @property
    def pid(self) -> int:
        """The parent process of the sandbox, outside of it."""
        return self._program.pid

    def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        timeout_s: float,
        max_output: int,
    ) -> ToolOutput:
        """Run a program in the workspace; whatever it has started ends with it."""
        return self._ask("run", stdin, timeout_s, max_output, argv=argv)

    def python(
        self, code: str, *, timeout_s: float, max_output: int, keeps: bool = False
    ) -> ToolOutput:
        """Run code in an interpreter.  keeps: continue the last interpreter, with its variables."""
        data = code.encode(errors="surrogatepass")
        if keeps:
            return self._ask("session", data, timeout_s, max_output, argv=_PYTHON)
        return self._ask("run", data, timeout_s, max_output, argv=(*_PYTHON, _ONCE))

    def read(self, path: str, *, timeout_s: float, max_output: int) -> ToolOutput:
        """Contents of a file of the workspace, in `out`."""
        return self._ask("read", b"", timeout_s, max_output, path=path)

    def write(self, path: str, data: bytes, *, timeout_s: float) -> ToolOutput:
        """Write a file of the workspace, and the folders that it lies in."""
        return self._ask("write", data, timeout_s, 1 << 12, path=path)

    def close(self) -> None:
        """End everything in the sandbox; its files are gone."""
        self.lost = self.lost or "was closed"
        self._program.close()

    def _ask(
        self,
        op: str,
        data: bytes,
        timeout_s: float,
        max_output: int,
        *,
        argv: Sequence[str] = (),
        path: str = "",
    ) -> ToolOutput:
        if len(data) > _REQUEST_BYTES:
            problem = f"{len(data)} bytes are more than the {_REQUEST_BYTES} that a call can have"
            return ToolOutput(-1, b"", problem.encode(), "refused")
        request: server.SandboxRequest = {
            "op": op,
            "argv": list(argv),
            "path": path,
            "timeout_s": timeout_s,
            "max_output": min(max_output, self._most),
        }
        try:
            head = msgspec.json.encode(request)
        except (UnicodeEncodeError, msgspec.MsgspecError) as error:
            return ToolOutput(
                -1, b"", f"not valid text: {error}".encode(errors="replace"), "refused"
            )
        with self._lock:
            return self._call(head + b"\n" + data, timeout_s)

    def _call(self, body: bytes, timeout_s: float) -> ToolOutput:
        if not self.lost:
            try:
                line, _, rest = self._program.call(body, timeout_s + _GRACE_S).partition(b"\n")
                head = msgspec.json.decode(line, type=_ReplyHead)
                out, err = rest[: head.out], rest[head.out :]
                return ToolOutput(head.code, out, err, head.why, head.lost)
            except (SandboxError, OSError) as error:
                self.lost = str(error)
            except msgspec.MsgspecError:
                self.lost = "answered with bytes that are no answer"
            self._program.close()
        return ToolOutput(-1, b"", b"", "lost")


class SandboxPool:
    """Opens sandboxes ahead of their use, in threads; each is given to one episode only."""

    def __init__(self, factory: SandboxFactory, warm: int = 2) -> None:
        """Start the first sandboxes.  warm: number of sandboxes that wait for an episode."""
        self._factory, self._warm = factory, warm
        self._ready: deque[Sandbox] = deque()
        self._open: set[Sandbox] = set()
        self._starting = 0
        self._closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="sandboxes")
        self._refill()

    @property
    def waiting(self) -> int:
        """Started sandboxes that no episode has."""
        return len(self._ready)

    def take(self) -> Sandbox:
        """An unused sandbox; the caller gives it to `end`.  Raises SandboxError."""
        with self._lock:
            sandbox = self._ready.popleft() if self._ready else None
        self._refill()
        if sandbox is None or sandbox.lost:
            sandbox = self._start()
        return sandbox

    def end(self, sandbox: Sandbox) -> None:
        """Close a sandbox; it is not used again."""
        sandbox.close()
        with self._lock:
            self._open.discard(sandbox)

    def close(self) -> None:
        """Close all sandboxes, also the sandboxes of running episodes."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(cancel_futures=True)
        for sandbox in list(self._open):
            self.end(sandbox)

    def _refill(self) -> None:
        with self._lock:
            if self._closed:
                return
            missing = self._warm - len(self._ready) - self._starting
            self._starting += max(0, missing)
            for _ in range(missing):
                self._threads.submit(self._start_one)

    def _start_one(self) -> None:
        sandbox = None
        with contextlib.suppress(SandboxError):  # `take` will try, and say why
            sandbox = self._start()
        with self._lock:
            self._starting -= 1
            if sandbox is not None:
                self._ready.append(sandbox)

    def _start(self) -> Sandbox:
        """A sandbox that has answered."""
        try:
            sandbox = self._factory.open()
        except OSError as error:
            raise SandboxError(f"could not be started: {error}") from None
        with self._lock:
            self._open.add(sandbox)
            closed = self._closed
        if closed or sandbox.run(["true"], timeout_s=_START_S, max_output=1).why == "lost":
            problem = sandbox.lost or "was closed"
            self.end(sandbox)
            raise SandboxError(problem)
        return sandbox

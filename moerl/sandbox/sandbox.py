"""Boxes for tools of agents: one per episode, never shared, with a pool of started ones.

A box is made by moerl.sandbox.limits, as that of a reward: bubblewrap, a user of its own, limits,
no network.  In it moerl.sandbox.server starts programs; nothing that they do raises here.
Without a sandbox nothing is started: `ToolSandbox` raises NoSandbox with what the machine lacks.
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
from moerl.sandbox import server
from moerl.sandbox.isolation import Box, BoxError, Isolation
from moerl.sandbox.limits import NoSandbox, make_boxed

TOOL_LIMITS = TaskLimits(memory_mb=1024, cpu_s=30, processes=32, file_mb=64, open_files=256)
_SERVER = str(Path(server.__file__).resolve())
_GRACE_S = 3.0  # for the server of a box, which ends what takes too long
_START_S = 60.0
_REQUEST_BYTES = 4 << 20  # of code, input or contents; the server holds it outside the limits
_PACKAGES = ("purelib", "platlib")
# Without `site`: start-up files of packages (*.pth) take longer than Python, and may import what a
# box does not show.  The packages are in PYTHONPATH.
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
    """How a program in a box ended.

    why: exit: by itself, with `code` (negative: the signal).  timeout, output, memory: at a limit,
    by force.  refused: not started, `err` says why.  lost: the box has ended, with its files.
    """

    code: int
    out: bytes
    err: bytes
    why: Why
    lost_variables: bool = False  # the interpreter of a session has ended


class _Head(msgspec.Struct, frozen=True):
    code: int
    why: Literal["exit", "timeout", "output", "memory"]
    out: int
    lost: bool


class ToolSandbox:
    """Makes boxes; tried on this machine first."""

    def __init__(self, limits: TaskLimits = TOOL_LIMITS, read_paths: Sequence[str] = ()) -> None:
        """read_paths: files and folders that programs see besides Python and /usr, read-only.

        `limits.memory_mb` is for each process and for all processes and files of a box together.
        Raises NoSandbox where this machine cannot make a box that holds.
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
        made = make_boxed(limits, environment, (_SERVER, *read_paths))
        # A reply holds both outputs; what they may have is asked for in each request.
        self._isolation: Isolation = replace(
            made, limits=replace(limits, reply_kb=2 * limits.reply_kb + 64)
        )
        self._most = limits.reply_kb * 1024

    def open_box(self) -> Sandbox:
        """A box with an empty workspace."""
        settings = msgspec.json.encode(self._settings).decode()
        return Sandbox(
            self._isolation.open([sys.executable, "-E", "-s", "-S", _SERVER, settings]), self._most
        )


class Sandbox:
    """One box; its methods block, and return also when whatever runs in it misbehaves."""

    def __init__(self, box: Box, most: int) -> None:
        """most: bytes of each output that a request can ask for."""
        self._box, self._most = box, most
        self._lock = threading.Lock()  # one request at a time
        self.lost = ""  # why the box has ended

    @property
    def pid(self) -> int:
        """The parent process of the box, outside of it."""
        return self._box.pid

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
        """Run code in an interpreter; keeps: in that of the last call, with its variables."""
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
        """End everything in the box; its files are gone."""
        self.lost = self.lost or "was closed"
        self._box.close()

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
        request: server.BoxRequest = {
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

    def _call(self, request: bytes, timeout_s: float) -> ToolOutput:
        if not self.lost:
            try:
                line, _, rest = self._box.call(request, timeout_s + _GRACE_S).partition(b"\n")
                head = msgspec.json.decode(line, type=_Head)
                out, err = rest[: head.out], rest[head.out :]
                return ToolOutput(head.code, out, err, head.why, head.lost)
            except (BoxError, OSError) as error:
                self.lost = str(error)
            except msgspec.MsgspecError:
                self.lost = "answered with bytes that are no answer"
            self._box.close()
        return ToolOutput(-1, b"", b"", "lost")


class SandboxPool:
    """Opens boxes ahead of their use, in threads; each is given to one episode only."""

    def __init__(self, sandbox: ToolSandbox, warm: int = 2) -> None:
        """warm: started boxes that wait for an episode."""
        self._sandbox, self._warm = sandbox, warm
        self._ready: deque[Sandbox] = deque()
        self._open: set[Sandbox] = set()
        self._starting = 0
        self._closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="boxes")
        self._refill()

    @property
    def waiting(self) -> int:
        """Started boxes that no episode has."""
        return len(self._ready)

    def take(self) -> Sandbox:
        """A box that nobody else has had; the caller gives it to `end`.  Raises BoxError."""
        with self._lock:
            box = self._ready.popleft() if self._ready else None
        self._refill()
        if box is None or box.lost:
            box = self._start()
        return box

    def end(self, box: Sandbox) -> None:
        """Close a box; it is not used again."""
        box.close()
        with self._lock:
            self._open.discard(box)

    def close(self) -> None:
        """Close all boxes, those of episodes too."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(cancel_futures=True)
        for box in list(self._open):
            self.end(box)

    def _refill(self) -> None:
        with self._lock:
            if self._closed:
                return
            missing = self._warm - len(self._ready) - self._starting
            self._starting += max(0, missing)
            for _ in range(missing):
                self._threads.submit(self._start_one)

    def _start_one(self) -> None:
        box = None
        with contextlib.suppress(BoxError):  # `take` will try, and say why
            box = self._start()
        with self._lock:
            self._starting -= 1
            if box is not None:
                self._ready.append(box)

    def _start(self) -> Sandbox:
        """A box that has answered."""
        try:
            box = self._sandbox.open_box()
        except OSError as error:
            raise BoxError(f"could not be started: {error}") from None
        with self._lock:
            self._open.add(box)
            closed = self._closed
        if closed or box.run(["true"], timeout_s=_START_S, max_output=1).why == "lost":
            problem = box.lost or "was closed"
            self.end(box)
            raise BoxError(problem)
        return box

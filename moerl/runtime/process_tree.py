"""Guarantees that no process outlives a run: two nested subreapers end all descendants.

`moerl train` is a thin front that starts one root process in its own session; the root starts
everything else.  Both are child subreapers (prctl), so an orphan becomes a child of the root, or of
the front if the root has ended.

- The front dies (SIGKILL included): the kernel sends the root SIGTERM (parent-death signal), and
  the root ends its descendants.
- The root dies: the front inherits its descendants and ends them.
- Anything else dies: the root notices, reports why, and ends the rest.

Only descendants are ever signalled, never processes found by name or group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from moerl.core import errors
from moerl.runtime.reaper import PR_SET_PDEATHSIG, become_subreaper, prctl, reap

STOP_GRACE_S = 2.0  # seconds between SIGTERM and SIGKILL for a root's descendants

INTERRUPT = "the run was interrupted"
RESUME_FILE = "resume.json"  # in a root's scratch folder: arguments of the next root
_INSTALL = "in a checkout, use tools/setup.sh, or pip install '.[cpu]' or '.[gpu]' (README.md)"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that `SignalWatch` notices


def die_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process when its parent dies."""
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died between the two calls
        os.kill(os.getpid(), signal.SIGTERM)


def run_command(work: Callable[[], None]) -> int:
    """Run the work of a command in its own process; returns the exit status.

    A user error is one sentence on standard error.  No descendant outlives the call.
    """
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    try:
        work()
    except errors.MoerlError as error:
        print(f"moerl: {errors.printable(error)}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("moerl: interrupted", file=sys.stderr, flush=True)
        return 130
    finally:
        end_descendants(STOP_GRACE_S)
    return 0


def leave(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a root process with Ray, and exit with its status.

    All children have ended; Ray's hooks for exits and exceptions would wait for them.
    """
    code = 1
    try:
        code = main()
    except BaseException:
        with contextlib.suppress(OSError):  # the terminal may be gone
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def end_descendants(grace_s: float, mark: tuple[str, str] | None = None) -> int:
    """SIGTERM, then SIGKILL, until this process has no descendant; returns the number killed.

    mark: only descendants with this environment variable; their zombies are left to their parents.
    Takes at most grace_s after SIGTERM and 5 s after SIGKILL.
    """
    seen = _descendants(mark)
    for process in seen:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _descendants(mark) and time.monotonic() < deadline:
        if mark is None:
            reap()
        time.sleep(0.05)
    killed = 0
    deadline = time.monotonic() + 5.0
    while (left := _descendants(mark)) and time.monotonic() < deadline:
        for process in left:
            killed += _signal(process, signal.SIGKILL)
        if mark is None:
            reap()
        time.sleep(0.05)
    return killed


class Orphans:
    """Collects zombies that this subreaper adopted.

    The starter of a process polls its exit status soon after its end (`Popen.poll`).  A child that
    stays a zombie for `patience_s` is an orphan: two for each killed server or torchrun.
    """

    def __init__(self, patience_s: float = 30.0) -> None:
        self._patience_s = patience_s
        self._dead: dict[int, float] = {}  # monotonic seconds when first seen dead, per pid
        self._due = 0.0

    def collect(self) -> int:
        """Collect old zombies; returns how many.  Call often."""
        now = time.monotonic()
        if now < self._due:
            return 0
        self._due = now + self._patience_s / 3
        self._dead = {pid: self._dead.get(pid, now) for pid in _dead_children()}
        late = [pid for pid, since in self._dead.items() if now - since >= self._patience_s]
        for pid in late:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return len(late)


def run_guarded(
    command: Sequence[str],
    *,
    grace_s: float = STOP_GRACE_S,
    again: Callable[[], Sequence[str]] = tuple,
) -> int:
    """The front: run the root, forward Ctrl-C and SIGTERM once, end remaining descendants.

    again: called when a root has ended; returns the command of the next root, which starts when no
    descendant is left and no signal came, or nothing.
    Returns the last root's exit status, 128 + n when signal n ended it.
    """
    become_subreaper()
    roots, signals = list[subprocess.Popen[bytes]](), list[int]()

    def forward(signum: int, _frame: FrameType | None) -> None:
        signals.append(signum)
        with contextlib.suppress(ProcessLookupError):
            roots[-1].send_signal(signum)

    while command:
        roots.append(subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent))
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, forward)
        code = roots[-1].wait()
        killed = end_descendants(grace_s=grace_s)
        command = () if signals or _descendants(None) else again()
    if code < 0:
        print(
            f"moerl: the run's root process was ended by signal {-code}; "
            f"its {killed} remaining processes were ended too",
            flush=True,
        )
    return code if code >= 0 else 128 - code


def guarded(arguments: dict[str, Any], module: str = "moerl.launch.train") -> int:
    """Run a command that needs torch in a guarded root process, then remove its scratch folder.

    A root that leaves RESUME_FILE there asks to be started again, with the arguments in it.
    """
    if importlib.util.find_spec("torch") is None:
        raise errors.MoerlError(f"this command needs torch: {_INSTALL}")
    scratch: list[str] = []  # a folder for each root
    with contextlib.ExitStack() as stack:

        def command(arguments: Mapping[str, object]) -> list[str]:
            folder = tempfile.TemporaryDirectory(prefix="moerl-", ignore_cleanup_errors=True)
            scratch.append(stack.enter_context(folder))
            body = json.dumps({**arguments, "scratch": scratch[-1]})
            return [sys.executable, "-m", module, body]

        def again() -> list[str]:
            asked = Path(scratch[-1], RESUME_FILE)
            return command(json.loads(asked.read_bytes())) if asked.exists() else []

        return run_guarded(command(arguments), again=again)


class Interrupted(errors.MoerlError):
    """Ctrl-C or SIGTERM."""


class SignalWatch:
    """Ctrl-C and SIGTERM: noticed by the loop, or by a thread when the loop hangs.

    Python runs a signal handler between two bytecodes of the main thread, so never while that
    thread is inside a call of C that does not return, as Ray's calls do when its server is gone.
    The kernel writes to the wake-up descriptor in any case, and a thread reads it.  The main thread
    calls all methods.
    """

    def __init__(self, end_at_once: Callable[[], None], patience_s: float = 10.0) -> None:
        """A thread calls end_at_once when no `check` follows a signal within patience_s."""
        self._end_at_once, self._patience_s = end_at_once, patience_s
        self._came, self._noticed = threading.Event(), threading.Event()

    def install(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in _SIGNALS:
            signal.signal(signum, self._note)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()

    def check(self) -> None:
        """Raises Interrupted after a signal.  Call often."""
        if self._came.is_set():
            self._noticed.set()
            raise Interrupted(INTERRUPT)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._came.set()  # an exception raised here would surface inside Ray

    def _watch(self) -> None:
        while self._reader.recv(1)[0] not in _SIGNALS:
            pass
        self._came.set()
        if not self._noticed.wait(self._patience_s):
            self._end_at_once()


def serving(pids: Mapping[str, int], logs: Path) -> list[tuple[int, Path]]:
    """(pid, log) of processes a trainer may wait for: controller, engine hosts, SGLang.

    pids: of this machine, as in `pids.json`.
    """
    found = []
    for name, pid in pids.items():
        if name == "controller":
            found.append((pid, logs / "controller.log"))
        elif name.endswith("-host"):
            found.append((pid, logs / f"{name.removesuffix('-host')}.host.log"))
        elif name.startswith("engine-"):
            with contextlib.suppress(psutil.Error):
                server = psutil.Process(pid)
                own = (server, *server.children(recursive=True))
                found += [(process.pid, logs / f"{name.replace('-', '')}.log") for process in own]
    return found


def children_with(pid: int, variable: str) -> list[tuple[int, str]]:
    """(pid, value) of a process's living children that have an environment variable."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if value := process.environ().get(variable):  # a zombie has no environment
                    found.append((process.pid, value))
    return found


def ending_of(code: int) -> str:
    """An exit status in words."""
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def error_in(log: Path, begin: int = 0) -> str:
    """The cause of a job's end in its log, from byte `begin` on.

    A rank that a signal ended, as torchrun's summary names it, or the first error that a rank
    reported in a sentence: other ranks fail because of it.  Else the last error, else the last
    line with a word.
    """
    text = log.read_bytes()[begin:].decode(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    reported = [line for line in lines if line.partition(": ")[0] in vars(errors)]
    causes = [line for line in lines if re.match(r"(\[rank\d+\]: )?(\w+\.)*\w+Error: ", line)]
    return [*_signalled(text), *reported[:1], *causes[-1:], *lines[-1:], f"nothing in {log}"][0]


_ENDED_RANK = re.compile(r"^ *rank +: (\d+) .*\n *exitcode +: -(\d+) \(pid: (\d+)\)", re.MULTILINE)


def _signalled(text: str) -> list[str]:
    """Sentences about ranks that signals ended, by torchrun's summary; it sends SIGTERM itself."""
    return [
        f"rank {rank} (process {pid}) was ended by {signal.Signals(int(number)).name}"
        for rank, number, pid in _ENDED_RANK.findall(text)
        if int(number) != signal.SIGTERM
    ]


def _descendants(mark: tuple[str, str] | None) -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if mark is None or process.environ().get(mark[0]) == mark[1]:
                alive.append(process)
    return alive


def _dead_children() -> list[int]:
    dead = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                dead.append(process.pid)
    return dead


def _signal(process: psutil.Process, signum: int) -> int:
    try:
        process.send_signal(signum)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return 1

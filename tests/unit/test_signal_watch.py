"""A signal ends a run whose root process hangs inside C, where no Python handler runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

ROOT = """
import ctypes, os, sys, time
from moerl.runtime.process_tree import Interrupted, SignalWatch

def end():
    print("the thread ends the run", flush=True)
    os._exit(130)

watch = SignalWatch(end, patience_s=0.3)
watch.install()
print("ready", flush=True)
if sys.argv[1] == "hangs":
    libc = ctypes.CDLL(None)
    libc.siginterrupt(15, 0)  # a signal does not end the wait
    libc.sem_wait(ctypes.create_string_buffer(64))
try:
    while True:
        time.sleep(0.05)
        watch.check()
except Interrupted as error:
    print(error, flush=True)
    time.sleep(0.6)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("hangs", 130, "the thread ends the run"), ("looks", 3, "the run was interrupted")],
)
def test_a_signal_while_the_main_thread_hangs(how: str, code: int, says: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", ROOT, how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == code
        assert process.stdout.read().splitlines()[-1] == says
    finally:
        process.kill()
        process.wait()

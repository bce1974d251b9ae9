"""Boxes for the tools of agents: starts per second, time to the first answer, calls per second.

    python bench/sandbox_start.py [--repeats 5] [--boxes 16] [--calls 200]

The measurements take turns, so that a busy machine slows all of them; a line holds the median and
the range.  `no box` starts the same program without isolation.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from moerl.sandbox.sandbox import Sandbox, SandboxFactory, SandboxPool

WAIT_S = 60.0
BYTES = 4096


def starts(sandbox: SandboxFactory, boxes: int) -> float:
    """Boxes per second, two at a time, each with a first answer."""
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: first_answer(sandbox), range(boxes)))
    return boxes / (time.perf_counter() - start)


def first_answer(sandbox: SandboxFactory) -> float:
    """Milliseconds from nothing to the answer of a shell."""
    start = time.perf_counter()
    box = sandbox.open()
    check(box)
    elapsed = time.perf_counter() - start
    box.close()
    return 1000 * elapsed


def warm_answer(sandbox: SandboxFactory) -> float:
    """Milliseconds to the answer of a shell in a box that had started."""
    pool = SandboxPool(sandbox, warm=1)
    while not pool.waiting:
        time.sleep(0.01)
    start = time.perf_counter()
    check(pool.take())
    elapsed = time.perf_counter() - start
    pool.close()
    return 1000 * elapsed


def check(box: Sandbox) -> None:
    ran = box.run(["/bin/sh", "-c", "echo 1"], timeout_s=WAIT_S, max_output=BYTES)
    assert ran.out == b"1\n", ran


def calls(count: int, call: Callable[[], object]) -> float:
    """Calls per second, one after the other."""
    call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - start)


def memory_mib(box: Sandbox) -> float:
    """Proportional set size of a box: reaper, two of bubblewrap, server."""
    reaper = psutil.Process(box.pid)
    family = [reaper, *reaper.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family) / 2**20


def measure(sandbox: SandboxFactory, boxes: int, count: int) -> dict[str, float]:
    """One round of everything."""
    box = sandbox.open()
    try:
        plain = [sys.executable, "-I", "-S", "-c", "print(1)"]
        limits = {"timeout_s": WAIT_S, "max_output": BYTES}
        return {
            "starts/s, 2 at a time": starts(sandbox, boxes),
            "ms to the first answer": first_answer(sandbox),
            "ms to the first answer, warm": warm_answer(sandbox),
            "calls/s: true": calls(count, lambda: box.run(["/bin/true"], **limits)),
            "calls/s: shell": calls(count, lambda: check(box)),
            "calls/s: python": calls(count // 4, lambda: box.python("print(1)", **limits)),
            "calls/s: python, keeps": calls(
                count, lambda: box.python("print(1)", keeps=True, **limits)
            ),
            "calls/s: write_file": calls(
                count, lambda: box.write("file", b"text", timeout_s=WAIT_S)
            ),
            "calls/s: python, no box": calls(
                count // 4, lambda: subprocess.run(plain, capture_output=True, check=True)
            ),
            "MiB of a box": memory_mib(box),
        }
    finally:
        box.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--boxes", type=int, default=16)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    sandbox = SandboxFactory()
    rounds = [measure(sandbox, options.boxes, options.calls) for _ in range(options.repeats)]
    for name in rounds[0]:
        found = [one[name] for one in rounds]
        median = statistics.median(found)
        print(f"{name:30} {median:8.1f}   ({min(found):.1f} .. {max(found):.1f})")


if __name__ == "__main__":
    main()

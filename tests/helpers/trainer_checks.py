"""Checks of a trainer's settings, all of a session in one process.

`moerl train --dry-run` starts `moerl.trainer.start_check` for each question, which imports Megatron
for 6 s of a core; tests/unit/test_start_check.py asks it so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from moerl.trainer.start_check import Job, answer


def ask(job: Job) -> dict[str, Any]:
    """In place of `moerl.launch.trainer_check.ask`; its process ends with that of the tests."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(job.text() + "\n")
    server.stdin.flush()
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


@cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.trainer_checks"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    for line in sys.stdin:
        print(answer(line), flush=True)

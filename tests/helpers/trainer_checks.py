"""Checks of a trainer's settings in a process that has imported Megatron.

`moerl train --dry-run` starts `moerl.trainer.start_check`, which imports it for 6 s of a core;
tests/unit/test_start_check.py asks it so.
"""

from __future__ import annotations

import json
from typing import Any

from moerl.trainer.start_check import Job
from tests.helpers.rank_server import run_code

_CODE = "import sys; from moerl.trainer.start_check import answer; print(answer(sys.stdin.read()))"


def ask(job: Job) -> dict[str, Any]:
    """In place of `moerl.launch.trainer_check.ask`."""
    done = run_code(_CODE, input=job.text())
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer

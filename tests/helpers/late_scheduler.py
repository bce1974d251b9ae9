"""Holds SGLang's scheduler up right after it has answered a request, while a file exists.

`MOERL_TEST_LATE`, in the environment of a server of tests/helpers/warm_engines.py, names the file;
each time the scheduler was held up, it gets one line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "MOERL_TEST_LATE"
HELD_S = 0.5  # longer than an answer and the next request take


def hold_up() -> None:
    """In the process that starts the scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    switch = Path(os.environ[VARIABLE])
    process = Scheduler.process_batch_result

    def late(self, batch, *rest, **fields):  # type: ignore[no-untyped-def]
        process(self, batch, *rest, **fields)
        if switch.exists() and any(req.finished() for req in batch.reqs):
            with switch.open("a") as lines:
                lines.write("held\n")
            time.sleep(HELD_S)

    Scheduler.process_batch_result = late

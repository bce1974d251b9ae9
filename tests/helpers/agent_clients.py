"""Programs of build/clients: agents of others, in an environment of their own.

verifiers makes environments of its chat programs with uv; here uv finds the wheels of the
project and asks no registry: an index that is no folder has no packages.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/clients"
PYTHON = FOLDER / "bin/python"
PROGRAMS = ROOT / "tests/helpers/clients"


def verifiers_agent(taskset: str, harness: str, **agent: object) -> tuple[str, ...]:
    """Arguments of the example that plays verifiers environments, on this machine."""
    seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}} | agent
    return str(ROOT / "examples/verifiers_agent.py"), taskset, json.dumps({"agent": seat})


def environment() -> dict[str, str]:
    """Variables of the programs; raises where the environment is not made."""
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON} is missing: tools/test_env.sh clients makes it")
    home = FOLDER / "home"
    home.mkdir(exist_ok=True)
    return {
        "PATH": f"{FOLDER / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(PROGRAMS),
        "HOME": str(home),
        "UV_CACHE_DIR": str(FOLDER / "uv"),
        "UV_DEFAULT_INDEX": (FOLDER / "no-index").as_uri(),
        "UV_FIND_LINKS": str(ROOT / "build/wheels/clients"),
        "UV_PYTHON_DOWNLOADS": "never",
    }

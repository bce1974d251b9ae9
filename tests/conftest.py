"""What several folders of tests share: a tiny model on disk, free ports, a quiet environment.

The environment variables are set here, before any test imports torch or transformers, because
those read them at import.  Heavy packages are imported inside fixtures only: unit tests of the
torch-free layers must stay fast.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import left_processes
from tests.helpers.patience import patience

if TYPE_CHECKING:
    from tests.helpers.short_run import ShortRun

ROOT = Path(__file__).resolve().parents[1]

# Kernels with which SGLang serves every model family on a plain CPU; servers inherit the variable.
CPU_SGLANG = str(ROOT / "tests/cpu_sglang")
sys.path.insert(0, CPU_SGLANG)

os.environ.update(
    PYTHONPATH=os.pathsep.join(filter(None, [CPU_SGLANG, os.environ.get("PYTHONPATH")])),
    HF_HUB_OFFLINE="1",  # a test that reaches for a hub fails instead of waiting
    TRANSFORMERS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",  # its threads warn after every fork
    OMP_NUM_THREADS="1",  # several ranks and an engine share two cores
)


@pytest.fixture(autouse=True)
def _processes_before() -> None:
    left_processes.remember()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# Fixtures of a session that several files use, and the group of these files.
SHARED = {"short_run": "short_run", "engine_world": "engines", "warm_engines": "engines"}


@cache
def group_of(file: str) -> str:
    """Files whose tests run in one worker: those that share a run or a server; else one file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    groups = (group for name, group in SHARED.items() if re.search(rf"[ (]{name}: ", text))
    return next(groups, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's schedule of files, with groups in place of files."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return Groups(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Time limits of tests are for tests that hang: three times as long, and by the load."""
    longer = settings._replace(timeout=patience(3.0 * settings.timeout))
    item.config.pluginmanager.getplugin("timeout").pytest_timeout_set_timer(item, longer)
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE folder (2 layers, 8 experts, top-2) with its tokenizer; read it only."""
    from moerl.config.schema import TinyModel
    from moerl.data.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder, TinyModel(enabled=True), seed=0)
    return folder


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> ShortRun:
    """A quickstart of two steps, looked at from outside."""
    from tests.helpers import short_run

    return short_run.make(tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Returns a function that names another free loopback TCP port at every call.

    Somebody else may take the port before its user binds it; ports once handed out are not handed
    out again in this session.
    """
    given: set[int] = set()

    def port() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                number: int = probe.getsockname()[1]
            if number not in given:
                given.add(number)
                return number

    return port

"""Engine and trainer processes get CUDA's compiler from one function."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moerl.config import load_config
from moerl.config.clusters import placement
from moerl.config.schema import EngineConfig
from moerl.engine.host.sglang_server import EngineServer
from moerl.launch.run_context import rank_environment
from moerl.runtime.cuda_folder import KERNELS, compiler_environment

PATHS = ["/usr/local/cuda-12.8/bin", "/usr/bin"]
CACHE = "SGLANG_JIT_CACHE_DIR"


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a compiler, on a machine with another one."""
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-12.8")
    monkeypatch.setenv("PATH", ":".join(PATHS))
    monkeypatch.delenv(CACHE, raising=False)
    return tmp_path


def both_ends(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Environments of an engine's server and of a trainer rank."""
    config = load_config("quickstart", ("cluster=node8",))
    server = EngineServer(
        EngineConfig(), folder, routing=True, version="0.0", token="", log=folder / "log"
    )
    return server._environment(), rank_environment(config, placement(config).trainers[0])


def test_both_ends_compile_with_the_environment(prefix: Path) -> None:
    """Its programs go first: ninja is one.  Control: without the folder the machine's stays."""
    for found in both_ends(prefix):
        assert found["CUDA_HOME"] == str(prefix / "cuda")
        assert found["PATH"].split(":") == [f"{prefix}/cuda/bin", f"{prefix}/bin", *PATHS]
        assert CACHE not in found
    (prefix / "cuda/bin/nvcc").unlink()
    for found in both_ends(prefix):
        assert found["CUDA_HOME"] == "/usr/local/cuda-12.8"
        assert found["PATH"].split(":") == [f"{prefix}/bin", *PATHS]


def test_kernels_that_were_compiled_before_are_found(prefix: Path) -> None:
    """A folder that the user named stays."""
    (prefix / "cuda" / KERNELS).mkdir()
    assert compiler_environment(os.environ)[CACHE] == str(prefix / "cuda" / KERNELS / "jit")
    assert compiler_environment({CACHE: "/mine"})[CACHE] == "/mine"

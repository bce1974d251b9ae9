"""pytest plugin: what the modules of one process on the double train with, made once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.double.train_once import NUMBERS, Numbers, Trained, numbers, prepare
from tests.double.watch import purpose

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the numbers of the same training on the CPU, from a process without the double."""
    made = tmp_path_factory.mktemp("cpu")
    command = [sys.executable, "-m", "tests.double.train_once", str(made)]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return made


@pytest.fixture(scope="session")
def trained(folder: Path) -> Iterator[Trained]:
    with purpose("model"):
        made = prepare("cuda", folder)
    gc.freeze()  # modules and this model: `outcome` collects often
    yield made
    gc.unfreeze()


@pytest.fixture(scope="session")
def here(trained: Trained) -> Numbers:
    return numbers(trained)


@pytest.fixture(scope="session")
def on_cpu(folder: Path) -> Numbers:
    found: Numbers = torch.load(folder / NUMBERS)
    return found

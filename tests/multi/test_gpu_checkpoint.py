"""Checkpoints on the device double: no device memory, exact resumes, host bytes of the dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_store import store_variable
from moerl.trainer.hf_io.hf_folder import HfFolder
from tests.double.build import build
from tests.double.on_checkpoint import TWO_RANKS, told
from tests.double.process import ROOT, Module
from tests.double.train_once import MODEL, make_folder
from tests.helpers.patience import patience

pytestmark = pytest.mark.full

CHECKPOINT = Module("on_checkpoint.py")


@pytest.mark.parametrize("name", CHECKPOINT.names())
def test_on_one_rank(name: str) -> None:
    CHECKPOINT.passed(name)


def test_two_ranks_write_their_shards(tmp_path: Path) -> None:
    build()
    make_folder(tmp_path)
    found = _on_two_ranks(tmp_path)
    memory = told(HfFolder(str(tmp_path / MODEL)).spec, TWO_RANKS)
    for rank, one in enumerate(found):
        assert one["allocated"] == 0
        assert one["gathered"] > 4 * TWO_RANKS.ddp["bucket_size"], "control: a bucket in fp32"
        planned = memory.checkpoint - rank * memory.weights  # which the first rank writes
        assert one["host"] == pytest.approx(planned, rel=0.02), "shards differ by padding"
        assert one["loaded"] == one["resumed"] == 0


def _on_two_ranks(folder: Path) -> list[dict[str, float]]:
    store = StoreServer("127.0.0.1", slots=1)
    shared = os.environ | store_variable(store.server_address, 0)
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.double.checkpoint_ranks", str(folder)]
    logs = [folder / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=out, stderr=out))
    codes = [rank.wait(timeout=patience(200)) for rank in ranks]
    store.close()
    assert not any(codes), "".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

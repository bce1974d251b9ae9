"""Both ends of a NCCL pair have one set of variables when the pair is made, in a real run.

The run is real but for NCCL, whose pairs are gloo's (`tests/helpers/nccl_on_cpu`).  Its shell has
other values, so that an end which does not get its variable shows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moerl.config.transport_rules import CUMEM, INTERFACES
from moerl.weight_sync.transports.pair_pipes import AGREED
from tests.helpers.short_run import SHORT
from tests.helpers.train_runs import Run, start

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

HOOK = Path(__file__).parents[1] / "helpers" / "nccl_on_cpu"
GPUS = (
    *("cluster=node8", "sync.transport=nccl", "engine.platform=auto", "trainer.platform=auto"),
    *("engine.count=1", "engine.tp=1", "engine.dtype=float32", "trainer.dtype=fp32"),
    "engine.args.attention_backend=torch_native",
    "trainer.parallel={dp: 1, ep: 1}",
)
SHELL = {CUMEM: "1", "NCCL_SOCKET_IFNAME": "eth9", "GLOO_SOCKET_IFNAME": "eth9"}


def started(root: Path, monkeypatch: pytest.MonkeyPatch, **more: str) -> Run:
    path = os.pathsep.join((str(HOOK), str(HOOK.parents[2]), os.environ.get("PYTHONPATH", "")))
    for name, value in {"PYTHONPATH": path, "MOERL_TEST_PAIRS": str(root), **SHELL, **more}.items():
        monkeypatch.setenv(name, value)
    return start(root, "quickstart", *GPUS, *SHORT, name="a")


def test_both_ends_agree_when_their_group_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path, monkeypatch)
    assert run.finish() == 0, run.text()
    found: list[dict[str, Any]] = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    ends = [[one for one in found if one["rank"] == rank] for rank in (0, 1)]
    assert ends[0]
    assert len(ends[0]) == len(ends[1])
    assert all(one["command"].startswith("sglang::scheduler") for one in ends[0])
    assert all("moerl.trainer.main" in one["command"] for one in ends[1])
    for name in AGREED:
        values = {one["environment"].get(name) for one in found}
        assert values == {"0" if name == CUMEM else None}, name
    for name in INTERFACES:
        assert {one["environment"].get(name) for one in found} == {"lo"}
    sglang = {one["environment"].get("NCCL_NVLS_ENABLE") for one in ends[0]}
    assert sglang == {"0"}, "SGLang's own changes are seen"


@pytest.mark.parametrize("end", ["sglang::scheduler", "moerl.trainer.main"])
def test_a_run_whose_ends_differ_is_refused_by_name(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one end has the value of its shell, as without `transport_environment`."""
    run = started(tmp_path, monkeypatch, MOERL_TEST_SHELL=json.dumps({end: SHELL}))
    assert run.finish() != 0, run.text()
    values = ("1", "0") if end.startswith("sglang") else ("0", "1")
    said = f"{CUMEM} is {values[0]} in the engine and {values[1]} in this trainer rank"
    assert said in run.text()

"""What bench/bare.py relies on: its arms differ as they say, and a batch begins when it says so."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import bare_engine
from moerl.controller.controller import Controller
from moerl.core.messages import Plan, StepDone, TakePlan
from moerl.core.types import PolicyVersion
from moerl.engine.record_files import FIELD
from tests.helpers.controllers import CONFIG, hello, make, running
from tests.helpers.stub_engine import StubEngine

ROOT = Path(__file__).resolve().parents[2]
BATCH = CONFIG.rollout.groups_per_step * CONFIG.rollout.group_size
META = {
    bare_engine.BARE: {"finish_reason": {"type": "length"}},
    bare_engine.RECORDS: {
        "finish_reason": {"type": "length"},
        "routed_experts": "AAAA",
        "output_token_sampling_mask": [[1, 2]],
    },
    bare_engine.DIRECT: {"finish_reason": {"type": "length", FIELD: "{}"}},
}


@pytest.mark.parametrize(("depth", "ahead"), [(0, 0), (2, 2)])
def test_a_batch_begins_when_it_is_admitted(tmp_path: Path, depth: int, ahead: int) -> None:
    """At depth 0 nothing runs between turns; at depth 2, the control, the engine runs ahead."""
    rollout = replace(CONFIG.rollout, buffer_depth=depth, max_lag=10**6)
    config = replace(CONFIG, rollout=rollout, run=replace(CONFIG.run, steps=100))

    async def body() -> list[int]:
        engine = StubEngine()
        controller, _ = make(tmp_path, engine, config)
        return await running(controller, turns(controller, engine))

    async def turns(controller: Controller, engine: StubEngine) -> list[int]:
        await controller.handle(hello(PolicyVersion(0, 0)))
        asked = []
        for number in range(4):
            if number:
                bare_engine.admit_batch(controller.context)
            assert isinstance(await controller.handle(TakePlan(number, 60.0, 0)), Plan)
            done = PolicyVersion(0, number + 1)
            await controller.handle(StepDone(number, done, {"mismatch/tokens": 1.0}, ""))
            await asyncio.sleep(0.1)  # time to run ahead
            asked.append(len(engine.requests))
        return asked

    assert asyncio.run(body()) == [(number + 1 + ahead) * BATCH for number in range(4)]


@pytest.mark.parametrize("arm", META)
def test_an_arm_is_refused_with_the_records_of_another(arm: str) -> None:
    for other, meta in META.items():
        if other == arm:
            bare_engine.check_records({"meta_info": meta}, arm)
        else:
            with pytest.raises(AssertionError, match="routes and masks in"):
                bare_engine.check_records({"meta_info": meta}, arm)


def test_a_bare_server_has_the_hooks_of_a_plain_cpu_only() -> None:
    shown = "print({hook.when.value for hook in hooks.HOOKS})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), str(ROOT)])}

    def found(begin: str) -> str:
        program = [sys.executable, "-c", f"{begin}; from moerl.engine.plugin import hooks; {shown}"]
        return subprocess.run(program, env=env, text=True, capture_output=True, check=True).stdout

    assert found("import bare_server").strip() == "{'without CUDA'}"
    assert "'always'" in found("pass")

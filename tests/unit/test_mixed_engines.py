"""Engines of different sizes: placement, refusals, plans, and what a dry run and `plan` say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import placement
from moerl.engine.host.server_args import server_args
from moerl.planning.dry_run import describe
from moerl.planning.publish_forecast import planned_layouts
from moerl.weight_sync.publisher import engine_layout
from moerl.weight_sync.transfer_plan import TransferPlan

MIXED = ("engine.count=3", "engine.tp_each=[4,8,4]", "cluster.nodes.engine.count=2")


def test_each_engine_gets_the_gpus_of_its_size() -> None:
    config = resolve(load_config("qwen3-30b-a3b", MIXED))
    check(config, starts=False)
    slots = placement(config).engines
    assert [(slot.node.name, slot.devices) for slot in slots] == [
        ("engine-0", (0, 1, 2, 3)),
        ("engine-1", tuple(range(8))),
        ("engine-0", (4, 5, 6, 7)),
    ]


def test_every_engine_has_a_plan_of_its_own_that_brings_it_the_whole_model() -> None:
    config = resolve(load_config("qwen3-30b-a3b", MIXED))
    found = planned_layouts(config)
    assert [(engines.tp, engines.num) for _, _, engines, _ in found] == [(4, 2), (8, 1)]
    ids, totals = set(), []
    for index, tp in config.engine.sizes.items():
        spec, trainer, _, policy = found[0]
        plan = TransferPlan(spec, trainer, engine_layout(config, tp), index, policy)
        ids.add(plan.id)
        received = plan.totals().received_bytes
        assert len(received) == tp
        totals.append((tp, sum(received)))
    assert len(ids) == 3
    whole = {total for _, total in totals}
    assert max(whole) < 1.2 * min(whole), (
        "either size receives a model, copies of small parts apart"
    )


def test_a_dry_run_says_what_each_size_is() -> None:
    text = describe(resolve(load_config("qwen3-30b-a3b", MIXED)), ["qwen3-30b-a3b", *MIXED])
    for line in (
        "memory of an engine rank, tp 4: weights 15.3 GB",
        "memory of an engine rank, tp 8: weights 7.68 GB",
        "into each of 2 x 4 engine ranks",
        "into each of 1 x 8 engine ranks",
        "engine 0,2: python -m moerl.engine.plugin.server_process",
        "engine 1: python -m moerl.engine.plugin.server_process",
    ):
        assert line in text


def test_a_dry_run_prints_the_command_that_an_engine_host_runs() -> None:
    config = resolve(load_config("quickstart", ("engine.args.page_size=1",)))
    text = describe(config, ["quickstart"])
    job = json.loads(next(line for line in text.splitlines() if line.startswith('  {"parent"')))
    engine = replace(config.engine, platform="cpu")
    model = Path(config.run.root) / config.run.name / "model"
    real = server_args(engine, model, routing=True, version="0.0", port=5, nccl_port=6)
    assert job["args"] == real | {"port": "FREE", "nccl_port": "FREE"}
    assert job["token"] == "TOKEN", "no secret is printed"


def test_plan_forecasts_each_size() -> None:
    responses = CliRunner().invoke(app, ["plan", "qwen3-30b-a3b", *MIXED])
    assert responses.exit_code == 0, responses.output
    assert "engines: 2 x 4 ranks" in responses.output
    assert "engines: 1 x 8 ranks" in responses.output
    data = CliRunner().invoke(app, ["plan", "qwen3-30b-a3b", *MIXED, "--json"])
    assert [one["engines"] for one in json.loads(data.output)["sizes"]] == [2, 1]

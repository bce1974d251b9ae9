"""Reference and teacher on ranks of their own: what is scored when, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import placement
from moerl.controller.buffer import GroupBuffer
from moerl.controller.ref_score_queue import RefScoreQueue
from moerl.core.errors import ConfigError, ProtocolError, RecordError
from moerl.core.messages import Ok, Plan, Scored, StepDone, Stop, TakePlan, TakeRecords
from moerl.core.types import BatchPlan, PolicyVersion
from moerl.data.batching import plan_batch
from moerl.data.packing import by_microbatch, by_row, version_lag
from moerl.data.ref_scores import basis_of, received, record_digest
from moerl.launch.cluster.node_commands import node_commands, torchrun
from moerl.launch.cluster.slurm_job import plan as slurm_plan
from moerl.launch.model_folders import check_ref_models
from moerl.layout import model_spec
from moerl.planning.dry_run import describe, process_table
from moerl.records.blob_store import BlobStore
from tests.helpers.controllers import (
    _numbers,
    hello,
    make,
    publish,
    running,
    scores_of,
    train,
    with_ref_models,
)
from tests.helpers.random_rollouts import group, make_rollout
from tests.helpers.stub_engine import StubEngine

OWN = (
    "deepseek-v32",
    ("ref_models.placement=separate", "ref_models.parallel.pp=2"),
)


# --- the controller ------------------------------------------------------------------------------


async def test_the_next_batch_is_scored_while_this_one_trains(tmp_path: Path) -> None:
    config = with_ref_models(tmp_path)
    controller, _ = make(tmp_path, StubEngine(), config)

    async def score() -> list[int]:
        reply = await controller.handle(TakeRecords(0, 1, 5.0))
        assert isinstance(reply, Plan), reply
        await controller.handle(scores_of(reply.plan, config))
        return [group.group_id for group in reply.plan.groups]

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(0, 0)))
        asking = asyncio.create_task(controller.handle(TakePlan(0, 60.0, 0)))
        await asyncio.sleep(0.05)
        assert not asking.done(), "a plan leaves with its scores, or not at all"
        first = [*await score(), *(await score() if not asking.done() else [])]
        reply = await asking
        assert isinstance(reply, Plan)
        ids = [group.group_id for group in reply.plan.groups]
        assert set(ids) <= set(first)
        found = received(reply.plan, config)["reference"]
        for rollout, values in zip(reply.plan.rollouts(), found, strict=True):
            assert values == pytest.approx(_numbers(rollout)), rollout.rollout_id
        ahead = await score()  # step 0 is still in training
        assert not set(ahead) & set(ids)
        await controller.handle(StepDone(0, PolicyVersion(0, 1), {}, ""))
        await publish(controller, PolicyVersion(0, 1))
        while controller._ref_models.next(1):
            await score()
        second = await controller.handle(TakePlan(1, 60.0, 0))
        assert isinstance(second, Plan)
        assert received(second.plan, config)

    await running(controller, work())


def test_groups_of_a_trainer_that_was_restarted_are_scored(tmp_path: Path) -> None:
    restarted = PolicyVersion(1, 0)
    rollout = make_rollout(BlobStore(tmp_path / "blobs", "n"), "4.0", 3, 5, versions=(restarted,))
    rules = GroupBuffer(groups_per_step=1, depth=1, max_lag=8)
    batches = Mock(planned={0: [group(4, [rollout], [1.0])]})
    context = Mock(config=with_ref_models(tmp_path), buffer=rules, batches=batches)
    line = RefScoreQueue(context, Mock())
    plan = line.next(1)
    assert plan is not None
    assert version_lag(plan.version, restarted) == 0, "its tokens are of no future version"


async def test_a_trainer_that_died_is_asked_again_and_told_to_stop(tmp_path: Path) -> None:
    config = with_ref_models(tmp_path)
    controller, reports = make(tmp_path, StubEngine(), config)

    async def job() -> int:
        start, plans = 0, 0
        while not isinstance(reply := await controller.handle(TakeRecords(start, 1, 5.0)), Stop):
            if isinstance(reply, Plan):
                start, plans = 1, plans + 1  # the first one dies with its records
                if plans > 1:
                    await controller.handle(scores_of(reply.plan, config))
        return plans

    async def work() -> None:
        scoring = asyncio.create_task(job())
        await train(controller, 4)
        assert await scoring > 1
        assert controller.status()["ref_models/start"] == 1.0

    await running(controller, work())
    assert len(reports) == 4
    assert all(report.metrics["ref_models/wait_s"] >= 0 for report in reports)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda values: {"reference": values[:-1]}, "ref_scores_length"),
        (lambda values: {"reference": values.astype(np.float64)}, "ref_scores_length"),
        (lambda values: {"reference": values * np.nan}, "ref_scores_finite"),
        (lambda values: {"teacher": values}, "ref_scores_roles"),
        (lambda values: {}, "ref_scores_roles"),
    ],
)
async def test_scores_that_do_not_fit_are_refused(
    tmp_path: Path, spoil: Callable[[np.ndarray], dict[str, np.ndarray]], reason: str
) -> None:
    config = with_ref_models(tmp_path)
    controller, _ = make(tmp_path, StubEngine(), config)

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(0, 0)))
        reply = await controller.handle(TakeRecords(0, 1, 5.0))
        assert isinstance(reply, Plan)
        scored = scores_of(reply.plan, config)
        bad = [replace(s, logprobs=spoil(s.logprobs["reference"])) for s in scored.scores]
        with pytest.raises(RecordError, match=reason):
            await controller.handle(Scored(tuple(bad)))
        assert await controller.handle(scored) == Ok(), "control"

    await running(controller, work())


async def test_a_plan_that_nobody_scores_is_an_error_in_time(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine(), with_ref_models(tmp_path))

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(0, 0)))
        with pytest.raises(ProtocolError, match="not scored by the reference ranks"):
            await controller.handle(TakePlan(0, 0.3, 0))

    await running(controller, work())


# --- the record ----------------------------------------------------------------------------------
def a_plan(root: Path, *, dp_size: int = 1) -> BatchPlan:
    store = BlobStore(root / "blobs", "n0")
    groups = [
        group(
            index,
            [make_rollout(store, f"{index}.{i}", 3 + i, 4 + 2 * i, seed=i) for i in range(4)],
            [0.0, 1.0, 0.0, 1.0],
        )
        for index in range(2)
    ]
    return plan_batch(0, PolicyVersion(0, 3), groups, dp_size=dp_size, max_tokens_per_microbatch=40)


def test_the_digest_covers_everything_that_scores_depend_on(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    rollout = plan.rollouts()[0]
    config = with_ref_models(tmp_path)
    want = record_digest(rollout, basis_of(config))
    ids, mask = rollout.token_ids.copy(), rollout.loss_mask.copy()
    ids[-1] += 1
    mask[-1] = False
    other = plan.rollouts()[2]  # of another length
    changed = [
        replace(rollout, rollout_id="x"),
        replace(rollout, token_ids=ids),
        replace(rollout, loss_mask=mask),
        replace(rollout, sampling=replace(rollout.sampling, temperature=0.5)),
        replace(rollout, sampling_mask=other.sampling_mask),
        replace(rollout, sampling_mask=()),
    ]
    digests = {record_digest(r, basis_of(config)) for r in changed}
    bf16 = replace(config, trainer=replace(config.trainer, dtype="bf16"))
    bare = replace(config, replay=replace(config.replay, sampling_mask=False))
    copy = tmp_path / "copy"
    copy.mkdir()
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(shape | {"num_experts_per_tok": 1}))
    routers = replace(config, algorithm=replace(config.algorithm, reference=str(copy)))
    digests |= {record_digest(rollout, basis_of(c)) for c in (bf16, bare, routers)}
    assert len(digests) == len(changed) + 3
    assert want not in digests
    same = replace(rollout, logprobs=rollout.logprobs - 1, routing=(), engine=7)
    assert record_digest(same, basis_of(config)) == want, "the student's own numbers do not matter"


def test_by_microbatch_is_the_inverse_of_by_row(tmp_path: Path) -> None:
    plan = a_plan(tmp_path, dp_size=2)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=r.num_sampled).astype(np.float32) for r in plan.rollouts()]
    assert plan.num_microbatches > 1
    seen = {}
    for rank in range(2):
        found = by_microbatch(plan, rank, values, plan.num_microbatches + 1)
        assert all(part.dtype == torch.float32 for part in found.values())
        assert not len(found[plan.num_microbatches]), "padding of the interleaved schedule"
        seen |= by_row(plan, rank, found)
    assert sorted(seen) == list(range(len(values)))
    assert all((seen[idx] == values[idx]).all() for idx in seen)


# --- the configuration ---------------------------------------------------------------------------
def test_own_ranks_are_placed_printed_and_counted() -> None:
    config = resolve(load_config(*OWN))
    check(config)
    placed = placement(config)
    assert [slot.ranks for slot in placed.ref_models] == [(0, 1)]
    assert "reference: tp 1 pp 2" in str(process_table(config, placed))
    text = describe(config, ("deepseek-v32",))
    assert "moerl.trainer.main" in text
    assert "--ref-models" in text
    assert "memory of a reference rank" in text
    plain = resolve(load_config("deepseek-v32"))
    assert not placement(plain).ref_models
    assert "others" in describe(plain, ()), "the reference on the trainer's ranks is counted"
    assert "others" not in describe(resolve(load_config("grpo")), ())


def test_a_model_that_cannot_score_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with_ref_models(tmp_path)  # leaves a model folder
    student = model_spec(json.loads((tmp_path / "model" / "config.json").read_text()))
    check_ref_models("algorithm.teacher", str(tmp_path / "model"), student)
    for name, change, responses in (
        ("unknown", {"model_type": "mamba"}, "known families"),
        ("foreign", {"vocab_size": 11}, "must share a tokenizer"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        shape = json.loads((tmp_path / "model" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(shape | change))
        with pytest.raises(ConfigError, match=rf"algorithm\.teacher .*{responses}"):
            check_ref_models("algorithm.teacher", str(folder), student)


def test_own_ranks_get_gpus_that_nobody_has() -> None:
    settings = ("cluster=node8", "engine.tp=1", *OWN[1], "trainer.parallel={dp: 4, ep: 4}")
    placed = placement(resolve(load_config("deepseek-v32", settings)))
    slots = (*placed.engines, *placed.trainers, *placed.ref_models)
    assert [d for slot in slots for d in slot.devices] == list(range(8))
    with pytest.raises(ConfigError, match=r"ref_models\.parallel"):
        placement(resolve(load_config("deepseek-v32", (*settings, "ref_models.parallel.dp=2"))))


def test_a_cluster_starts_the_trainer_on_its_own_port() -> None:
    hosts = (
        "cluster=hosts",
        "cluster.nodes.engine.hosts=[10.9.0.1]",
        "cluster.nodes.trainer.hosts=[10.9.0.2,10.9.0.3]",
        "run.root=/r",
        "run.name=a",
    )
    config = resolve(load_config("deepseek-v32", (*hosts, *OWN[1])))
    check(config)
    placed = placement(config)
    assert [(s.node.address, s.ranks) for s in placed.ref_models] == [
        ("10.9.0.2", (0,)),
        ("10.9.0.3", (1,)),
    ]
    lines = node_commands(config, placed, ())
    assert lines["trainer-1"] == [
        "tools/launch/torchrun.sh /r/a 1",
        "tools/launch/torchrun.sh /r/a 1 ref_models",
    ]
    command = torchrun(config, placed, placed.ref_models[1], job="ref_models")
    assert command[-1] == "--ref-models"
    assert "slot=1,port=17104,join_timeout=3600" in command
    assert "/r/a/endpoints/ref_models-store.json" in command
    assert "a-ref_models" in command
    trainer = torchrun(config, placed, placed.trainers[1])
    assert "slot=1,port=17103,join_timeout=3600" in trainer
    assert "/r/a/endpoints/trainer-store.json" in trainer
    assert "--ref-models" not in trainer


def test_slurm_gives_the_trainer_its_nodes() -> None:
    settings = ["deepseek-v32", "cluster=slurm", "model.path=configs/models/qwen3-30b-a3b"]
    settings += [
        "ref_models.placement=separate",
        "cluster.nodes.trainer.roles=[trainer]",
        "run.name=a",
    ]
    settings += ["cluster.nodes.engine.roles=[controller,engine,ref_models]"]
    settings += ["ref_models.parallel={dp: 2, ep: 2}", "trainer.parallel={dp: 4, ep: 4}"]
    lines = slurm_plan("n1,n2,n3,n4", [*settings, "run.root=/r", "--run", "a"])
    assert [line for line in lines if line.startswith("trainer=")] == ["trainer=n3", "trainer=n4"]
    assert [line for line in lines if line.startswith("ref_models=")] == [
        "ref_models=n1",
        "ref_models=n2",
    ]

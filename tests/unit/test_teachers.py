"""Teachers of distillation: settings, versions, mixtures by task, the controller's scores."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.algorithms.head_logprob import SamplingMask
from moerl.algorithms.loss import distillation, policy_loss
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.audit.verify_run import _teacher_differences
from moerl.config import load_config, resolve
from moerl.config.algorithms import followers_of, ref_models_of
from moerl.config.clusters import placement
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import (
    AlgorithmConfig,
    Config,
    ParallelConfig,
    RefModelsConfig,
    TeacherConfig,
)
from moerl.controller.buffer import GroupBuffer
from moerl.controller.ref_score_queue import RefScoreQueue
from moerl.core.errors import ConfigError, LayoutError, ModelError, RecordError
from moerl.core.messages import Scored
from moerl.core.types import BatchPlan, EpisodeGroup, PolicyVersion
from moerl.data.batching import plan_batch
from moerl.data.ref_scores import received
from moerl.data.teacher_versions import teacher_folder, teacher_step, teachers_at, version_at
from moerl.layout import at, check_parallel, hf_shapes, megatron_tiles
from moerl.planning.estimates import estimates
from moerl.planning.memory import Training, trainer_memory, with_teachers
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.trainer.hf_io.content_digest import box_sums, joined
from moerl.trainer.hf_io.teacher_folder import TEACHER_FILE, check_digest
from moerl.trainer.passes.over_support import TeacherSupport, of_tasks
from tests.helpers.controllers import scores_of, with_ref_models
from tests.helpers.layout_families import SPECS
from tests.helpers.random_rollouts import group, make_rollout

SLOW = TeacherConfig(name="slow", follows="policy", lag=1, every=2)


# --- versions -------------------------------------------------------------------------------------
@pytest.mark.parametrize("lag", range(4))
@pytest.mark.parametrize("every", range(1, 5))
def test_a_teacher_is_the_newest_multiple_that_is_old_enough(lag: int, every: int) -> None:
    teacher = replace(SLOW, lag=lag, every=every)
    for step in range(20):
        old = [v for v in range(step + 1) if v % every == 0 and v <= step - lag]
        assert teacher_step(teacher, step) == max(old, default=0)


def test_a_version_is_named_by_the_trainer_that_made_it() -> None:
    begins = [PolicyVersion(0, 0), PolicyVersion(1, 5), PolicyVersion(2, 3)]
    names = {step: str(version_at(begins, step)) for step in (0, 3, 4, 6)}
    assert names == {0: "0.0", 3: "0.3", 4: "2.4", 6: "2.6"}
    assert str(version_at(begins[:2], 5)) == "0.5", "the checkpoint has the weights of before"
    assert str(version_at([PolicyVersion(0, 0), PolicyVersion(1, 0)], 0)) == "1.0"


# --- settings -------------------------------------------------------------------------------------
def _config(*teachers: TeacherConfig, **algorithm: Any) -> Config:
    tasks = [{"label": "sums"}, {"label": "sorts"}]
    found = replace(load_config("quickstart"), tasks=tasks)
    settings = AlgorithmConfig(distill_coef=1.0, teachers=list(teachers), **algorithm)
    return replace(found, algorithm=settings)


def test_with_adapters_the_trainer_has_no_second_model() -> None:
    config = replace(_config(SLOW), lora=LoraConfig(rank=4))
    assert ref_models_of(config) == {}
    apart = replace(config, ref_models=RefModelsConfig(placement="separate"))
    assert list(ref_models_of(apart)) == list(followers_of(apart.algorithm)) == ["slow"]


# --- mixtures -------------------------------------------------------------------------------------
def test_the_advantage_is_the_weighted_sum_over_the_teachers() -> None:
    theta = torch.randn(5, dtype=torch.float64, requires_grad=True)
    every, weights = torch.randn(2, 5, dtype=torch.float64), torch.tensor([[2.0], [0.5]])
    weights = weights * torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 1]])  # the fourth has none
    zeros = torch.zeros(5, dtype=torch.float64)
    tokens = Tokens(
        theta,
        theta.detach() - 0.1,
        zeros,
        Sequences(torch.arange(5), 5),
        zeros.long(),
        teacher=(weights * every).sum(0),
        teacher_weight=weights.sum(0),
    )
    want = torch.stack([w * (t - theta.detach()) for w, t in zip(weights, every, strict=True)])
    assert torch.allclose(distillation(tokens), want.sum(0), rtol=0, atol=1e-14)
    assert distillation(tokens)[3] == 0
    algorithm = AlgorithmConfig(advantage="none", objective="importance", distill_coef=0.7)
    policy_loss(algorithm, tokens, torch.full((5,), 0.2, dtype=torch.float64)).loss.backward()
    right = -0.7 * 0.2 * want.sum(0) * np.exp(0.1)
    assert theta.grad is not None
    assert torch.allclose(theta.grad, right, rtol=0, atol=1e-14)
    assert not torch.allclose(theta.grad, 1.01 * right, rtol=0, atol=1e-14), "control"


def test_each_token_has_the_support_of_its_tasks_teacher() -> None:
    lengths = torch.tensor([2, 2, 2, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    every = [
        TeacherSupport(SamplingMask(offsets, ids.flatten()), logprobs.flatten())
        for ids, logprobs in zip(torch.arange(16).view(2, 4, 2), torch.randn(2, 4, 2), strict=True)
    ]
    weights = [torch.tensor([0.0, 2.0, 0, 0, 0]), torch.tensor([9.0, 0, 0, 3.0, 0])]
    held = torch.tensor([1, 2, 3, 4])
    found = of_tasks(every, weights, held)
    for place, owner in ((0, 0), (2, 1)):  # the others have no teacher
        cut, want = slice(2 * place, 2 * place + 2), every[owner]
        assert torch.equal(found.entries.ids[cut], want.entries.ids[cut])
        assert torch.equal(found.logprobs[cut], want.logprobs[cut])
    assert found.weight is not None
    assert found.weight.tolist() == [2.0, 0.0, 3.0, 0.0]


# --- digests --------------------------------------------------------------------------------------
MESHES = ({}, {"tp": 2, "etp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"pp": 2})


@pytest.mark.parametrize("family", SPECS)
def test_a_digest_is_equal_under_every_layout_and_sees_one_element(family: str) -> None:
    spec = replace(SPECS[family], mtp_layers=0)
    shapes = hf_shapes(spec)
    draw = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}

    def digest(tensors: dict[str, Tensor], axes: dict[str, int]) -> str:
        layout = ParallelConfig(**axes)
        check_parallel(spec, layout)
        ranks = []
        for rank in range(layout.world_size):
            tiles = megatron_tiles(spec, layout, rank)
            held = {name: torch.zeros(local.shape) for name, local in tiles.items()}
            for name, local in tiles.items():
                for tile in local.tiles:
                    part = tensors[tile.hf][at(tile.hf_box)]
                    held[name][at(tile.box)] = part
            ranks.append(box_sums(held, tiles, shapes))
        return joined(ranks)

    found = set()
    for axes in MESHES:
        with (
            contextlib.nullcontext() if not axes else contextlib.suppress(ConfigError, LayoutError)
        ):
            found.add(digest(whole, axes))  # some families cannot be cut so
    assert len(found) == 1
    name = sorted(whole)[len(whole) // 2]
    spoiled = whole[name].clone()
    place = tuple(size // 2 for size in spoiled.shape)
    spoiled[place] = torch.nextafter(spoiled[place], torch.tensor(torch.inf))
    assert digest(whole | {name: spoiled}, {}) not in found, "control: one element, one bit"
    turned = whole[name].flatten().flip(0).view(whole[name].shape)
    assert digest(whole | {name: turned}, {}) not in found, "control: the same elements elsewhere"


def test_loaded_weights_with_another_digest_are_refused(tmp_path: Path) -> None:
    (tmp_path / TEACHER_FILE).write_text('{"weights": "00"}')
    check_digest(tmp_path, "00")
    with pytest.raises(ModelError, match="digest 01, the trainer wrote 00"):
        check_digest(tmp_path, "01")


# --- the controller -------------------------------------------------------------------------------
class Line:
    """A controller's queue with one ready group per step, and reference ranks that answer."""

    def __init__(self, root: Path) -> None:
        algorithm = AlgorithmConfig(distill_coef=1.0, teachers=[SLOW])
        config = replace(with_ref_models(root), algorithm=algorithm)
        run = replace(config.run, root=str(root), name="run")
        rollout = replace(config.rollout, groups_per_step=1)
        self.config = replace(config, run=run, rollout=rollout)
        self.run = RunDir(root / "run")
        store = BlobStore(root / "blobs", "n")
        self.groups = [group(i, [make_rollout(store, f"{i}.0", 3, 5)], [1.0]) for i in range(4)]
        self.buffer = GroupBuffer(groups_per_step=1, depth=4, max_lag=8)
        self.lineage = Mock(begins=(PolicyVersion(0, 0),))
        self.planned: dict[int, list[EpisodeGroup]] = {}
        batches = Mock(planned=self.planned)
        self.context = Mock(
            config=self.config, buffer=self.buffer, batches=batches, lineage=self.lineage
        )
        self.queue = RefScoreQueue(self.context, Mock())

    def write(self, *names: str) -> None:
        for name in names:
            (self.run.teachers / "slow" / name).mkdir(parents=True)

    def score(self) -> list[tuple[int, str]]:
        """Score what is asked for; groups with the version of their teacher."""
        found = []
        while plan := self.queue.next(1):
            self.queue.add(self.scored(plan))
            found += [(one.group_id, str(plan.teachers["slow"])) for one in plan.groups]
        return found

    def scored(self, plan: BatchPlan) -> Scored:
        every = scores_of(plan, self.config).scores
        role = {"slow": every[0].logprobs["reference"]}
        return Scored(tuple(replace(one, logprobs=role, teachers=plan.teachers) for one in every))

    def plan(self, step: int, groups: Sequence[EpisodeGroup]) -> BatchPlan:
        version = PolicyVersion(0, step)
        plan = plan_batch(step, version, groups, dp_size=1, max_tokens_per_microbatch=64)
        return self.queue.with_scores(plan)


def test_groups_are_scored_with_the_version_of_their_step(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.planned |= {step: [line.groups[step]] for step in range(4)}
    assert line.score() == [], "no version is written"
    line.write("0.0")
    assert line.score() == [(0, "0.0"), (1, "0.0"), (2, "0.0")]
    assert line.queue.waits(3, line.planned[3]), "its teacher is not written: the plan waits"
    line.write("0.2")
    assert line.score() == [(3, "0.2")]
    assert not line.queue.waits(3, line.planned[3])
    plan = line.plan(3, line.planned[3])
    assert {str(v) for v in plan.teachers.values()} == {"0.2"}
    assert received(plan, line.config)


def test_scores_of_a_version_that_was_exchanged_are_made_again(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.write("0.0", "0.2", "1.2")
    line.planned[2] = [line.groups[0]]
    assert line.score() == [(0, "0.0")]
    line.planned[3] = line.planned.pop(2)  # it is trained a step later, with a newer teacher
    assert line.queue.waits(3, line.planned[3])
    assert line.score() == [(0, "0.2")]
    line.lineage.begins = (PolicyVersion(0, 0), PolicyVersion(1, 1))  # step 2 was trained again
    assert line.queue.waits(3, line.planned[3])
    assert line.score() == [(0, "1.2")]


def test_a_plan_with_two_versions_is_refused(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.write("0.0", "0.2")
    line.planned[3] = line.groups[:2]
    line.score()
    plan = line.plan(3, line.planned[3])
    assert received(plan, line.config), "control: one version"
    first, second = plan.ref_models
    old = {"slow": PolicyVersion(0, 0)}
    for wrong in (
        replace(plan, ref_models=(replace(first, teachers=old), second)),  # a swap in mid-batch
        replace(plan, ref_models=(first, replace(second, teachers={}))),
        replace(plan, teachers=old),
        replace(
            plan, teachers=old, ref_models=tuple(replace(s, teachers=old) for s in plan.ref_models)
        ),
    ):
        with pytest.raises(RecordError) as refused:
            received(wrong, line.config)
        assert refused.value.reason == "ref_scores_version"


def test_verify_compares_the_versions_of_a_step(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.write("0.0", "0.2")
    line.planned[3] = line.groups[:2]
    line.score()
    plan = line.plan(3, line.planned[3])
    settings = {"algorithm": {"distill_coef": 1.0, "teachers": [vars(SLOW)]}}
    start = Mock(settings=settings, begins=(PolicyVersion(0, 0),))
    assert list(_teacher_differences(start, Mock(step=3), plan)) == []
    moved = replace(plan, ref_models=(replace(plan.ref_models[0], teachers={}),) * 2)
    (first, _) = _teacher_differences(start, Mock(step=3), moved)
    assert first.endswith("teachers none, want slow 0.2")
    assert len(list(_teacher_differences(start, Mock(step=5), plan))) == 3, "control: another step"


def test_folders_have_names_of_versions(tmp_path: Path) -> None:
    version = teachers_at(
        AlgorithmConfig(distill_coef=1.0, teachers=[SLOW]), [PolicyVersion(0, 0)], 7
    )["slow"]
    assert teacher_folder(RunDir(tmp_path), "slow", version) == tmp_path / "teachers/slow/0.6"


def test_a_dry_run_names_teachers_and_their_memory() -> None:
    settings = ["algorithm.distill_coef=1", "ref_models.placement=separate"]
    teachers = "[{follows: policy, lag: 2, every: 4},{name: mean, follows: policy, ema: 0.5}]"
    config = load_config("quickstart", [*settings, f"algorithm.teachers={teachers}"])
    config = resolve(config)
    text = "\n".join(map(str, estimates(config, placement(config))))
    assert "teacher teacher: version t - 2 of the policy, exchanged every 4; on reference" in text
    assert "mean with ema 0.5" in text
    rank = trainer_memory(SPECS["qwen3_moe"], ParallelConfig(), Training(dtype="fp32"))[0]
    (found,) = with_teachers([rank], Training(dtype="fp32"), config.algorithm.teachers)
    assert found.teachers == 8 * rank.parameters, "a copy, and one mean"
    assert found.host - rank.host == found.teachers

"""Controllers with stub services, and trainers and reference ranks that speak their protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moerl.config import resolve
from moerl.config.schema import (
    AlgorithmConfig,
    Config,
    EngineConfig,
    ModelConfig,
    RefModelsConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from moerl.controller.context import Services
from moerl.controller.controller import Controller
from moerl.controller.journal.journal import Journal
from moerl.controller.step_metrics import StepReport
from moerl.core.episode_view import EpisodeView, ScoreRequest
from moerl.core.errors import (
    EngineError,
    ScoreError,
)
from moerl.core.ids import Ranges, ranges, without_life
from moerl.core.messages import (
    CommitUpdate,
    Hello,
    Ok,
    Plan,
    PrepareUpdate,
    Refresh,
    Scored,
    SessionMessage,
    SetEngines,
    StepDone,
    TakePlan,
    WriteUpdate,
)
from moerl.core.types import (
    BatchPlan,
    ModelShape,
    PolicyVersion,
    Prompt,
    RefScores,
    Rollout,
    Score,
)
from moerl.data.ref_scores import basis_of, record_digest
from moerl.records import BlobStore
from tests.helpers.patience import patience
from tests.helpers.stub_engine import StubEngine

CONFIG = Config(
    run=RunConfig(steps=4),
    rollout=RolloutConfig(
        groups_per_step=2,
        group_size=2,
        max_lag=2,
        buffer_depth=2,
    ),
    sampling=SamplingConfig(max_new_tokens=4),
)


def sibling(episode: EpisodeView) -> int:
    """Its number in its group."""
    return int(re.findall(r"\d+", without_life(episode.name).rpartition(".")[2])[0])


class StubScorer:
    def __init__(self, error: ScoreError | None = None) -> None:
        self.error = error

    async def score(
        self, task: str, term: str, asked: Sequence[ScoreRequest]
    ) -> list[Score | ScoreError]:
        """By `rewards`, for the requests about each prompt."""
        found: dict[str, Score | ScoreError] = {}
        for index in dict.fromkeys(request.prompt.index for request in asked):
            mine = [request for request in asked if request.prompt.index == index]
            keys = [request.key for request in mine]
            try:
                scores = await self.rewards(mine[0].prompt, [one.episode for one in mine])
            except ScoreError as error:
                scores = [error] * len(mine)
            found |= zip(keys, scores, strict=False)  # it may lose some
        return [found[request.key] for request in asked if request.key in found]

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        if self.error:
            raise self.error
        return [Score(float(sibling(episode))) for episode in episodes]

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        raise AssertionError("nothing is asked of an environment")


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (1, 2), f"p{index}", None, {})


def make(tmp_path: Path, engine: StubEngine, config: Config = CONFIG, **kwargs):
    reports: list[StepReport] = []
    blobs = kwargs.get("blobs") or BlobStore(tmp_path / "blobs", "n")
    moe_layers = kwargs.get("moe_layers", 0)
    engines = dict(enumerate([engine, *kwargs.get("more_engines", ())]))
    services = Services(
        model=kwargs.get("model")
        or ModelShape(10, moe_layers, tuple(range(moe_layers)), 4, top_k=2 * moe_layers),
        engines=engines,
        sizes=dict.fromkeys(engines, 1),
        scorer=kwargs.get("scorer", StubScorer()),
        prompts=kwargs.get("prompts", Prompts()),
        held_out=kwargs.get("held_out"),
        decode=lambda ids: " ".join(map(str, ids)),
        encode=lambda text: [int(word) for word in text.split()],
        blobs=blobs,
        journal=Journal(tmp_path / "journal", blobs, kwargs.get("segments")),
        stream=kwargs.get("stream"),
        saved_steps=kwargs.get("saved_steps", lambda: 0),
        on_step=reports.append,
        on_rewind=kwargs.get("on_rewind", lambda step: None),
        agents=kwargs.get("agents") or {},
    )
    controller = Controller(
        replace(config, engine=EngineConfig(count=len(engines))),
        services,
        trainer_alive=kwargs.get("trainer_alive", False),
    )
    controller.engines_started()
    return controller, reports


async def train(
    controller: Controller,
    steps: int,
    consumed: tuple[int, ...] = (),
    start: PolicyVersion = PolicyVersion(0, 0),
    step_s: float = 0.005,
    ends: Callable[[int], Awaitable[object]] | None = None,
) -> list:
    """A trainer that publishes after every step, and before the first if it was restarted.

    ends: awaited before each step ends.
    """
    assert await controller.handle(hello(start, ranges(consumed))) == Ok()
    if start != PolicyVersion(0, 0):
        await publish(controller, start)
    plans = []
    for step in range(start.step, steps):
        ask = TakePlan(step, 60.0, start.incarnation)
        while (reply := await controller.handle(ask)) == Refresh():
            await publish(controller, PolicyVersion(start.incarnation, step))
        assert isinstance(reply, Plan), reply
        plans.append(reply.plan)
        await asyncio.sleep(step_s)
        if ends is not None:
            await ends(step)
        version = PolicyVersion(start.incarnation, step + 1)
        await controller.handle(StepDone(step, version, {"loss/pg": 0.0}, ""))
        await publish(controller, version)
    return plans


def hello(version: PolicyVersion, consumed: Ranges = ()) -> Hello:
    """Of a trainer of one rank; its checkpoint knows of the first trainer only."""
    return Hello(1, 1, version, consumed, tuple(sorted({PolicyVersion(0, 0), version})))


def written_live(version: PolicyVersion, engine: int) -> Iterator[SessionMessage]:
    """A publish session into the live weights of an engine that sleeps."""
    plan = ("", "", "shm", {}, {}, "local", 60.0)
    yield PrepareUpdate(engine, version, 0, *plan, writes_live=True)
    yield WriteUpdate(engine, version, 0, 60.0)
    yield commit(version, engine)


def commit(version: PolicyVersion, engine: int = 0) -> CommitUpdate:
    """The step of a publish session that changes what an engine serves."""
    return CommitUpdate(engine, version, 60.0)


async def publish(controller: Controller, version: PolicyVersion, engine: int = 0) -> None:
    with contextlib.suppress(EngineError):  # a dead engine gets a later version
        await controller.handle(commit(version, engine))


async def running(controller: Controller, work, timeout_s: float = 20):
    """Run `work` beside the controller; the controller's own failure wins."""
    tasks = asyncio.create_task(controller.run())
    try:
        job = asyncio.create_task(work)
        limit_s = patience(3.0 * timeout_s)
        await asyncio.wait({tasks, job}, return_when=asyncio.FIRST_COMPLETED, timeout=limit_s)
        if tasks.done():
            job.cancel()
            return await tasks
        if not job.done():
            job.cancel()
            raise TimeoutError(f"the work has not ended after {limit_s:.0f} s")
        return await job
    finally:
        await controller.stop()
        with contextlib.suppress(BaseException):
            await tasks


def with_rollout(**changes: object) -> Config:
    """CONFIG, resolved, with other rollout settings."""
    return resolve(replace(CONFIG, rollout=replace(CONFIG.rollout, **changes)))


class EqualFor(StubScorer):
    """All rewards of a group are equal for the prompts that `equal` names."""

    def __init__(self, equal: Callable[[int], bool]) -> None:
        super().__init__()
        self.equal = equal

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        is_equal = self.equal(prompt.index)
        return [Score(0.0 if is_equal else float(sibling(episode))) for episode in episodes]


def successor(tmp_path: Path, engine: StubEngine, dead: Controller, **kwargs):
    """A controller after one that was killed: nothing was closed, nobody was told."""
    for task in list(dead.context.tasks._tasks):
        task.cancel()
    return make(tmp_path, engine, **kwargs)


class PublishingTrainer:
    """Publishes to the engines that it was told of, after every step."""

    def __init__(self, controller: Controller, engines: tuple[int, ...] = (0,)) -> None:
        self._controller, self.engines = controller, engines
        self.version = PolicyVersion(0, 0)
        self.told: list[tuple[int, ...]] = []
        self.groups: list = []

    async def hello(self) -> None:
        assert await self._controller.handle(hello(self.version)) == Ok()

    async def publish(self) -> None:
        for engine in reversed(self.engines):  # whoever is first has room to start more
            await self._controller.handle(commit(self.version, engine))

    async def step(self) -> None:
        step = self.version.step
        while not isinstance(reply := await self._controller.handle(TakePlan(step, 60.0, 0)), Plan):
            if isinstance(reply, SetEngines):
                self.engines = tuple(one.engine for one in reply.engines)
                self.told.append(self.engines)
            else:
                assert reply == Refresh()
            await self.publish()
        self.groups += reply.plan.groups
        self.version = PolicyVersion(0, step + 1)
        await self._controller.handle(StepDone(step, self.version, {}, ""))
        await self.publish()


def with_ref_models(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4}
    shape |= {"num_experts_per_tok": 2, "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 10, "moe_intermediate_size": 8}
    shape |= {"intermediate_size": 8, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(shape))
    return replace(
        CONFIG,
        model=ModelConfig(path=str(model)),
        algorithm=AlgorithmConfig(kl="k3", kl_coef=0.1),
        ref_models=RefModelsConfig(placement="separate"),
    )


def scores_of(plan: BatchPlan, config: Config) -> Scored:
    """As a reference ranks answers: each number says which rollout it belongs to."""
    basis = basis_of(config)
    return Scored(
        tuple(
            RefScores(
                rollout.rollout_id,
                record_digest(rollout, basis),
                {"reference": _numbers(rollout)},
            )
            for rollout in plan.rollouts()
        )
    )


def _numbers(rollout: Rollout) -> np.ndarray:
    group, sibling = rollout.rollout_id.split(".")[:2]
    return np.full(rollout.num_sampled, -int(group) - 0.1 * int(sibling), np.float32)

"""Runs of a controller with stub services under the fake clock, for `tests.helpers.episode_oracle`.

Scenarios are written against what a run is given: settings, engines, a scorer, prompts, classes of
environments, programs that speak HTTP.  `agents_of` alone knows what plays them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config.load import resolve
from moerl.config.schema import (
    Config,
    EvaluationConfig,
    ReplayConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
)
from moerl.config.task_mixture import entries_of
from moerl.controller.controller import Controller
from moerl.core.messages import Ok, Plan, Refresh, StepDone, Stop, TakePlan
from moerl.core.types import EpisodeGroup, ModelShape, PolicyVersion
from moerl.records import BlobStore
from tests.helpers.controllers import CONFIG, hello, make, publish, running
from tests.helpers.episode_oracle import counts_of, digest, evaluations_of, form, rows_of_steps
from tests.helpers.fake_clock import run_with_fake_clock
from tests.helpers.oracle_engine import (
    EXPERTS,
    LONGEST,
    TOP_K,
    VOCABULARY,
    OracleEngine,
    OraclePrompts,
    OracleScorer,
    World,
    draw,
)

STOP_TOKEN = 2
SHAPE = ModelShape(VOCABULARY, 2, (0,), EXPERTS, TOP_K, eos_token_ids=(STOP_TOKEN,))
LIMIT_S = 600.0  # of the fake clock
_OF_PLACES = ("async/recomputed_tokens", "async/interrupts")
_SOCKETS_S = 0.01  # real: bytes of loopback arrive in microseconds
Accident = Callable[[Controller, Sequence[OracleEngine], World], Any]


@dataclass(frozen=True)
class Scenario:
    """A run.  rollout, sampling, task, replay: settings that differ from those of all scenarios."""

    rollout: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    tasks: Sequence[Mapping[str, Any]] = ()  # of a mixture
    replay: Mapping[str, Any] = field(default_factory=dict)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    steps: int = 4
    step_s: float = 0.0303  # of the trainer: an answer takes about as long
    engines: int = 1
    world: Mapping[str, Any] = field(default_factory=dict)  # fields of World
    scorer: Mapping[str, Any] = field(default_factory=dict)  # fields of OracleScorer
    faults: Mapping[str, Any] = field(default_factory=dict)  # fields of oracle_agents.Faults
    accident: Accident | None = None

    @property
    def has_sockets(self) -> bool:
        return any(task.get("agent", {}).get("command") for task in (self.task, *self.tasks))

    @property
    def has_agents(self) -> bool:
        return any(entry.kind.uses_chat for entry in entries_of(self.config()))

    def config(self) -> Config:
        rollout = {"groups_per_step": 3, "group_size": 3, "max_lag": 2, "buffer_depth": 2}
        config = replace(
            CONFIG,
            run=replace(CONFIG.run, steps=self.steps),
            rollout=RolloutConfig(**rollout | dict(self.rollout)),
            sampling=SamplingConfig(**{"max_new_tokens": LONGEST} | dict(self.sampling)),
            task=TaskConfig(**self.task),
            tasks=[dict(task) for task in self.tasks],
            replay=ReplayConfig(**self.replay),
            evaluation=self.evaluation,
        )
        return resolve(config)


@dataclass(frozen=True)
class Played:
    """groups: form of each admission, by group id.  summary: what is stored."""

    groups: dict[int, list[Any]]
    summary: dict[str, Any]


def played(name: str, folder: Path, *, seed: int = 0) -> Played:
    """Play a scenario to its end."""
    scenario = SCENARIOS[name]
    with pytest.MonkeyPatch.context() as patch:
        groups, plans, rows = run_with_fake_clock(
            _run(scenario, folder, seed, patch), patch, sockets_s=_SOCKETS_S * scenario.has_sockets
        )
    counts = counts_of(rows, of_episodes=scenario.has_agents and not scenario.tasks)
    if scenario.engines > 1:  # these depend on which engine has a group
        counts = {name: n for name, n in counts.items() if name not in _OF_PLACES}
    summary = {
        "groups": {str(number): [digest(one)[:16] for one in groups[number]] for number in groups},
        "plans": plans,
        "counts": counts,
        "steps": digest(rows_of_steps(rows)),
    }
    if scenario.evaluation.every:
        summary["evaluations"] = evaluations_of(rows)
    return Played(groups, summary | {"digest": digest([groups, summary])})


async def _run(
    scenario: Scenario, folder: Path, seed: int, patch: pytest.MonkeyPatch
) -> tuple[dict[int, list[Any]], list[list[int]], list[dict[str, float]]]:
    config, store = scenario.config(), BlobStore(folder / "blobs", "n")
    world = World(store, seed, config.rollout.in_flight_mode, **scenario.world)
    engines = [OracleEngine(world, number=number) for number in range(scenario.engines)]
    labels = [str(task["label"]) for task in scenario.tasks] or [""]
    agents: dict[str, Any] = {}
    if scenario.has_agents:
        from tests.helpers.oracle_agents import Faults, agents_of, on_one_loop

        on_one_loop(patch)
        agents = agents_of(config, Faults(**scenario.faults), folder, patch)
    controller, reports = make(
        folder,
        engines[0],
        config,
        more_engines=engines[1:],
        model=SHAPE,
        blobs=store,
        scorer=OracleScorer(**scenario.scorer),
        prompts=OraclePrompts(labels),
        held_out=OraclePrompts(labels),
        agents=agents,
    )
    groups = _recorded(controller, store, patch)
    accident = None
    if scenario.accident is not None:
        accident = asyncio.create_task(scenario.accident(controller, engines, world))
    plans = await running(controller, _train(controller, scenario), LIMIT_S)
    if accident is not None:
        await accident
    assert all(len(world.tries[turn]) > at for turn, at in world.refusals), "not refused"
    return dict(sorted(groups.items())), plans, [report.metrics for report in reports]


def _recorded(
    controller: Controller, store: BlobStore, patch: pytest.MonkeyPatch
) -> dict[int, list[Any]]:
    """The form of each group when it enters the journal: its records are whole then."""
    groups: dict[int, list[Any]] = {}
    journal = controller.context.services.journal
    admit = journal.admitted

    def admitted(group: EpisodeGroup) -> None:
        groups.setdefault(group.group_id, []).append(form(group, store))
        admit(group)

    patch.setattr(journal, "admitted", admitted)
    return groups


async def _train(controller: Controller, scenario: Scenario) -> list[list[int]]:
    """A trainer that publishes to all engines after each step.  Returns the groups by step."""
    plans: list[list[int]] = []
    version = PolicyVersion(0, 0)

    async def publish_to_all() -> None:
        for engine in range(scenario.engines):
            await publish(controller, version, engine)

    assert await controller.handle(hello(version))
    while True:
        reply = await controller.handle(TakePlan(version.step, 60.0, 0))
        if isinstance(reply, Stop):
            return plans
        if isinstance(reply, Refresh):
            await publish_to_all()
        if not isinstance(reply, Plan):
            assert reply in (Refresh(), Ok()), reply  # ask again
            continue
        plans.append([group.group_id for group in reply.plan.groups])
        await asyncio.sleep(scenario.step_s)
        version = PolicyVersion(0, version.step + 1)
        await controller.handle(StepDone(version.step - 1, version, {}, ""))
        await publish_to_all()


# --- accidents ------------------------------------------------------------------------------------
async def engine_dies(
    controller: Controller, engines: Sequence[OracleEngine], world: World
) -> None:
    """The last engine dies in mid-answer; a fresh one takes its place a little later."""
    await asyncio.sleep(0.0777)
    number = len(engines) - 1
    while not engines[number].is_sampling:
        await asyncio.sleep(0.0013)
    engines[number].kill()
    controller.engine_lost(number)
    await asyncio.sleep(0.0543)
    fresh: Any = OracleEngine(world, number=number)
    controller.engine_back(number, fresh)


# With at most 16 requests in flight: more replies are handed out in parts, between which a group
# that has its quorum may close.
QUORUM = {"group_size": 4, "group_quorum": 2, "max_lag": 100, "cancel_lag": 100}
QUORUM |= {"groups_per_step": 1}
ENVIRONMENT = {"environment": "package:Answering"}  # of tests.helpers.oracle_agents
PROGRAM = {"command": ["program"]}
TURNS = {"environment": "package:function", "max_turns": 4}
EVALUATION = EvaluationConfig(every=2, prompts=3, samples=2, max_requests=4, hold_s=9.0)
LONG_STEP_S = 0.9  # an evaluation ends in it, so no update waits for one
MIXTURE: list[dict[str, Any]] = [
    {"label": "text", "sampling": {"max_new_tokens": 40}},
    {"label": "turns", **TURNS},
    {"label": "environment", **ENVIRONMENT, "sampling": {"temperature": 0.9}},
    {"label": "program", "agent": PROGRAM},
]
SCENARIOS: dict[str, Scenario] = {
    "text_abort_resume": Scenario(),
    "text_retract": Scenario({"in_flight_mode": "retract"}),
    "text_in_place": Scenario({"in_flight_mode": "in_place"}),
    "text_drain": Scenario({"in_flight_mode": "drain"}),
    "text_masks": Scenario(sampling={"top_k": 5}),
    "fixed_lag": Scenario({"fixed_lag": 1}),
    "quorum_drop": Scenario(QUORUM, steps=12),
    "quorum_carry": Scenario(QUORUM | {"late_siblings": "carry"}, steps=16),
    "slices": Scenario({"slice_tokens": 16}),
    "slices_in_place": Scenario({"slice_tokens": 16, "in_flight_mode": "in_place"}),
    "quorum_carry_slices": Scenario(
        QUORUM | {"late_siblings": "carry", "slice_tokens": 16}, steps=16
    ),
    "stale": Scenario(
        {"max_lag": 1},
        world={"longest": lambda turn: 90 * (1 + draw(turn) % 3)},
        sampling={"max_new_tokens": 300},
    ),
    "equal_rewards": Scenario(
        {"drop_zero_variance": True}, scorer={"equal": frozenset({0, 3, 4, 8})}
    ),
    "oversample": Scenario({"oversample": 2, "group_size": 2}),
    "turns": Scenario(task=TURNS),
    "turns_split": Scenario({"turn_rows": "split"}, task=TURNS, replay={"audit": True}),
    "turns_separate": Scenario({"turn_rows": "separate"}, task=TURNS, scorer={"steps": True}),
    "turns_quorum_carry": Scenario(QUORUM | {"late_siblings": "carry"}, task=TURNS, steps=8),
    "engine_lost": Scenario(steps=6, accident=engine_dies),
    "one_engine_of_two_lost": Scenario({"fixed_lag": 1}, engines=2, accident=engine_dies),
    "record_refused": Scenario(
        world={
            "refusals": {
                ("1.0.t0", 0): "routing_rows",
                ("2.2.t0", 0): "logprob_finite",
                ("2.2.t0", 1): "logprob_finite",
            }
        }
    ),
    "turn_refused": Scenario(task=TURNS, world={"refusals": {("0.0.t1", 0): "routing_rows"}}),
    "score_failed": Scenario(scorer={"fails": frozenset({1, 4})}),
    "reply_failed": Scenario(task=TURNS, scorer={"breaks": frozenset({2})}),
    "evaluation": Scenario(
        {"fixed_lag": 1},
        evaluation=EVALUATION,
    ),
    "agent": Scenario(task=ENVIRONMENT),
    "agent_in_place": Scenario({"in_flight_mode": "in_place"}, task=ENVIRONMENT),
    "agent_retract": Scenario({"in_flight_mode": "retract"}, task=ENVIRONMENT),
    "agent_task_reward": Scenario(task=ENVIRONMENT | {"reward": "source"}),
    "agent_limits": Scenario(task=ENVIRONMENT | {"max_turns": 2, "max_sampled_tokens": 100}),
    "agent_stale": Scenario({"max_lag": 1}, task=ENVIRONMENT),
    "agent_failed": Scenario(task=ENVIRONMENT, faults={"fails": frozenset({"1.1"})}),
    "agent_worker_lost": Scenario(task=ENVIRONMENT, faults={"lost": frozenset({"1.1", "4.0"})}),
    "agent_record_refused": Scenario(
        task=ENVIRONMENT, world={"refusals": {("0.0.t1", 0): "routing_rows"}}
    ),
    "agent_engine_lost": Scenario(task=ENVIRONMENT, accident=engine_dies),
    "agent_evaluation": Scenario(task=ENVIRONMENT, evaluation=EVALUATION, step_s=LONG_STEP_S),
    "program": Scenario(task={"agent": PROGRAM}, steps=3),
    "program_failed": Scenario(
        task={"agent": PROGRAM},
        steps=3,
        faults={"fails": frozenset({"1.1"}), "lost": frozenset({"2.0"})},
    ),
    "mixture": Scenario(tasks=MIXTURE),
    "mixture_engine_lost": Scenario(tasks=MIXTURE, accident=engine_dies),
    "mixture_evaluation": Scenario(tasks=MIXTURE[:3], evaluation=EVALUATION, step_s=LONG_STEP_S),
}

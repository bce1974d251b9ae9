"""The controller's loops with a stub engine and scorer and a trainer that speaks the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moerl.controller.engine_pool import EnginePhase
from moerl.core.episode_view import EpisodeView
from moerl.core.errors import (
    ConfigError,
    EngineError,
    LineError,
    ProtocolError,
    RecordError,
    ScoreError,
    TrainerError,
)
from moerl.core.ids import episode_of, group_of
from moerl.core.messages import (
    Failed,
    GenerateRequest,
    Hello,
    Ok,
    Stop,
    TakePlan,
)
from moerl.core.types import (
    BatchPlan,
    PolicyVersion,
    Prompt,
    Score,
)
from moerl.records.stream_files import StepFile, read_lines, surviving, whole_plan
from moerl.runtime import disk_wait
from tests.helpers.controllers import (
    CONFIG,
    EqualFor,
    Prompts,
    StubScorer,
    commit,
    hello,
    make,
    running,
    train,
    with_rollout,
)
from tests.helpers.fake_clock import run_with_fake_clock
from tests.helpers.streams import Writing
from tests.helpers.stub_engine import Reply, StubEngine, always


@pytest.mark.parametrize("ends_run", [True, False])
def test_a_fault_that_a_restart_would_meet_again_ends_the_run(
    tmp_path: Path, ends_run: bool
) -> None:
    async def body() -> str:
        controller, _ = make(tmp_path, StubEngine())

        async def work() -> str:
            failed = Failed(0, "the gradient norm is inf", incarnation=0, ends_run=ends_run)
            assert await controller.handle(hello(PolicyVersion(0, 0))) == Ok()
            assert await controller.handle(failed) == Ok()
            await asyncio.sleep(0.2)
            return "the trainer is started again"

        return str(await running(controller, work()))

    if ends_run:
        with pytest.raises(TrainerError, match="the gradient norm is inf"):
            asyncio.run(body())
    else:
        assert asyncio.run(body()) == "the trainer is started again"


async def test_a_whole_run(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.waits_for_updates = True
    controller, reports = make(tmp_path, engine)

    async def work() -> list:
        plans = await train(controller, 4)
        assert isinstance(await controller.handle(TakePlan(4, 1.0, 0)), Stop)
        return plans

    plans = await running(controller, work())
    ids = [group.group_id for plan in plans for group in plan.groups]
    assert sorted(ids) == list(range(8)), "every group once, no surplus"
    for plan in plans:
        assert all(0 <= plan.step - g.oldest.step <= 2 for g in plan.groups)
    spans = [len(r.versions) for p in plans for g in p.groups for r in g.rollouts()]
    assert max(spans) == 2, "no rollout was interrupted by an update and resumed"
    assert [r.step for r in reports] == [0, 1, 2, 3]
    row = reports[-1].metrics
    assert row["reward/mean"] == 0.5
    assert row["async/lag_max"] <= 2
    assert row["async/interrupts"] == 1
    # a call of two groups was cut after two of four tokens: prompt and first token once more
    cut = [r for p in plans for g in p.groups for r in g.rollouts() if len(r.versions) == 2]
    fed = sum(r.prompt_len + 1 for r in cut)
    assert sum(r.metrics["async/recomputed_tokens"] for r in reports) == fed
    assert row["sample/length_mean"] == 4


async def test_resume_does_not_train_consumed_groups(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine())
    plans = await running(controller, train(controller, 2, consumed=(0, 2)))
    assert sorted(g.group_id for p in plans for g in p.groups) == [1, 3, 4, 5]


async def test_a_refused_record_is_counted_and_generated_again(tmp_path: Path) -> None:
    engine = StubEngine(refuse=[1, 1, 1, 1])  # both siblings, twice
    controller, reports = make(tmp_path, engine)
    plans = await running(controller, train(controller, 4))
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
    assert reports[-1].metrics["refused/routing_rows"] == 4
    names = {r.rollout_id for r in engine.requests if r.rollout_id.startswith("1.0")}
    assert len(names) == 3, "blobs of an earlier try may still be there"
    assert not controller.context.buffer.tries, "nothing is kept of a try that began"


async def test_a_refused_record_costs_its_rollout_only(tmp_path: Path) -> None:
    """The sibling is trained as it was; its tokens are not sampled again."""
    engine = StubEngine(refuse=[1])
    controller, reports = make(tmp_path, engine)
    plans = await running(controller, train(controller, 4))
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
    assert reports[-1].metrics["refused/routing_rows"] == 1
    asked = {episode_of(request.rollout_id) for request in engine.requests}
    names = sorted(name for name in asked if name.startswith("1."))
    assert names[0] == "1.0"
    assert names[1].startswith("1.0.r0-")
    assert names[2:] == ["1.1"]
    trained = {r.rollout_id for p in plans for g in p.groups for r in g.rollouts()}
    assert {"1.1", names[1]} <= trained
    assert "1.0" not in trained


async def test_three_refusals_end_the_run(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine(refuse=[1] * 6))
    with pytest.raises(EngineError, match="a rollout of group 1 was refused 3 times"):
        await running(controller, train(controller, 4))


@pytest.mark.parametrize("patience_s", [60.0, 0.0])
async def test_rollouts_wait_while_their_records_find_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """Six refusals in a row end no run while the wait lasts; without it, they do (control)."""
    monkeypatch.setattr(disk_wait, "PAUSE_S", 0.01)

    class Full(StubEngine):
        left = 6

        def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Reply:
            if group_of(request.rollout_id) == 1 and self.left:
                self.left -= 1
                return RecordError("blob", f"{request.rollout_id}: No space left on device")
            return super()._reply(request, version)

    controller, reports = make(tmp_path, Full())
    controller.scoring_stage._room._patience = replace(
        controller.scoring_stage._room._patience, limit_s=patience_s
    )
    if not patience_s:
        with pytest.raises(EngineError, match=r"refused 3 times.*No space left"):
            await running(controller, train(controller, 4))
        return
    plans = await running(controller, train(controller, 4))
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
    assert not any("refused/blob" in report.metrics for report in reports)


async def test_a_bad_reward_names_the_setting(tmp_path: Path) -> None:
    scorer = StubScorer(ScoreError("non-finite reward nan for prompt 0"))
    controller, _ = make(tmp_path, StubEngine(), scorer=scorer)
    with pytest.raises(ConfigError, match=r"task\.reward = .*non-finite reward nan"):
        await running(controller, train(controller, 4))


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_fixed_lag_is_exact(tmp_path: Path, lag: int) -> None:
    """Every token of step s is of version s - lag (of version 0 before), in prompt order."""
    controller, reports = make(tmp_path, StubEngine(), with_rollout(fixed_lag=lag))
    plans = await running(controller, train(controller, 4))
    for plan in plans:
        versions = {
            span.version.step for g in plan.groups for r in g.rollouts() for span in r.versions
        }
        assert versions == {max(0, plan.step - lag)}
    assert [g.group_id for p in plans for g in p.groups] == list(range(8))
    assert [r.metrics["async/lag_min"] for r in reports] == [min(s, lag) for s in range(4)]


@pytest.mark.parametrize("lag", [0, 1])
async def test_an_engine_that_came_back_is_updated_before_its_groups_end(
    tmp_path: Path, lag: int
) -> None:
    """They wait for its weights; an update that waited for them would never begin."""
    dead = StubEngine(hangs=lambda request: dead.version.step == 1)
    controller, _ = make(tmp_path, dead, with_rollout(fixed_lag=lag, drain_timeout_s=2.0))

    async def dies() -> None:
        while not (dead.version.step == 1 and controller.context.pool.engines[0].generating):
            await asyncio.sleep(0.002)
        controller.engine_lost(0)
        dead.kill()
        while controller.context.pool.engines[0].generating:
            await asyncio.sleep(0.002)
        controller.engine_back(0, StubEngine())

    async def work() -> list[BatchPlan]:
        accident = asyncio.create_task(dies())
        plans: list[BatchPlan] = await train(controller, 4)
        await accident
        return plans

    plans = await running(controller, work())
    assert [g.group_id for plan in plans for g in plan.groups] == list(range(8))


async def test_drain_finishes_what_runs_before_an_update(tmp_path: Path) -> None:
    engine = StubEngine()
    controller, _ = make(tmp_path, engine, with_rollout(in_flight_mode="drain"))
    plans = await running(controller, train(controller, 4))
    spans = [len(r.versions) for p in plans for g in p.groups for r in g.rollouts()]
    assert set(spans) == {1}, "an update cut a rollout"


async def test_a_drain_that_never_ends_is_an_error(tmp_path: Path) -> None:
    config = with_rollout(in_flight_mode="drain", drain_timeout_s=0.5)
    controller, _ = make(tmp_path, StubEngine(hangs=always), config)

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(0, 0)))
        await asyncio.sleep(0.02)
        await controller.handle(commit(PolicyVersion(0, 1)))

    with pytest.raises(EngineError, match="12 requests did not finish within"):
        await running(controller, work())


async def test_groups_of_equal_rewards_are_replaced(tmp_path: Path) -> None:
    scorer = EqualFor(lambda index: index % 2 == 0)
    config = with_rollout(drop_zero_variance=True)
    controller, reports = make(tmp_path, StubEngine(), config, scorer=scorer)
    plans = await running(controller, train(controller, 4))
    ids = [g.group_id for p in plans for g in p.groups]
    assert len(set(ids)) == 8
    assert all(i % 2 for i in ids), "a group without signal was trained"
    assert sum(r.metrics["async/dropped_zero_variance_groups"] for r in reports) >= 6
    assert all(r.metrics["reward/zero_var_frac"] == 0 for r in reports)


async def test_a_solved_task_does_not_starve(tmp_path: Path) -> None:
    config = with_rollout(drop_zero_variance=True, max_drop_batches=1)
    scorer = EqualFor(lambda index: True)
    controller, reports = make(tmp_path, StubEngine(), config, scorer=scorer)
    plans = await running(controller, train(controller, 4))
    assert sum(len(p.groups) for p in plans) == 8
    assert all(r.metrics["async/dropped_zero_variance_groups"] <= 4 for r in reports)


def test_a_run_whose_groups_are_all_dropped_says_so_soon_and_again(tmp_path: Path) -> None:
    async def notices(equal: Callable[[int], bool], name: str) -> list[str]:
        config = with_rollout(drop_zero_variance=True, max_drop_batches=1_000_000)
        controller, _ = make(tmp_path / name, StubEngine(), config, scorer=EqualFor(equal))
        await running(controller, train(controller, 1))
        return controller.take_notices() + controller.take_notices()

    found = asyncio.run(notices(lambda index: index < 20, "all"))
    assert [int(text.split(" ")[2]) for text in found[:4]] == [2, 4, 8, 16], "said once each"
    assert "rollout.drop_zero_variance finds nothing to train; check task.reward" in found[0]
    assert asyncio.run(notices(lambda index: index % 2 == 0, "half")) == [], "control"


class FailsFor(StubScorer):
    def __init__(self, fails: Callable[[int], bool]) -> None:
        super().__init__()
        self.fails = fails

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        if self.fails(prompt.index):
            raise ScoreError(f"prompt {prompt.index}: no answer within 10 s")
        return await super().rewards(prompt, episodes)


async def test_failed_scores_are_dropped_and_counted_by_default(tmp_path: Path) -> None:
    scorer = FailsFor(lambda index: index in (1, 2))
    controller, reports = make(tmp_path, StubEngine(), scorer=scorer)
    plans = await running(controller, train(controller, 4))
    ids = {g.group_id for p in plans for g in p.groups}
    assert len(ids) == 8
    assert not ids & {1, 2}
    assert sum(r.metrics["scorer/failed"] for r in reports) == 2


async def test_one_failed_score_ends_the_run_only_if_that_is_asked_for(tmp_path: Path) -> None:
    config = replace(CONFIG, task=replace(CONFIG.task, on_score_error="stop"))
    controller, _ = make(tmp_path, StubEngine(), config, scorer=FailsFor(lambda i: i == 1))
    with pytest.raises(ConfigError, match=r"task\.reward = .*prompt 1: no answer within"):
        await running(controller, train(controller, 4))


async def test_a_scorer_that_never_works_ends_the_run(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, StubEngine(), scorer=FailsFor(lambda index: True))
    says = r"task\.reward = .*none of the first 4 groups could be scored; last: .*no answer within"
    with pytest.raises(ConfigError, match=says):
        await running(controller, train(controller, 4))


@pytest.mark.parametrize(("failing", "ends"), [(1, False), (3, True)])
async def test_a_share_of_failed_scores_ends_the_run(
    tmp_path: Path, failing: int, ends: bool
) -> None:
    """Of four groups in a row `failing` fail: one is replaced, three are too many."""
    fails = FailsFor(lambda index: index % 4 >= 4 - failing)
    config = replace(CONFIG, run=replace(CONFIG.run, steps=80))
    controller, reports = make(tmp_path, StubEngine(), config, scorer=fails)
    training = running(controller, train(controller, 80))
    if not ends:
        await training
        assert sum(r.metrics["scorer/failed"] for r in reports) > 40
        return
    with pytest.raises(ConfigError, match=r"33 of the last 64 groups could not be scored"):
        await training


@pytest.mark.parametrize("admission", ["bounded", "unbounded"])
def test_without_the_bound_old_groups_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, admission: str
) -> None:
    """A slow trainer: more groups are ready than it trains in time.  Control: the bound."""

    async def scenario() -> None:
        steps = 8
        rollout = replace(CONFIG.rollout, max_lag=1, buffer_depth=1, admission=admission)
        rollout = replace(rollout, max_groups_in_flight=4)
        config = replace(CONFIG, run=replace(CONFIG.run, steps=steps), rollout=rollout)
        controller, reports = make(tmp_path, StubEngine(), config)
        plans = await running(controller, train(controller, steps, step_s=1.0), 60.0)
        trained = [group.group_id for plan in plans for group in plan.groups]
        assert len(trained) == len(set(trained)) == 2 * steps
        assert max(report.metrics["async/lag_max"] for report in reports) <= 1
        assert all(p.step - g.oldest.step <= 1 for p in plans for g in p.groups)
        rejected = sum(report.metrics["async/dropped_stale_groups"] for report in reports)
        assert (rejected > 0) == (admission == "unbounded")
        ready = max(report.metrics["async/buffer_depth"] for report in reports)
        assert (ready > 2 * 2) == (admission == "unbounded")
        assert ready <= 4 + 2 * 2, "groups in flight, and two batches"

    run_with_fake_clock(scenario(), monkeypatch)


async def test_depth_zero_is_synchronous(tmp_path: Path) -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, buffer_depth=0))
    engine = StubEngine()
    controller, reports = make(tmp_path, engine, config)
    plans = await running(controller, train(controller, 3))
    assert all(g.oldest.step == p.step for p in plans for g in p.groups)
    assert all(r.metrics["async/lag_max"] == 0 for r in reports)


async def test_a_trainer_without_a_checkpoint_makes_one_history(tmp_path: Path) -> None:
    """Killed after step 3 without a checkpoint: it begins again with the weights of version 0.0."""
    rewinds: list[int] = []
    controller, reports = make(tmp_path, StubEngine(), on_rewind=rewinds.append)

    async def work() -> list:
        await train(controller, 3)
        return await train(controller, 4, (), PolicyVersion(1, 0))

    plans = await running(controller, work())
    assert rewinds == [0, 0]
    assert [p.step for p in plans] == [0, 1, 2, 3]
    ids = [g.group_id for p in plans for g in p.groups]
    assert sorted(ids) == list(range(8)), "a group is lost, or trained twice"
    spans = [s for p in plans for g in p.groups for r in g.rollouts() for s in r.versions]
    assert all(s.version.incarnation == 1 or s.version.step == 0 for s in spans)
    assert any(s.version == PolicyVersion(0, 0) for s in spans), "its first groups stay"
    assert [r.step for r in reports] == [0, 1, 2, 0, 1, 2, 3]


async def test_the_stream_knows_all_starts_with_the_first_weights(tmp_path: Path) -> None:
    """Else `moerl verify` takes tokens of 0.0, which are trained again, for a stranger's."""
    controller, _ = make(tmp_path, StubEngine())
    seen: list[Hello] = []
    controller.trainer._stream = SimpleNamespace(began=seen.append)  # type: ignore[assignment]
    controller.engines_started()
    first, again = PolicyVersion(0, 0), PolicyVersion(1, 0)
    for version in (first, again):
        await controller.handle(replace(hello(version), begins=(version,)))
    assert [found.begins for found in seen] == [(first,), (first, again)]


async def test_a_restarted_trainer_makes_one_history(tmp_path: Path) -> None:
    """Killed after step 3 with a checkpoint of step 1, while it waits for a plan."""
    rewinds: list[int] = []
    controller, reports = make(tmp_path, StubEngine(), on_rewind=rewinds.append)

    async def work() -> list:
        first = await train(controller, 3)
        held = [g.group_id for g in first[0].groups]
        await controller.handle(TakePlan(3, 60.0, 0))  # a plan that is never trained
        again = await train(controller, 4, tuple(held), PolicyVersion(1, 1))
        return [first[0], *again]

    plans = await running(controller, work())
    assert rewinds == [0, 1]
    assert [p.step for p in plans] == [0, 1, 2, 3]
    ids = [g.group_id for p in plans for g in p.groups]
    assert sorted(ids) == list(range(8)), "a group is lost, or trained twice"
    for plan in plans[1:]:
        for span in (s for g in plan.groups for r in g.rollouts() for s in r.versions):
            given_up = span.version.incarnation == 0 and span.version.step > 1
            assert not given_up, f"step {plan.step} trains a token of {span.version}"
            assert 0 <= plan.step - span.version.step <= 2
    assert [r.step for r in reports] == [0, 1, 2, 1, 2, 3]


async def test_a_plan_that_a_dead_trainer_waits_for_takes_no_groups(tmp_path: Path) -> None:
    engine = StubEngine()
    controller, _ = make(tmp_path, engine)
    engine.open.clear()  # nothing is generated yet

    async def work() -> list:
        await controller.handle(hello(PolicyVersion(0, 0)))
        waiting = asyncio.create_task(controller.handle(TakePlan(0, 60.0, 0)))
        await asyncio.sleep(0.01)
        await controller.handle(hello(PolicyVersion(1, 0)))
        engine.open.set()
        with pytest.raises(ProtocolError, match="a newer trainer has started"):
            await waiting
        replaced = "trainer 0 was replaced: 1 is the newest one"
        with pytest.raises(ProtocolError, match=replaced):
            await controller.handle(TakePlan(0, 60.0, 0))
        with pytest.raises(ProtocolError, match=replaced):
            await controller.handle(hello(PolicyVersion(0, 0)))
        await controller.handle(Failed(0, "its peers are gone", incarnation=0))
        assert controller.trainer.failure == "", (
            "what an old trainer dies of says nothing of the new one"
        )
        await controller.handle(Failed(1, "no memory", incarnation=1))
        assert controller.trainer.failure == "trainer rank 1: no memory"
        return await train(controller, 4, (), PolicyVersion(1, 0))

    plans = await running(controller, work())
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))


async def test_an_engine_that_dies_loses_nothing(tmp_path: Path) -> None:
    """Its groups go on when it is back, from the tokens that an update had already cut off."""
    engine, fresh = StubEngine(), StubEngine()
    engine.dies_in_update = engine.waits_for_updates = True
    controller, reports = make(tmp_path, engine)

    async def restart() -> None:
        while not engine.dead:
            await asyncio.sleep(0.001)
        controller.engine_lost(0)
        await asyncio.sleep(0.05)
        assert not fresh.requests
        controller.engine_back(0, fresh)

    async def work() -> list:
        restarting = asyncio.create_task(restart())
        plans = await train(controller, 4)
        await restarting
        return plans

    plans = await running(controller, work())
    assert sorted(g.group_id for p in plans for g in p.groups) == list(range(8))
    assert sum(r.metrics["async/engine_restarts"] for r in reports) == 1
    resumed = [r for r in fresh.requests if r.num_sampled]
    assert resumed, "what the dead engine had sampled was thrown away"


async def test_without_restarts_a_dead_engine_ends_the_run(tmp_path: Path) -> None:
    engine = StubEngine()
    engine.dead = True
    config = replace(CONFIG, supervision=replace(CONFIG.supervision, max_restarts=0))
    controller, _ = make(tmp_path, engine, config)
    with pytest.raises(EngineError, match="it was killed"):
        await running(controller, train(controller, 4))


async def test_an_engine_of_another_history_gets_no_work(tmp_path: Path) -> None:
    """After a resume the engines serve the start weights until the trainer publishes."""
    engine = StubEngine()
    controller, _ = make(tmp_path, engine)

    async def work() -> None:
        await controller.handle(hello(PolicyVersion(1, 2)))
        await asyncio.sleep(0.1)
        assert not engine.requests
        await controller.handle(commit(PolicyVersion(1, 2)))
        await controller.handle(TakePlan(2, 60.0, 1))
        assert engine.requests

    await running(controller, work())


async def test_hello_waits_for_the_engines(tmp_path: Path) -> None:
    """A resumed trainer publishes right after hello: no engine may be missing then."""
    controller, _ = make(tmp_path, StubEngine())
    controller.trainer.engines_up.clear()
    asked = asyncio.create_task(controller.handle(hello(PolicyVersion(0, 0))))
    await asyncio.sleep(0.05)
    assert not asked.done()
    controller.engines_started()
    assert await asked == Ok()
    await controller.stop()


async def test_the_trainers_cause_ends_the_run(tmp_path: Path) -> None:
    config = replace(CONFIG, supervision=replace(CONFIG.supervision, max_restarts=0))
    controller, _ = make(tmp_path, StubEngine(), config)

    async def work() -> None:
        await controller.handle(Failed(1, "loss is not finite at step 3"))
        await asyncio.sleep(5)

    with pytest.raises(TrainerError, match="rank 1: loss is not finite"):
        await running(controller, work())


async def test_a_stream_has_what_was_trained_and_blobs_are_let_go(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    controller, reports = make(tmp_path, StubEngine(), stream=writing.writer, blobs=writing.blobs)
    plans = await running(controller, train(controller, 2))
    kept, _ = surviving(line for line, _ in read_lines(writing.folder.log))
    told = [[str(group.group_id) for group in plan.groups] for plan in plans]
    assert [list(line.groups) for line in kept] == told
    again = [whole_plan(StepFile(writing.folder, line))[0] for line in kept]
    assert [plan.rows for plan in again] == [plan.rows for plan in plans]
    assert all(report.metrics["stream/bytes"] > 0 for report in reports)


async def test_engines_share_what_is_to_be_generated(tmp_path: Path) -> None:
    """The first engine to look does not take all."""
    engines = [StubEngine(hangs=always) for _ in range(3)]
    rollout = replace(CONFIG.rollout, buffer_depth=2)
    config = replace(CONFIG, rollout=rollout)
    controller, _ = make(tmp_path, engines[0], config, more_engines=engines[1:])
    assert await controller.handle(hello(PolicyVersion(0, 0))) == Ok()
    tasks = asyncio.create_task(controller.run())
    await asyncio.sleep(0.3)
    assert [len(engine.requests) for engine in engines] == [4, 4, 4]  # 6 groups of 2
    pool = controller.context.pool
    assert [pool.share(0, wanted) for wanted in range(5)] == [0, 1, 1, 1, 2]
    # newer weights: the other engines, less busy but older, are not waited for
    pool.engines[0].version = PolicyVersion(0, 1)
    pool.engines[1].groups = 0
    assert (pool.share(0, 4), pool.share(1, 4)) == (4, 3)
    pool.engines[1].groups = 5
    assert (pool.share(1, 1), pool.share(2, 1)) == (0, 1)
    # drained for an update that the first engine has had: they are about to serve it
    for number in (1, 2):
        member = pool.engines[number]
        member.groups, member.generating, member.draining = 0, 0, True
    pool.engines[0].groups = 0
    assert pool.share(0, 9) == 3
    pool.engines[1].phase, pool.engines[2].leaving = EnginePhase.SUSPENDED, True
    assert pool.share(0, 9) == 9, "control: these do not come back soon"
    await controller.stop()
    await tasks


async def test_engines_share_the_groups_of_one_that_failed(tmp_path: Path) -> None:
    """The first engine to look does not take all of them."""
    engines = [StubEngine(hangs=always) for _ in range(3)]
    rollout = replace(CONFIG.rollout, buffer_depth=2)
    config = replace(CONFIG, rollout=rollout)
    controller, _ = make(tmp_path, engines[0], config, more_engines=engines[1:])
    assert await controller.handle(hello(PolicyVersion(0, 0))) == Ok()
    tasks = asyncio.create_task(controller.run())
    await asyncio.sleep(0.3)
    assert [len(engine.requests) for engine in engines] == [4, 4, 4]  # 6 groups of 2
    engines[0].kill()
    await asyncio.sleep(0.3)
    assert [len(engine.requests) for engine in engines] == [4, 6, 6]
    await controller.stop()
    await tasks


async def test_late_siblings_are_trained_once_in_a_later_step(tmp_path: Path) -> None:
    """Each goes on as it was, and counts the others in its baseline."""
    rollout = replace(CONFIG.rollout, group_size=4, group_quorum=2, slice_tokens=4)
    rollout = replace(rollout, late_siblings="carry", max_lag=100)  # none too old
    sampling = replace(CONFIG.sampling, max_new_tokens=4000)
    run = replace(CONFIG.run, steps=8)
    config = replace(CONFIG, run=run, rollout=rollout, sampling=sampling)
    controller, reports = make(tmp_path, StubEngine(lengths=(4, 8, 12, 16)), config)
    plans = await running(controller, train(controller, 8))
    seen = {g.group_id: (plan.step, g) for plan in plans for g in plan.groups}
    late = {group_id: g for group_id, (_, g) in seen.items() if group_id < 0}
    assert late, "nothing was carried"
    ids = [r.rollout_id for _, g in seen.values() for r in g.rollouts()]
    assert len(ids) == len(set(ids)), "each rollout once"
    assert len(seen) == 8 * CONFIG.rollout.groups_per_step, "each group once"
    assert all(min(r.num_sampled for r in g.rollouts()) >= 12 for g in late.values())
    pairs = [(g, seen[~i][1]) for i, g in late.items() if ~i in seen]  # the last may not be
    assert pairs
    for group, early in pairs:
        assert group.prompt == early.prompt
        names = [r.rollout_id for r in (*early.rollouts(), *group.rollouts())]
        assert [int(name.split(".")[1]) for name in names] == [0, 1, 2, 3]
        assert group.peers == tuple(e.score.reward for e in early.episodes)
        assert early.peers == ()
    assert sum(report.metrics["async/carried_siblings"] for report in reports) >= 2 * len(late)


async def test_a_group_closes_when_enough_siblings_are_done(tmp_path: Path) -> None:
    """The stragglers are dropped, and the true size of the group is what is trained."""
    rollout = replace(CONFIG.rollout, group_size=4, group_quorum=2, slice_tokens=4)
    sampling = replace(CONFIG.sampling, max_new_tokens=4000)
    config = replace(CONFIG, rollout=rollout, sampling=sampling)
    controller, reports = make(tmp_path, StubEngine(lengths=(4, 8)), config)
    plans = await running(controller, train(controller, 3))
    for plan in plans:
        for group in plan.groups:
            lengths = [episode.turns[0].rollout.num_sampled for episode in group.episodes]
            assert len(lengths) == 2
            assert max(lengths) <= 12  # two slices, one more where an update cut them short
    assert sum(report.metrics["async/dropped_siblings"] for report in reports) >= 3 * 2 * 2


class WithBadLines(Prompts):
    """Each prompt whose number `is_bad` names cannot be used."""

    def __init__(self, is_bad: Callable[[int], bool]) -> None:
        self._is_bad = is_bad

    def prompt(self, index: int) -> Prompt:
        if self._is_bad(index):
            problem = f"line {index} is not JSON"
            raise LineError("task.path", "prompts.jsonl", problem, "not JSON")
        return super().prompt(index)


async def test_a_line_that_cannot_be_used_is_set_aside(tmp_path: Path) -> None:
    prompts = WithBadLines(lambda index: index in (1, 4))
    controller, reports = make(tmp_path, StubEngine(), prompts=prompts)
    plans = await running(controller, train(controller, 4))
    trained = sorted(group.group_id for plan in plans for group in plan.groups)
    assert trained == [0, 2, 3, 5, 6, 7, 8, 9], "the next lines take their places"
    assert sum(report.metrics["async/bad_prompts"] for report in reports) == 2
    assert {prompt.index for prompt in controller.producer._usable(range(6))} == {0, 2, 3, 5}


def test_a_file_without_a_usable_line_ends_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        controller, _ = make(tmp_path, StubEngine(), prompts=WithBadLines(lambda index: True))
        await running(controller, train(controller, 1))

    with pytest.raises(LineError, match="line 999 is not JSON"):
        asyncio.run(body())

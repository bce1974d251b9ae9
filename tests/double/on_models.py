"""Reference, teacher and critic on the double: the CPU's numbers, their waits, seeded blunders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moerl.config.schema import RefModelsConfig
from moerl.core.rpc import Keys
from moerl.core.types import BatchPlan
from moerl.data.batching import Minibatch
from moerl.runtime.run_dir import RunDir
from tests.double import other_models
from tests.double.mutations import CRITIC_BLUNDERS, REF_BLUNDERS, VALUE_BLUNDERS, Blunder
from tests.double.outcome import Work, caught, check_repeats, outcome, stop_streams
from tests.double.train_once import (
    BOUNDS,
    Numbers,
    Tensors,
    Trained,
    largest_difference,
    other_metrics,
    small_plan,
)
from tests.double.watch import PAGEABLE, WAITS, Watch, watch

if TYPE_CHECKING:
    from moerl.trainer.passes.schedule import Batches
    from moerl.trainer.ref_model_loop import RefModelLoop

pytest_plugins = ("tests.double.trainer_fixtures",)

COPIES = "moerl/algorithms/device_copies.py"  # numbers of a whole pass, to the host
CRITIC = "moerl/trainer/learner/critic.py"  # the critic's sums of a step
STEP_SUMS = "moerl/trainer/learner/step_sums.py"  # the policy's
FEW_TOKENS = 24  # in a microbatch: the first group takes several


def batches_of(trained: Trained, plan: BatchPlan) -> Batches:
    from moerl.trainer.passes.schedule import Batches

    learner = trained.learner
    return Batches(plan, learner.config, learner.parallel, learner.store)


def check_waits(seen: Watch, allowed: dict[str, int]) -> None:
    print("own:", seen.own_lines(*WAITS, PAGEABLE))
    assert not seen.own_lines(PAGEABLE), "copies from pageable memory"
    assert dict(seen.own_files(*WAITS)) == allowed, seen.own_lines(*WAITS)


# --- reference and teacher ------------------------------------------------------------------------
@dataclass(frozen=True)
class SeparateRanks:
    """Reference and teacher on ranks of their own, and the trainer that takes their scores."""

    loop: RefModelLoop
    trainer: Trained

    def scores(self, plan: BatchPlan) -> Tensors:
        """By role and microbatch, as the trainer has them on its device."""
        every, batches = self.loop.score(plan), batches_of(self.trainer, plan)
        return {
            f"{role}.{microbatch}": value.cpu()
            for role in self.loop.policies
            for microbatch, value in batches.by_microbatch(
                [one.logprobs[role] for one in every]
            ).items()
        }


@pytest.fixture(scope="module")
def scored(trained: Trained, folder: Path) -> Trained:
    return other_models.with_ref_models(trained, folder)


@pytest.fixture(scope="module")
def separate(scored: Trained, tmp_path_factory: pytest.TempPathFactory) -> SeparateRanks:
    from moerl.trainer.ref_model_loop import RefModelLoop, own_layout
    from moerl.trainer.train_loop import RankContext

    learner, run = scored.learner, RunDir(tmp_path_factory.mktemp("loop") / "run")
    run.create()
    config = replace(learner.config, ref_models=RefModelsConfig(placement="separate"))
    # the controller is never asked
    context = RankContext(run, "tcp://127.0.0.1:9", Keys.make(), 0, learner.store, None)
    return SeparateRanks(RefModelLoop(own_layout(config), context, learner.parallel), scored)


def test_scores_and_a_step_with_them_are_those_of_the_cpu(scored: Trained, on_cpu: Numbers) -> None:
    want, found = on_cpu["ref models"], other_models.ref_numbers(scored)
    assert set(scored.learner.ref_models) == {"reference", "teacher"}
    assert largest_difference(found["scores"], want["scores"]) == 0
    for part, bound in BOUNDS.items():
        assert largest_difference(found[part], want[part]) <= bound, part
    assert other_metrics(found["metrics"], want["metrics"]) == []
    assert found["metrics"]["loss/kl_ref_k3"] > 0
    # controls: another model's scores, and a step without them
    roles = {name: found["scores"][name.replace("reference", "teacher")] for name in want["scores"]}
    assert largest_difference(roles, want["scores"]) > 1e-3
    assert largest_difference(found["gradients"], on_cpu["gradients"]) > 0.1


def test_a_score_does_not_wait(scored: Trained) -> None:
    batches = batches_of(scored, scored.plan)
    assert batches.num_microbatches > 1
    for policy in scored.learner.ref_models.values():
        with watch() as seen:
            policy.logprobs(batches)
        check_waits(seen, {})


def test_separate_ranks_wait_once_for_each_model(separate: SeparateRanks, on_cpu: Numbers) -> None:
    plan = separate.trainer.plan
    with watch() as seen:
        separate.loop.score(plan)
    check_waits(seen, {COPIES: 2})
    assert largest_difference(separate.scores(plan), on_cpu["ref models"]["scores"]) == 0


# --- the critic -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def valued(trained: Trained) -> Trained:
    return other_models.with_critic(trained)


def test_a_critic_is_that_of_the_cpu(valued: Trained, on_cpu: Numbers) -> None:
    want, found = on_cpu["critic"], other_models.critic_numbers(valued)
    for part in ("values", "advantages"):
        assert largest_difference(found[part], want[part]) == 0, part
    for part, bound in BOUNDS.items():
        assert largest_difference(found[part], want[part]) <= bound, part
    assert other_metrics(found["metrics"], want["metrics"]) == []
    # control: values after the step, whose weights are others
    after = other_models.by_row(other_models.critic_of(valued).values(valued.plan))
    assert largest_difference(after, want["values"]) > 1e-3


def test_a_critic_waits_once_per_pass(valued: Trained) -> None:
    critic, plan = other_models.critic_of(valued), valued.plan
    assert plan.num_microbatches > 1
    with watch() as seen:
        critic.advantages(plan)
    check_waits(seen, {COPIES: 1})
    with watch() as seen:
        critic.update([Minibatch.whole(plan)])
    check_waits(seen, {CRITIC: 1})


def test_scores_of_a_whole_batch_wait_once_for_each_use(valued: Trained) -> None:
    """Three passes (proximal, reference, training); to the host: M2PO's gaps, both sides of the KL
    in the reward, values of the critic, scores of the step.
    """
    plan = valued.plan
    with watch() as seen:
        valued.learner.gradients(plan)
    check_waits(seen, {COPIES: 5, STEP_SUMS: 1})


# --- seeded blunders ------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    yield
    stop_streams()


def check_caught(blunder: Blunder, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = outcome(work)
    check_repeats(work, sound)
    blunder.apply(monkeypatch)
    found = caught(work, sound)
    print(f"{blunder.name}: {found or 'NOT CAUGHT'}")
    assert found


@pytest.mark.parametrize("blunder", REF_BLUNDERS, ids=[b.name for b in REF_BLUNDERS])
def test_blunders_of_a_reference_are_caught(
    blunder: Blunder, separate: SeparateRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = separate.trainer
    plan = small_plan(trained, FEW_TOKENS)

    def score_and_train() -> Tensors:
        scores = separate.scores(plan)
        trained.learner.gradients(plan)
        return scores | trained.current_gradients()

    check_caught(blunder, score_and_train, monkeypatch)
    assert trained.learner.model.replay is not None
    trained.learner.model.replay.clear()


@pytest.mark.parametrize("blunder", VALUE_BLUNDERS, ids=[b.name for b in VALUE_BLUNDERS])
def test_blunders_of_values_are_caught(
    blunder: Blunder, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = other_models.critic_of(other_models.with_critic(trained))
    plan = small_plan(trained, FEW_TOKENS)
    check_caught(blunder, lambda: other_models.by_row(critic.values(plan)), monkeypatch)


def test_a_blunder_is_in_every_module_that_imported_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from moerl.trainer.learner import critic
    from moerl.trainer.passes import values

    assert critic.values_at is values.values_at
    VALUE_BLUNDERS[0].apply(monkeypatch)
    for module in (critic, values):
        assert "enable_grad" in module.values_at.__code__.co_names


@pytest.mark.parametrize("blunder", CRITIC_BLUNDERS, ids=[b.name for b in CRITIC_BLUNDERS])
def test_blunders_of_a_critic_are_caught(
    blunder: Blunder, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = other_models.with_critic(trained, rate=0.0)  # steps leave the weights as they are
    critic, plan = other_models.critic_of(made), small_plan(trained, FEW_TOKENS)

    def train() -> Tensors:
        made.learner.gradients(plan)
        critic.update([Minibatch.whole(plan)])
        named = critic.model.gpt.named_parameters()
        return {name: p.main_grad.cpu().clone() for name, p in named}

    train()  # the first step makes the optimizer's state
    check_caught(blunder, train, monkeypatch)

"""A user's reward has any honest form and value; every other one is refused and quoted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.config.checks import check
from moerl.config.load import load_config, resolve
from moerl.config.schema import TaskConfig
from moerl.controller.step_metrics import batch_metrics
from moerl.core.errors import ConfigError, ScoreError
from moerl.core.types import (
    MOST_REWARD,
    Episode,
    EpisodeGroup,
    ModelShape,
    Prompt,
    SamplingParams,
    Score,
    Turn,
    reward_problem,
)
from moerl.data.reward_values import BadReturn
from moerl.data.rewards import make_reward
from moerl.records.blob_store import BlobStore
from moerl.scoring import ProcessScorer
from tests.helpers.episode_views import score_each, view
from tests.helpers.patience import patience
from tests.helpers.synthetic import RolloutSpec, random_rollout

HERE = "tests.helpers.reward_forms:"
PROMPT = Prompt(0, (1,), "1+1=", "2", {"level": 3})


def reward(name: str, response: str = "2", prompt: Prompt = PROMPT, **other: Any) -> Score:
    form, _, function = name.rpartition("/")
    path = f"{form}:{HERE}{function}" if form else HERE + function
    return make_reward(TaskConfig(name="jsonl", reward=path, **other))(prompt, view(response))


# --- values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    ["bool", "int", "Decimal", "Fraction", "numpy float16", "numpy bool", "numpy array of one"]
    + ["torch bfloat16", "torch of one"],
)
def test_numbers_of_every_library(value: str) -> None:
    found = reward("value", value)
    assert found == Score(1.0)
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("None", "returned NoneType None, want a number"),
        ("text", "returned str '0.5', want a number"),
        ("numpy text", "returned str_ "),
        ("array of text", "returned ndarray array('1'"),
        ("complex", "returned complex 1j, want a number"),
        ("empty", "returned dict {}, which has no reward, steps, turns or roles"),
        ("errors only", "which has no reward"),
        ("score", "returned dict {'score': 1.0, 'acc': 1.0}, which has no reward"),
        ("list", "returned list [1.0], want a number"),
        ("two numbers", "returned ndarray array([1., 1.]), want a number"),
        ("nan", "returned float nan, which is not finite"),
        ("Decimal infinity", "returned Decimal Decimal('Infinity'), which is not finite"),
        ("1e30", "returned float 1e+30, which has a square that float32 cannot hold"),
        ("-2e19", "float32 cannot hold"),
        ("step of 1e30", "returned float 1e+30, which has a square"),
        ("sum of steps", "returned float 3e+19, which has a square"),
        ("long integer", "returned int 1000"),
        ("long text", "xxx..., want a number"),
        ("metric mean", "returned a dict with str 'mean', which cannot name a metric"),
        ("metric nan", "returned acc = nan, which is not finite"),
        ("many metrics", "returned 40 metrics, more than 32"),
    ],
)
def test_other_values_are_quoted(value: str, says: str) -> None:
    with pytest.raises(BadReturn) as error:
        reward("value", value)
    assert says in str(error.value)
    assert len(str(error.value)) < 200


def test_the_largest_reward_has_a_finite_square_in_float32() -> None:
    assert reward("value", "1e19").reward == 1e19, "control: below the limit"
    assert np.isfinite(np.square(np.float32(MOST_REWARD)))
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.square(np.float32(MOST_REWARD * 1.0001)))
    assert reward_problem(-MOST_REWARD) == ""
    assert reward_problem(MOST_REWARD * 1.0001)


def test_a_bad_value_costs_its_sibling_and_names_the_function() -> None:
    task = TaskConfig(name="jsonl", reward=f"{HERE}value")
    scorer = ProcessScorer(task, workers=1, timeout_s=patience(20.0))
    try:
        right, text, huge, parts = score_each(scorer, PROMPT, "int", "text", "1e30", "metrics")
    finally:
        scorer.close()
    assert right == Score(1.0)
    assert isinstance(text, ScoreError)
    assert (
        str(text) == f"reward {HERE}value returned str '0.5', want a number or a dict with one "
        "for prompt 0"
    )
    assert "returned float 1e+30, which has a square" in str(huge)
    assert parts == Score(0.5, metrics={"acc": 1.0, "cost": 2.5}), "text is no metric"


def group_of(tmp_path: Path, *scores: Score) -> EpisodeGroup:
    shape = ModelShape(10, 1, (), 1, top_k=1)
    spec = RolloutSpec(shape, 2, SamplingParams(2))
    store, rng = BlobStore(tmp_path / "blobs", "n"), np.random.default_rng(0)
    rollout = random_rollout(store, rng, "0.0", np.zeros(2, np.int32), spec)
    episodes = tuple(Episode("0.0", (Turn(rollout),), score) for score in scores)
    return EpisodeGroup(0, PROMPT, episodes)


def test_further_numbers_of_a_dict_become_metrics(tmp_path: Path) -> None:
    assert reward("value", "lists") == Score(0.5), "control: no numbers"
    scores = Score(0.5, metrics={"acc": 1.0}), Score(1.0, metrics={"acc": 0.0, "cost": 4.0})
    group = group_of(tmp_path, *scores)
    found = batch_metrics([group, replace(group, prompt=replace(PROMPT, task="sums"))], 1)
    assert (found["reward/acc"], found["reward/cost"], found["reward/mean"]) == (0.5, 4.0, 0.75)
    assert found["reward/acc/sums"] == 0.5
    assert "reward/acc" not in batch_metrics([group_of(tmp_path / "plain", Score(1.0))], 1)


# --- functions ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    ["awaited", "match", "async_match", "scaled", "by_fields", "one_field", "three"]
    + ["whole_episode", "verl/async_score"],
)
def test_functions_of_every_form(name: str) -> None:
    assert reward(name).reward == 1.0
    other = "3" if name != "whole_episode" else "2x"
    assert reward(name, other).reward == 0.0, "control: another response"


def test_a_field_that_the_line_lacks_is_named() -> None:
    with pytest.raises(BadReturn, match="has a parameter level, which is no field of its prompt"):
        reward("one_field", prompt=replace(PROMPT, extra={}))


@pytest.mark.parametrize(
    "value", ["value", "awaited", "match", "scaled", "by_fields", "one_field", "whole_episode"]
)
def test_control_every_form_that_fits_passes_the_dry_run(value: str) -> None:
    check(resolve(load_config("quickstart", [f"task.reward={HERE}{value}"])))


@pytest.mark.parametrize(
    ("name", "kind"), [("two", "parameters"), ("Match", "class"), ("VALUES", "dict")]
)
def test_an_imported_function_is_checked_too(name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=kind):
        reward(name)


# --- verl and TRL ---------------------------------------------------------------------------------
def test_verl_calls_by_keyword_and_reads_the_score_of_a_dict() -> None:
    extra = {"data_source": "gsm8k", "extra_info": {"index": 7}, "ability": "math"}
    found = reward("verl/compute_score", prompt=replace(PROMPT, extra=extra))
    assert found == Score(1.0, metrics={"acc": 1.0})
    wrong = reward("verl/compute_score", "3", replace(PROMPT, extra=extra))
    assert wrong == Score(0.0, metrics={"acc": 0.0}), "control"
    check(resolve(load_config("quickstart", [f"task.reward=verl:{HERE}compute_score"])))


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "1+1"}]])
def test_trl_calls_with_lists_and_columns(messages: Any) -> None:
    extra = PROMPT.extra | ({"messages": messages} if messages else {})
    prompt = replace(PROMPT, extra=extra)
    columns = {"answer": "solution"}
    assert reward("trl/trl_match", "2", prompt, columns=columns).reward == 1.0
    assert reward("trl/trl_match", "3", prompt, columns=columns).reward == 0.0, "control"
    assert reward("trl/trl_prompt", "3", prompt).reward == float(messages is not None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trl_none", "returned NoneType None, want a number"),
        ("trl_number", "returned float 1.0, want a list of one number"),
    ],
)
def test_trl_values_that_score_nothing_are_refused(name: str, says: str) -> None:
    with pytest.raises(BadReturn, match=says):
        reward(f"trl/{name}")

"""Several tasks in one run: their settings, their order, their prompts, their scorers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config import Config, load_config, resolve, save_config
from moerl.config.load import load_saved
from moerl.config.task_mixture import TaskEntry, by_label, entries_of, whole_weights
from moerl.core.errors import ConfigError
from moerl.data.tasks import PromptMixture, PromptStream, TaskOrder, chairmen, load_tokenizer
from moerl.scoring import ProcessScorer, RunScorers
from tests.helpers.episode_views import asked, view

RECIPE = "digits-mixture"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


# --- settings ------------------------------------------------------------------------------------
def test_an_entry_is_laid_over_task_and_sampling() -> None:
    config = load_config(RECIPE, ["task.score_timeout_s=7", "tasks.five.limits.file_mb=1"])
    three, five, turns = entries_of(config)
    assert (three.label, three.weight, three.digits) == ("three", 2.0, 3)
    assert (three.sampling.temperature, three.sampling.top_p) == (0.9, 0.95)
    assert (five.sampling.top_k, three.sampling.top_k) == (32, 64)
    assert (turns.turn_limit, three.turn_limit) == (3, 1)
    assert {entry.score_timeout_s for entry in (three, five, turns)} == {7.0}
    assert (five.limits.file_mb, five.limits.memory_mb, three.limits.file_mb) == (1, 4096, 64)


def test_task_alone_is_one_entry() -> None:
    config = load_config("quickstart")
    (only,) = entries_of(config)
    assert (only.label, only.digits, only.sampling) == ("", config.task.digits, config.sampling)


def test_overrides_by_label_survive_a_saved_configuration(tmp_path: Path) -> None:
    config = resolve(load_config(RECIPE, ["tasks.three.sampling.temperature=0.5"]))
    save_config(config, tmp_path / "config.yaml")
    again = load_saved(tmp_path / "config.yaml", ["tasks.turns.weight=3", "task.digits=9"])
    found = by_label(again)
    assert found["three"].sampling.temperature == 0.5
    assert (found["turns"].weight, found["turns"].digits) == (3.0, 4)
    assert entries_of(replace(again, tasks=[]))[0].digits == 9
    whole = load_config(RECIPE, ["tasks=[{label: a}, {label: b, weight: 3}]"])
    assert list(by_label(whole)) == ["a", "b"]


def test_a_truncating_entry_gets_a_finite_top_k() -> None:
    config = load_config(RECIPE, ["sampling.top_k=-1"])
    assert [e.sampling.top_k for e in entries_of(config)] == [512, 32, 512]
    assert entries_of(resolve(config)) == entries_of(config)


# --- order ---------------------------------------------------------------------------------------
WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


def farthest(order: np.ndarray, weights: list[int]) -> float:
    """Largest distance of a task's prompts so far from its share, over two periods."""
    twice = np.concatenate([order, order])
    length = np.arange(1, len(twice) + 1)
    share = np.asarray(weights) / sum(weights)
    return max(
        float(np.abs(np.cumsum(twice == task) - length * share[task]).max())
        for task in range(len(weights))
    )


@settings(deadline=None, max_examples=80)
@given(WEIGHTS)
def test_every_prefix_and_window_holds_the_weights(weights: list[int]) -> None:
    order = chairmen(weights)
    assert np.bincount(order, minlength=len(weights)).tolist() == weights, "exact in a period"
    worst = farthest(order, weights)
    assert worst < 1.0, "so a window is less than two prompts away from its share"
    if len(weights) > 1:
        assert worst <= 1 - 1 / (2 * len(weights) - 2) + 1e-9, "the bound of the theorem"


def test_a_shuffled_order_does_not_hold_them() -> None:
    """Negative control of the bound: the same counts in another order."""
    order = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [30, 20, 10]))
    assert farthest(order, [30, 20, 10]) > 1.5


@settings(deadline=None, max_examples=40)
@given(WEIGHTS)
def test_places_of_a_task_are_consecutive(weights: list[int]) -> None:
    order, seen = TaskOrder(weights), Counter[int]()
    for index in range(2 * sum(weights) + 3):
        task, place = order.place(index)
        assert place == seen[task]
        seen[task] += 1
    far = 10**9 * sum(weights) + 1
    assert order.place(far)[1] in {10**9 * w + d for w in weights for d in (0, 1)}


def test_weights_are_ratios() -> None:
    def whole(*weights: float) -> list[int]:
        return whole_weights([TaskEntry(label=f"t{w}", weight=w) for w in weights])

    assert whole(0.7, 0.2, 0.1) == [7, 2, 1]
    assert whole(4, 2) == [2, 1]
    assert whole(0.3333, 0.6667) == [3333, 6667]
    assert whole(5) == [1]


# --- prompts -------------------------------------------------------------------------------------
def mixture(config: Config, tokenizer: Any, seed: int = 3) -> PromptMixture:
    return PromptMixture(entries_of(config), tokenizer, seed)


def test_a_prompt_is_a_function_of_its_index(tokenizer: Any) -> None:
    config = load_config(RECIPE)
    straight = mixture(config, tokenizer)
    prompts = [straight.prompt(index) for index in range(40)]
    resumed = mixture(config, tokenizer)
    assert [resumed.prompt(index) for index in reversed(range(40))] == prompts[::-1]
    assert [prompt.index for prompt in prompts] == list(range(40))
    assert Counter(p.task for p in prompts) == {"three": 20, "five": 10, "turns": 10}
    digits = {"three": 3, "five": 5, "turns": 4}
    assert all(len(str(p.answer)) == digits[p.task] for p in prompts)
    assert mixture(config, tokenizer, seed=4).prompt(0).text != prompts[0].text


def test_a_stream_does_not_depend_on_its_neighbours(tokenizer: Any) -> None:
    """Other weights, tasks and order: each task still draws its own items in the same order."""
    config = load_config(RECIPE)
    other = load_config(RECIPE, ["tasks=[{label: new}, {label: five, digits: 5, weight: 4}]"])

    def texts(config: Config) -> list[str]:
        prompts = (mixture(config, tokenizer).prompt(index) for index in range(60))
        return [prompt.text for prompt in prompts if prompt.task == "five"][:15]

    assert texts(config) == texts(other)


def test_epochs_are_those_of_each_task(tokenizer: Any, tmp_path: Path) -> None:
    files = {"a": 3, "b": 5}
    for name, size in files.items():
        lines = [f'{{"prompt": "{number}", "answer": "{name}"}}\n' for number in range(size)]
        (tmp_path / name).write_text("".join(lines))
    entries = ", ".join(
        f"{{label: {name}, name: jsonl, reward: exact_match, path: {tmp_path / name}}}"
        for name in files
    )
    stream = mixture(load_config(RECIPE, [f"tasks=[{entries}]"]), tokenizer)
    drawn = [stream.prompt(index) for index in range(30)]
    for name, size in files.items():
        mine = [prompt.text for prompt in drawn if prompt.task == name]
        epochs = [mine[at : at + size] for at in range(0, 15, size)]
        assert all(sorted(epoch) == [str(n) for n in range(size)] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1, "shuffled again in each epoch"


def test_one_task_has_the_prompts_that_it_had(tokenizer: Any) -> None:
    config = load_config("quickstart")
    plain, one = PromptStream(config.task, tokenizer, 3), mixture(config, tokenizer)
    assert [one.prompt(i) for i in range(9)] == [plain.prompt(i) for i in range(9)]


def test_a_prompt_that_does_not_fit_names_its_entry(tokenizer: Any) -> None:
    stream = mixture(load_config(RECIPE, ["tasks.five.max_prompt_tokens=3"]), tokenizer)
    with pytest.raises(ConfigError, match=r"tasks\.five\.max_prompt_tokens"):
        list(map(stream.prompt, range(8)))


# --- scorers -------------------------------------------------------------------------------------
def test_each_task_has_its_reward_and_environment(tokenizer: Any) -> None:
    rewards = ["tasks.three.reward=exact_match"]
    config = load_config(RECIPE, rewards)
    every = {e.label: ProcessScorer(e, workers=1, timeout_s=10.0) for e in entries_of(config)}
    scorers = RunScorers({(label, "reward"): one for label, one in every.items()}, every)
    stream = mixture(config, tokenizer)
    first = {prompt.task: prompt for prompt in map(stream.prompt, range(4))}

    async def ask() -> tuple[list[float], str]:
        found = []
        for label in ("three", "five"):
            half = str(first[label].answer)[:-1] + "x"
            scores = await scorers.score(label, "reward", asked(first[label], [view(half)]))
            found.append(scores[0].reward)
        return found, await scorers.reply(first["turns"], ["xxxx"])

    try:
        (three, five), said = asyncio.run(ask())
    finally:
        for scorer in every.values():
            scorer.close()
    assert (three, five) == (0.0, 0.8), "all or nothing, and the share of right positions"
    assert said.startswith("\n0 of 4")

"""Rewards by a model with a value head: exact tokens to the reference ranks, values back."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config import load_config
from moerl.config.reward_terms import RewardTerm
from moerl.config.schema import Config, SftConfig, TinyModel
from moerl.config.task_mixture import entries_of
from moerl.controller.episode_scores import EpisodeScores, entropy_ends
from moerl.controller.reward_models import RewardModels
from moerl.controller.step_metrics import StepMetrics
from moerl.controller.task_group import TaskGroup
from moerl.core.episode_view import EpisodeView, ScoreRequest
from moerl.core.errors import ConfigError, LineError, ProtocolError
from moerl.core.messages import (
    Ok,
    Stop,
    TakePlan,
    TakeRecords,
    ValueRow,
    ValueRows,
    Values,
)
from moerl.core.serialization import decode, encode
from moerl.core.types import Prompt, Segment
from moerl.data.packing import ReadOptions, pack_microbatch
from moerl.data.tasks import load_tokenizer
from moerl.data.tiny_model import make_tiny_model
from moerl.data.value_rows import labelled_row, value_plan, with_steps
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn
from moerl.launch.model_folders import check_policy, check_ref_models, check_reward_model
from moerl.layout import model_spec
from moerl.records.blob_store import BlobStore
from moerl.records.token_entropy import token_entropies
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import value_config
from tests.helpers.controllers import CONFIG, make, running, train
from tests.helpers.recorded_turns import recorded, turn
from tests.helpers.stub_engine import StubEngine

TERM = RewardTerm("prm", where="model", model="prm", unit="step", separator=" ", queue=64)


def config(*terms: RewardTerm, **rollout: Any) -> Config:
    task = replace(CONFIG.task, rewards=list(terms))
    return replace(CONFIG, task=task, rollout=replace(CONFIG.rollout, **rollout))


def value_of(ids: np.ndarray) -> float:
    """Of a part of a conversation: it depends on every token and its place."""
    return float(np.dot(np.arange(1, len(ids) + 1), ids)) / 64


def answered(rows: ValueRows) -> Values:
    rows = decode(encode(rows))
    return Values(
        rows.number,
        tuple(
            np.array([value_of(row.token_ids[:end]) for end in row.ends], np.float32)
            for row in rows.rows
        ),
    )


class Ranks:
    """Reference ranks with one reward model; `answer` replaces some answers."""

    def __init__(self, controller: Any, answer: Callable[[ValueRows], Values | None]) -> None:
        self.controller, self.answer, self.asked = controller, answer, list[ValueRows]()

    async def run(self) -> None:
        start = 0
        while not isinstance(
            rows := await self.controller.handle(TakeRecords(start, 1, 0.5)), Stop
        ):
            if isinstance(rows, ValueRows):
                self.asked.append(rows)
                await asyncio.sleep(0)
                found = self.answer(rows)
                if found is None:
                    start += 1  # they die with their rows
                else:
                    assert await self.controller.handle(found) == Ok()


def played(
    tmp_path: Path,
    settings: Config,
    answer: Callable[[ValueRows], Values | None] = answered,
    engine: StubEngine | None = None,
) -> tuple[list[ValueRows], list, list, StubEngine]:
    async def body() -> Any:
        mine = engine or StubEngine()
        controller, reports = make(tmp_path, mine, settings)
        ranks = Ranks(controller, answer)

        async def work() -> list:
            scoring = asyncio.create_task(ranks.run())
            plans = await train(controller, 2)
            await controller.handle(TakePlan(CONFIG.run.steps, 5.0, 0))
            scoring.cancel()
            return [group for plan in plans for group in plan.groups]

        groups = await running(controller, work(), 60)
        return ranks.asked, groups, reports, mine

    return asyncio.run(body())


def test_steps_are_valued_at_their_exact_tokens_while_the_episode_goes_on(tmp_path: Path) -> None:
    asked, groups, reports, engine = played(tmp_path, config(TERM, slice_tokens=1))
    assert len(engine.requests) > 4 * len(groups), "a token a slice"
    for group in groups:
        for episode in group.episodes:
            row = episode.turns[0].rollout.token_ids
            values = [value_of(row[: len(row) - 3 + place]) for place in range(1, 4)]
            # `3 3 3 3`: a separator comes with the token behind it, the last token ends two steps
            wanted = [(1, values[0]), (2, values[1]), (3, 2 * values[2])]
            assert episode.score.steps == tuple((p, pytest.approx(v)) for p, v in wanted)
            assert episode.score.reward == pytest.approx(sum(v for _, v in wanted))
    assert {1} <= {len(row.ends) for rows in asked for row in rows.rows}
    assert sum(report.metrics.get("scorer/asked/prm", 0) for report in reports) >= 16
    assert all(report.metrics["scorer/failed"] == 0 for report in reports)


def test_steps_that_end_together_are_one_row(tmp_path: Path) -> None:
    """Without slices all steps of an answer are asked about at its end: one pass, three places."""
    asked, groups, _, _ = played(tmp_path, config(TERM))
    assert {len(row.ends) for rows in asked for row in rows.rows} == {3}
    for group in groups:
        for episode in group.episodes:
            row = episode.turns[0].rollout.token_ids
            mine = [r for rows in asked for r in rows.rows if np.array_equal(r.token_ids, row)]
            assert mine, "the row ends with the answer's last token"


@pytest.mark.parametrize("unit", ["turn", "episode"])
def test_turns_and_episodes_are_valued_at_their_last_token(tmp_path: Path, unit: Any) -> None:
    _, groups, _, _ = played(tmp_path, config(replace(TERM, unit=unit)))
    for group in groups:
        for episode in group.episodes:
            want = value_of(episode.turns[0].rollout.token_ids)
            assert episode.score.reward == pytest.approx(want)
            assert want != pytest.approx(value_of(episode.turns[0].rollout.token_ids[:-1]))


def test_ranks_that_die_get_their_rows_again_and_nothing_is_lost(tmp_path: Path) -> None:
    seen: list[int] = []

    def dies(rows: ValueRows) -> Values | None:
        seen.append(rows.number)
        return None if len(seen) in (1, 4) else answered(rows)

    _, groups, reports, _ = played(tmp_path, config(replace(TERM, unit="episode", batch=1)), dies)
    assert seen[0] == seen[1], "the same question, to the ranks that were started again"
    assert seen[3] == seen[4]
    assert len({group.group_id for group in groups}) == len(groups) == 4
    assert all(report.metrics["scorer/failed"] == 0 for report in reports)


def test_a_head_that_lies_costs_its_groups_and_not_the_run(tmp_path: Path) -> None:
    lied: list[int] = []

    def lies(rows: ValueRows) -> Values | None:
        true = answered(rows)
        if len(lied) == 1:
            return true
        lied.append(rows.number)
        return replace(true, values=tuple(np.full_like(v, math.nan) for v in true.values))

    term = replace(TERM, unit="episode", batch=1)
    _, groups, reports, _ = played(tmp_path, config(term), lies)
    assert lied
    assert sum(report.metrics["scorer/failed"] for report in reports) == 1
    assert all(math.isfinite(e.score.reward) for group in groups for e in group.episodes)


async def test_values_of_another_number_of_parts_are_refused() -> None:
    models = RewardModels(TaskGroup())
    ids = np.arange(4, dtype=np.int32)
    asked = [
        ScoreRequest(f"a:{end}", PROMPT, EpisodeView("a", ()), token_ids=ids, end=end)
        for end in (4, 2)
    ]
    waiting = asyncio.create_task(models.score(TERM, asked))
    await asyncio.sleep(0)
    rows = models.next()
    assert rows is not None
    assert [row.ends for row in rows.rows] == [(2, 4)]
    with pytest.raises(ProtocolError, match=r"gave \[1\] values for \[2\] parts"):
        models.add(Values(rows.number, (np.zeros(1, np.float32),)))
    models.add(Values(rows.number, (np.array([0.25, 0.75], np.float32),)))
    assert [score.reward for score in await waiting] == [0.75, 0.25], "in the order of asking"
    assert models.next() is None
    models.add(Values(rows.number, ()))  # withdrawn: dropped
    waiting = asyncio.create_task(models.score(TERM, asked))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert models.next() is None, "a withdrawn question is not asked"


PROMPT = Prompt(0, (1, 2), "1 2", None, {})


def test_branches_and_agents_turns_are_valued_in_their_own_conversation() -> None:
    """Turn 1 continues turn 0, turn 2 replaces its stop token: another conversation."""
    first = recorded(0, turn([1, 2], [3, 9]))
    second = recorded(1, turn([1, 2, 3, 9, 4], [5, 6]), first)
    other = RecordedTurn(first, 3, "", "7.0.t2", turn([1, 2, 3, 8, 7], [6, 5]))
    episode = FinishedEpisode("7.0", PROMPT, (first, second, other))

    async def body() -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {}
        tasks = TaskGroup()
        models = RewardModels(tasks)
        term = replace(TERM, unit="turn")
        entries = entries_of(config(term))
        scores = EpisodeScores(
            entries, None, lambda ids: " ".join(map(str, ids)), StepMetrics(), tasks, models
        )
        scores.ended(episode)
        await asyncio.sleep(0.05)
        rows = models.next()
        assert rows is not None
        for row, name in zip(rows.rows, ("t0", "t1", "t2"), strict=True):
            assert row.ends == (len(row.token_ids),)
            seen[name] = row.token_ids.tolist()
        models.add(answered(rows))
        await asyncio.sleep(0.05)
        score = await scores.score([episode])
        values = [value_of(np.array(seen[name])) for name in ("t0", "t1", "t2")]
        assert score[0].steps == tuple(zip((1, 3, 5), map(pytest.approx, values), strict=True))
        return seen

    assert asyncio.run(body()) == {
        "t0": [1, 2, 3, 9],
        "t1": [1, 2, 3, 9, 4, 5, 6],
        "t2": [1, 2, 3, 8, 7, 6, 5],
    }


# --- steps by entropy ----------------------------------------------------------------------------
def ends(entropies: list[float], first: int = 0, least: int = 1, length: int = 0) -> list[int]:
    term = replace(TERM, steps_by="entropy", entropy=1.0, step_tokens=least)
    return entropy_ends(np.array(entropies, np.float16), first, term, length)


def test_a_token_of_high_entropy_begins_a_step() -> None:
    spikes = [2.0, 0.1, 0.1, 1.5, 0.2, 1.0, 0.9]
    assert ends(spikes) == [3, 5], "the first token ends nothing"
    assert ends(spikes, length=7) == [3, 5, 7]
    assert ends(spikes, least=3, length=7) == [3, 7], "5 would be a step of two tokens"
    assert ends(spikes, first=3) == [5]
    assert ends([2.0], length=1) == [1]
    assert ends([]) == []
    for cut in range(1, 8):  # a stream cut anywhere has the same steps
        before = ends(spikes[:cut])
        assert before + ends(spikes, first=before[-1] if before else 0) == [3, 5]


def test_entropy_is_that_of_the_recorded_support() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 9))
    full = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    want = -(np.exp(full) * full).sum(1)
    offsets = np.arange(0, 46, 9)
    support = (offsets, np.tile(np.arange(9), 5), full.ravel().astype(np.float16))
    got = token_entropies(full[:, 0], support, is_whole=True)
    np.testing.assert_allclose(got, want, atol=4e-3)
    top = np.sort(full, 1)[:, ::-1][:, :4]
    part = (np.arange(0, 21, 4), np.zeros(20), top.ravel().astype(np.float16))
    rest = 1 - np.exp(top).sum(1)
    wanted = -(np.exp(top) * top).sum(1) - rest * np.log(rest)
    got = token_entropies(full[:, 0], part, is_whole=False)
    np.testing.assert_allclose(got, wanted, atol=4e-3)
    np.testing.assert_allclose(
        token_entropies(full[:, 0], (), is_whole=True), -full[:, 0], atol=4e-3
    )
    assert not np.allclose(-full[:, 0], want, atol=0.05), "control: one token's is another number"


def test_steps_by_entropy_are_asked_about_while_their_episode_goes_on(tmp_path: Path) -> None:
    """Every second token is a spike; control: without recorded entropies there is one step."""

    def spiky(segment: Segment) -> Segment:
        place = np.arange(len(segment.output_ids))
        return replace(segment, entropies=(place % 2 * 2.0).astype(np.float16))

    term = replace(TERM, steps_by="entropy", entropy=1.0, step_tokens=1, unit="step")
    engine = StubEngine(spoil=spiky, num_spoiled=10**6)
    asked, groups, _, _ = played(tmp_path / "a", config(term), engine=engine)
    first = groups[0].episodes[0]
    assert [place for place, _ in first.score.steps] == [0, 2, 3]
    row = first.turns[0].rollout.token_ids
    begin = len(row) - 4
    for place, value in first.score.steps:
        assert value == pytest.approx(value_of(row[: begin + place + 1]))
    assert any(len(row.ends) == 3 for rows in asked for row in rows.rows)
    _, groups, _, _ = played(tmp_path / "b", config(term))
    assert [place for place, _ in groups[0].episodes[0].score.steps] == [3]


def test_two_terms_cut_one_answer_each_in_its_own_way(tmp_path: Path) -> None:
    """The second had no steps when both shared one place."""
    other = replace(TERM, name="other", separator="3")
    _, groups, _, _ = played(tmp_path, config(TERM, other))
    metrics = groups[0].episodes[0].score.metrics
    assert metrics["prm"] > 0
    assert metrics["other"] > 0


# --- rows ----------------------------------------------------------------------------------------
def test_a_row_is_read_at_the_last_token_of_each_part(tmp_path: Path) -> None:
    rows = [
        ValueRow(np.array([5, 6, 7, 8], np.int32), (2, 4)),
        ValueRow(np.array([9], np.int32), (1,)),
    ]
    plan = value_plan(rows, dp_size=1, max_tokens_per_microbatch=64)
    rollouts = {
        place.group: rollout for place, rollout in zip(plan.rows, plan.rollouts(), strict=True)
    }
    assert rollouts[0].token_ids.tolist() == [5, 6, 7, 8, 8]
    assert np.flatnonzero(rollouts[0].loss_mask).tolist() == [2, 4], "read at tokens 1 and 3"
    batch = pack_microbatch(plan, 0, 0, BlobStore(tmp_path, "n"), reads=ReadOptions(mask=False))
    tokens = batch.tokens.flatten()[batch.sampled_rows].tolist()
    assert sorted(tokens) == [6, 8, 9]


def test_labelled_steps_are_tokens_and_labels_at_their_ends() -> None:
    prompt = replace(PROMPT, extra={"steps": [["ab", 1], ["c", None], ["de", 0.25]]})
    row, labels = labelled_row(with_steps("bce", prompt), lambda text: list(map(ord, text)), [0])
    assert row.token_ids.tolist() == [1, 2, 97, 98, 99, 100, 101, 0]
    assert row.ends == (4, 8)
    assert labels.tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("steps", "loss"),
    [
        (None, "mse"),
        ([], "mse"),
        ([["a"]], "mse"),
        ([["", 1]], "mse"),
        ([["a", math.inf]], "mse"),
        ([["a", "1"]], "mse"),
        ([["a", None]], "mse"),
        ([["a", 1.5]], "bce"),
        ([["a", -0.5]], "bce"),
    ],
)
def test_steps_without_use_are_refused(steps: Any, loss: str) -> None:
    prompt = replace(PROMPT, extra={} if steps is None else {"steps": steps})
    with pytest.raises(LineError, match="step"):
        with_steps(loss, prompt)
    good = replace(PROMPT, extra={"steps": [["a", 1.5], ["b", None]]})
    assert with_steps("mse", good) is good


# --- early refusals ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    make_tiny_model(folder, TinyModel(enabled=True), seed=0)
    return folder


def reward_folder(policy: Path, folder: Path, head: dict[str, torch.Tensor]) -> Path:
    """A copy of the policy with this head."""
    shutil.copytree(policy, folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(value_config(shape, "bce")))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors | head, folder / "model.safetensors")
    return folder


def test_a_folder_that_gives_no_value_is_refused(policy: Path, tmp_path: Path) -> None:
    student = model_spec(json.loads((policy / "config.json").read_text()))
    tokenizer = load_tokenizer(policy)

    def refusal(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            check_reward_model(str(folder), student, tokenizer)
        return str(caught.value)

    head = {"score.weight": torch.zeros(1, student.hidden), "score.bias": torch.zeros(1)}
    good = reward_folder(policy, tmp_path / "good", head)
    check_reward_model(str(good), student, tokenizer)
    assert HfFolder(good).spec.values == 1
    assert "has no value head" in refusal(policy)
    two = {"score.weight": torch.zeros(2, student.hidden), "score.bias": torch.zeros(2)}
    refused = refusal(reward_folder(policy, tmp_path / "two", two))
    assert "score.weight has shape (2, 128), the config says (1, 128)" in refused
    bare = {"score.weight": head["score.weight"]}
    assert "score.bias" in refusal(reward_folder(policy, tmp_path / "bare", bare))
    foreign = reward_folder(policy, tmp_path / "foreign", head)
    words = json.loads((foreign / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["0"], ids["1"] = ids["1"], ids["0"]
    (foreign / "tokenizer.json").write_text(json.dumps(words))
    assert "token ids mean other tokens" in refusal(foreign)
    (foreign / "tokenizer.json").unlink()
    (foreign / "tokenizer_config.json").unlink()
    assert "it has no tokenizer" in refusal(foreign)
    wide = replace(student, vocab_size=student.vocab_size + 1)
    with pytest.raises(ConfigError, match="vocabulary"):
        check_reward_model(str(good), wide, tokenizer)
    with pytest.raises(ConfigError, match="it has a value head"):
        check_ref_models("algorithm.teacher", str(good), student)
    settings = load_config("quickstart")
    spec, shape = HfFolder(good).spec, HfFolder(good).config
    with pytest.raises(ConfigError, match=r"model\.path .*it has a value head"):
        check_policy(settings, spec, shape)
    trains = replace(settings, sft=SftConfig("bce"))
    check_policy(trains, spec, shape)
    with pytest.raises(ConfigError, match=r"lora\.rank must be 0"):
        check_policy(replace(trains, lora=replace(trains.lora, rank=4)), spec, shape)
    with pytest.raises(ConfigError, match="needed is"):
        check_policy(trains, spec, shape | {"architectures": ["Qwen3MoeForQuestionAnswering"]})

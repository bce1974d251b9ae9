"""The examples are short, say how to run them, and do what they say."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch

from examples.audit_dump import write_dump
from examples.live_environment import Locks
from examples.new_model_family import CONFIG
from examples.new_objective import soft_clip
from examples.own_reward import reward
from examples.turn_environment import reply
from examples.turn_environment import reward as turn_reward
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    EpisodeStart,
    EpisodeTools,
    Observation,
    PolicyAnswer,
)
from moerl.algorithms.registry import choose
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.audit.dumps import model_shape, read_dump
from moerl.config import load_config
from moerl.config.algorithms import OBJECTIVES
from moerl.config.checks import check
from moerl.config.schema import AlgorithmConfig, TinyModel
from moerl.core.errors import LayoutError
from moerl.core.json_files import read_model_config
from moerl.data.tiny_model import make_tiny_model
from moerl.layout import model_spec
from moerl.records.blob_store import BlobStore
from tests.helpers.doc_commands import wrong_command
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def command_of(example: Path) -> str:
    """The one command of its header, continued lines joined."""
    lines = example.read_text().replace("\\\n", " ").splitlines()
    (line,) = (line.strip() for line in lines if line.startswith(("    moerl ", "    python ")))
    return line


def test_there_are_thirteen() -> None:
    assert len(EXAMPLES) == 13


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_its_command_is_right(example: Path) -> None:
    assert 40 <= len(example.read_text().splitlines()) <= 80
    command = command_of(example)
    assert wrong_command(command) == ""
    words = shlex.split(command)
    if words[0] == "python":
        assert ROOT / words[1] == example
    else:
        check(load_config(words[2], [word for word in words[3:-2] if "=" in word]))


def test_the_reward_counts_order_and_digits() -> None:
    assert reward("3142", "1234", "1234", {}) == 1.0
    assert reward("3142", "1234", "4321", {}) == 0.5
    assert reward("3142", "1234", "1239", {}) == 0.5 + 0.5 * 3 / 4
    assert reward("3142", "1234", "", {}) == 0.0


def test_the_environment_names_the_first_wrong_position() -> None:
    assert reply("3142", "1234", ["1234"], {}) == ""
    assert reply("3142", "1234", ["1324", "1243"], {}) == "\n3 is wrong\n3142"
    assert reply("3142", "1234", ["12"], {}) == "\n3 is wrong\n3142"
    assert turn_reward("3142", "1234", "1234", {"turns": ["1", "1234"]}) == 0.9
    assert turn_reward("3142", "1234", "1243", {"turns": ["1243"]}) == 0.25


def test_the_live_environment_opens_each_lock_once() -> None:
    async def played() -> list[Observation | EpisodeEnd]:
        locks = Locks(wait_s=0.0)
        tools = cast(EpisodeTools, None)
        prompt = [{"role": "user", "content": "3142"}]
        seen = await locks.reset(EpisodeStart("0.0", "3142", prompt, "1234", {}, tools))
        assert seen == Observation(prompt)
        return [await locks.step(PolicyAnswer(text)) for text in ("1432", "1432", "_2_4")]

    assert asyncio.run(played()) == [
        Observation([{"role": "user", "content": "1_3_"}], reward=0.5),
        Observation([{"role": "user", "content": "1_3_"}], reward=0.0),
        EpisodeEnd(0.5),
    ]


def test_the_objective_fades_with_distance() -> None:
    old, x = torch.zeros(4, dtype=torch.float64), torch.tensor([0.0, 0.1, 3.0, -3.0]).double()
    advantage = torch.tensor([1.0, -2.0, 1.0, 1.0], dtype=torch.float64)
    x.requires_grad_()
    tokens = Tokens(x, old, advantage, Sequences(torch.tensor([0, 0, 1, 1]), 2), old.long(), old)
    settings = AlgorithmConfig(objective="examples.new_objective:soft_clip")
    responses = choose("algorithm.objective", settings.objective, OBJECTIVES)(tokens, old, settings)
    assert choose("algorithm.objective", settings.objective, OBJECTIVES) is soft_clip
    responses.loss.sum().backward()
    assert x.grad is not None
    assert x.grad[0] == -1.0, "the policy gradient where nothing has changed"
    assert 0 < x.grad[1] < 2
    assert x.grad[2:].abs().max() < 1e-6
    assert responses.high.tolist() == [False, False, True, False]
    assert responses.low.tolist() == [False, False, False, True]


def test_the_family_is_proved_and_a_wrong_table_is_named() -> None:
    """In a process of its own: the table keeps the family."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples/new_model_family.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.stdout.startswith("exact: 867 tensors"), done.stderr
    wrong = (
        "from dataclasses import replace\nfrom examples.new_model_family import *\n"
        "parts = (NORM_GQA, GQA, replace(QKV_BIAS, megatron=()), QK_NORM)\n"
        "FAMILY_TABLES['acme_moe'] = Family(SpecReader(read), parts, ACME.moe)\n"
        "check_layout(model_spec(CONFIG), ParallelConfig(), EngineLayout(tp=1), 'local')"
    )
    done = subprocess.run(
        [sys.executable, "-c", wrong],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert "self_attn.q_proj.bias: sources hold 0 of" in done.stderr, "control: a missing rule"


def test_the_family_is_known_in_that_process_only() -> None:
    with pytest.raises(LayoutError, match="'acme_moe' has no layout"):
        model_spec(CONFIG)


def test_the_audited_stack_writes_a_dump_that_fits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder, TinyModel(), seed=0)
    write_dump(folder, tmp_path / "dump.jsonl", num_rollouts=2, num_tokens=3)
    shape = model_shape(model_spec(read_model_config(folder)))
    rollouts = read_dump(tmp_path / "dump.jsonl", BlobStore(tmp_path / "blobs", "n"), shape)
    assert [rollout.num_sampled for rollout in rollouts] == [3, 3]

"""An own reward is called before a run: a start, a dry run and `moerl data` say the same of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config
from moerl.config.task_mixture import entries_of
from moerl.core.errors import ConfigError
from moerl.data.prompt_checks import LineCheck
from moerl.data.tasks import PromptMixture
from moerl.launch.reward_trial import try_rewards
from tests.helpers.chat_tokenizer import chat_tokenizer

# The arguments of each are named by one letter; `r` is the response.
REWARDS = """
import asyncio, functools, os

def text(p, a, r, e): return "0.5"
def empty(p, a, r, e): return {}
def none(p, a, r, e): return 1.0 if r else None
def nan(p, a, r, e): return float("nan")
def huge(p, a, r, e): return 1e30
def verl_like(p, a, r, e): return {"score": 1.0, "acc": 1.0}
async def awaited(p, a, r, e):
    await asyncio.sleep(0)
    return "0.5"
def far_steps(p, a, r, e): return {"steps": [(99, 1.0)]}
def two(response, answer): return 0.0
def wrapped(*values, **fields): return two(*values, **fields)
def field(p, a, r, *, level): return 1.0
def late(p, a, r, e, more): return 1.0
hidden = lambda *values: late(*values)

def right(p, a, r, e): return float(r == a)
async def right_later(p, a, r, e): return float(r == a)
right_object = functools.partial(right)
def by_name(prompt, answer, response, **extra): return float(response == answer)
def metrics(p, a, r, e): return {"reward": 1.0, "acc": 0.5}

def divides(p, a, r, e): return 1.0 / len(r)
def unknown(p, a, r, e): return {}[r]
def ends(p, a, r, e): os._exit(3)

def elsewhere(p, a, r, e): return "here" if os.getpid() == PID else 1.0
def marks(p, a, r, e):
    open(MARK, "a").write(r + ";")
    return 1.0
PID, MARK = {pid}, {mark!r}
"""
PROMPT, ANSWER = "12=", "12"
Settings = Callable[..., list[str]]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    module = f"own_rewards_{os.getpid()}_{tmp_path.name}"
    text = REWARDS.replace("{pid}", str(os.getpid())).replace("{mark!r}", repr(f"{tmp_path}/mark"))
    (tmp_path / f"{module}.py").write_text(text)
    (tmp_path / "p.jsonl").write_text(f"\n{json.dumps({'prompt': PROMPT, 'answer': ANSWER})}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def words(reward: str, *more: str) -> list[str]:
        path = f"task.path={tmp_path}/p.jsonl"
        return [
            "quickstart-smoke",
            "task.name=jsonl",
            path,
            f"task.reward={module}:{reward}",
            *more,
        ]

    return words


def tried(words: list[str], *, here: bool = True) -> list[str]:
    entries = entries_of(load_config(words[0], words[1:]))
    streams = PromptMixture(entries, chat_tokenizer(), 0).streams
    return try_rewards([LineCheck(*stream) for stream in streams], here=here)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text", "it returned str '0.5', want a number or a dict with one, for line 2 of"),
        ("empty", "it returned dict {}, which has no reward, steps, turns or roles, for line 2 of"),
        ("none", "it returned NoneType None, want a number"),
        ("nan", "it returned float nan, which is not finite"),
        ("huge", "it returned float 1e+30, which has a square that float32 cannot hold"),
        ("verl_like", "it returned dict {'score': 1.0, 'acc': 1.0}, which has no reward"),
        ("awaited", "it returned str '0.5', want a number"),
        ("far_steps", "it has steps that end at characters [99] of 2"),
        ("wrapped", "it cannot be called: two() takes 2 positional arguments but 4 were given"),
        ("hidden", "it cannot be called: late() missing 1 required positional argument: 'more'"),
        ("field", "it has a parameter level, which is no field of its prompt"),
        ("gone", "it could not be started: raised ConfigError: "),
    ],
)
def test_a_reward_that_scores_nothing_is_refused(
    settings: Settings, tmp_path: Path, name: str, says: str
) -> None:
    words = settings(name)
    with pytest.raises(ConfigError) as error:
        tried(words)
    assert error.value.field == "task.reward"
    text = str(error.value)
    assert says in text
    assert f"line 2 of {tmp_path}/p.jsonl" in text
    response = "" if name == "none" else ANSWER
    assert f"the response {response!r} ({tmp_path}/" in text
    source = next(tmp_path.glob("own_rewards_*.py"))
    numbers = [
        n for n, line in enumerate(source.read_text().split("\n"), 1) if f"def {name}(" in line
    ]
    assert not numbers or f"({source} line {numbers[0]})" in text


@pytest.mark.parametrize(
    "name", ["right", "right_later", "right_object", "by_name", "metrics", "elsewhere"]
)
def test_control_a_reward_that_scores_is_not_mentioned(settings: Settings, name: str) -> None:
    assert tried(settings(name)) == []


@pytest.mark.parametrize(
    ("name", "says", "times"),
    [
        ("divides", "it raised ZeroDivisionError: float division by zero", 1),
        ("unknown", "it raised KeyError", 2),
        ("ends", "exit", 2),
    ],
)
def test_a_reward_may_fail_for_a_text_and_this_is_said(
    settings: Settings, tmp_path: Path, name: str, says: str, times: int
) -> None:
    said = tried(settings(name))
    assert len(said) == times
    assert says in said[-1]
    assert f"for line 2 of {tmp_path}/p.jsonl and the response ''" in said[-1]


def test_another_machine_may_have_what_this_one_lacks(settings: Settings) -> None:
    (said,) = tried(settings("gone"), here=False)
    assert "was not tried: it could not be started: raised ConfigError" in said
    with pytest.raises(ConfigError, match="returned str"):
        tried(settings("text"), here=False)


@pytest.mark.parametrize(
    "more", [["task.environment=calculator", "task.max_turns=2"], ["task.agent.command=[true]"]]
)
def test_episodes_of_several_turns_are_not_made_up(
    settings: Settings, tmp_path: Path, more: list[str]
) -> None:
    ours = "task.limits.user=same"  # its marks are in a folder of ours
    assert tried(settings("marks", ours, *more)) == []
    assert not (tmp_path / "mark").exists()
    assert tried(settings("marks", ours)) == []
    assert (tmp_path / "mark").read_text() == f"{ANSWER};;", (
        "control: of the answer, and of nothing"
    )
    assert tried([*settings("marks", ours), "task.reward=exact_match"]) == [], (
        "no function of the user"
    )


# --- the commands ---------------------------------------------------------------------------------
def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_data_calls_the_reward_outside_of_its_own_process(settings: Settings) -> None:
    code, text = said("data", *settings("elsewhere"), "--response", "a", "--response", "b")
    assert (code, re.findall(r"reward   '(.)' -> (\S+)", text)) == (0, [("a", "1"), ("b", "1")])
    code, text = said("data", *settings("ends"))
    assert code == 0, "a failed score is counted by a run, and refused by none"
    assert text.count("no reward: it ") == 2
    code, text = said("data", *settings("text"))
    assert code == 1
    assert "'12' -> no reward: it returned str '0.5', want a number" in text
    assert "a run would refuse this: task.reward" in text


def test_a_dry_run_calls_the_reward(settings: Settings) -> None:
    code, text = said("train", *settings("text"), "--dry-run")
    assert code == 1
    assert "it returned str '0.5'" in text
    made = [word for word in settings("text") if not word.startswith(("task.name", "task.path"))]
    assert "for prompt 0 and the response" in said("train", *made, "--dry-run")[1]
    code, text = said("train", *settings("divides"), "--dry-run")
    assert (code, "it raised ZeroDivisionError" in text) == (0, True)
    code, text = said("train", *settings("right"), "--dry-run")
    assert (code, "task.reward = " in text) == (0, False), "control"


def test_a_start_ends_before_an_engine_begins(
    settings: Settings, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moerl.launch import train
    from moerl.launch.supervision import supervisor

    started: list[object] = []

    class Stopped(Exception):
        pass

    def begin(*given: Any, **named: Any) -> None:
        started.append(given)
        raise Stopped

    monkeypatch.setattr(supervisor, "Supervisor", begin)

    def start(name: str) -> None:
        root = [f"run.root={tmp_path}/runs", f"run.name={name}", f"cluster.blob_dir={tmp_path}/b"]
        words = settings(name, *root)
        train.train(load_config(words[0], words[1:]), resume=False, scratch=tmp_path)

    with pytest.raises(ConfigError, match="it returned str"):
        start("text")
    assert not started
    with pytest.raises(Stopped):
        start("divides")
    assert started
    assert "moerl: task.reward = " in capfd.readouterr().err

"""Rewards run in worker processes; every way of failing hurts one response only."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError, ScoreError
from moerl.core.types import Prompt, Score
from moerl.scoring import ProcessScorer
from moerl.scoring.process import refusal
from tests.helpers.episode_views import asked, view
from tests.helpers.episode_views import score_each as score_texts
from tests.helpers.patience import patience

ROOT = Path(__file__).parents[2]
TASK = TaskConfig(name="jsonl", reward="tests.helpers.misbehaving_rewards:by_text")
PROMPT = Prompt(4, (1, 2), "text", None, {"bonus": 0.25})


@pytest.fixture(scope="module")
def scorer() -> Iterator[ProcessScorer]:
    scorer = ProcessScorer(TASK, workers=1, timeout_s=patience(1.0))
    yield scorer
    scorer.close()


def score_each(scorer: ProcessScorer, *texts: str) -> list[Score | ScoreError]:
    return score_texts(scorer, PROMPT, *texts)


def test_scores_in_order_with_the_extra_fields(scorer: ProcessScorer) -> None:
    assert score_each(scorer, "1", "-2", "0.5") == [Score(1.25), Score(-1.75), Score(0.75)]


def test_process_rewards_and_errors() -> None:
    task = TaskConfig(name="jsonl", reward="tests.helpers.misbehaving_rewards:by_steps")
    steps = ProcessScorer(task, workers=1, timeout_s=patience(5.0))
    try:
        whole, beyond, unknown = score_each(steps, "+-+x", "+>", "+?")
    finally:
        steps.close()
    assert whole == Score(1.0, text_steps=((1, 1.0), (2, -1.0), (3, 1.0), (4, 0.0)), errors=1.0)
    assert "steps that end at characters [1, 2, 99] of 2" in str(beyond)
    assert "returned a dict with str '?', which cannot name a metric" in str(unknown)


def test_an_environment_answers_with_text_or_the_turn_fails() -> None:
    """None is no word that the policy should read."""
    task = TaskConfig(
        name="jsonl",
        reward="exact_match",
        environment="tests.helpers.misbehaving_rewards:forgetful",
        max_turns=3,
    )
    scorer = ProcessScorer(task, workers=1, timeout_s=patience(5.0))
    try:
        for text, kind in (("text", "NoneType"), ("other", "function")):
            with pytest.raises(ScoreError, match=f"returned {kind}, want text"):
                asyncio.run(scorer.reply(replace(PROMPT, text=text), ["1"]))
    finally:
        scorer.close()


def test_rewards_of_turns() -> None:
    task = TaskConfig(
        name="jsonl",
        reward="tests.helpers.misbehaving_rewards:by_turns",
        environment="check_digits",
        max_turns=3,
    )
    turns = ProcessScorer(task, workers=1, timeout_s=patience(5.0))
    try:
        episodes = [view("1", "2.5"), view("3"), view("1", "few")]
        two, one, few = asyncio.run(turns.score(asked(PROMPT, episodes)))
    finally:
        turns.close()
    assert two == Score(3.5, turns=(1.0, 2.5))
    assert one == Score(3.0, turns=(3.0,))
    assert "has rewards for 1 of 2 turns" in str(few)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nan", "returned float nan, which is not finite for prompt 4"),
        ("-inf", "returned float -inf, which is not finite"),
        ("raise", "raised _Unpicklable: broken reward"),
        ("sys_exit", "raised SystemExit: 3"),
        ("not a number", "raised ValueError"),
        ("hang", "took longer than task.score_timeout_s = "),
        ("crash", "exit code 7"),
    ],
)
def test_a_failure_is_an_error_of_that_response_alone(
    scorer: ProcessScorer, text: str, says: str
) -> None:
    before, failed, after = score_each(scorer, "1", text, "2")
    assert (before, after) == (Score(1.25), Score(2.25))
    assert isinstance(failed, ScoreError)
    assert says in str(failed)
    assert "for prompt 4" in str(failed)
    assert "\n" not in str(failed)


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1e30])
def test_an_answer_of_a_worker_is_checked_again(number: float) -> None:
    """The worker checks the reward, and may be under the control of the reward."""
    for score in (
        Score(number),
        Score(1.0, text_steps=((1, number),)),
        Score(1.0, turns=(number,)),
    ):
        assert f"gave {number}, which " in refusal(score, ["12"])
    assert not refusal(Score(1.0, text_steps=((1, 0.5),), turns=(1.0,)), ["12"])


def test_a_hung_worker_is_replaced_and_the_loop_goes_on(scorer: ProcessScorer) -> None:
    async def run() -> tuple[int, list[Score | ScoreError]]:
        ticks, scored = (
            0,
            asyncio.ensure_future(scorer.score(asked(PROMPT, [view("hang")]))),
        )
        while not scored.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, scored.result()

    (pid,) = score_each(scorer, "pid")
    ticks, (failed,) = asyncio.run(run())
    (other,) = score_each(scorer, "pid")
    assert isinstance(failed, ScoreError)
    assert isinstance(pid, Score)
    assert isinstance(other, Score)
    assert pid != other
    assert ticks > 5, "the event loop stood still while a reward ran"


@pytest.mark.parametrize("outside", [True, False])
def test_a_score_is_tried_again_when_its_worker_was_ended_from_outside(
    scorer: ProcessScorer, outside: bool
) -> None:
    """At the end of a run workers die before the controller, which must not drop their groups.

    The control: a worker that is killed itself, as for its use of memory, has failed.
    """
    (pid,) = score_each(scorer, "pid")
    assert isinstance(pid, Score)
    worker = psutil.Process(int(pid.reward))

    async def run() -> list[Score | ScoreError]:
        text = f"hang in {worker.pid}"
        scored = asyncio.ensure_future(scorer.score(asked(PROMPT, [view(text)])))
        await asyncio.sleep(0.2)
        (worker.parent() if outside else worker).send_signal(15 if outside else 9)
        return await scored

    (score,) = asyncio.run(run())
    if outside:
        assert score == Score(1.0)
    else:
        assert "was ended by SIGKILL" in str(score)


def test_a_worker_that_can_start_no_process_is_replaced(scorer: ProcessScorer) -> None:
    (pid,) = score_each(scorer, "pid")
    (failed,) = score_each(scorer, "no process")
    assert "Resource temporarily unavailable" in str(failed)
    assert score_each(scorer, "pid") != [pid]


def test_rewards_run_in_the_main_thread_of_another_process(scorer: ProcessScorer) -> None:
    where, pid = score_each(scorer, "main_thread", "pid")
    assert where == Score(1.0)
    assert isinstance(pid, Score)
    assert int(pid.reward) != os.getpid()


def test_math_verify_works_inside_a_worker() -> None:
    scorer = ProcessScorer(TaskConfig(name="jsonl", reward="math_verify"), 1, 20.0)
    prompt = Prompt(0, (1,), "", "\\frac{1}{2}", {})
    episodes = [view(text) for text in ("so it is 0.5", "$\\frac{2}{4}$", "2", "no idea")]
    rewards = [score.reward for score in asyncio.run(scorer.score(asked(prompt, episodes)))]
    unreadable = asyncio.run(scorer.score(asked(Prompt(1, (1,), "", "", {}), [view("1")])))
    scorer.close()
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    assert isinstance(unreadable[0], ScoreError)


def test_close_leaves_no_worker_even_while_one_hangs() -> None:
    async def run() -> list[psutil.Process]:
        (score,) = await scorer.score(asked(PROMPT, [view("pid")]))
        hung = asyncio.ensure_future(scorer.score(asked(PROMPT, [view("hang")])))
        await asyncio.sleep(0.1)
        worker = psutil.Process(int(score.reward))
        assert worker.is_running()
        scorer.close()
        hung.cancel()
        return [worker]

    scorer = ProcessScorer(TASK, workers=1, timeout_s=patience(60.0))
    _, alive = psutil.wait_procs(asyncio.run(run()), timeout=patience(10))
    assert not alive


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "import asyncio\n"
        "from tests.unit.test_scoring import PROMPT, TASK, ProcessScorer, asked, view\n"
        "if __name__ == '__main__':\n"
        "    scorer = ProcessScorer(TASK, 1, 60.0)\n"
        "    async def run():\n"
        "        (s,) = await scorer.score(asked(PROMPT, [view('pid')]))\n"
        "        print(int(s.reward), flush=True)\n"
        "        await scorer.score(asked(PROMPT, [view('hang')]))\n"
        "    asyncio.run(run())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait(patience(10))
    parent.stdout.close()
    _, alive = psutil.wait_procs([worker], timeout=patience(10))
    assert not alive


def test_an_unusable_reward_is_refused_before_anything_starts() -> None:
    for reward in ("exact", "no.such.module:f", "tests.helpers.misbehaving_rewards:nothing", ""):
        with pytest.raises(ConfigError, match=r"task\.reward = .*package\.module:function"):
            ProcessScorer(TaskConfig(name="jsonl", reward=reward), 1, 1.0)
